"""Image sources beside the body: addresses, files of --media-path, uploaded files."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from logitless.engine.records.store import Store
from logitless.models.vision import images
from logitless.server.api import context
from logitless.server.outgoing.fetch import FetchError
from tests.helpers.http_fakes import Running, running
from tests.helpers.media_fakes import FakeMedia, shown
from tests.helpers.vision_files import picture, png

PICTURE = png(picture(40, 24))
URI = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "See"}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def dialects(url: str) -> dict[str, tuple[dict[str, Any], str]]:
    """By endpoint: a request that names the address, and the field that has it."""
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    anthropic = {"type": "image", "source": {"type": "url", "url": url}}
    responses = {
        "role": "user",
        "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": url}],
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": [anthropic]}
    return {
        "/v1/chat/completions": (chat(image), "messages[0].content[1].image_url.url"),
        "/v1/messages": (chat(anthropic), "messages[0].content[1].source.url"),
        "/v1/messages/count_tokens": (chat(result), "messages[0].content[1].content[0].source.url"),
        "/v1/responses": ({"input": [responses]}, "input[0].content[1].image_url"),
        "/v1/responses/input_tokens": ({"input": [responses]}, "input[0].content[1].image_url"),
    }


async def refusal(
    server: Running, body: Mapping[str, Any], path: str = "/v1/chat/completions", status: int = 400
) -> str:
    got, reply = await server.post(path, body)
    assert got == status, reply
    return str(reply["error"]["message"])


async def test_addresses_need_the_flag() -> None:
    async with running(media=FakeMedia()) as server:
        for path, (body, name) in dialects("https://example.com/a.png").items():
            message = await refusal(server, body, path)
            assert (
                message
                == f"field '{name}': names an address: this server fetches none, it was started without --media-urls"
            )
        for path, (body, name) in dialects("file:///etc/passwd").items():
            message = await refusal(server, body, path)
            assert message == f"field '{name}': names a file: this server was started without --media-path"
        for path, (body, name) in dialects("ftp://example.com/a.png").items():
            assert (await refusal(server, body, path)).startswith(f"field '{name}': must be a data URI, base64, or")
    async with running(media_urls=True) as server:  # without a model that reads images nothing is fetched
        assert "--mmproj" in await refusal(server, dialects("http://a/")["/v1/chat/completions"][0])


@pytest.mark.parametrize("huge", [context._HUGE, 0])  # 0: the values of the body are read once, and parsed twice
async def test_addresses_are_fetched(huge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_HUGE", huge)
    asked: list[list[str]] = []

    async def fetch_all(urls: list[str], most: int, take: Any) -> dict[str, bytes | FetchError]:
        asked.append(list(urls))
        take(len(PICTURE))
        answers = {"https://there/": PICTURE, "https://broken/": PICTURE[:60]}
        return {url: answers.get(url, FetchError("its server answers 404")) for url in urls}

    monkeypatch.setattr(context, "fetch_all", fetch_all)
    vision = FakeMedia()
    async with running(media=vision, media_urls=True) as server:
        for path, (body, _) in dialects("https://there/").items():
            status, reply = await server.post(path, body)
            assert status == 200, reply
        assert len(asked) == vision.n_decoded == 5
        assert shown(server).count("{40x24}") == 1
        for url, problem in (
            ("https://gone/", "the image cannot be fetched: its server answers 404"),
            ("https://broken/", "the image cannot be decoded: "),
        ):
            for path, (body, name) in dialects(url).items():
                assert (await refusal(server, body, path)).startswith(f"field '{name}': {problem}")
        asked.clear()
        parts = [
            {"type": "image_url", "image_url": url}
            for url in ("https://there/", URI, "HTTPS://THERE/", "https://there/")
        ]
        assert "image_url': the image cannot be fetched" in await refusal(server, chat(*parts))
        assert asked == [["https://there/", "HTTPS://THERE/", "https://there/"]]  # at once
        assert server.bodies._free == 4 * (64 << 20)  # what was fetched has given its room back
    async with running(media=vision, media_urls=True, max_body=1000) as server:
        body = dialects("https://there/")["/v1/chat/completions"][0]
        monkeypatch.setattr(context, "fetch_all", _too_much)
        assert "too many large requests" in await refusal(server, body, status=503)
        assert not server.bodies._taken


async def _too_much(urls: list[str], most: int, take: Any) -> dict[str, bytes]:
    take(4001)
    return {}


async def test_images_of_a_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    image = {"type": "image_url", "image_url": {"url": "file://a.png"}}
    async with running(media=FakeMedia(), media_path=str(tmp_path), max_body=2 * len(PICTURE)) as server:
        assert (await server.post("/v1/chat/completions", chat(image, image)))[0] == 200
        message = await refusal(server, chat(image, image, image))
        assert message.startswith("field 'messages[0].content[3].image_url.url': the media of a request have at most")
    monkeypatch.setattr(images, "MAX_BYTES", len(PICTURE) - 1)
    async with running(media=FakeMedia(), media_path=str(tmp_path)) as server:
        assert f"the image has more than {len(PICTURE) - 1} bytes" in await refusal(server, chat(image))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images, and ways out of it."""
    media = tmp_path / "media"
    (media / "sub").mkdir(parents=True)
    for path in (media / "a b.png", media / "sub" / "b.png", tmp_path / "secret.png", tmp_path / "media2.png"):
        path.write_bytes(PICTURE)
    (media / "inner.png").symlink_to("sub/b.png")
    (media / "outer.png").symlink_to("../secret.png")
    (media / "up").symlink_to("..")
    (media / "loop").symlink_to("loop")
    os.mkfifo(media / "pipe.png")
    return media


@pytest.mark.parametrize(
    "url",
    ["file://a b.png", "file://a%20b.png", "file:///a%20b.png", "file:a b.png", "FILE://sub/b.png", "file://localhost/sub/b.png",
     "file://sub/../sub/./b.png", "file://inner.png", "file://{folder}/sub/b.png", "file://localhost{folder}/inner.png"],
)  # fmt: skip
async def test_files_below_the_folder(url: str, folder: Path) -> None:
    async with running(media=FakeMedia(), media_path=str(folder)) as server:
        image = {"type": "image_url", "image_url": {"url": url.format(folder=quote(str(folder)))}}
        status, reply = await server.post("/v1/chat/completions", chat(image))
        assert status == 200, reply


@pytest.mark.parametrize(
    "url",
    ["file://../secret.png", "file://sub/../../secret.png", "file://..%2fsecret.png", "file://%2e%2e/secret.png",
     "file://outer.png", "file://up/secret.png", "file://up/media2.png", "file://loop", "file://sub", "file://", "file:///",
     "file://none.png", "file://pipe.png", "file://a%20b.png/x", "file:///etc/passwd", "file://{folder}2.png",
     "file://{folder}/../secret.png", "file://a%00.png", "file://" + "a" * 5000, "file://" + "../" * 40 + "etc/passwd"],
)  # fmt: skip
async def test_nothing_else_is_read(url: str, folder: Path) -> None:
    async with running(media=FakeMedia(), media_path=str(folder)) as server:
        image = {"type": "image_url", "image_url": {"url": url.format(folder=folder)}}
        message = await refusal(server, chat(image))
        assert message == "field 'messages[0].content[1].image_url.url': the image is no file of --media-path"


async def test_images_in_outputs_of_functions() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "Seen"}, {"type": "input_image", "image_url": URI}]
    said = {"role": "user", "content": "Look"}
    items = [said, call, {"type": "function_call_output", "call_id": "c", "output": output}]
    async with running(media=FakeMedia()) as server:
        status, reply = await server.post("/v1/responses", {"input": items})
        assert status == 200, reply
        assert "Seen\n{40x24}" in shown(server)
        output[1]["image_url"] = "data:image/png;base64,aGVsbG8="
        message = await refusal(server, {"input": items}, "/v1/responses")
        assert message.startswith("field 'input[2].output[1].image_url': the image is no image")


async def test_uploaded_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ids = {
        purpose: store.add_file(PICTURE, "a.png", purpose, "me")["id"]
        for purpose in ("vision", "user_data", "fine-tune")
    }
    tuning = SimpleNamespace(store=store, stats=None, ready=False, pending=False, close=store.close)
    async with running(media=FakeMedia(), tuning=tuning) as server:
        for id in (ids["vision"], ids["user_data"]):
            for path, body in (
                ("/v1/chat/completions", chat({"type": "file", "file": {"file_id": id}})),
                ("/v1/messages", chat({"type": "image", "source": {"type": "file", "file_id": id}})),
                ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": id}]}]}),
            ):
                status, reply = await server.post(path, body)
                assert status == 200, reply
                assert "{40x24}" in shown(server)
        assert (await server.post("/v1/chat/completions", chat({"type": "file", "file": {"file_data": URI}})))[0] == 200
        for id, problem in (
            (ids["fine-tune"], "the file has the purpose fine-tune: media have vision or user_data"),
            ("file-none", "the file does not exist"),
            ("../logitless.sqlite", "the file does not exist"),
        ):
            item = {"role": "user", "content": [{"type": "input_image", "file_id": id}]}
            assert (
                await refusal(server, {"input": [item]}, "/v1/responses")
                == f"field 'input[0].content[0].file_id': {problem}"
            )
        store.file_path(ids["vision"]).unlink()
        named = {"type": "image", "source": {"type": "file", "file_id": ids["vision"]}}
        message = await refusal(server, chat(named), "/v1/messages")
        assert message == "field 'messages[0].content[1].source.file_id': the file cannot be read"
    store = Store(tmp_path)
    tuning.store, tuning.close = store, store.close
    async with running(media=FakeMedia(), tuning=tuning, api_keys=("k", "l")) as server:  # another key's
        message = await refusal_with(server, "k", chat({"type": "file", "file": {"file_id": ids["user_data"]}}))
        assert message == "field 'messages[0].content[1].file.file_id': the file does not exist"
    async with running(media=FakeMedia()) as server:
        assert "--data-dir" in await refusal(server, chat({"type": "file", "file": {"file_id": "a"}}))
        assert "an object" in await refusal(server, chat({"type": "file", "file": "a"}))


async def refusal_with(server: Running, key: str, body: Mapping[str, Any]) -> str:
    status, reply = await server.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {key}"})
    assert status == 400, reply
    return str(reply["error"]["message"])

"""Audio in requests: every dialect's parts, sources, bounds, and models that read none."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.cli.commands.router import _flags
from logitless.cli.flags.flags import parse
from logitless.cli.setup.server import server_config
from logitless.engine.loading.open_model import open_model
from logitless.engine.records.store import Store
from logitless.server.api import context
from tests.helpers.http_fakes import Running, running
from tests.helpers.media_fakes import FakeMedia, shown
from tests.helpers.paths import MODELS
from tests.helpers.sounds import sine, wav
from tests.helpers.vision_files import picture, png

SOUND = wav(sine(440, 4000))
BASE64 = base64.b64encode(SOUND).decode()
URI = f"data:audio/wav;base64,{BASE64}"
IMAGE = base64.b64encode(png(picture(40, 24))).decode()


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "Hear"}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def heard(data: str = BASE64, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def respond(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hear"}, *parts]}]}


PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # by the field that has the sound
    "messages[0].content[1].input_audio.data": ("/v1/chat/completions", chat(heard())),
    "messages[0].content[1].audio_url.url": (
        "/v1/chat/completions",
        chat({"type": "audio_url", "audio_url": {"url": URI}}),
    ),
    "messages[0].content[1].file.file_data": (
        "/v1/chat/completions",
        chat({"type": "file", "file": {"filename": "a.wav", "file_data": URI}}),
    ),
    "input[0].content[1].input_audio.data": ("/v1/responses", respond(heard())),
    "input[0].content[1].file_data": ("/v1/responses", respond({"type": "input_file", "file_data": URI})),
}


async def refusal(server: Running, path: str, body: dict[str, Any], status: int = 400) -> str:
    got, reply = await server.post(path, body)
    assert got == status, reply
    return str(reply["error"]["message"])


def broken(body: Any, sound: str) -> Any:
    """The request with another sound."""
    if isinstance(body, dict):
        return {key: broken(value, sound) for key, value in body.items()}
    if isinstance(body, list):
        return [broken(value, sound) for value in body]
    return body.replace(BASE64, sound) if isinstance(body, str) else body


@pytest.mark.parametrize("field", PARTS)
async def test_parts(field: str) -> None:
    path, body = PARTS[field]
    media = FakeMedia(audio=True)
    async with running(media=media) as server:
        status, reply = await server.post(path, body)
        assert status == 200, reply
        assert "Hear\n{0.25s}" in shown(server)
        (waveform,) = media.waveforms
        assert np.abs(waveform.samples - sine(440, 4000)).max() < 1e-4
        cut = base64.b64encode(SOUND[:-1]).decode()
        assert (await refusal(server, path, broken(body, cut))).startswith(f"field '{field}': the audio is cut off: ")
        assert await refusal(server, path, broken(body, "x")) == f"field '{field}': is not valid base64"


async def test_models_without_audio_name_what_is_missing() -> None:
    for media, reason in (
        (None, "this server was started without --mmproj"),
        (FakeMedia(), "the projector of --mmproj reads images only"),
    ):
        async with running(media=media) as server:
            for field, (path, body) in PARTS.items():
                message = await refusal(server, path, body)
                assert message.startswith(f"field '{field}': ")
                assert message.endswith(f" a model that reads {'them' if 'files' in message else 'it'}: {reason}")
            modalities = (await server.get("/props"))[1]["modalities"]
            assert modalities == {"vision": media is not None, "audio": False}
    async with running(media=FakeMedia(images=False, audio=True)) as server:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
        message = await refusal(server, "/v1/chat/completions", chat(part))
        assert message.endswith("images need a model that reads them: the projector of --mmproj reads audio only")
        assert (await server.get("/props"))[1]["modalities"] == {"vision": False, "audio": True}
        (model,) = (await server.get("/v1/models"))[1]["data"]
        assert model["architecture"]["input_modalities"] == ["text", "audio"]
        status, shown_model = await server.post("/api/show", {"model": "fake"})
        assert status == 200
        assert "vision" not in shown_model["capabilities"]


async def test_prompts_with_markers() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        marker = (await server.get("/props"))[1]["media_marker"]
        prompt = {"prompt_string": f"a{marker}b{marker}c", "multimodal_data": [BASE64, IMAGE]}
        assert (await server.post("/completion", {"prompt": prompt, "n_predict": 1}))[0] == 200
        assert shown(server).endswith("a{0.25s}b{40x24}c")
        _, counted = await server.post("/tokenize", {"content": prompt})
        assert len(counted["tokens"]) == len("a{0.25s}b{40x24}c")
        short = {**prompt, "prompt_string": f"a{marker}"}
        message = await refusal(server, "/completion", {"prompt": short})
        assert message == "field 'prompt': has 2 images or sounds and 1 places for them"
        cut = {**prompt, "multimodal_data": [BASE64, BASE64[:400]]}
        message = await refusal(server, "/completion", {"prompt": cut})
        assert message.startswith("field 'prompt.multimodal_data[1]': the audio is cut off")


async def test_marker_of_the_configuration_stands_for_media_in_prompts_and_chats() -> None:
    async with running(media=FakeMedia(audio=True), media_marker="<__media__>") as server:
        assert (await server.get("/props"))[1]["media_marker"] == "<__media__>"
        prompt = {"prompt_string": "a<__media__>b", "multimodal_data": [BASE64]}
        assert (await server.post("/completion", {"prompt": prompt, "n_predict": 1}))[0] == 200
        assert shown(server).endswith("a{0.25s}b")
        path, body = PARTS["messages[0].content[1].input_audio.data"]
        assert (await server.post(path, body))[0] == 200
        assert "Hear\n{0.25s}" in shown(server)
        assert (await server.post("/completion", {"prompt": "a<__media__>b", "n_predict": 1}))[0] == 200
        assert shown(server).endswith("a<__media__>b")  # a text without media is a text


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
async def test_models_that_see_or_hear_are_multimodal(path: str) -> None:
    for media in (None, FakeMedia(), FakeMedia(audio=True), FakeMedia(images=False, audio=True)):
        async with running(media=media) as server:
            (model,) = (await server.get(path))[1]["models"]
            assert model["capabilities"] == ["completion", *(["multimodal"] if media is not None else [])]


async def test_tokens_of_media_are_counted() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        for part, length in ((heard(), "{0.25s}"), ({"type": "image_url", "image_url": {"url": IMAGE}}, "{40x24}")):
            text = {"type": "text", "text": length}
            expected = (await server.post("/tokenize", chat(text)))[1]
            counted = (await server.post("/tokenize", {**chat(part), "return_token_strs": True}))[1]
            assert counted["count"] == expected["count"] == len(counted["token_strs"])
            tokens = (await server.post("/v1/chat/completions/input_tokens", chat(part)))[1]["input_tokens"]
            assert tokens == (await server.post("/v1/chat/completions/input_tokens", chat(text)))[1]["input_tokens"]


async def test_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fetch_all(urls: list[str], most: int, take: Any) -> dict[str, bytes]:
        return dict.fromkeys(urls, SOUND)

    monkeypatch.setattr(context, "fetch_all", fetch_all)
    (tmp_path / "a.wav").write_bytes(SOUND)
    store = Store(tmp_path / "data")
    id = store.add_file(SOUND, "a.wav", "user_data", "me")["id"]
    tuning = SimpleNamespace(store=store, stats=None, ready=False, pending=False, close=store.close)
    requests = (
        ("/v1/chat/completions", chat({"type": "audio_url", "audio_url": {"url": "https://there/a.wav"}})),
        ("/v1/chat/completions", chat({"type": "audio_url", "audio_url": {"url": "file://a.wav"}})),
        ("/v1/chat/completions", chat({"type": "audio_url", "file_id": id})),
        ("/v1/chat/completions", chat({"type": "file", "file": {"file_id": id}})),
        ("/v1/responses", respond({"type": "input_file", "file_url": "https://there/a.wav"})),
        ("/v1/responses", respond({"type": "input_file", "file_id": id})),
    )
    async with running(media=FakeMedia(audio=True), media_urls=True, media_path=str(tmp_path), tuning=tuning) as server:
        for path, body in requests:
            status, reply = await server.post(path, body)
            assert status == 200, reply
            assert "{0.25s}" in shown(server)
        gone = chat({"type": "audio_url", "audio_url": {"url": "file://gone.wav"}})
        message = await refusal(server, "/v1/chat/completions", gone)
        assert message == "field 'messages[0].content[1].audio_url.url': the audio is no file of --media-path"
    async with running(media=FakeMedia(audio=True)) as server:
        assert "--media-urls" in await refusal(server, *requests[0])
        assert "--media-path" in await refusal(server, *requests[1])


async def test_seconds_of_a_request_are_bounded_together() -> None:
    media = FakeMedia(audio=True)
    async with running(media=media, audio_max_seconds=1) as server:
        assert (await server.post("/v1/chat/completions", chat(*[heard()] * 4)))[0] == 200
        assert len({id(waveform) for waveform in media.waveforms}) == 1  # decoded once
        message = await refusal(server, "/v1/chat/completions", chat(*[heard()] * 5))
        field = "messages[0].content[5].input_audio.data"
        assert message == f"field '{field}': the sounds of a request have at most 1 seconds together"
        long = base64.b64encode(wav(sine(440, 16_001))).decode()
        message = await refusal(server, "/v1/chat/completions", chat(heard(long)))
        assert message.endswith("input_audio.data': the audio is longer than 1 seconds")


async def test_dialects_without_audio_refuse_it() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        message = await refusal(server, "/v1/messages", {**chat(heard()), "max_tokens": 1})
        assert message == (
            "field 'messages[0].content[1].type': 'input_audio' is not possible in a message of the user"
        )
        status, reply = await server.post(
            "/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "Hear", "images": [BASE64]}]}
        )
        assert status == 400
        assert reply["error"].startswith("field 'messages[0].images[0]': the image is no image of a known format")
        raw = {"model": "fake", "prompt": "Hear", "raw": True, "images": [IMAGE, BASE64]}
        status, reply = await server.post("/api/generate", raw)
        assert (status, reply["error"]) == (400, "field 'images[1]': is audio, which this API does not take")


def test_marker_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama-server's; empty is none."""
    model = MODELS / "stories260K.gguf"
    options = parse(_flags(), ["-m", str(model)], {})
    for value in ("<__media__>", ""):
        monkeypatch.setenv("LLAMA_MEDIA_MARKER", value)
        assert server_config(options, open_model(model)).media_marker == value

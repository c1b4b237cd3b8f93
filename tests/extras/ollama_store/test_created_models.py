"""Models that clients of Ollama's API create: uploads, settings, names, refusals. Their servers do not start."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from logitless.cli.commands.router import _flags, meaning
from logitless.extras.ollama_store import blobs
from logitless.extras.ollama_store.model_stores import OllamaStore
from logitless.models.errors import ModelFileError
from logitless.models.gguf.write import Key, tensor, text, write_gguf
from logitless.router.app import Router
from logitless.router.cached import Cache
from logitless.router.catalog import Sources
from logitless.router.fleet import Fleet
from logitless.router.jobs import RouterJobs
from logitless.server.config import ServerConfig
from tests.router.test_router_app import _broken, _fetch


class House(NamedTuple):
    """A router over a folder, and a function that asks it."""

    folder: Path
    url: str
    session: aiohttp.ClientSession
    fleet: Fleet[Any]

    async def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, list[Any]]:
        """(status, lines of JSON)."""
        headers = {"Authorization": f"Bearer {key}"}
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.request(method, self.url + path, headers=headers, **data) as reply:
            return reply.status, [json.loads(line) for line in (await reply.read()).splitlines()]

    async def upload(self, path: Path) -> str:
        """The digest of a file that is here then."""
        raw = path.read_bytes()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        assert await self.ask("POST", f"/api/blobs/{digest}", raw) == (201, [])
        return digest

    async def create(self, **body: Any) -> tuple[int, list[Any]]:
        return await self.ask("POST", "/api/create", {"stream": False, **body})

    async def refusal(self, status: int, **body: Any) -> str:
        """The error of a model that cannot be made; nothing is left of it."""
        got, (told,) = await self.create(**{"model": "new", **body})
        assert (got, sorted(told)) == (status, ["error"]), told
        assert not list((self.folder / ".blobs").glob("*.part"))
        assert "\n" not in told["error"]
        assert str(self.folder) not in told["error"]
        return str(told["error"])

    def words(self, name: str) -> list[str]:
        """The arguments of a model's server, without the folder."""
        return [word.replace(f"{self.folder}/", "") for word in self.fleet.find(name).entry.args]

    @property
    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


async def _quantize(source: Path, place: Path, kind: str) -> None:
    if kind == "Q8_0":
        raise ModelFileError(source, "the disk of the test is full")
    place.write_bytes(source.read_bytes() + kind.encode())


@asynccontextmanager
async def routing(folder: Path, most: int = 0, **settings: Any) -> AsyncIterator[House]:
    created = OllamaStore(folder, _quantize, most)
    sources = Sources(folder, None, (), store=created)
    read = partial(sources.read, partial(meaning, _flags(), ()))
    fleet = Fleet(read(), _broken, 1)
    cache = Cache(str, _fetch, lambda _: None, lambda _: None)
    config = ServerConfig(**settings)
    router = Router(fleet, config, read, RouterJobs(""), cache, autoload=True, limit=1, created=created)
    runner = web.AppRunner(router.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield House(folder, f"http://127.0.0.1:{runner.addresses[0][1]}", session, fleet)
    finally:
        await fleet.close()
        await runner.cleanup()


def gguf(path: Path, kind: str = "model", arch: str = "llama") -> Path:
    """A file with one small tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keys: dict[str, Key] = {"general.type": text(kind), "tokenizer.chat_template": text("{{ messages[0].content }}")}
    write_gguf(path, arch, keys, [("token_embd.weight", tensor(np.ones((2, 32), np.float32)))])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gguf(tmp_path / "models" / "base.gguf")
    return tmp_path / "models"


async def test_a_model_of_an_upload_with_settings(folder: Path, tmp_path: Path) -> None:
    async with routing(folder) as house:
        file = gguf(tmp_path / "up.gguf")
        digest = await house.upload(file)
        assert (await house.ask("HEAD", f"/api/blobs/{digest}"))[0] == 200
        settings: dict[str, Any] = {
            "system": 'Say "ho".',
            "template": "{{ .System }}/{{ .Prompt }}",
            "parameters": {"temperature": 0.5, "num_ctx": 64.0, "num_predict": -2, "seed": -1, "stop": ["a", "--b\n"]},
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "license": ["MIT", "more"],
        }
        status, lines = await house.ask(
            "POST", "/api/create", {"model": "me/mario:v1", "files": {"a.gguf": digest}, **settings}
        )
        told = [f"using existing layer {digest}", "writing manifest", "success"]
        assert (status, [line["status"] for line in lines]) == (200, told)
        words = house.words("me/mario:v1")
        made = folder / "me%2Fmario%3Av1"
        assert f"--model {made.name}/model.gguf" in " ".join(words)
        assert words[-8:] == [
            f"--chat-template-file={made.name}/template.jinja",
            f"--first-messages={made.name}/messages.json",
            "--kv-unified-per-slot=64",
            "--predict=-1",
            "--seed=-1",
            "--reverse-prompt=a",
            "--reverse-prompt=--b\n",
            "--temp=0.5",
        ]
        system = {"role": "system", "content": settings["system"]}
        assert json.loads((made / "messages.json").read_bytes()) == [system, *settings["messages"]]
        (blob,) = (folder / ".blobs").iterdir()
        assert blob.samefile(made / "model.gguf")
        _, (shown,) = await house.ask("POST", "/api/show", {"model": "me/mario:v1"})
        assert (shown["system"], shown["template"]) == (settings["system"], settings["template"])
        assert (shown["messages"], shown["license"]) == (settings["messages"], "MIT\nmore")
        assert "num_ctx                        64\n" in shown["parameters"]
        assert 'SYSTEM """Say "ho"."""\nPARAMETER num_ctx 64\n' in shown["modelfile"]
        _, (tags,) = await house.ask("GET", "/api/tags")
        assert [model["name"] for model in tags["models"]] == ["base:latest", "me/mario:v1"]
        _, (listed,) = await house.ask("GET", "/v1/models")
        assert [(model["id"], model["can_remove"]) for model in listed["data"]] == [
            ("base", False),
            ("me/mario:v1", True),
        ]
    async with routing(folder) as house:  # a restart
        assert house.words("me/mario:v1") == words
        assert await house.ask("DELETE", "/api/delete", {"model": "me/mario:v1"}) == (200, [])
        assert house.files == {"base.gguf"}


async def test_a_model_of_another_one(folder: Path) -> None:
    async with routing(folder) as house:
        assert await house.create(
            model="a:latest", **{"from": "base:latest"}, system="one", parameters={"top_k": 3}
        ) == (200, [{"status": "success"}])
        assert (folder / "a" / "model.gguf").samefile(folder / "base.gguf")
        await house.create(model="b", **{"from": "a"}, system="two", quantize="q4_K_M")
        assert (folder / "b" / "model.gguf").read_bytes().endswith(b"Q4_K_M")
        assert house.words("b")[-2:] == ["--first-messages=b/messages.json", "--top-k=3"]
        _, (shown,) = await house.ask("POST", "/api/show", {"model": "b"})
        assert (shown["system"], shown["details"]["parent_model"]) == ("two", "base")
        assert "FROM base\n" in shown["modelfile"]
        before = house.fleet.find("a").entry
        assert (await house.create(model="a", **{"from": "base"}))[0] == 200  # anew: nothing of it stays
        assert house.fleet.find("a").entry != before
        assert not {"a/messages.json"} & house.files
        assert (await house.ask("POST", "/api/copy", {"source": "b", "destination": "c:x"})) == (200, [])
        assert house.words("c:x")[-1] == "--top-k=3"
        assert await house.ask("DELETE", "/models?model=b") == (200, [{"success": True}])
        assert (await house.ask("POST", "/api/show", {"model": "c:x"}))[1][0]["system"] == "two"
        assert (await house.ask("POST", "/api/show", {"model": "b"}))[0] == 404
        for body, status in (
            ({"source": "nobody", "destination": "x"}, 404),
            ({"source": "a", "destination": ".."}, 400),
        ):
            assert (await house.ask("POST", "/api/copy", body))[0] == status


async def test_refusals(folder: Path, tmp_path: Path) -> None:
    async with routing(folder) as house:
        digest = await house.upload(gguf(tmp_path / "a.gguf"))
        adapter = await house.upload(gguf(tmp_path / "b.gguf", "adapter"))
        (tmp_path / "text").write_text("no model")
        text = await house.upload(tmp_path / "text")
        base = {"from": "base"}
        for name in ("", "../x", "a/../b", ".blobs", "a b", "/etc", "a:", "x" * 300, "a\\b", "é", "a%2Fb"):
            assert "'model'" in await house.refusal(400, model=name, **base)
        assert "exists already" in await house.refusal(400, model="base", **base)
        assert "'from'" in await house.refusal(400)
        assert "not both" in await house.refusal(400, files={"a": digest}, **base)
        await house.refusal(404, **{"from": "nobody"})
        assert "upload it" in await house.refusal(400, files={"a": "sha256:" + "0" * 64})
        for wrong in ("", "sha256:x", "../base.gguf", f"{digest}/../x"):
            assert "is no digest" in await house.refusal(400, files={"a": wrong})
        assert "not a GGUF file" in await house.refusal(400, files={"a": text})
        assert "have no model" in await house.refusal(400, files={"a": adapter})
        assert "there is a model already" in await house.refusal(400, files={"a": digest, "b": digest})
        assert "'adapters'" in await house.refusal(400, adapters={"a": digest}, **base)
        assert "'adapters'" in await house.refusal(400, adapters={"a": adapter}, **base)
        assert "'quantize'" in await house.refusal(400, quantize="q9", **base)
        assert "the disk of the test is full" in await house.refusal(400, quantize="q8_0", **base)
        for template in ("{{ .Tools }}", "{{ if .System }}", "{% if %}", "{{ range .Messages }}", "{{ (((( }}"):
            assert "template" in await house.refusal(400, template=template, **base)
        loops = "{% for m in messages %}" * 30 + "{% endfor %}" * 30  # more than Python compiles
        assert "is nested too deeply" in await house.refusal(400, template=loops, **base)
        assert "more than 262144 characters" in await house.refusal(400, template="{{ 1 }}" * 40_000, **base)
        for parameters in (
            {"num_gpu": 1},
            {"mirostat": "x"},
            {"temperature": "hot"},
            {"stop": [1]},
            {"top_k": None, "x": 1},
        ):
            assert "'parameters." in await house.refusal(400, parameters=parameters, **base)
        for messages in ([{"role": "tool", "content": "x"}], [{"role": "user", "images": ["x"]}], [{"content": "x"}]):
            assert "'messages[0]" in await house.refusal(400, messages=messages, **base)
        for name in ("modelfile", "path", "renderer"):
            assert f"'{name}'" in await house.refusal(400, **{name: "x"}, **base)
        assert house.files == {"base.gguf", *(f".blobs/{d.replace(':', '-')}" for d in (digest, adapter, text))}
        status, (told,) = await house.ask("DELETE", "/api/delete", {"model": "base"})
        assert (status, "cannot be removed" in told["error"]) == (400, True)


async def test_uploads_are_checked_and_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(folder, most=100) as house:
        digest = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
        assert (await house.ask("HEAD", f"/api/blobs/{digest}"))[0] == 404
        status, (told,) = await house.ask("POST", f"/api/blobs/{digest}", b"abd")
        assert (status, "SHA-256" in told["error"]) == (400, True)
        assert (await house.ask("POST", f"/api/blobs/{digest}", b"x" * 101))[0] == 413
        assert (await house.ask("POST", "/api/blobs/sha256:..%2Fx", b"abc"))[0] == 400

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 10

        async with house.session.post(f"{house.url}/api/blobs/{digest}", data=pieces()) as reply:  # of no length
            assert reply.status == 413
        usage = shutil.disk_usage(folder)
        monkeypatch.setattr(blobs.shutil, "disk_usage", lambda _: usage._replace(free=blobs.RESERVE + 2))
        status, (told,) = await house.ask("POST", f"/api/blobs/{digest}", b"abc")
        assert (status, "has room for 2 bytes, not for 3" in told["error"]) == (507, True)
        monkeypatch.undo()
        assert house.files == {"base.gguf"}
        assert (await house.ask("POST", f"/api/blobs/{digest}", b"abc"))[0] == 201
        (folder / ".blobs" / digest.replace(":", "-")).unlink()
        (folder / ".blobs" / digest.replace(":", "-")).symlink_to(folder / "base.gguf")
        assert (await house.ask("HEAD", f"/api/blobs/{digest}"))[0] == 404  # a link is no upload


async def test_an_upload_whose_client_leaves_leaves_nothing(folder: Path) -> None:
    async with routing(folder) as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(house.url.rpartition(":")[2]))
        path = f"/api/blobs/sha256:{'0' * 64}"
        writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\nabc".encode())
        async with asyncio.timeout(10):
            while not list(folder.glob(".blobs/*.part")):
                await asyncio.sleep(0)
            writer.close()
            while list(folder.glob(".blobs/*.part")):
                await asyncio.sleep(0)
        assert house.files == {"base.gguf"}
        del reader


async def test_leftovers_of_killed_processes_are_deleted(folder: Path) -> None:
    old = folder / ".blobs"
    (old / "x.part").mkdir(parents=True)
    (old / "x.part" / "model.gguf").touch()
    (old / "y.part").touch()
    names = ("x.part/model.gguf", "x.part", f"sha256-{'1' * 64}")
    (old / names[2]).touch()
    for name in names:
        os.utime(old / name, (0, 0))
    async with routing(folder) as house:
        assert list(house.fleet.models) == ["base"]
        await house.create(model="a", **{"from": "base"})
        assert {path.name for path in old.iterdir()} == {"y.part"}  # that is being written


async def test_links_and_foreign_folders_are_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    async with routing(folder) as house:
        await house.create(model="a", **{"from": "base"})
        (folder / "a").rename(outside)
        (folder / "a").symlink_to(outside)
        assert "not created here" in await house.refusal(400, model="a", **{"from": "base"})
        (folder / "b").mkdir()
        (folder / "b" / "notes.txt").touch()
        assert "not created here" in await house.refusal(400, model="b", **{"from": "base"})
        assert (outside / "created.json").exists()
        (folder / "c").mkdir()
        manifest = json.loads((outside / "created.json").read_bytes())
        for change in ({"name": "c", "model": "../base.gguf"}, {"name": "c", "parameters": {"x": 1}}, {"name": "d"}):
            (folder / "c" / "created.json").write_text(json.dumps(manifest | change))
            (folder / "c" / "model.gguf").touch()
            assert (await house.ask("GET", "/models?reload=1"))[0] == 200
            assert "c" not in house.fleet.models
        shutil.rmtree(folder / ".blobs")
        (folder / ".blobs").symlink_to(tmp_path)
        assert "a link" in await house.refusal(400, **{"from": "base"})


async def test_changes_need_the_admin_key_and_a_folder(folder: Path) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/api/create", {"model": "a", "from": "base"}),
        ("POST", "/api/copy", {"source": "base", "destination": "b"}),
        ("POST", f"/api/blobs/sha256:{hashlib.sha256(b'x').hexdigest()}", b"x"),
        ("DELETE", "/api/delete", {"model": "a"}),
    ]
    async with routing(folder, api_keys=("k",), admin_api_key="chief") as house:
        for method, path, body in calls:
            told = [(await house.ask(method, path, body, key))[0] for key in ("", "k", "chief")]
            assert told[:2] == [401, 403]
            assert told[2] in (200, 201), path

"""Models of Docker's hub, from a local server that answers like its registry."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.flags.flags import CliError, UsageError, parse
from logitless.cli.flags.options import SERVE
from logitless.cli.hub import docker, model_source
from logitless.cli.setup.model import named_model

FLAGS = [flag for group in SERVE for flag in group.flags]
CONTENT = b"GGUF" + bytes(range(256)) * 8
MODEL, OTHER = "application/vnd.docker.ai.gguf.v3", "application/vnd.docker.ai.license"


class Registry:
    """Layers (type, content) by repository and tag. `log` has (path, Authorization) of each request."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        self.log: list[tuple[str, str]] = []

    def answer(self, path: str) -> bytes | None:
        if path.startswith("/token?"):
            return b'{"token": "t"}'
        _, _, user, name, kind, last = path.split("/")
        if kind == "manifests":
            layers = self.models.get((f"{user}/{name}", last))
            if layers is None:
                return None
            told = [{"mediaType": kind, "digest": digest(data), "size": len(data)} for kind, data in layers]
            return json.dumps({"schemaVersion": 2, "layers": told}).encode()
        return next((data for layers in self.models.values() for _, data in layers if digest(data) == last), None)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    fake = Registry()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            fake.log.append((self.path, self.headers.get("Authorization", "")))
            data = fake.answer(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(docker, "REGISTRY", url)
    monkeypatch.setattr(docker, "TOKENS", f"{url}/token")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache"))
    yield fake
    server.shutdown()
    server.server_close()


def found(*words: str) -> Path:
    path = named_model(parse(FLAGS, words, {}))
    assert path is not None
    return path


def test_a_model_is_downloaded_once_and_again_when_it_changes(registry: Registry) -> None:
    registry.models["ai/gemma3", "latest"] = [(OTHER, b"x"), (MODEL, CONTENT)]
    path = found("-dr", "gemma3")
    assert path.read_bytes() == CONTENT
    assert registry.log[0][0].endswith("scope=repository%3Aai%2Fgemma3%3Apull")
    assert {key for _, key in registry.log[1:]} == {"Bearer t"}
    n = len(registry.log)
    assert found("--docker-repo", "ai/gemma3:latest") == path
    assert len(registry.log) == n + 2  # no file
    registry.models["ai/gemma3", "latest"] = [(MODEL, CONTENT + b"new")]
    assert found("-dr", "gemma3").read_bytes() == CONTENT + b"new"


def test_an_earlier_download_serves_without_the_hub(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.models["me/m", "Q4"] = [(MODEL, CONTENT)]
    path = found("-dr", "me/m:Q4")
    monkeypatch.setattr(docker, "REGISTRY", "http://127.0.0.1:9")
    monkeypatch.setattr(docker, "TOKENS", "http://127.0.0.1:9/token")
    assert found("-dr", "me/m:Q4") == found("-dr", "me/m:Q4", "--offline") == path
    with pytest.raises(CliError, match="--docker-repo: ai/other:latest: Docker's hub cannot be reached"):
        found("-dr", "other")
    with pytest.raises(CliError, match="--offline: ai/other:latest has never been downloaded"):
        found("-dr", "other", "--offline")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("-dr", "nothing"), "ai/nothing:latest: Docker's hub answers: there is no such model"),
        (("-dr", "image"), "ai/image:latest: has no GGUF file"),
        (("-dr", "liar"), "does not have the checksum"),
        (("-dr", "a", "-m", "b.gguf"), "--docker-repo and --model: give one of them"),
        (("-dr", "../a"), "is not MODEL, REPO/MODEL or REPO/MODEL:TAG"),
        (("-dr", "a/b/c"), "is not MODEL, REPO/MODEL or REPO/MODEL:TAG"),
        (("-dr", ""), "is not MODEL, REPO/MODEL or REPO/MODEL:TAG"),
    ],
)
def test_missing_or_altered_image_is_one_line(
    registry: Registry, words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.models["ai/image", "latest"] = [("application/vnd.oci.image.layer.v1.tar", b"x")]
    registry.models["ai/liar", "latest"] = [(MODEL, CONTENT)]
    if "liar" in words:
        monkeypatch.setattr(docker, "_layer", lambda *_: (digest(CONTENT)[:-1] + "0", None))
        monkeypatch.setattr(registry, "answer", lambda path: CONTENT if "blobs" in path else b"{}")
    with pytest.raises((CliError, UsageError), match=line):
        found(*words)


def test_its_folder_is_no_listed_model_of_an_address(registry: Registry) -> None:
    registry.models["ai/gemma3", "latest"] = [(MODEL, CONTENT)]
    found("-dr", "gemma3")
    assert list(model_source.downloaded()) == []

"""Security of a real server: secret keys, confined files, log lines, large requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.test_fuzz import Client

SECRET = "sk-tower-of-babel"
WRITTEN, DATA = "slots", "data"


class Guarded:
    """A server with a key, and all that it has said so far."""

    def __init__(self, server: Any, folder: Path, log: Path) -> None:
        self.server, self.folder, self.log, self.client = server, folder, log, Client(server.url)
        self.said: list[bytes] = []

    def ask(self, method: str, path: str, body: Any = None, key: str | None = SECRET) -> tuple[int, bytes]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        status, text = self.client.ask(method, path, None if body is None else json.dumps(body).encode(), **headers)
        self.said.append(text)
        return status, text


@pytest.fixture(scope="module")
def guarded(serve_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder, log = tmp_path_factory.mktemp("secure"), tmp_path_factory.mktemp("log") / "log"
    for name in (WRITTEN, DATA):
        (folder / name).mkdir()
    flags = (
        "--data-dir",
        str(folder / DATA),
        "-c",
        "128",
        "-np",
        "2",
        "-kvu",
        "--api-key",
        f"{SECRET},another",
        "--metrics",
        "--props",
        "-v",
        "--log-file",
        str(log),
    )
    made = Guarded(serve_module(None, "--demo", *flags, "--slot-save-path", str(folder / WRITTEN)), folder, log)
    yield made
    made.client.connection.close()


def test_keys_are_in_no_answer_and_no_log(guarded: Guarded) -> None:
    for path in (
        "/props",
        "/slots",
        "/v1/models",
        "/metrics",
        "/health",
        "/openapi.json",
        "/",
        "/lora-adapters",
        "/nothing",
    ):
        status, _ = guarded.ask("GET", path)
        assert status in (200, 404, 501), path
    guarded.ask("POST", "/props", {"x": 1})
    guarded.ask("POST", "/completion", {"prompt": "a", "n_predict": 1, "verbose": True})
    guarded.ask("POST", "/completion", {"prompt": 1})
    assert not any(SECRET.encode() in text for text in guarded.said)


@pytest.mark.parametrize("name", ["../../out.jsonl", "/tmp/out.jsonl", "..\\out", "a\0b", "x" * 5000, "%2e%2e%2fout"])
def test_uploads_and_names_stay_in_their_folder(guarded: Guarded, name: str) -> None:
    """A file is kept under an id of the server's own; what the client calls it is only shown."""
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    named = b'; filename="%s"' % name.encode()
    body = part % (b"purpose", b"", b"fine-tune") + part % (b"file", named, b'{"text": "a b c"}') + b"--b--\r\n"
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "multipart/form-data; boundary=b"}
    status, text = guarded.client.ask("POST", "/v1/files", body, **headers)
    assert status in (200, 400), text
    assert sorted(p.name for p in guarded.folder.iterdir()) == [DATA, WRITTEN]
    assert all(p.name.startswith("file-") for p in (guarded.folder / DATA / "files").iterdir())
    escaped = quote(name, safe="")
    for path in (f"/v1/files/{escaped}", f"/v1/files/{escaped}/content", f"/v1/models/{escaped}"):
        status, text = guarded.ask("GET", path)
        assert status in (400, 404), text
    assert guarded.ask("DELETE", f"/v1/files/{escaped}")[0] in (400, 404)
    status, text = guarded.ask("POST", "/completion", {"prompt": "a", "n_predict": 1, "model": name})
    assert status in (200, 400, 404)  # the model that is loaded answers, whatever it is called
    status, text = guarded.ask("POST", "/v1/fine_tuning/jobs", {"model": name, "training_file": name})
    assert status == 400, text


def test_the_log_has_one_line_an_event(guarded: Guarded) -> None:
    """Runs last: names with line breaks and escapes in paths, headers and bodies make no lines of their own."""
    for path in ("/x%0aFORGED%20line", "/v1/models/%0d%0aFORGED", "/slots/%1b%5b31mFORGED?action=save"):
        guarded.ask("GET", path)
        guarded.ask("POST", path, {"filename": "a\nFORGED line"})
    guarded.ask("POST", "/completion", {"prompt": "a", "grammar": "FORGED\nFORGED line\n"})
    guarded.server.process.terminate()
    told = guarded.server.ended()
    assert SECRET not in told
    assert "listening on" in (kept := guarded.log.read_text())
    assert {line for line in kept.splitlines() if "listening" not in line} <= set(told.splitlines())
    assert "\x1b" not in told
    assert not any(line.startswith("FORGED") for line in told.splitlines())

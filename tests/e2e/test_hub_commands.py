"""-hf and --model-url as a user types them, against a server on this machine in the place of the hub."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from server.cli.main import main

REPO = "someone/stories-GGUF"
COMMIT = "f" * 40


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder, with the headers that the hub adds."""

    def log_message(self, *_: Any) -> None:
        pass

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1-2-3"')
        super().end_headers()


@pytest.fixture
def hub(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "site"
    (folder / "api/models/someone").mkdir(parents=True)
    (folder / f"api/models/{REPO}").write_text('{"id": "x", "siblings": [{"rfilename": "stories-Q8_0.gguf"}]}')
    files = folder / REPO / "resolve/main"
    files.mkdir(parents=True)
    (files / "stories-Q8_0.gguf").symlink_to(shared_data / "models" / "stories260K-conv-Q8_0.gguf")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in (("HF_ENDPOINT", url), ("HF_HOME", str(tmp_path / "hf")), ("LLAMA_CACHE", str(tmp_path))):
            monkeypatch.setenv(name, value)
        yield url
        server.shutdown()


def test_serving_a_repository_and_then_the_same_offline(hub: str, serve: Any) -> None:
    server = serve(None, "-hf", f"{REPO}:q8_0", "--hf-token", "hf_verysecret")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.models.list().data[0].id == f"{REPO}:q8_0"
    said = client.completions.create(model=f"{REPO}:q8_0", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert said.choices[0].text
    assert "downloading" in "".join(server.log)
    assert "verysecret" not in "".join(server.log) + str(server.get("/props"))
    command = [sys.executable, "-m", "server.cli"]
    repository, tail = ["-hf", REPO, "--offline"], ["-p", "Once upon a time", "-n", "8", "--temp", "0"]
    got = subprocess.run([*command, "generate", *repository, *tail], capture_output=True, text=True, timeout=60)
    assert said.choices[0].text.strip() in got.stdout, got.stderr


def test_what_cannot_be_is_one_line(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, code, line in (
        (["-mu", f"{hub}/none.gguf"], 1, f"{hub}/none.gguf: the server answers 404"),
        (["-hf", REPO, "-m", "x.gguf"], 2, "--hf-repo and -m: give one of them"),
        (["-hff", "x.gguf"], 2, "--hf-file needs --hf-repo"),
        (["-hf", "nothing"], 2, "-hf: 'nothing' is not USER/REPO"),
        (["-mu", "file:///etc/passwd"], 2, "is not an http:// or https:// address"),
    ):
        assert main(["serve", *flags]) == code
        said = capsys.readouterr().err
        assert said.startswith("logitless: ")
        assert line in said
        assert said.count("\n") == 1

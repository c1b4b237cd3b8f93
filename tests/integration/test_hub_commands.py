"""Hub flags (-hf, --model-url) of commands, against a local server in the place of the hub."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from logitless.cli.main import main

REPO = "someone/stories-GGUF"
COMMIT = "f" * 40
gate = threading.Event()  # what a file whose name has "slow" waits for in its middle


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder, with the headers that the hub adds."""

    def log_message(self, *_: Any) -> None:
        pass

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):x}-2-3"')
        super().end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if "slow" in self.path:
            outputfile.write(source.read(1 << 16))
            assert gate.wait(60)
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)


@pytest.fixture
def hub(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "site"
    (folder / "api/models/someone").mkdir(parents=True)
    names = ("stories-Q8_0.gguf", "slow-Q4_0.gguf")
    siblings = [{"rfilename": name} for name in names]
    (folder / f"api/models/{REPO}").write_text(json.dumps({"id": "x", "siblings": siblings}))
    files = folder / REPO / "resolve/main"
    files.mkdir(parents=True)
    for name in names:
        (files / name).symlink_to(shared_data / "models" / "stories260K-conv-Q8_0.gguf")
    (folder / "page.gguf").write_text("<html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in (("HF_ENDPOINT", url), ("HF_HOME", str(tmp_path / "hf")), ("LLAMA_CACHE", str(tmp_path))):
            monkeypatch.setenv(name, value)
        gate.clear()
        yield url
        gate.set()
        server.shutdown()


def test_serving_a_repository_and_then_the_same_offline(hub: str, serve: Any, connect: Any) -> None:
    keys = ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]
    draft = ["-hfd", f"{REPO}:Q8_0", "--spec-type", "draft-simple"]
    server = serve(None, "-hf", f"{REPO}:q8_0", "--hf-token", "hf_verysecret", *draft, *keys)
    client = connect(f"{server.url}/v1")
    assert client.models.list().data[0].id == f"{REPO}:q8_0"
    said = client.completions.create(model=f"{REPO}:q8_0", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert said.choices[0].text
    assert said.timings["draft_n_accepted"] > 0  # type: ignore[attr-defined]  # itself drafts for it
    assert said.usage.prompt_tokens == len(server.post("/tokenize", {"content": "Once upon a time"})["tokens"])  # type: ignore[union-attr]
    assert "downloading" in "".join(server.log)
    assert "verysecret" not in "".join(server.log) + str(server.get("/props"))
    command = [sys.executable, "-m", "logitless"]
    repository, tail = ["-hf", REPO, "--offline"], ["-p", "Once upon a time", "-n", "8", "--temp", "0"]
    got = subprocess.run([*command, "generate", *repository, *tail, *keys], capture_output=True, text=True, timeout=60)
    assert said.choices[0].text.strip() in got.stdout, got.stderr


def test_impossible_download_is_one_line(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, code, line in (
        (["-mu", f"{hub}/none.gguf"], 1, f"{hub}/none.gguf: the server answers 404"),
        (["-m", "x.gguf", "-hfd", REPO, "-md", "y.gguf"], 2, "--hf-repo-draft and --model-draft: give one of them"),
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


def test_a_router_downloads_models_and_takes_them_away(hub: str, serve: Any, connect: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.gguf").write_text("precious")
    (tmp_path / "p.ini").write_text("[mine]\nalias = ours, theirs\ntags = small\n")
    flags = ("--models-dir", str(folder), "--models-preset", str(tmp_path / "p.ini"))
    router = serve(None, *flags, "--admin-api-key", "admin", "-c", "256")
    client = connect(router.url, "admin", timeout=60)

    def get(model: str) -> Any:
        return client.post("/models", body={"model": model}, cast_to=dict[str, Any])

    def listed() -> dict[str, Any]:
        return {item["id"]: item for item in router.get("/models")["data"]}

    def drop(model: str) -> Any:
        return client.delete("/models", options={"params": {"model": model}}, cast_to=dict[str, Any])

    def said(call: Callable[[], Any]) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            call()
        return f"{caught.value.status_code} {caught.value.body['message']}"  # type: ignore[index]

    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").post("/models", body={"model": REPO}, cast_to=dict[str, Any])
    for model, told in (
        ("nothing", "400 field 'model': 'nothing' is not USER/REPO"),
        ("file:///etc/passwd", "400 field 'model': is not an http:// or https:// address"),
        ("http://localhost:9/m.gguf", "400 localhost is at "),
        ("http://2852039166/latest/meta-data", "400 2852039166 is at 169.254.169.254, which is no public address"),
        (f"{REPO}:Q6_K", f"400 --hf-repo: {REPO} has no Q6_K"),
    ):
        assert said(lambda model=model: get(model)).startswith(told)  # type: ignore[misc]
    assert (listed()["mine"]["aliases"], listed()["mine"]["tags"]) == (["ours", "theirs"], ["small"])
    assert said(lambda: drop("theirs")).startswith("400 model 'theirs' was neither downloaded by its name nor created")
    assert said(lambda: drop("../mine")).startswith("404 ")

    name, slow = f"{REPO}:Q8_0", f"{REPO}:Q4_0"
    with client._client.stream("GET", f"{router.url}/models/sse", headers=client.auth_headers) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        assert get(name) == {"success": True}
        told = list(iter(lambda: next(events), {"model": name, "event": "download_finished"}))
        size = (tmp_path / "site" / REPO / "resolve/main/stories-Q8_0.gguf").stat().st_size
        progress = {"progress": {f"{REPO}/stories-Q8_0.gguf": {"done": size, "total": size}}}
        assert {"model": name, "event": "download_progress", "data": progress} in told
        assert {"model": "*", "event": "models_reload"} in events
        assert (listed()[name]["source"], listed()[name]["can_remove"]) == ("cache", True)
        assert said(lambda: get(name)) == f"400 model '{name}' already exists"
        assert listed()[name]["aliases"] == [REPO]  # it is what the repository gives

        page = f"{hub}/page.gguf"
        assert get(page) == {"success": True}
        error = {"error": f"{page}: is not a GGUF file"}
        assert {"model": page, "event": "download_failed", "data": error} in events

        assert get(slow) == {"success": True}  # which is half there
        item = listed()[slow]
        assert (item["status"]["value"], item["progress"][f"{REPO}/slow-Q4_0.gguf"]["total"]) == ("downloading", size)
        assert said(lambda: client.post("/v1/completions", body={"model": slow}, cast_to=dict[str, Any])).startswith(
            "503 "
        )
        parts = list((tmp_path / "hf").rglob("*.part"))
        assert len(parts) == 1
        assert drop(slow) == {"success": True}
        failed = {"model": slow, "event": "download_failed", "data": {"error": "it was cancelled"}}
        assert failed in events
    assert slow not in listed()
    assert not parts[0].exists()
    gate.set()
    address = f"{hub}/{REPO}/resolve/main/stories-Q8_0.gguf"
    assert get(f"{address}?key=secret") == {"success": True}
    assert "secret" not in json.dumps(listed())
    for model in (name, address):
        assert drop(model) == {"success": True}
    assert set(listed()) == {"mine"}
    assert (folder / "mine.gguf").read_text() == "precious"
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".part", ".gguf") and "hf" in path.parts]
    assert "secret" not in "".join(router.log)

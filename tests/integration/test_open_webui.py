"""Open WebUI itself on a router: both of its connections, the tasks that it sets, and documents (--clients PYTHON)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.main import main
from tests.helpers.paths import MODELS
from tests.integration.conftest import ServerFactory

NAME, SAID = "m:latest", [{"role": "user", "content": "Once upon a time"}]
FEW: Any = {"model": NAME, "messages": SAID, "stream": False, "params": {"max_tokens": 8}}
UPLOAD = MODELS / "stories260K.gguf"


class WebUI:
    """A running Open WebUI, whose only user is its administrator."""

    def __init__(self, url: str) -> None:
        self.url, self.key = url, ""
        self.key = self("POST", "/api/v1/auths/signin", {"email": "", "password": ""})[0]["token"]

    def __call__(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> list[Any]:
        """The lines of JSON of an answer, or the data of its events."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind, "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()[:500]}") from None
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def webui(
    request: pytest.FixtureRequest, serve_module: ServerFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebUI]:
    commands = [Path(python).parent / "open-webui" for python in request.config.getoption("--clients")]
    command = next((command for command in commands if command.exists()), None)
    if command is None:
        pytest.skip("no interpreter has open_webui (--clients PYTHON)")
    folder = tmp_path_factory.mktemp("models")
    assert main(["synth", "--type", "Q8_0", "-o", str(folder / "m.gguf")]) == 0
    server = serve_module(None, "--models-dir", str(folder), "--embedding")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    told = {
        **os.environ,
        "DATA_DIR": str(tmp_path_factory.mktemp("webui")),
        "WEBUI_AUTH": "False",
        "OLLAMA_BASE_URL": server.url,
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "ollama",
        "RAG_EMBEDDING_MODEL": NAME,
        "RAG_OLLAMA_BASE_URL": server.url,
        "OFFLINE_MODE": "True",
        "ANONYMIZED_TELEMETRY": "False",
    }
    words = [str(command), "serve", "--host", "127.0.0.1", "--port", str(port)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, env=told, cwd=told["DATA_DIR"], **pipes)
    assert process.stdout is not None
    rest = threading.Thread(target=lambda log: deque(log, 0), args=(process.stdout,))  # a full pipe would stop it
    try:
        assert any("scheduler_worker_loop" in line for line in process.stdout)  # the last line of its start
        rest.start()
        deadline = time.monotonic() + 60
        with closing(socket.socket()) as probe:
            while probe.connect_ex(("127.0.0.1", port)):  # it listens in a moment
                assert time.monotonic() < deadline
        yield WebUI(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
        if rest.ident is not None:
            rest.join()
        process.stdout.close()


def test_its_ollama_connection(webui: WebUI) -> None:
    assert [m["model"] for m in webui("GET", "/ollama/api/tags")[0]["models"]] == [NAME]
    for path in ("/ollama/api/version", "/ollama/api/ps", "/ollama/v1/models/0", "/api/models"):
        assert webui("GET", path)
    assert webui("POST", "/ollama/verify", {"url": webui("GET", "/ollama/config")[0]["OLLAMA_BASE_URLS"][0], "key": ""})
    assert "general.architecture" in webui("POST", "/ollama/api/show", {"model": NAME})[0]["model_info"]
    lines = webui("POST", "/ollama/api/chat", {"model": NAME, "messages": SAID, "options": {"num_predict": 8}})
    assert (len(lines) > 2, lines[-1]["eval_count"]) == (True, 8)
    assert webui("POST", "/api/chat/completions", {**FEW, "stream": True})[-1]["usage"]["completion_tokens"] == 8
    assert webui("POST", "/api/chat/completions", FEW)[0]["choices"][0]["message"]["content"]
    few = {"model": NAME, "max_tokens": 8}
    for path, body in (
        ("chat/completions", {"messages": SAID}),
        ("completions", {"prompt": "Once"}),
        ("messages", {"messages": SAID}),
        ("responses", {"input": "Once", "max_output_tokens": 16}),
        ("embeddings", {"input": ["a"]}),
    ):
        assert webui("POST", f"/ollama/v1/{path}/0", few | body)
    for task in ("title", "tags", "follow_up", "queries", "emoji"):
        body = {"model": NAME, "messages": SAID, "prompt": "x", "type": "web_search"}
        assert webui("POST", f"/api/v1/tasks/{task}/completions", body)[0]["choices"]
    assert webui("POST", "/ollama/api/pull/0", {"model": NAME})[-1] == {"status": "success"}
    assert webui("POST", "/ollama/api/unload", {"model": NAME}) == [{"status": True}]


def test_its_openai_connection(webui: WebUI) -> None:
    assert [m["id"] for m in webui("GET", "/openai/models")[0]["data"]] == ["m"]
    few = {"model": "m", "messages": SAID, "max_tokens": 8}
    assert webui("POST", "/openai/chat/completions", few)[0]["usage"]["completion_tokens"] == 8
    assert len(webui("POST", "/api/chat/completions", {**few, "stream": True})) > 2
    assert webui("POST", "/openai/responses", {"model": "m", "input": "Once", "max_output_tokens": 16})
    config = webui("GET", "/openai/config")[0] | {"OPENAI_API_CONFIGS": {"0": {"provider": "llama.cpp"}}}
    webui("POST", "/openai/config/update", config)
    assert webui("GET", "/openai/models/0/catalog")
    assert webui("POST", "/openai/models/0/unload", {"model": "m"}) == [{"success": True}]


def test_models_that_it_makes(webui: WebUI) -> None:
    made = {"model": "mario", "from": NAME, "system": "You are Mario.", "parameters": {"temperature": 0.3}}
    assert webui("POST", "/ollama/api/create/0", made)[-1] == {"status": "success"}
    assert webui("POST", "/ollama/api/copy/0", {"source": "mario:latest", "destination": "luigi"}) == [True]
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="My.Q8_0.gguf"\r\n\r\n'
    form += UPLOAD.read_bytes() + b"\r\n--x--\r\n"
    steps = webui("POST", "/ollama/models/upload/0", form, "multipart/form-data; boundary=x")
    assert steps[-1]["model_created"] == "My.Q8_0"
    body = {"model": "My.Q8_0:latest", "messages": SAID, "options": {"num_predict": 8}, "stream": False}
    assert webui("POST", "/ollama/api/chat/0", body)[0]["eval_count"] == 8
    for name in ("mario", "luigi", "My.Q8_0"):
        assert webui("DELETE", "/ollama/api/delete/0", {"model": f"{name}:latest"}) == [True]


def test_documents(webui: WebUI) -> None:
    """Vectors of both connections."""
    url = webui("GET", "/ollama/config")[0]["OLLAMA_BASE_URLS"][0]
    for kind, name, place in (("ollama", NAME, url), ("openai", "m", f"{url}/v1")):
        config = {"RAG_EMBEDDING_ENGINE": kind, "RAG_EMBEDDING_MODEL": name, "RAG_EMBEDDING_BATCH_SIZE": 4}
        webui("POST", "/api/v1/retrieval/embedding/update", config | {f"{kind}_config": {"url": place, "key": "none"}})
        text = {"name": "doc", "content": "The zoo is blue. " * 60, "collection_name": f"docs-{kind}"}
        webui("POST", "/api/v1/retrieval/process/text", text)
        asked = {"collection_names": [f"docs-{kind}"], "query": "zoo", "k": 2}
        assert "zoo" in webui("POST", "/api/v1/retrieval/query/collection", asked)[0]["documents"][0][0]
    files = [{"type": "collection", "id": "docs-openai"}]
    assert webui("POST", "/api/chat/completions", {**FEW, "files": files})[0]["choices"][0]["message"]["content"]

"""README and guides: their code, run on the demo model."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import command, script
from tests.helpers.paths import ROOT
from tests.integration.conftest import Server, ServerFactory
from tests.test_docs import blocks, commands

ADDRESS = "http://127.0.0.1:8080"
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "python.md"]
SNIPPETS = [*PAGES, ROOT / "docs" / "integrations.md"]


@pytest.fixture(scope="module")
def server(serve_here_module: ServerFactory) -> Iterator[Server]:
    return serve_here_module(None, "--demo", "--demo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the examples name."""
    (tmp_path / "model.gguf").symlink_to(ROOT / "models" / "demo" / "shakespeare.gguf")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in ("To be", "or not", "to be.")))
    return tmp_path


def requests(page: Path) -> list[str]:
    """The calls of curl."""
    return [text for text in blocks(page, "sh") if text.startswith("curl ")]


@pytest.mark.parametrize("command", [text for page in PAGES for text in requests(page)])
def test_requests_are_answered(server: Server, command: str) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    url = next(word for word in words if word.startswith(ADDRESS)).replace(ADDRESS, server.url)
    body = json.loads(words[words.index("-d") + 1])
    if not body.get("stream") and "messages" in body:
        body["max_tokens"] = 200
    headers = dict([words[words.index("-H") + 1].split(": ")])
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as reply:
        text = reply.read().decode()
    if body.get("stream"):
        assert text.startswith("data: {")
        assert text.rstrip().endswith("data: [DONE]")
    else:
        assert "data" in json.loads(text) or json.loads(text)["choices"]


@pytest.mark.parametrize("code", [text for page in SNIPPETS for text in blocks(page, "python")])
def test_python_examples_run(server: Server, folder: Path, code: str) -> None:
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        pytest.importorskip(module, reason=f"needs {module}: pip install -e .[clients]", exc_type=ImportError)
    assert script(code.replace(ADDRESS, server.url), folder)


def test_the_finetune_writes_an_adapter(folder: Path) -> None:
    words = next(words for words in commands(ROOT / "README.md") if words[0] == "finetune")
    with contextlib.chdir(folder):
        done = command(*words, "-t", "1", "--val-split", "0")
    assert done.returncode == 0, done.stderr
    assert (folder / "adapter.gguf").stat().st_size > 0

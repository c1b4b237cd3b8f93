"""Examples of README and docs: every fenced block runs on a small model, or says at its fence why it does not."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import pytest
import yaml

from logitless.backends.disk_cache import cache_folder
from scripts.docs_pages import REASONS, Block, blocks, pages
from tests.helpers import command_forks
from tests.helpers.audio_files import AUDIO_SPECS, N_CTX, sound, write_audio_projector, write_audio_text_model
from tests.helpers.paths import MODELS, ROOT
from tests.helpers.sounds import wav
from tests.helpers.vision_files import SPECS, picture, png, write_projector

ADDRESS = "http://127.0.0.1:8080"
STORIES = MODELS / "stories260K.gguf"
DEMO = ROOT / "models" / "demo" / "shakespeare.gguf"
PAIRS = [{"prompt": "Who is there?", "chosen": " I.", "rejected": " Nobody at all."}] * 3
PROMPTS = [{"messages": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}] * 2
GRADER = {"type": "string_check", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "4"}
FRAGMENT = f"""
import json
from openai import OpenAI
from pathlib import Path
client = OpenAI(base_url="{ADDRESS}/v1", api_key="none")
file = client.files.create(file=Path("FILE"), purpose="fine-tune")
grader = json.loads(Path("grader.json").read_bytes())
"""
SHELL = ("bash", "-euo", "pipefail", "-c")
WAIT = """
with client._client.stream("GET", f"{client.base_url}fine_tuning/jobs/{job.id}/events?stream=true") as events:
    told = events.read().decode()
assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model, told
"""


class Setup(NamedTuple):
    """A page's model, and what its server has beside it."""

    flags: tuple[str, ...] = ("-m", "model.gguf", "--alias", "shakespeare", "-n", "24", "--data-dir", "data")
    kind: str = "text"
    before: str = ":"  # in the shell


SUMS = {"mcpServers": {"sums": {"command": sys.executable, "args": [str(ROOT / "tests/helpers/mcp_server.py")]}}}
SETUPS = {
    "images": Setup(
        ("-m", "model.gguf", "--mmproj", "mmproj.gguf", "--media-path", ".", "--data-dir", "data", "-c", "512"), "image"
    ),
    "audio": Setup(("-m", "model.gguf", "--mmproj", "mmproj.gguf", "-c", str(2 * N_CTX)), "audio"),
    "tools": Setup(
        (
            "--demo",
            "-n",
            "8",
            "-c",
            "1024",
            "--tools",
            "all",
            "--tools-folder",
            ".",
            "--data-dir",
            "data",
            "--mcp-servers-json",
            json.dumps(SUMS),
        )
    ),
    "migration": Setup(
        ("--models-dir", "models", "-n", "8", "-c", "512"),
        before="logitless finetune -m model.gguf --file rows.jsonl --lora-out adapter.gguf --epochs 1",
    ),
    "training": Setup(("-m", "model.gguf", "--mmproj", "mmproj.gguf", "--data-dir", "data", "-c", "256"), "image"),
}


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a process that runs commands."""
    path = str(tmp_path_factory.mktemp("forks") / "socket")
    words = [sys.executable, command_forks.__file__, path]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield path
        os.killpg(process.pid, signal.SIGTERM)


def written(folder: Path, kind: str) -> dict[str, str]:
    """Write the files that examples name; the environment of commands in this folder."""
    if kind == "text":
        (folder / "model.gguf").symlink_to(DEMO)
    else:
        if not STORIES.exists():
            pytest.skip("no stories260K.gguf beside the checkout")
        if kind == "image":
            (folder / "model.gguf").symlink_to(STORIES)
            write_projector(folder / "mmproj.gguf", SPECS["mlp"])
        else:
            write_audio_text_model(folder / "model.gguf", AUDIO_SPECS["qwen2.5o audio"], STORIES)
            write_audio_projector(folder / "mmproj.gguf", AUDIO_SPECS["qwen2.5o audio"])
    for name in ("pictures", "project", "models"):
        (folder / name).mkdir()
    (folder / "models" / "base.gguf").symlink_to(DEMO)
    for name in ("model-F16.gguf", "stories.gguf"):
        (folder / name).symlink_to(DEMO)
    (folder / "cat.png").write_bytes(png(picture(40, 24)))
    (folder / "pictures" / "1.png").write_bytes(png(picture(40, 24)))
    (folder / "speech.wav").write_bytes(wav(sound(1, 0).samples))
    (folder / "text.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    (folder / "README.md").write_text("Read me.\n")
    (folder / "keys.txt").write_text("secret\n")
    (folder / "grader.json").write_text(json.dumps(GRADER))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in ("To be", "or not", "to be.")))
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LANG", "OPENBLAS", "LOGITLESS"))}
    return kept | {
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "LOGITLESS_CACHE": str(cache_folder()),
        "HF_HUB_OFFLINE": "1",
    }


def code(block: Block, url: str) -> str:
    """The text of a block, with the server of the test."""
    text = block.text.replace(ADDRESS, url).replace("/opt/logitless", str(cache_folder())).replace('"NAME"', '"model"')
    text = text.replace('"KEY"', '"none"').replace("# later, with the job's fine_tuned_model:", WAIT)
    text = text.replace("logitless selftest ", "logitless selftest --op softmax ")  # all of them compile every kernel
    text = "\n" + text
    if block.language == "python" and "client." in text and "import " not in block.text:
        rows = "pairs" if '"dpo"' in text else "prompts" if "grader" in text else "rows"
        end = "client.fine_tuning.jobs.cancel(job.id)" if "jobs.create" in text and WAIT not in text else ""
        text = text.replace("\nclient.fine_tuning.jobs.create(", "\njob = client.fine_tuning.jobs.create(")
        return "\n".join([FRAGMENT.replace(ADDRESS, url).replace("FILE", f"{rows}.jsonl"), text, end])
    return text


def can_run(block: Block) -> bool:
    """A block that runs; of those that need a package, one of Python whose modules are installed."""
    if block.reason == "needs-package" and block.language == "python":
        names = re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)
        return bool(names) and all(find_spec(name) for name in names)
    return not block.reason and ("curl " not in block.text or which("curl") is not None)


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page)], ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, socket_path: str, tmp_path: Path) -> None:
    running = [block for block in blocks(page) if can_run(block)]
    if not running:
        pytest.skip("no block runs here")
    setup = SETUPS.get(page.stem, Setup())
    environment = written(tmp_path, setup.kind)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "man").write_text('#!/bin/sh\nexec cat "$2"\n')  # small systems have none
    (tmp_path / "bin" / "man").chmod(0o755)
    for program in ("logitless", "python"):
        client = command_forks.CLIENT.format(python=sys.executable, address=socket_path, program=program)
        (tmp_path / "bin" / program).write_text(client)
        (tmp_path / "bin" / program).chmod(0o755)

    def run(*words: str) -> str:
        """Run a program; what it says if it fails."""
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, cwd=tmp_path, env=environment, text=True, timeout=300, **pipes)
        return done.returncode and f"{done.stdout}\nended with {done.returncode}"

    with ExitStack() as stack:
        assert not run(*SHELL, setup.before)
        url = ""
        if any(ADDRESS in block.text or "client." in block.text for block in running):
            words = ["logitless", "serve", *setup.flags]
            server = stack.enter_context(command_forks.request(socket_path, words, tmp_path, environment, stay=True))
            url = server.recv(256).decode()
            assert url.startswith("http"), (tmp_path / "server.log").read_text()
        for block in running:
            if block.file:
                text = block.text if not block.file.endswith(".jsonl") else json.dumps(json.loads(block.text)) + "\n"
                (tmp_path / block.file).write_text(text)
                continue
            program = SHELL if block.language == "sh" else ("python", "-c")
            failure = run(*program, code(block, url))
            assert not failure, f"{page.name}:{block.line}\n{block.text}{failure}"


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page)], ids=lambda page: page.stem)
def test_a_block_that_does_not_run_can_be_read(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "python":
                ast.parse(block.text)
            case "sh":
                subprocess.run(["bash", "-nc", block.text], check=True)
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "yaml":
                list(yaml.safe_load_all(block.text))


def test_every_fence_is_read_and_its_reason_is_one_of_the_list() -> None:
    for page in pages():
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page
        assert {block.reason for block in blocks(page)} <= {"", *REASONS}

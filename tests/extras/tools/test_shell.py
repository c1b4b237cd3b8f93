"""Shell tool: output, time and processes of a command are bounded, its environment is bare, containers run it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from logitless.extras.tools.built_in import shell
from logitless.extras.tools.built_in.folder import Folder
from logitless.extras.tools.built_in.shell import Runtime, shell_tool
from logitless.extras.tools.processes import MARK
from logitless.extras.tools.server_tool import result_text


async def run(folder: Path, command: str, runtime: Runtime | None = None, **more: Any) -> str:
    return result_text(await shell_tool(Folder(folder), runtime).call({"command": command, **more}, "me"))


def alive() -> list[str]:
    """Processes that still have the mark of a call, and are of this test."""
    own = {f"TMPDIR={os.environ['TMPDIR']}".encode()}
    result = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if own <= set(variables) and any(variable.startswith(f"{MARK}=".encode()) for variable in variables):
                result.append((entry / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return result


async def test_output_and_exit_code(tmp_path: Path) -> None:
    assert await run(tmp_path, "pwd; echo no >&2; exit 3") == f"{tmp_path}\nno\n\n[exit code: 3]"
    assert await run(tmp_path, "cat; read x || echo closed") == "closed\n\n[exit code: 0]"
    assert await run(tmp_path, "printf '\\377'") == "�\n[exit code: 0]"


async def test_keys_are_not_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA_API_KEY", "HF_TOKEN", "LOGITLESS_ADMIN_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in await run(tmp_path, "env")


async def test_huge_output(tmp_path: Path) -> None:
    text = await run(tmp_path, "head -c 30000000 /dev/zero | tr '\\0' x")
    assert text.endswith("[output truncated]\n[exit code: 0]")
    assert len(text) < shell.MAX_OUTPUT + 100
    assert (await run(tmp_path, "echo 123456", max_output_size=3)).startswith("123\n[output truncated]")


async def test_time_and_processes_that_would_stay(tmp_path: Path) -> None:
    """Also those in sessions of their own, and while new ones come."""
    began = time.monotonic()
    bomb = "i=0; while [ $i -lt 60 ]; do setsid sh -c 'sleep 99 & sleep 99' & i=$((i+1)); done; sleep 99"
    text = await run(tmp_path, bomb, timeout=1)
    assert text.endswith("[exit code: -9] [exit due to timed out]")
    assert time.monotonic() - began < 8
    assert alive() == []
    assert "[exit code: 0]" in await run(tmp_path, "(setsid sleep 99 >/dev/null 2>&1 &)")
    assert alive() == []


async def test_a_chain_of_forks_is_caught(tmp_path: Path) -> None:
    """Each process starts the next and ends, so no list of them is ever whole."""
    (tmp_path / "next.sh").write_text('[ "$1" -gt 0 ] && setsid sh next.sh $(($1 - 1)) >/dev/null 2>&1 &\n')
    await run(tmp_path, "sh next.sh 400; sleep 99", timeout=1)
    assert alive() == []


async def test_a_client_that_leaves_ends_its_command(tmp_path: Path) -> None:
    (tmp_path / "begun").unlink(missing_ok=True)
    task = asyncio.create_task(run(tmp_path, "touch begun; sleep 99", timeout=60))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive() == []


async def test_limits_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.extras.tools.processes.MAX_FILE", 1000)
    await run(tmp_path, "head -c 5000 /dev/zero > f")
    assert (tmp_path / "f").stat().st_size == 1000


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A podman that tells its arguments, and runs a command that follows `sh -c`."""
    script = tmp_path / "bin" / "podman"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nwhile [ "$1" != -c ]; do shift; done\nexec sh "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return tmp_path / "said"


async def test_containers(tmp_path: Path, engine: Path) -> None:
    assert await run(tmp_path, "echo hi", Runtime.parse("podman:alpine:3")) == "hi\n\n[exit code: 0]"
    said = engine.read_text()
    for words in ("run --rm", "--network none", "--pids-limit", "--memory", f"--volume {tmp_path}:{tmp_path}"):
        assert words in said
    assert said.rstrip().endswith("alpine:3 sh -c echo hi")
    await run(tmp_path, "echo hi", Runtime.parse("podman-container:abc"), timeout=7)
    assert f"exec --workdir {tmp_path} abc timeout -s KILL 7 sh -c echo hi" in engine.read_text()
    engine.unlink()
    await run(tmp_path, "sleep 99", Runtime.parse("podman:alpine"), timeout=1)
    assert "\nkill logitless-" in engine.read_text()


@pytest.mark.parametrize("text", ["", "alpine", "ssh:me@host", "podman:", "podman:-v/:/", "podman: x", "docker-x:y"])
def test_runtimes_that_are_none(engine: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of|names no"):
        Runtime.parse(text)

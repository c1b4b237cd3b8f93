"""Shell tool: a command in the working folder, on this machine or in a container, bounded in time and output."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Struct

from logitless.engine.sampling.params import Param
from logitless.extras.tools.built_in.declared import described, parsed, schema
from logitless.extras.tools.built_in.folder import Folder
from logitless.extras.tools.processes import MARK, end, environment, limit, start
from logitless.extras.tools.server_tool import Answer, Say, ServerTool, ToolError, plain

MAX_SECONDS, MAX_OUTPUT = 60, 16 << 10  # llama-server's
ENGINES = ("docker", "podman")
_BEGIN = 'read -r _; exec sh -c "$1"'  # once its limits are set


class ExecShellCommand(Struct, frozen=True, kw_only=True):
    """Run a shell command in the working folder; tells its output, errors included, and its exit code."""

    command: Annotated[str, Param("the command, for sh")]
    timeout: Annotated[int, Param(f"seconds, at most {MAX_SECONDS}", 1, MAX_SECONDS)] = 10
    max_output_size: Annotated[int, Param("bytes of output to tell", 1, MAX_OUTPUT)] = MAX_OUTPUT


@dataclass(frozen=True, slots=True)
class Runtime:
    """The container of shell commands: one for each command, of an image, or one that runs already."""

    engine: str  # docker or podman
    target: str
    attach: bool = False

    @classmethod
    def parse(cls, text: str) -> Runtime:
        """docker:IMAGE, podman:IMAGE, docker-container:ID, podman-container:ID. ValueError: it is none of them."""
        kind, _, target = text.partition(":")
        engine, _, attach = kind.partition("-")
        if engine not in ENGINES or attach not in ("", "container"):
            kinds = ", ".join(f"{name}:IMAGE, {name}-container:ID" for name in ENGINES)
            raise ValueError(f"must be one of {kinds}, not {text!r}")
        if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", target, re.ASCII):
            raise ValueError(f"names no {'container' if attach else 'image'}: {text!r}")
        if shutil.which(engine) is None:
            raise ValueError(f"there is no {engine} on this machine")
        return cls(engine, target, bool(attach))

    def command(self, folder: str, cwd: str, name: str, seconds: int, command: str) -> list[str]:
        """The command line that runs a shell command in the container, which has `folder`, in `cwd`."""
        if self.attach:
            inner = ["timeout", "-s", "KILL", str(seconds), "sh", "-c", command]
            return [self.engine, "exec", "--workdir", cwd, self.target, *inner]
        bounds = ["--network", "none", "--pids-limit", "256", "--memory", "2g", "--cap-drop", "ALL"]
        user = ["--user", f"{os.getuid()}:{os.getgid()}"] if self.engine == "docker" else []
        return [
            *(self.engine, "run", "--rm", "--name", name, *bounds, *user, "--security-opt", "no-new-privileges"),
            *("--volume", f"{folder}:{folder}", "--workdir", cwd, self.target, "sh", "-c", command),
        ]


def shell_tool(folder: Folder, runtime: Runtime | None) -> ServerTool:
    """exec_shell_command in a working folder."""

    async def live(arguments: Mapping[str, Any], say: Say) -> Answer:
        pieces: list[str] = []

        def tell(piece: str) -> None:
            if piece:
                pieces.append(piece)
                say(piece)

        await _run(folder, runtime, parsed(ExecShellCommand, arguments), tell)
        return plain("".join(pieces))

    async def call(arguments: Mapping[str, Any], client: str) -> Answer:
        return await live(arguments, lambda _: None)

    kind, title = ExecShellCommand, "Execute shell command"
    return ServerTool("exec_shell_command", title, described(kind), schema(kind), call, writes=True, live=live)


async def _run(folder: Folder, runtime: Runtime | None, body: ExecShellCommand, say: Say) -> None:
    """Run a command; `say` gets its output, and its exit code as the last."""
    environ, cwd = environment(), str(folder.cwd)
    name = f"logitless-{environ[MARK]}"
    if runtime is None:
        words: Sequence[str] = ["sh", "-c", _BEGIN, "sh", body.command]
    else:
        words = runtime.command(str(folder.root), cwd, name, body.timeout, body.command)
    pipes: dict[str, Any] = {
        "stdin": asyncio.subprocess.PIPE,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.STDOUT,
    }
    try:
        process = await start(words, environ, cwd, **pipes)
    except (OSError, ValueError) as error:
        raise ToolError(f"the command cannot be started: {error}") from None
    output, late = _Output(body.max_output_size, say), False
    try:
        if runtime is None:
            limit(process)
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(b"\n")
            process.stdin.close()
        async with asyncio.timeout(body.timeout):
            await _read(process, output)
            await process.wait()
    except TimeoutError:
        late = True
    finally:
        await asyncio.shield(_end(process, environ[MARK], runtime, name, late))
    output.end()
    code = process.returncode if process.returncode is not None and not late else -9
    say(f"\n[exit code: {code}]{' [exit due to timed out]' if late else ''}")


class _Output:
    """The text of a command's output, tell as it comes; what is beyond `room` bytes is dropped."""

    def __init__(self, room: int, say: Say) -> None:
        self._room, self._say, self._cut = room, say, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, piece: bytes) -> None:
        self._cut = self._cut or len(piece) > self._room
        entries = piece[: self._room]
        self._room -= len(entries)
        self._say(self._decoder.decode(entries))

    def end(self) -> None:
        self._say(self._decoder.decode(b"", final=True) + ("\n[output truncated]" if self._cut else ""))


async def _read(process: asyncio.subprocess.Process, output: _Output) -> None:
    """Take the output in until it ends."""
    assert process.stdout is not None
    while piece := await process.stdout.read(1 << 16):
        output.take(piece)


async def _end(process: asyncio.subprocess.Process, mark: str, runtime: Runtime | None, name: str, late: bool) -> None:
    """End what is left of the command: of a container that its time is over."""
    await end(process, mark)
    if runtime is not None and not runtime.attach and late:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.DEVNULL)
        environ = environment()
        with suppress(OSError, TimeoutError):
            killing = await start([runtime.engine, "kill", name], environ, **pipes)
            try:
                await asyncio.wait_for(killing.wait(), 10)
            finally:
                await end(killing, environ[MARK])

"""Child process of the router: starting it, waiting until it is ready, ending it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from logitless.models.errors import ModelFileError
from logitless.router.downloads import DownloadFailed, Report
from logitless.router.fleet import StartFailed, without_folders

ROOT = Path(__file__).parents[2]  # of the installation: the folder that has logitless/
_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)(?:$|\")")  # also in a line of JSON
_LOADED = "model loaded"
_LONGEST_LINE = 1 << 16


async def spawn(words: Sequence[str], environ: Mapping[str, str], stdout: int) -> asyncio.subprocess.Process:
    """Start `logitless` with these words; it ends when this process does.

    It imports this installation, and nothing from the working directory."""
    path = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "logitless.cli.commands.router_child", *words),
        env={**environ, "PYTHONPATH": path},
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl+C is the router's; it ends its children itself
    )


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a child's output until it ends."""
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # longer than any line of ours
            continue
        if not raw:
            return
        yield raw.decode("utf-8", "replace").rstrip()


class ServerProcess:
    """A server of one model on a port of this machine that only `key` opens."""

    def __init__(self, process: asyncio.subprocess.Process, key: str, say: Callable[[str], None]) -> None:
        self.key = key
        self.url = ""
        self._process = process
        self._say = say
        self._last = ""  # line of its log
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, args: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]) -> ServerProcess:
        """Start a server and wait until it is ready. StartFailed has its last line; cancelling ends it.

        `say` gets the lines of its log."""
        key = secrets.token_urlsafe(32)
        words = ("serve", *args, "--host", "127.0.0.1", "--port", "0")
        own = {"LLAMA_API_KEY": key, "LOGITLESS_BEHIND_ROUTER": "1"}
        process = await spawn(words, {**environ, **own}, asyncio.subprocess.DEVNULL)
        child = cls(process, key, say)
        try:
            await asyncio.shield(child._ready)
        except BaseException:
            await child.stop(0)
            raise
        return child

    async def _read(self) -> None:
        """Read its log until it ends."""
        assert self._process.stderr is not None
        loaded = False
        async for line in lines(self._process.stderr):
            self._say(line)
            self._last = line or self._last
            if match := _LISTENING.search(line):
                self.url = match[1]
            loaded = loaded or _LOADED in line  # a small model may load before the port is open
            if self.url and loaded and not self._ready.done():
                self._ready.set_result(None)
        code = await self._process.wait()
        if not self._ready.done():
            reason = self._last.removeprefix("logitless: ") or f"it ended with exit code {code}"
            self._ready.set_exception(StartFailed(reason, code))
            self._ready.exception()  # seen, also when nobody waits any more

    async def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        await asyncio.shield(self._reading)
        return await self._process.wait()

    async def stop(self, seconds: float) -> None:
        """End it: running requests have `seconds`, then the process is killed."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM if seconds > 0 else signal.SIGKILL)
        try:
            async with asyncio.timeout(seconds or None):
                await self.ended()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self.ended()


@asynccontextmanager
async def _running(words: Sequence[str], environ: Mapping[str, str], stdout: int) -> AsyncIterator[Process]:
    """A process of a command, which is killed if the block ends before it."""
    process = await spawn(words, environ, stdout)
    try:
        yield process
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _last_line(stderr: asyncio.StreamReader | None, say: Callable[[str], None]) -> str:
    """The last line that is not empty; `say` gets each."""
    assert stderr is not None
    last = ""
    async for line in lines(stderr):
        say(line)
        last = line or last
    return last.removeprefix("logitless: ")


async def download(
    words: Sequence[str], environ: Mapping[str, str], report: Report, say: Callable[[str], None]
) -> None:
    """Run `logitless download` for the source in the environment. DownloadFailed has its last line."""
    async with _running(("download", *words, "--json"), environ, asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        listening = asyncio.create_task(_last_line(process.stderr, say))
        try:
            async for line in lines(process.stdout):
                with suppress(ValueError, TypeError, KeyError):  # a line of some library
                    progress = json.loads(line)
                    report(str(progress["file"]), int(progress["done"]), int(progress["total"]))
            last, code = await listening, await process.wait()
        finally:
            listening.cancel()
    if code:
        raise DownloadFailed(last or f"the download ended with exit code {code}")


async def quantize(
    environ: Mapping[str, str], say: Callable[[str], None], source: Path, place: Path, kind: str
) -> None:
    """Run `logitless quantize`. ModelFileError has its last line."""
    words = ("quantize", str(source), str(place), kind)
    async with _running(words, environ, asyncio.subprocess.DEVNULL) as process:
        last, code = await _last_line(process.stderr, say), await process.wait()
    if code:
        reason = last.partition("; --")[0] or f"it ended with exit code {code}"
        raise ModelFileError(place, without_folders(reason, str(source)))


def environment(own: frozenset[str]) -> dict[str, str]:
    """Environment of children: everything but the router's own variables."""
    return {name: value for name, value in os.environ.items() if name not in own}

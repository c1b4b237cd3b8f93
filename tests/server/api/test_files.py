"""Uploads streamed to disk: memory, a client that leaves, a full disk."""

from __future__ import annotations

import asyncio
import gzip
import resource
import signal
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from logitless.router.jobs import RouterJobs
from logitless.server.api.openai import files
from logitless.server.api.openai.tuning_context import DESK, SILENCE
from logitless.server.auth import ApiKeys
from logitless.server.bodies.form import FormParts
from logitless.server.config import ServerConfig
from logitless.server.middleware import Guard

LINE = b'{"text": "' + b"a" * 10_227 + b'"}\n'  # 10 KiB


@asynccontextmanager
async def serving(folder: Path, silence: float = 60) -> AsyncIterator[tuple[aiohttp.ClientSession, str, Path]]:
    app = Guard(ServerConfig(), ApiKeys((), ""), frozenset()).application()
    desk = RouterJobs(str(folder))
    app[DESK], app[SILENCE] = desk, silence
    app.add_routes([web.post("/v1/files", files.upload), web.get("/v1/files/{id}/content", files.content)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield session, f"http://127.0.0.1:{runner.addresses[0][1]}/v1/files", folder / "files"
    await runner.cleanup()
    desk.store.close()


def form(content: AsyncIterator[bytes]) -> aiohttp.FormData:
    data = aiohttp.FormData()
    data.add_field("purpose", "fine-tune")
    data.add_field("file", content, filename="rows.jsonl")
    return data


async def lines(n: int, end: bytes = b"") -> AsyncIterator[bytes]:
    for _ in range(n // 10):
        yield LINE * 10
    yield end


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    async def peak(n: int) -> int:
        async with serving(tmp_path / str(n)) as (session, url, _):
            tracemalloc.reset_peak()
            async with session.post(url, data=form(lines(n))) as reply:
                row = await reply.json()
            got = 0
            async with session.get(f"{url}/{row['id']}/content") as reply:
                async for piece in reply.content.iter_any():
                    got += len(piece)
            assert got == row["bytes"] == n * len(LINE)
            return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        asyncio.run(peak(10))
        small, large = asyncio.run(peak(300)), asyncio.run(peak(1200))
    finally:
        tracemalloc.stop()
    assert large < small + (4 << 20), (small, large)  # of 3 and 12 MB


async def test_a_compressed_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = LINE * 100
    head = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n%s\r\n--b--\r\n'
    data = head % (b"purpose", b"fine-tune") + file % rows
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with serving(tmp_path) as (session, url, folder):
        for coding, raw in (("gzip", gzip.compress(data)), ("deflate", zlib.compress(data))):
            async with session.post(url, data=raw, headers={**headers, "Content-Encoding": coding}) as reply:
                row = await reply.json()
            async with session.get(f"{url}/{row['id']}/content") as reply:
                assert await reply.read() == rows
        monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
        n_kept = len(list(folder.iterdir()))
        for coding, raw, status in (
            ("gzip", gzip.compress(head % (b"nothing", bytes(1 << 20)) * 9 + data), 413),
            ("gzip", gzip.compress(head % (b"file", bytes(1 << 21))), 413),
            ("gzip", gzip.compress(bytes(1 << 21)), 400),
            ("gzip", b"no gzip", 400),
            ("br", b"no brotli", 415),
        ):
            async with session.post(url, data=raw, headers={**headers, "Content-Encoding": coding}) as reply:
                assert reply.status == status, await reply.text()
                assert (await reply.json())["error"]["code"] == status
        assert len(list(folder.iterdir())) == n_kept


def test_the_check_of_a_file_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop, begun, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def check(self: RouterJobs, path: Path, filename: str, goes_on: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(begun.set)
            try:
                while True:
                    goes_on()
            finally:
                loop.call_soon_threadsafe(ended.set)

        monkeypatch.setattr(RouterJobs, "check", check)
        async with serving(tmp_path) as (session, url, folder):
            task = asyncio.create_task(session.post(url, data=form(lines(10))))
            async with asyncio.timeout(20):
                await begun.wait()
                task.cancel()
                await ended.wait()
            assert list(folder.iterdir()) == []

    asyncio.run(run())


def test_a_client_that_leaves_and_a_bad_line_leave_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (session, url, folder):
            here = asyncio.Event()

            async def stuck() -> AsyncIterator[bytes]:
                yield LINE * 300
                here.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(session.post(url, data=form(stuck())))
            await here.wait()
            async with asyncio.timeout(20):
                while not list(folder.iterdir()):
                    await asyncio.sleep(0)
                task.cancel()
                while list(folder.iterdir()):
                    await asyncio.sleep(0)
            async with session.post(url, data=form(lines(20, b"{}\n"))) as reply:
                told = (await reply.json())["error"]["message"]
            assert reply.status == 400
            assert told.startswith("field 'file': rows.jsonl: line 21: must have one of 'text'")
            assert list(folder.iterdir()) == []

    asyncio.run(run())


def test_silent_client_is_refused_and_slow_one_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own, which goes on when the server has read what was sent."""

    async def run() -> None:
        silence, n_read, late = 10.0, 0, 0.0
        loop, piece = asyncio.get_running_loop(), FormParts.piece
        time = loop.time

        async def counted(parts: FormParts) -> bytes:
            nonlocal n_read
            data = await piece(parts)
            n_read += len(data)
            return data

        monkeypatch.setattr(loop, "time", lambda: time() + late)
        monkeypatch.setattr(FormParts, "piece", counted)

        async def wait(seconds: float, nbytes: int) -> None:
            nonlocal late
            while n_read < nbytes - 1000:  # the parser keeps what may begin the form's end
                await asyncio.sleep(0)
            late += seconds

        async with serving(tmp_path, silence) as (session, url, folder):

            async def stuck() -> AsyncIterator[bytes]:
                yield LINE * 300
                await wait(1.5 * silence, 300 * len(LINE))
                await asyncio.Event().wait()

            async def slow() -> AsyncIterator[bytes]:
                nonlocal n_read
                n_read = 0
                for n in range(1, 76):
                    yield LINE
                    await wait(silence / 50, n * len(LINE))

            async with session.post(url, data=form(stuck())) as reply:
                assert (reply.status, (await reply.json())["error"]["message"]) == (
                    408,
                    "the request did not arrive in time",
                )
            assert list(folder.iterdir()) == []
            async with session.post(url, data=form(slow())) as reply:
                assert reply.status == 200

    asyncio.run(run())


def test_a_disk_that_gets_full(tmp_path: Path) -> None:
    """The system refuses to write more than 3 MB to a file."""

    async def run() -> None:
        async with serving(tmp_path) as (session, url, folder):
            resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, before[1]))
            async with session.post(url, data=form(lines(500))) as reply:
                assert (reply.status, (await reply.json())["error"]["message"]) == (
                    507,
                    "the file cannot be kept: File too large",
                )
            assert list(folder.iterdir()) == []
            async with session.post(url, data=form(lines(10))) as reply:
                assert reply.status == 200

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

"""Batch runner: answers the lines of all open batches, through the routes of their own application.

A line that has its record in the store is never asked again, whatever ends the process: the record
is on the disk before the line counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from logitless.engine.async_engine import AsyncEngine
from logitless.engine.errors import GaveWay, NotSupported
from logitless.frontend.workers import compute, to_thread
from logitless.server.api.batches.batch import MESSAGES, client_of
from logitless.server.api.batches.lines import Line, check_lines, read_lines, result, unanswered
from logitless.server.api.context import CONTEXT
from logitless.server.api.openai.files import OPEN
from logitless.server.asgi import call
from logitless.server.clients import HttpClient
from logitless.server.config import ServerConfig

if TYPE_CHECKING:
    from logitless.engine.records.store import Row, Store

Answered = list[tuple[int, bool, bytes]]  # (line, True if it is no error, text)
log = logging.getLogger("logitless.batches")
AHEAD: Final = 2  # lines that are asked at once, as a multiple of the slots: one may end in each at the same step
RETRY: Final = 1.0  # seconds before a line that the server had no room for is asked again, or a write repeated
_AGAIN = frozenset((429, 503))  # statuses of a server that has no room


async def ask(server: web.Server, path: str, line: Line, client: HttpClient, request_id: str) -> tuple[int, bytes]:
    """(status, body) of a line's answer; a line for which the server has no room is asked again."""
    while True:
        status, body = await call(server, path, line.body, client, request_id)
        if status not in _AGAIN:
            return status, body
        await asyncio.sleep(0 if GaveWay.type.encode() in body else RETRY)


async def answer_file(
    app: web.Application, source: Path, endpoint: str, skip: Collection[int], keep: Callable[[bool, bytes], None]
) -> None:
    """Answer the lines of a checked file in this process; `keep` gets each result as it comes.

    `skip`: numbers of lines that are done."""
    runner = web.AppRunner(app)
    await runner.setup()
    config = app[CONTEXT].config
    room = asyncio.Semaphore(AHEAD * config.n_parallel)
    client = HttpClient(batch=True)

    async def answer(line: Line) -> None:
        async with room:
            id = f"batch-{line.number}"
            status, body = await ask(cast("web.Server", runner.server), endpoint, line, client, id)
            keep(*result(endpoint, line, status, body, id))

    try:
        async with asyncio.TaskGroup() as group:
            for line in read_lines(source, skip):
                async with room:  # so that few lines are read ahead
                    group.create_task(answer(line))
                    await asyncio.sleep(0)
    finally:
        await runner.cleanup()


class BatchRunner:
    """Batches of a model's server. They take turns line by line, and give way to all other requests."""

    def __init__(self, service: AsyncEngine, config: ServerConfig) -> None:
        self._service, self._config = service, config
        self._room = asyncio.Semaphore(AHEAD * config.n_parallel)
        self._working: dict[str, asyncio.Task[None]] = {}  # by the batch's id
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: web.Server
        self._prefix = config.api_prefix.rstrip("/")

    @property
    def store(self) -> Store:
        """The store. NotSupported: there is none."""
        tuning = self._service.served.tuning if self._service.served is not None else None
        if tuning is None:
            raise NotSupported("batches need a folder: start the server with --data-dir DIR")
        return tuning.store

    @property
    def name(self) -> str:
        """The server's name in the rows of its batches: several servers of a router share a store."""
        return self._config.model if self._config.behind_router else ""

    async def live(self, app: web.Application) -> AsyncIterator[None]:
        """Context of the application: goes on with open batches once the model has loaded."""
        handle: Any = app._handle
        self._server = web.Server(handle, request_factory=app._make_request)
        starting = asyncio.create_task(self._start())
        yield
        for task in (starting, *self._tasks):
            task.cancel()
        await asyncio.gather(starting, *self._tasks, return_exceptions=True)

    async def _start(self) -> None:
        served = await self._service.loaded()
        if served.tuning is None:
            return
        try:
            rows = await self._service.ask(lambda _: self.store.all("batches"), wakes=False)
        except OSError as error:
            log.error("the batches cannot be read: %s", error)
            return
        for row in reversed(rows):
            if row["status"] in OPEN and row["server"] == self.name:
                self.begin(row)

    def begin(self, row: Row) -> None:
        """Work on a batch until it has ended."""
        task = asyncio.create_task(self._run(row))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, id: str) -> None:
        """End a batch that is being cancelled: its lines are given up."""
        if id in self._working:
            self._working[id].cancel()

    # -- one batch

    async def _run(self, row: Row) -> None:
        try:
            row = await self._checked(row)
            if row["status"] in OPEN:
                await self._finish(row, await self._worked(row))
        except OSError as error:  # of its files: the store's own are repeated
            log.error("batch %s: %s", row["id"], error)
            problem = {"code": "server_error", "line": None, "message": str(error.strerror), "param": None}
            await self._change(row, "failed", errors=[problem])

    async def _checked(self, row: Row) -> Row:
        """Check the input file of a new batch, which fails if a line is wrong."""
        if row["status"] != "validating":
            return row
        path = self.store.file_path(row["input_file_id"])
        total, errors = await compute(partial(check_lines, path, row["endpoint"]), row["owner"])
        if errors:
            return await self._change(row, "failed", errors=errors)
        return await self._change(row, "in_progress", total=total)

    async def _worked(self, row: Row) -> str:
        """The status in which the batch ends, once its lines are answered or given up."""
        if row["status"] in ("finalizing", "cancelling"):
            return str(row.get("ends_as", "cancelled"))
        if row["expires_at"] <= time.time():
            return "expired"
        work = self._working[row["id"]] = asyncio.create_task(self._answer_all(row))
        try:
            await asyncio.wait([work], timeout=max(0.0, row["expires_at"] - time.time()))
            expired = not work.done()
            work.cancel()
            await asyncio.wait([work])
        finally:
            work.cancel()
            del self._working[row["id"]]
        if work.cancelled():
            return "expired" if expired else "cancelled"
        work.result()
        return "completed"

    async def _answer_all(self, row: Row) -> None:
        """Answer the lines that have no record."""
        store, id = self.store, row["id"]
        done = await to_thread(partial(store.lines_done, id))
        lines = read_lines(store.file_path(row["input_file_id"]), done)
        answered: Answered = []
        async with asyncio.TaskGroup() as group:
            there, ended = asyncio.Event(), asyncio.Event()
            keeping = group.create_task(self._keep(id, answered, there, ended))
            async with asyncio.TaskGroup() as asking:
                while (line := await to_thread(partial(next, lines, None))) is not None:
                    await self._room.acquire()
                    task = asking.create_task(self._answer(row, line, answered, there))
                    task.add_done_callback(lambda _: self._room.release())
            ended.set()
            there.set()
            await keeping

    async def _answer(self, row: Row, line: Line, answered: Answered, there: asyncio.Event) -> None:
        request_id = f"{row['id']}-{line.number}"
        path = self._prefix + row["endpoint"]
        status, body = await ask(self._server, path, line, client_of(row), request_id)
        answered.append((line.number, *result(row["endpoint"], line, status, body, request_id)))
        there.set()

    async def _keep(self, id: str, answered: Answered, there: asyncio.Event, ended: asyncio.Event) -> None:
        """Write the records of answered lines, all that there are at once. A full disk is waited for."""
        while answered or not ended.is_set():
            await there.wait()
            there.clear()
            lines = [*answered]
            while lines:
                writing = asyncio.ensure_future(to_thread(partial(self.store.add_lines, id, lines)))
                try:
                    await asyncio.shield(writing)
                    del answered[: len(lines)]
                    break
                except asyncio.CancelledError:
                    await asyncio.wait([writing])  # the results must not be read before
                    raise
                except OSError as error:
                    log.error("batch %s waits: its answers cannot be kept: %s", id, error)
                    await asyncio.sleep(RETRY)

    async def _finish(self, row: Row, status: str) -> None:
        """Write the files of results, then the batch's last state. May be done again after a kill."""
        from logitless.engine.records.store import new_id

        row = await self._change(
            row, "cancelling" if status == "cancelled" else "finalizing",
            ends_as=status, outputs=row.get("outputs") or [new_id("file"), new_id("file")],
        )  # fmt: skip
        while True:
            try:
                files = await to_thread(partial(self._write, row, status))
                break
            except OSError as error:
                log.error("batch %s waits: its results cannot be written: %s", row["id"], error)
                await asyncio.sleep(RETRY)
        counts = await to_thread(partial(self.store.count_lines, row["id"]))
        await self._change(row, status, counts=list(counts), **files)
        await to_thread(partial(self.store.forget_lines, row["id"]))
        log.info("batch %s: %s, %d answered, %d failed of %d", row["id"], status, *counts, row["total"])

    def _write(self, row: Row, status: str) -> dict[str, str]:
        """The files of answers and of errors, by their fields; Anthropic's has both."""
        store, endpoint = self.store, row["endpoint"]
        together = endpoint == MESSAGES
        done = store.lines_done(row["id"]) if status != "completed" else set[int]()
        files = {}
        for name, id, kinds in (
            ("output_file_id", row["outputs"][0], (True, False) if together else (True,)),
            ("error_file_id", row["outputs"][1], () if together else (False,)),
        ):
            n = 0
            with store.incoming() as part, open(part, "wb") as file:
                for text in store.lines(row["id"], kinds):
                    n += file.write(text + b"\n")
                if status != "completed" and (together or name == "error_file_id"):
                    for line in read_lines(store.file_path(row["input_file_id"]), done):
                        rest = unanswered(endpoint, line, status)
                        n += file.write(rest + b"\n") if rest is not None else 0
                file.flush()
                if n:
                    label = "output" if name == "output_file_id" else "errors"
                    store.keep_file(part, f"{row['id']}_{label}.jsonl", "batch_output", row["owner"], id=id)
                    files[name] = id
        return files

    async def _change(self, row: Row, status: str, **fields: object) -> Row:
        """The row in its new state, written durably; a batch that is being cancelled stays so."""
        now = int(time.time())
        stamp = f"{status}_at"

        def change(old: Row) -> Row:
            goes_on = old["status"] != "cancelling" or status != "in_progress"
            return {**old, stamp: old.get(stamp, now), **fields, "status": status if goes_on else "cancelling"}

        while True:
            try:
                changed = await to_thread(partial(self.store.change, "batches", row["id"], change))
                return changed if changed is not None else {**row, "status": "cancelled"}
            except OSError as error:
                log.error("batch %s waits: its state cannot be kept: %s", row["id"], error)
                await asyncio.sleep(RETRY)


BATCHES: web.AppKey[BatchRunner] = web.AppKey("batches", BatchRunner)

"""Download states of the router: requested model, progress, result."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from logitless.engine.errors import InvalidRequest, TooManyRequests

log = logging.getLogger("logitless.router")
AT_ONCE = 4
_REMEMBERED = 200  # events; a slower reader misses some
Report = Callable[[str, int, int], None]  # file name, bytes done, bytes in all (0: unknown)


class DownloadFailed(Exception):
    """The reason, in one line."""


@dataclass(eq=False)
class Download:
    """A running download of one model."""

    name: str
    source: str  # repository or address that the client asked for; may hold secrets
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # by name: done, total
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    error: str = ""

    @property
    def progress(self) -> dict[str, Any]:
        return {"progress": {name: dict(counts) for name, counts in self.files.items()}}


class Downloads:
    """Running downloads. `fetch(source, report)` downloads a model or raises DownloadFailed, `landed`
    adds it to the catalog, and `changed` is called after every event."""

    def __init__(
        self,
        fetch: Callable[[str, Report], Awaitable[None]],
        landed: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self.running: dict[str, Download] = {}
        self._fetch, self._landed, self._changed = fetch, landed, changed
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_REMEMBERED)
        self.n_events = 0

    async def begin(self, name: str, source: str) -> Download:
        """Begin a download; returns when the model is known to exist. InvalidRequest: it does not."""
        if name in self.running:
            raise InvalidRequest(f"model {name!r} is being downloaded already")
        if len(self.running) >= AT_ONCE:
            raise TooManyRequests(f"{AT_ONCE} models are being downloaded; try again when one of them is there")
        download = self.running[name] = Download(name, source)
        task = download.task = asyncio.create_task(self._run(download))
        task.add_done_callback(partial(self._cancelled, download))
        begun = asyncio.create_task(download.begun.wait())
        try:
            await asyncio.wait([begun, task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if download.error and not download.begun.is_set():
            raise InvalidRequest(download.error)
        return download

    async def cancel(self, name: str) -> Download:
        """Cancel a download; its partial files stay."""
        download = self.running[name]
        assert download.task is not None
        download.task.cancel()
        await asyncio.wait([download.task])
        return download

    async def close(self) -> None:
        for name in list(self.running):
            await self.cancel(name)

    def since(self, n: int) -> Iterator[dict[str, Any]]:
        """The events after the first n."""
        yield from [event for number, event in self._events if number >= n]

    def tell(self, name: str, event: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of a model."""
        self._events.append((self.n_events, {"model": name, "event": event} | ({} if data is None else {"data": data})))
        self.n_events += 1
        self._changed()

    async def _run(self, download: Download) -> None:
        def report(file: str, done: int, total: int) -> None:
            download.files[file] = {"done": done, "total": total}
            download.begun.set()
            self.tell(download.name, "download_progress", download.progress)

        error = ""
        try:
            await self._fetch(download.source, report)
            await self._landed()
        except DownloadFailed as failed:
            error = " ".join(str(failed).split())
        except Exception as failed:
            error = f"internal error: {type(failed).__name__}"
            log.error("%s: %s: %s", download.name, type(failed).__name__, " ".join(str(failed).split()))
        self._end(download, error)

    def _cancelled(self, download: Download, running: asyncio.Task[None]) -> None:
        """Separate from `_run`: a task that is cancelled before it begins never runs its own code."""
        if running.cancelled():
            self._end(download, "it was cancelled")

    def _end(self, download: Download, error: str) -> None:
        download.error = error
        del self.running[download.name]
        log.info("%s: %s", download.name, error or "downloaded")
        if error:
            self.tell(download.name, "download_failed", {"error": error})
        else:
            self.tell(download.name, "download_finished")

"""Worker threads: work that would hold up the event loop, a few at a time and fair among clients."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_running = threading.local()  # .job: the one that this thread does


class ClientLeft(Exception):
    """Nobody waits for the result of this thread's work any more."""


class _Job(Generic[T]):
    """Work for one client, and the future of its result."""

    __slots__ = ("client", "done", "loop", "unwanted", "work")

    def __init__(self, work: Callable[[], T], client: str) -> None:
        self.work, self.client, self.unwanted = work, client, False
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = self.loop.create_future()

    def run(self) -> None:
        result, raised = None, None
        _running.job = self
        try:
            result = self.work()
        except BaseException as error:
            raised = error
        finally:
            _running.job = None
        with suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(self._settle, result, raised)
        del self, result, raised  # the error's traceback has this frame: a cycle would keep the request's body

    def _settle(self, result: Any, raised: BaseException | None) -> None:
        if self.done.done():  # nobody waits any more
            return
        if raised is not None:
            self.done.set_exception(raised)
        else:
            self.done.set_result(result)


class Workers:
    """At most `n` threads. Clients take turns, and one of them has all threads but one at most.

    The process does not wait for the threads when it ends, as it would for asyncio's own."""

    def __init__(self, n: int, name: str) -> None:
        self._n, self._name = n, name
        self._lock = threading.Condition()
        self._waiting: dict[str, deque[_Job[Any]]] = {}  # by client, the next one's turn first
        self._busy: Counter[str] = Counter()  # running jobs by client
        self._n_threads = self._n_idle = 0

    def limit(self, n: int) -> None:
        """Have at most `n` threads; before the first job."""
        self._n = n

    async def do(self, work: Callable[[], T], client: str = "") -> T:
        """The result of `work`. When the caller is cancelled, work that has not begun never does, and
        work that looks (`check`) ends."""
        job = _Job(work, client)
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)
            if not self._n_idle and self._n_threads < self._n:
                self._n_threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._lock.notify()
        try:
            return await job.done
        finally:
            job.unwanted = True
            with self._lock:
                self._forget(job)
            del job  # its future has the error, whose traceback has this frame

    def _serve(self) -> None:
        while True:
            job = self._take()
            client = job.client
            job.run()
            del job  # its references may be large
            with self._lock:
                self._busy -= Counter((client,))
                self._lock.notify()  # a job may have waited for this client's turn

    def _take(self) -> _Job[Any]:
        with self._lock:
            while (client := self._next()) is None:
                self._n_idle += 1
                self._lock.wait()
                self._n_idle -= 1
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind all others
            self._busy[client] += 1
            return job

    def _next(self) -> str | None:
        most = max(1, self._n - 1)
        return next((client for client in self._waiting if self._busy[client] < most), None)

    def _forget(self, job: _Job[Any]) -> None:
        jobs = self._waiting.get(job.client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.client]


def check() -> None:
    """ClientLeft, where the client of this thread's work has left. Long work calls this now and then."""
    job: _Job[Any] | None = getattr(_running, "job", None)
    if job is not None and job.unwanted:
        raise ClientLeft


_COMPUTING, _WAITING = Workers(4, "compute"), Workers(8, "disk")


def limit_threads(n: int) -> None:
    """Let `compute` have so many threads, from now on."""
    _COMPUTING.limit(n)


async def compute(work: Callable[[], T], client: str = "") -> T:
    """The result of work that keeps a processor busy, for this client."""
    return await _COMPUTING.do(work, client)


async def to_thread(work: Callable[[], T]) -> T:
    """The result of work that waits for disks, other processes or the network."""
    return await _WAITING.do(work)

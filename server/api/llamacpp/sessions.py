"""Buffers of resumable streams: sent bytes are tail, and sent again from any position.

llama-server's semantics (tools/server, "resumable streams"): bytes are counted, the oldest are
dropped first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from logitless.engine.errors import InvalidRequest, Unavailable
from logitless.engine.stream import Stream

log = logging.getLogger("logitless.http")
MAX_BYTES = 4 << 20  # of one stream
MAX_SESSIONS = 32  # so 128 MiB in all
KEEP = 300.0  # seconds that a stream is tail when it is complete, and that it goes on when nobody reads it

Place = tuple[str, str]  # the client's key, and its name for the stream: keys see their own streams only


class StreamSession:
    """The bytes of one stream, for as many readers as come."""

    def __init__(self, id: str, *, lasting: bool = False) -> None:
        """`lasting`: it goes on however long nobody reads it."""
        self.id, self._lasting = id, lasting
        self.started_at, self.completed_at = time.time(), 0.0
        self.total = 0  # bytes so far, those that were dropped included
        self.done = False
        self._tail = bytearray()
        self._news = asyncio.Event()
        self._n_readers = 0
        self._left_at = time.monotonic()
        self._stream: Stream | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def start(self) -> int:
        """The first byte that is still tail."""
        return self.total - len(self._tail)

    @property
    def tail(self) -> bytes:
        """The bytes that are still tail."""
        return bytes(self._tail)

    def begin(self, stream: Stream, data: AsyncGenerator[bytes, None], ping_interval: int) -> None:
        """Take in `data`, what `stream` says, from now on, and comment lines when it is silent: they count, or offsets
        would be wrong. The stream ends with the session."""
        if self.done:  # it was ended while the job was being submitted
            stream.close()
            return
        self._stream = stream
        self._tasks = [asyncio.create_task(self._pump(data))]
        if ping_interval > 0:
            self._tasks.append(asyncio.create_task(self._ping(ping_interval)))

    async def _pump(self, data: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(data):
                async for piece in data:
                    self.add(piece)
                    if not self._lasting and not self._n_readers and time.monotonic() - self._left_at > KEEP:
                        log.info("nobody came back for a stream; it is ended")
                        break
        finally:
            self.end()

    async def _ping(self, interval: int) -> None:
        total = -1
        while True:
            if total == self.total:
                self.add(b":\n\n")
            total = self.total
            await asyncio.sleep(interval)

    def add(self, piece: bytes) -> None:
        """The stream goes on."""
        self._tail += piece
        self.total += len(piece)
        del self._tail[:-MAX_BYTES]
        self._tell()

    def end(self) -> None:
        """Nothing more comes: it is complete, or somebody ended it."""
        if not self.done:
            self.done, self.completed_at = True, time.time()
            for task in self._tasks:
                task.cancel()
            if self._stream is not None:
                self._stream.close()
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def check(self, offset: int) -> None:
        """InvalidRequest: the bytes from there on are not tail any more."""
        if offset < self.start:
            raise InvalidRequest(f"'from': only the bytes from {self.start} on are still kept")

    async def read(self, offset: int) -> AsyncGenerator[bytes, None]:
        """Everything from this byte on, until the end. ConnectionError: the reader is too slow for what is tail."""
        self._n_readers += 1
        try:
            while True:
                if offset < self.start:
                    raise ConnectionResetError("too slow")
                piece = bytes(self._tail[offset - self.start :])
                if piece:
                    offset += len(piece)
                    yield piece
                elif self.done:
                    return
                else:
                    await self._news.wait()
        finally:
            self._n_readers -= 1
            self._left_at = time.monotonic()


class StreamSessions:
    """All of a server."""

    def __init__(self) -> None:
        self._all: dict[Place, StreamSession] = {}

    def open(self, place: Place, *, lasting: bool = False) -> StreamSession:
        """A new one; it ends the one that had this place. Unavailable: too many are running."""
        self.drop(place)
        self._forget_old()
        while len(self._all) >= MAX_SESSIONS:
            oldest = next((p for p, session in self._all.items() if session.done), None)
            if oldest is None:
                hint = "later" if lasting else "without X-Conversation-Id"
                raise Unavailable(f"{MAX_SESSIONS} resumable streams are running; try again {hint}")
            del self._all[oldest]
        self._all[place] = session = StreamSession(place[1], lasting=lasting)
        return session

    def find(self, place: Place) -> StreamSession | None:
        """The one at this place."""
        self._forget_old()
        return self._all.get(place)

    def drop(self, place: Place) -> None:
        """End it and forget it, if there is one."""
        session = self._all.pop(place, None)
        if session is not None:
            session.end()

    def _forget_old(self) -> None:
        now = time.time()
        self._all = {p: s for p, s in self._all.items() if not s.done or now - s.completed_at < KEEP}

"""Event stream of the requests that a client submits together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from logitless.engine.requests import Event, Failed, Finished, Token


class Owner(Protocol):
    """Engine that owns the streams."""

    def forget(self, stream: Stream) -> None:
        """Remove a stream whose requests have all ended."""

    def cancel(self, stream: Stream) -> None:
        """Cancel all requests of a stream."""


class Stream:
    """Events of requests that were submitted together, as (index of the request, event), in order.

    Iterate over it, or take all arrived events with `batch`. As an async context manager it cancels
    running requests on exit. Use it on the event loop's thread only. `whole`: see AsyncEngine.submit.
    """

    def __init__(self, owner: Owner, n: int, *, whole: bool = False) -> None:
        self._owner = owner
        self.whole = whole
        self._events: list[tuple[int, Event]] = []
        self._arrived: asyncio.Future[None] | None = None
        self._running = set(range(n))
        self._refusal: BaseException | None = None
        self.closed = False
        self.latest: dict[int, Token] = {}  # of a whole stream: the last token of each running request

    def push(self, index: int, event: Event) -> None:
        """Add an event."""
        if self.closed or index not in self._running:
            return
        if isinstance(event, Finished | Failed):
            self._running.discard(index)
            self.latest.pop(index, None)
            if not self._running:
                self._owner.forget(self)
        self._events.append((index, event))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def batch(self) -> list[tuple[int, Event]]:
        """Return all new events; wait for the first.

        An empty list means that the stream has ended. Raises the error of requests that were refused
        after AsyncEngine.begin.
        """
        while self._refusal is None and not self._events and self._running and not self.closed:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events, []
        return events

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while events := await self.batch():
            for item in events:
                yield item

    def fail(self, failed: Failed) -> None:
        """End every running request with this error."""
        for index in sorted(self._running):
            self.push(index, failed)

    def refuse(self, error: BaseException) -> None:
        """Raise this error to whoever waits for events: the requests were refused."""
        self._refusal = error
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Cancel running requests; their slots are free before the next step."""
        if not self.closed:
            self.closed = True
            self._events.clear()
            if self._arrived is not None and not self._arrived.done():
                self._arrived.set_result(None)
            if self._running:
                self._owner.cancel(self)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

"""Event stream of the requests that a client submits together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from logitless.engine.requests import Event, Failed, Finished, Token

# bounds of log-probabilities, in alternatives of 8 bytes (TokenProb.weight)
MOST_WHOLE: Final = 1 << 23  # of an answer as a whole
MOST_STREAMED: Final = 1 << 20  # of a prompt that a stream tells of in one event
MOST_TOGETHER: Final = 1 << 25  # of all answers
UNREAD: Final = 1 << 16  # of a stream: then its sequences wait for the reader
TURN: Final = 1 << 12  # of the events that are read at once


class Owner(Protocol):
    """Engine that owns the streams."""

    def forget(self, stream: Stream) -> None:
        """Remove a stream whose requests have all ended."""

    def cancel(self, stream: Stream) -> None:
        """Cancel all requests of a stream."""

    def resume(self, stream: Stream) -> None:
        """Go on with the sequences of a stream that is read again."""

    def release(self, stream: Stream) -> None:
        """Free the room of a stream's log-probabilities."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Delivery of the events of requests to their reader.

    `whole`: those between a request's first token and its last come together; that costs the event
    loop less. `most_logprobs` bounds the log-probabilities of a whole, or of a stream whose reader
    keeps them until its end (`keeps_logprobs`); the sequences of others wait for their reader."""

    whole: bool = False
    most_logprobs: int | None = None
    keeps_logprobs: bool = False


STREAMED = Delivery()


class Stream:
    """Events of requests that were submitted together, as (index of the request, event), in order.

    Iterate over it, or take arrived events with `batch`. As an async context manager it cancels
    running requests on exit. Use it on the event loop's thread only."""

    def __init__(self, owner: Owner, n: int, delivery: Delivery, prompt_weight: int = 0) -> None:
        """`prompt_weight`: memory of the log-probabilities of the prompts."""
        self._owner = owner
        self.whole, self.most = delivery.whole, delivery.most_logprobs
        self._keeps = delivery.whole or delivery.keeps_logprobs
        self._events: list[tuple[int, Event]] = []
        self._arrived: asyncio.Future[None] | None = None
        self._running = set(range(n))
        self._refusal: BaseException | None = None
        self._prompt_weight = prompt_weight
        self.weight = 0  # of computed log-probabilities; the engine thread's
        self.n_reads = self._weight_read = 0
        self.watched = False  # a timer ends it where nobody reads it
        self.is_held = False  # its sequences wait for the reader; the engine thread sets it
        self.closed = False
        self.latest: dict[int, Token] = {}  # of a whole stream: the last token of each running request

    @property
    def unread(self) -> int:
        """Memory of its log-probabilities that are still to be read, or to be written as a whole."""
        return self._prompt_weight + self.weight - self._weight_read

    @property
    def overflows(self) -> bool:
        """True if the log-probabilities that are kept until the end are too many."""
        return self._keeps and self.most is not None and self._prompt_weight + self.weight > self.most

    @property
    def ended(self) -> bool:
        """True if all of its requests have ended."""
        return not self._running

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
        """Return the new events, at most those with TURN log-probabilities; wait for the first.

        An empty list means that the stream has ended. Raises the error of requests that were refused
        after AsyncEngine.begin."""
        while self._refusal is None and not self._events and self._running and not self.closed:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events, []
        if self.weight and not self.whole:
            n = self._turn(events)
            events, self._events = events[:n], events[n:]
            if self.is_held and self.unread < UNREAD // 2:
                self._owner.resume(self)
        return events

    def _turn(self, events: list[tuple[int, Event]]) -> int:
        """Number of the events to read now, which are counted as read."""
        self.n_reads += 1
        n = weight = 0
        while n < len(events) and weight < TURN:
            weight += event_weight(events[n][1])
            n += 1
        self._weight_read += weight
        return n

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
            self._owner.release(self)
            if self._arrived is not None and not self._arrived.done():
                self._arrived.set_result(None)
            if self._running:
                self._owner.cancel(self)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def event_weight(event: Event) -> int:
    """Memory of the log-probabilities of an event's token."""
    return event.prob.weight if isinstance(event, Token) and event.prob is not None else 0

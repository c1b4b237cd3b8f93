"""Resumable streams of the router (X-Conversation-Id) whose model still loads or waits for memory.

Such a request goes on without its client, here as in the server. It is found again by the client's key and its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from logitless.engine.errors import InvalidRequest
from logitless.server.api.llamacpp.sessions import KEEP, Place


@dataclass(eq=False)
class _Beginning:
    """A request on its way to the head of its answer. The stack holds the answer and the model."""

    task: asyncio.Task[aiohttp.ClientResponse]
    stack: AsyncExitStack
    started_at: float = field(default_factory=time.time)


class Conversations:
    """All of a router."""

    def __init__(self) -> None:
        self._beginning: dict[Place, _Beginning] = {}
        self._unfinished: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def begun(
        self, place: Place, begin: Coroutine[Any, Any, aiohttp.ClientResponse], stack: AsyncExitStack
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's head, from `begin`, which enters what it holds into `stack`. A stream that had this place is
        ended. When the client leaves before, `begin` goes on. InvalidRequest: `end` was called meanwhile."""
        self.end(place)
        own = self._beginning[place] = _Beginning(asyncio.create_task(begin), stack)
        try:
            answer = await asyncio.shield(own.task)
        except asyncio.CancelledError:
            if own.task.cancelled():
                await stack.aclose()
                raise InvalidRequest("the stream was cancelled before it began") from None
            self._let_go_on(place, own)
            raise
        except BaseException:
            await stack.aclose()
            raise
        finally:
            if own.task.done():
                self._forget(place, own)
        async with stack:
            yield answer

    def _let_go_on(self, place: Place, own: _Beginning) -> None:
        async def rest() -> None:
            try:
                await asyncio.wait([own.task], timeout=KEEP)
                own.task.cancel()
                await asyncio.gather(own.task, return_exceptions=True)
            finally:
                self._forget(place, own)
                await own.stack.aclose()

        task = asyncio.create_task(rest())
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)

    def _forget(self, place: Place, own: _Beginning) -> None:
        if self._beginning.get(place) is own:
            del self._beginning[place]

    def end(self, place: Place) -> None:
        """Cancel the request, if there is one."""
        if (own := self._beginning.get(place)) is not None:
            own.task.cancel()

    async def wait(self, place: Place) -> None:
        """Wait until the server of its model has the stream, or it has failed."""
        if (own := self._beginning.get(place)) is not None:
            await asyncio.wait([own.task])

    def rows(self, key: str, ids: Iterable[str]) -> list[dict[str, Any]]:
        """Items of /v1/streams/lookup: the client's requests of these names."""
        result = [(id, self._beginning.get((key, id))) for id in dict.fromkeys(ids)]
        return [
            {
                "conversation_id": id,
                "is_done": False,
                "total_bytes": 0,
                "started_at": int(own.started_at),
                "completed_at": 0,
            }
            for id, own in result
            if own is not None
        ]

    async def close(self) -> None:
        """Cancel all."""
        for place in list(self._beginning):
            self.end(place)
        await asyncio.gather(*self._unfinished, return_exceptions=True)

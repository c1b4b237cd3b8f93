"""Replica: one model in one process of a Ray Serve deployment. Requests come as ASGI scopes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from logitless.async_llm import AsyncLLM
from logitless.errors import Error
from logitless.ray.config import ModelConfig
from logitless.ray.prefixes import Route
from logitless.server.asgi import Message
from logitless.serving import asgi_app

GATHER = 0.01  # seconds between two parcels of one answer: a hop between processes costs as much as a token


class Replica:
    """Replica of a model. The methods are Serve's: it calls them on the replica's event loop."""

    async def __init__(self, config: ModelConfig, data_dir: str = "") -> None:  # type: ignore[misc]
        """Load the model: Serve waits for that. `data_dir`: as FleetConfig has it."""
        options = {"threads": max(1, int(config.num_cpus)), "parallel": config.n_slots, **config.options}
        self._llm = AsyncLLM(config.model or None, data_dir=data_dir or None, **options)
        self._llm.share_jobs(config.id)
        self._app = asgi_app(self._llm, alias=config.id, ui=False, behind_router=True, metrics=True)
        self.__del__ = self.close  # of the object: Serve calls it, and the garbage collector does not
        await self._llm.start()

    async def exchange(self, scope: Message, body: bytes, route: Route) -> AsyncGenerator[list[Message], None]:
        """Answer a request: the ASGI messages of the response, several at a time.

        The first message comes at once, later ones every `GATHER` seconds. `route` is for the
        router in front. Closing the generator cancels the request.
        """
        received = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []
        changed, left = asyncio.Event(), asyncio.Event()

        async def receive() -> Message:
            if received:
                return received.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            changed.set()

        answering = asyncio.ensure_future(self._app(scope, receive, send))
        answering.add_done_callback(lambda _: changed.set())
        try:
            while not answering.done() or sent:
                await changed.wait()
                changed.clear()
                if sent:
                    parcel, sent[:] = sent.copy(), []
                    yield parcel
                    if not answering.done():
                        await asyncio.wait([answering], timeout=GATHER)
            answering.result()
        finally:
            left.set()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    def check_health(self) -> None:
        """Serve replaces a replica of which this raises."""
        if not self._llm.alive:
            raise Error("the engine has ended")

    async def record_routing_stats(self) -> dict[str, float]:
        """Counters and gauges of the scheduler, for the routers. Replicas take up each other's finetunes here."""
        with contextlib.suppress(Error):
            await self._llm.follow_jobs()
            return await self._llm.stats()
        return {}

    async def close(self) -> None:
        """Unload the model, once the replica's requests have ended."""
        await self._app.close()
        await self._llm.close()  # also if there was no request

"""Replica: one model in one process of a Ray Serve deployment. Requests come as ASGI scopes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from logitless.async_llm import AsyncLLM
from logitless.errors import Error
from logitless.extras.ray.config import ModelConfig
from logitless.extras.ray.prefixes import PrefixRoute
from logitless.server.asgi import Message
from logitless.serving import asgi_app

if TYPE_CHECKING:
    from logitless.engine.finetuning.rollout_queue import Queues
    from logitless.extras.ray.rpc_servers import Servers

# Each parcel passes two more processes, for which it costs more than a small model's token.
PARCELS = 100  # of all answers of a replica, in a second
GATHER = 0.01, 0.1  # least and most seconds between two parcels of one answer


def joined(messages: Sequence[Message]) -> list[Message]:
    """ASGI messages of a response, with consecutive parts of its body as one."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else {}
        if message["type"] == last.get("type") == "http.response.body":
            body = last.get("body", b"") + message.get("body", b"")
            result[-1] = {**message, "body": body}
        else:
            result.append(message)
    return result


class Replica:
    """Replica of a model. The methods are Serve's: it calls them on the replica's event loop."""

    async def __init__(self, config: ModelConfig, data_dir: str = "") -> None:  # type: ignore[misc]
        """Load the model: Serve waits for that. `data_dir`: as FleetConfig has it."""
        options = {"threads": max(1, int(config.num_cpus)), "parallel": config.n_slots, **config.options}
        self._servers: Servers | None = None
        if config.rpc_servers is not None:
            from logitless.extras.ray.rpc_servers import Servers

            self._servers = Servers(config.rpc_servers)
            options["rpc"] = await self._servers.addresses()
        self._llm = AsyncLLM(config.model or None, data_dir=data_dir or None, **options)
        self._llm.share_jobs(config.id, self._queues(config))
        self._running = 0  # answers
        self._app = asgi_app(self._llm, alias=config.id, ui=False, behind_router=True, metrics=True)
        self.__del__ = self.close  # of the object: Serve calls it, and the garbage collector does not
        await self._llm.start()

    @staticmethod
    def _queues(config: ModelConfig) -> Queues | None:
        """Meeting place of replicas that sample answers for one job; None: its own replica samples alone."""
        if not config.share_rollouts or config.replicas == 1:
            return None
        from ray import serve

        from logitless.extras.ray.rollouts import ActorQueues

        return ActorQueues(f"{serve.get_replica_context().app_name}/{config.id}")

    async def exchange(self, scope: Message, body: bytes, route: PrefixRoute) -> AsyncGenerator[list[Message], None]:
        """Answer a request: the ASGI messages of the response, several at a time.

        The first message comes at once, and so do later ones of slow answers; those of fast ones
        are gathered for a while. `route` is for the router in front. Closing the generator cancels
        the request."""
        received = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []
        changed, departure = asyncio.Event(), asyncio.Event()

        async def receive() -> Message:
            if received:
                return received.pop()
            await departure.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            changed.set()

        self._running += 1
        answering = asyncio.ensure_future(self._app(scope, receive, send))
        answering.add_done_callback(lambda _: changed.set())
        try:
            while not answering.done() or sent:
                await changed.wait()
                changed.clear()
                if sent:
                    parcel, sent[:] = joined(sent), []
                    yield parcel
                    if not answering.done():
                        gather = min(max(GATHER[0], self._running / PARCELS), GATHER[1])
                        await asyncio.wait([answering], timeout=gather)
            answering.result()
        finally:
            self._running -= 1
            departure.set()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def check_health(self) -> None:
        """Serve replaces a replica of which this raises, and with it its rpc-servers."""
        if not self._llm.alive:
            raise Error("the engine has ended")
        if self._servers is not None:
            await self._servers.addresses()

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

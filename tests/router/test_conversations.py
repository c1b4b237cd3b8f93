"""Resumable streams of a router whose model waits for memory: continued and ended without their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from logitless.router.app import Router
from logitless.router.cached import Cache
from logitless.router.fleet import Entry, Fleet
from logitless.router.jobs import RouterJobs
from logitless.server.config import ServerConfig

TALK = {"model": "a", "stream": True}


class Child:
    """A model's server, as far as it has streams. `gate`: its model is loaded."""

    def __init__(self) -> None:
        self.key, self.url = "k", ""
        self.streams: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def say(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.headers.get("X-Conversation-Id", ""))
        self.streams[self.asked[-1]] = b"data: hello\n\n"
        return web.Response(body=b"data: hello\n\n", content_type="text/event-stream")

    async def follow(self, request: web.Request) -> web.Response:
        text = self.streams.get(request.match_info["id"])
        return web.Response(status=404) if text is None else web.Response(body=text)

    async def stop_stream(self, request: web.Request) -> web.Response:
        self.streams.pop(request.match_info["id"], None)
        return web.Response(status=204)

    async def lookup(self, request: web.Request) -> web.Response:
        ids = (await request.json())["conversation_ids"]
        return web.json_response([{"conversation_id": id, "is_done": True} for id in ids if id in self.streams])

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    async def stop(self, _: float) -> None:
        if not self._end.done():
            self._end.set_result(0)


@pytest.fixture
async def place() -> AsyncIterator[tuple[aiohttp.ClientSession, str, Child]]:
    """A client, the router's address, and the only model's server."""
    child = Child()
    behind = web.Application()
    behind.router.add_post("/v1/completions", child.say)
    behind.router.add_get("/v1/stream/{id}", child.follow)
    behind.router.add_delete("/v1/stream/{id}", child.stop_stream)
    behind.router.add_post("/v1/streams/lookup", child.lookup)

    async def start(_: Entry) -> Any:
        await child.gate.wait()
        return child

    fleet: Any = Fleet([Entry("a", ()), Entry("b", ())], start, 1)
    cache: Any = Cache(str, SimpleNamespace, SimpleNamespace, SimpleNamespace)
    router = Router(fleet, ServerConfig(), list, RouterJobs(""), cache, autoload=True, limit=1)
    async with AsyncExitStack() as stack:
        urls = []
        for app in (behind, router.app()):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        child.url, url = urls
        stack.push_async_callback(fleet.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield session, url, child


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, str]:
    headers = {"X-Conversation-Id": "talk"}
    async with session.post(f"{url}/v1/completions", json={**TALK, **body}, headers=headers) as reply:
        return reply.status, await reply.text()


async def look(session: aiohttp.ClientSession, url: str, key: str = "") -> list[Any]:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"conversation_ids": ["talk", "other"]}
    async with session.post(f"{url}/v1/streams/lookup", json=body, headers=headers) as reply:
        rows: list[Any] = await reply.json()
        return rows


async def states(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/models") as reply:
        return {model["id"]: model["status"]["value"] for model in (await reply.json())["data"]}


async def waits(session: aiohttp.ClientSession, url: str) -> None:
    while not await look(session, url):
        await asyncio.sleep(0.01)


async def test_a_stream_is_ended_before_its_model_is_there(place: tuple[aiohttp.ClientSession, str, Child]) -> None:
    session, url, child = place
    asking = asyncio.create_task(ask(session, url))
    await waits(session, url)
    async with session.delete(f"{url}/v1/stream/talk", headers={"Authorization": "Bearer other"}) as reply:
        assert reply.status == 204  # another client's
    assert [row["is_done"] for row in await look(session, url)] == [False]
    async with session.delete(f"{url}/v1/stream/talk") as reply:
        assert reply.status == 204
    status, text = await asking
    assert (status, "the stream was cancelled before it began" in text) == (400, True)
    assert await look(session, url) == []
    child.gate.set()
    assert await ask(session, url) == (200, "data: hello\n\n")
    assert child.asked == ["talk"]


async def test_a_stream_goes_on_while_its_model_loads(place: tuple[aiohttp.ClientSession, str, Child]) -> None:
    session, url, child = place
    asking = asyncio.create_task(ask(session, url))
    await waits(session, url)
    asking.cancel()  # the page is loaded again
    await asyncio.wait([asking])
    assert [row["total_bytes"] for row in await look(session, url)] == [0]
    assert await look(session, url, "another") == []
    following = asyncio.create_task(session.get(f"{url}/v1/stream/talk"))
    child.gate.set()
    async with await following as reply:
        assert await reply.text() == "data: hello\n\n"
    assert [row["is_done"] for row in await look(session, url)] == [True]


async def test_request_without_stream_ends_with_its_client(place: tuple[aiohttp.ClientSession, str, Child]) -> None:
    session, url, child = place
    asking = asyncio.create_task(ask(session, url, stream=False))
    while (await states(session, url))["a"] != "loading":
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    assert await look(session, url) == []
    child.gate.set()
    assert (await ask(session, url, prompt="next"))[0] == 200
    assert child.asked == ["talk"]


async def test_the_same_name_again_ends_the_one_before(place: tuple[aiohttp.ClientSession, str, Child]) -> None:
    session, url, child = place
    first = asyncio.create_task(ask(session, url))
    await waits(session, url)
    second = asyncio.create_task(ask(session, url))
    assert (await first)[0] == 400
    child.gate.set()
    assert await second == (200, "data: hello\n\n")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_looking_for_a_stream_loads_nothing(place: tuple[aiohttp.ClientSession, str, Child], method: str) -> None:
    session, url, child = place
    child.gate.set()
    assert (await ask(session, url))[0] == 200
    for query in ("?model=b", ""):
        async with session.request(method, f"{url}/v1/stream/lost{query}") as reply:
            assert reply.status == (404 if method == "GET" else 204)
    assert await states(session, url) == {"a": "loaded", "b": "unloaded"}

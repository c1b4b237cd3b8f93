"""Proxy: the bytes of a request that reach a child."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from logitless.router.proxy import OUTLIVES, ask, pass_back, stream_over
from logitless.server.auth import ApiKeys
from logitless.server.clients import CLIENT, OWNER, RIGHTS, SALT, HttpClient
from logitless.server.config import ServerConfig
from logitless.server.middleware import Guard
from tests.helpers.otlp import collecting


async def started(app: web.Application) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


@pytest.mark.parametrize(
    "path", ["/x/../lora-adapters?model=a", "/./props", "/%2e%2e/props", "/v1//models", "/a%2Fb?x=%2B+%zz"]
)
async def test_a_path_is_passed_on_as_it_came(path: str) -> None:
    """Else a path that needs the admin key could be written so that only the child sees that it does."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(text=request.raw_path)

    behind = web.Application()
    behind.router.add_route("*", "/{path:.*}", echo)
    child_runner, port = await started(behind)
    child: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", key="k")
    async with aiohttp.ClientSession() as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            async with await ask(session, request, child, request.rel_url.raw_path_qs, b"") as answer:
                return await pass_back(request, answer)

        front = web.Application()
        front.router.add_route("*", "/{path:.*}", pass_on)
        runner, port = await started(front)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await runner.cleanup()
    await child_runner.cleanup()
    assert answer.partition("\r\n\r\n")[2] == path


@pytest.mark.parametrize("last", [[{"is_done": True}], [], None])
async def test_a_stream_is_over_when_the_child_says_so(last: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.router.proxy.POLL", 0.0)
    answers, asked = [[{"is_done": False}], [{"is_done": False}], last], []

    async def lookup(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json(), request.headers["X-Logitless-Key"]))
        result = answers.pop(0)
        return web.json_response(result, status=503 if result is None else 200)

    behind = web.Application()
    behind.router.add_post("/{path:.*}", lookup)
    runner, port = await started(behind)
    child: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", key="k")
    request = make_mocked_request("POST", "/v1/completions", {"X-Conversation-Id": "c"})
    request[OUTLIVES] = "c"
    async with aiohttp.ClientSession() as session:
        await stream_over(session, request, child)
        await runner.cleanup()
        assert asked == [("/v1/streams/lookup", {"conversation_ids": ["c"]}, "")] * 3
        await stream_over(session, request, child)  # nobody answers any more


async def test_a_client_cannot_speak_for_another() -> None:
    """What a router says of its clients comes from the router alone."""
    seen: list[Any] = []

    async def look(request: web.Request) -> web.Response:
        seen.append(
            (HttpClient.passed_on(request), {name.lower() for name in request.headers} & {"x-api-key", "api-key"})
        )
        return web.Response()

    behind = web.Application()
    behind.router.add_get("/props", look)
    runner, port = await started(behind)
    child: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", key="k")
    lies = {OWNER: "o", RIGHTS: "all,admin,tools", SALT: "s", "Api-Key": "k", "X-Api-Key": "k"}
    clients = (HttpClient("mine", False, False, "mine"), HttpClient("", False, False, "", False))
    async with aiohttp.ClientSession() as session:
        for client in clients:
            request = make_mocked_request("GET", "/props", lies)
            request[CLIENT] = client
            async with await ask(session, request, child, "/props", b"") as answer:
                assert answer.status == 200
    await runner.cleanup()
    assert seen == [(client, set()) for client in clients]


@pytest.mark.parametrize("traces", [False, True])
async def test_a_trace_goes_on_behind_the_router(monkeypatch: pytest.MonkeyPatch, traces: bool) -> None:
    """As a part of the router's span; where the router has no traces, of the client's."""
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def echo(request: web.Request) -> web.Response:
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        return web.json_response([pair for pair in headers if pair[0].startswith("trace")])

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with await ask(session, request, child, "/props", b"") as answer:
            return await pass_back(request, answer)

    behind = web.Application()
    behind.router.add_get("/props", echo)
    child_runner, port = await started(behind)
    child: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", key="k")
    async with collecting(monkeypatch) as collector, aiohttp.ClientSession() as session:
        if not traces:
            monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        config = ServerConfig()
        front = Guard(config, ApiKeys((), ""), frozenset()).application()
        front.router.add_get("/props", pass_on)
        runner, port = await started(front)
        headers = {"TraceParent": f"00-{trace}-{span}-01", "TraceState": "vendor=1"}
        async with session.get(f"http://127.0.0.1:{port}/props", headers=headers) as answer:
            seen = await answer.json()
        await runner.cleanup()
    await child_runner.cleanup()
    assert dict(seen).keys() == {"traceparent", "tracestate"}
    assert len(seen) == 2
    parent = collector.named("GET /props")["id"] if traces else span
    assert dict(seen) == {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "vendor=1"}

"""ASGI application: the server's routes in ASGI hosts.

`LOGITLESS_TEST_HTTP_HOST=uvicorn pytest tests/server` runs all tests of the server in such a host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from logitless import LLM, AsyncLLM, ModelError, OptionError, asgi_app
from logitless.server.app import make_app
from logitless.server.asgi import ASGIApp
from logitless.server.config import ServerConfig
from tests.helpers.asgi_hosts import HOSTS, nothing
from tests.helpers.http_fakes import Running, running, while_stepping

ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/health", {}),
    ("HEAD", "/health", {}),
    ("GET", "/", {}),
    ("GET", "/v1/models", {}),
    ("GET", "//v1//models/", {}),
    ("GET", "/v1/models/n%C3%A4me%2Fx", {}),
    ("GET", "/nope", {}),
    ("PUT", "/v1/completions", {}),
    ("OPTIONS", "/v1/completions", {"headers": {"Origin": "http://127.0.0.1"}}),
    ("POST", "/tokenize", {"json": {"content": "hello", "add_special": True}}),
    ("POST", "/tokenize", {"data": b'{"content": "hello"}', "headers": {"Content-Encoding": "br"}}),
    ("POST", "/tokenize", {"data": b"{", "headers": {"Expect": "100-continue"}}),
    ("POST", "/tokenize", {"data": b"a=1", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}),
    ("POST", "/v1/completions", {"json": {"prompt": "say: hi", "seed": 1}}),
    ("POST", "/v1/completions", {"json": {"prompt": "a" * (1 << 19)}}),
    ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "x"}], "stream": True}}),
    ("GET", "/props", {"headers": {"Authorization": "Bearer wrong"}}),
]
CHANGING = ("id", "created", "timings")  # members that differ from answer to answer
KEPT = (
    "Content-Type",
    "Allow",
    "Accept-Encoding",
    "WWW-Authenticate",
    "Access-Control-Allow-Methods",
    "Server",
    "Vary",
)


def stable(text: str) -> str:
    """The text of an answer without its members that change."""

    def drop(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: drop(v) for k, v in value.items() if k not in CHANGING}
        return [drop(v) for v in value] if isinstance(value, list) else value

    lines = []
    for line in text.splitlines():
        start, brace, rest = line.partition("{")
        with contextlib.suppress(ValueError):
            line = start + json.dumps(drop(json.loads(brace + rest)))
        lines.append(line)
    return "\n".join(lines)


async def answers(host: str) -> list[Any]:
    told = []
    async with running(http_host=host, api_keys=("key",)) as server:
        for method, path, options in ASKED:
            headers = {"Authorization": "Bearer key", **options.get("headers", {})}
            async with server.http.request(method, server.url + path, **{**options, "headers": headers}) as reply:
                kept = {name: reply.headers.get(name) for name in KEPT}
                told.append((method, path, reply.status, kept, stable(await reply.text())))
    return told


async def test_every_host_gives_the_same_answers() -> None:
    expected, *others = [await answers(host) for host in HOSTS]
    assert [status for _, _, status, _, _ in expected].count(200) >= 8
    for told in others:
        for one, other in zip(told, expected, strict=True):
            assert one == other


@pytest.fixture(params=HOSTS[1:])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with running(http_host=request.param, n_parallel=1) as started:
        yield started


async def test_pieces_come_as_they_are_made_and_a_client_that_leaves_frees_its_slot(server: Running) -> None:
    gate = server.scheduler.gate = threading.Semaphore(0)
    body = {"prompt": "a", "stream": True, "max_tokens": 26}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as reply:
        gate.release(2)
        first = await reply.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "a"
        reply.close()
    assert await while_stepping(gate, asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=20))
    gate.release(1000)
    status, answer = await server.post("/v1/completions", {"prompt": "say: on", "max_tokens": 9})
    assert (status, answer["choices"][0]["text"]) == (200, " on")


async def test_the_body_is_read_no_faster_than_it_is_used() -> None:
    """A refused upload is not taken into memory."""
    n_asked = 0

    async def receive() -> dict[str, Any]:
        nonlocal n_asked
        n_asked += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with running(api_keys=("key",)) as server:
        app = ASGIApp(make_app(server.service, ServerConfig(model_path="x", api_keys=("key",))), nothing, nothing)
        scope = {**SCOPE, "method": "POST", "path": "/tokenize", "headers": [(b"content-length", b"999999999")]}
        await app(scope, receive, send)
        await app.close()
    assert sent[0]["status"] == 401
    assert n_asked <= 4


SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}


async def exchange(app: Any, scope: dict[str, Any], *received: dict[str, Any]) -> list[dict[str, Any]]:
    """What the application sends."""
    sent, waiting = [], [*received]

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await app(scope, receive, send)
    return sent


EMPTY = {"type": "http.request", "body": b"", "more_body": False}


async def test_below_another_applications_path() -> None:
    async with running() as server:
        app = ASGIApp(make_app(server.service, ServerConfig(model_path="x")), nothing, nothing)
        for scope in (
            {"path": "/llm/health", "root_path": "/llm"},
            {"path": "/a b/health", "root_path": "/a b", "raw_path": b"/a%20b/health"},
            {"path": "/health", "root_path": "/llm", "raw_path": b"/health"},
        ):
            start, body = await exchange(app, {**SCOPE, **scope}, EMPTY)
            assert (start["status"], json.loads(body["body"])) == (200, {"status": "ok"})
        (closed,) = await exchange(app, {"type": "websocket", "path": "/"}, {"type": "websocket.connect"})
        assert closed["type"] == "websocket.close"
        assert await exchange(app, SCOPE, {"type": "http.disconnect"}) == []
        await app.close()


@pytest.mark.parametrize(
    "told", [("127.0.0.1", 80), ["127.0.0.1", 80], ["::1", 80], ["localhost", 80], ["/run/x.sock", None], None], ids=str
)
async def test_foreign_pages_are_judged_however_the_host_tells_its_address(told: Any) -> None:
    def headers(**given: str) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode()) for name, value in given.items()]

    async with running() as server:
        app = ASGIApp(make_app(server.service, ServerConfig(model_path="x")), nothing, nothing)
        told_scope = {**SCOPE, "path": "/props", "server": told}
        has_name = told is not None and told[1] is not None  # names are judged over TCP alone
        for given, wanted in (
            (headers(Host="127.0.0.1"), 200),
            (headers(Host="127.0.0.1", Origin="http://elsewhere.example"), 403),
            (headers(Host="elsewhere.example"), 403 if has_name else 200),
        ):
            start, _ = await exchange(app, {**told_scope, "headers": given}, EMPTY)
            assert start["status"] == wanted, given
        await app.close()


async def test_the_lifespan_starts_and_closes_the_model() -> None:
    llm = AsyncLLM(ctx_size=256, parallel=2)
    app = asgi_app(llm, alias="tiny")
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    living = asyncio.create_task(app({"type": "lifespan"}, messages.get, told.put))
    await messages.put({"type": "lifespan.startup"})
    assert await told.get() == {"type": "lifespan.startup.complete"}
    _, body = await exchange(app, {**SCOPE, "path": "/v1/models"}, EMPTY)
    assert json.loads(body["body"])["data"][0]["id"] == "tiny"
    await messages.put({"type": "lifespan.shutdown"})
    assert await told.get() == {"type": "lifespan.shutdown.complete"}
    await living
    with pytest.raises(Exception, match="closed"):
        await llm.start()


async def test_a_start_that_fails_is_told_in_one_line() -> None:
    async def start() -> None:
        raise ModelError("model.gguf: not a GGUF file")

    app = ASGIApp(aiohttp.web.Application(), start, nothing)
    (failed,) = await exchange(app, {"type": "lifespan"}, {"type": "lifespan.startup"})
    assert failed == {"type": "lifespan.startup.failed", "message": "model.gguf: not a GGUF file"}


def test_wrong_uses_are_named() -> None:
    with LLM(ctx_size=256) as llm, pytest.raises(OptionError, match="AsyncLLM"):
        asgi_app(llm)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="api_kees"):
        asgi_app(AsyncLLM(ctx_size=256), api_kees=("a",))

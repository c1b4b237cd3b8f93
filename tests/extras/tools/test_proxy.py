"""Proxy of pages to configured MCP servers, and every address that it does not reach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from logitless.extras.tools.config import McpSettings
from logitless.extras.tools.mcp import proxy as mcp_proxy
from logitless.extras.tools.settings import ToolSettings
from tests.helpers.http_fakes import Running, running


@asynccontextmanager
async def proxied(**settings: Any) -> AsyncIterator[tuple[Running, str, list[Any]]]:
    """A server with a proxy, the configured address behind it, and what that is asked."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, dict(request.headers), await request.text()))
        if request.path == "/away":
            raise web.HTTPFound("http://127.0.0.1:1/")
        return web.Response(text="x" * 100, headers={"Mcp-Session-Id": "s", "Set-Cookie": "a=b"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    servers = (
        McpSettings("a", url=url, headers={"Authorization": "Bearer s"}),
        McpSettings("b", url=url[:-3] + "away"),
    )
    async with running(tools=ToolSettings(servers=servers, proxy=True), **settings) as server:
        seen.clear()
        yield server, url, seen
    await runner.cleanup()


async def test_requests_that_are_passed_on() -> None:
    async with proxied() as (server, url, seen):
        seen.clear()
        headers = {"x-llama-server-proxy-header-Mcp-Session-Id": "s", "Cookie": "c=d", "X-Other": "y"}
        headers["x-llama-server-proxy-header-Cookie"] = "c=d"
        at = f"{server.url}/cors-proxy"
        async with server.http.post(at, params={"url": url}, json={"a": 1}, headers=headers) as reply:
            assert (reply.status, await reply.text()) == (200, "x" * 100)
            assert reply.headers["Mcp-Session-Id"] == "s"
            assert "Set-Cookie" not in reply.headers
        method, told, body = next(one for one in seen if one[2] == '{"a": 1}')
        assert (method, told["Mcp-Session-Id"], told["Authorization"]) == ("POST", "s", "Bearer s")
        assert not {"Cookie", "X-Other"} & set(told)
        assert body == '{"a": 1}'
        async with server.http.get(at, params={"url": url[:-3] + "away"}, allow_redirects=False) as reply:
            assert reply.status == 302
            assert "Location" not in reply.headers  # neither the proxy nor the page follows
        async with server.http.delete(at, params={"url": url}) as reply:
            assert reply.status == 200


async def test_addresses_that_it_does_not_reach() -> None:
    async with proxied() as (server, url, _):
        for other in (
            "",
            "http://169.254.169.254/",
            url + "/x",
            url + "?a",
            url.replace("127.0.0.1", "localhost"),
            "x",
        ):
            status, refused = await server.get("/cors-proxy", params={"url": other})
            assert (status, "none of a configured" in refused["error"]["message"]) == (403, True)
        evil = {"Origin": "https://evil.example"}
        assert (await server.get("/cors-proxy", params={"url": url}, headers=evil))[0] == 403
    async with proxied(api_keys=("k",), admin_api_key="a") as (server, url, _):
        for key, status in ((None, 401), ("k", 403), ("a", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with server.http.get(f"{server.url}/cors-proxy", params={"url": url}, headers=headers) as reply:
                assert reply.status == status
    gone = McpSettings("a", url="http://127.0.0.1:1/mcp")
    async with running(tools=ToolSettings(servers=(gone,), proxy=True)) as server:
        assert (await server.get("/cors-proxy", params={"url": gone.url}))[0] == 502
    async with running(tools=ToolSettings(servers=(gone,))) as server:
        assert (await server.get("/cors-proxy", params={"url": gone.url}))[0] == 403


async def test_an_answer_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(mcp_proxy, "MAX_BYTES", 50)
    async with proxied() as (server, url, _), server.http.get(f"{server.url}/cors-proxy?url={url}") as reply:
        assert len(await reply.read()) <= 50

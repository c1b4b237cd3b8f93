"""Fetches of addresses that clients name: public ones, bounded in bytes, seconds and redirects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from logitless.server.outgoing import fetch
from logitless.server.outgoing.fetch import FetchError, fetch_all

PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"  # one of this machine's addresses plays a public one


class Site:
    """A server on both addresses; `seen`: the paths that it was asked for."""

    def __init__(self, port: int) -> None:
        self.port, self.seen = port, list[str]()

    def at(self, host: str, path: str) -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        found.seen.append(f"{request.host.partition(':')[0]}{request.path}")
        kind, _, rest = request.path_qs.lstrip("/").partition("/")
        if kind == "to":
            raise web.HTTPFound(rest)
        if kind == "again":
            raise web.HTTPFound(f"/again/{rest}x")
        if kind == "never":
            await never.wait()
        if kind == "chunks":
            reply = web.StreamResponse()
            await reply.prepare(request)
            for _ in range(20):
                await reply.write(bytes(100))
            return reply
        return web.Response(body=b"x" * int(rest or 4), status=404 if kind == "missing" else 200)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, PUBLIC, 0).start()
    port = runner.addresses[0][1]
    await web.TCPSite(runner, PRIVATE, port).start()
    found = Site(port)
    monkeypatch.setattr(fetch, "is_public", lambda address: address == PUBLIC)
    yield found
    never.set()
    await runner.cleanup()


async def got(url: str, most: int = 1000) -> str | bytes:
    (found,) = (await fetch_all([url], most)).values()
    return str(found) if isinstance(found, Exception) else found


async def test_public_url_is_fetched(site: Site) -> None:
    assert await got(site.at(PUBLIC, "/a/7")) == b"xxxxxxx"
    assert await got(site.at(PUBLIC, "/to//b/9")) == b"xxxxxxxxx"
    urls = [site.at(PUBLIC, f"/c/{n}") for n in (1, 2, 3, 4, 5, 6, 1)]
    found = await fetch_all(urls, 1000)
    assert [len(found[url]) for url in urls] == [1, 2, 3, 4, 5, 6, 1]  # type: ignore[arg-type]
    assert len([path for path in site.seen if "/c/" in path]) == 6


async def test_private_addresses_are_never_connected_to(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "its host has no public address"
    assert await got(site.at(PRIVATE, "/a")) == refusal
    assert await got(site.at(PUBLIC, f"/to/{site.at(PRIVATE, '/b')}")) == refusal
    assert await got(site.at("[::ffff:127.0.0.2]", "/a")) == refusal
    names = {"both": [PRIVATE, PUBLIC], "none": [PRIVATE], "changes": [PUBLIC]}

    def resolve(host: str, port: int, *_: Any) -> list[tuple[Any, ...]]:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]
        if host == "changes":
            names[host] = [PRIVATE]  # the next look
        return found

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    assert await got(site.at("none", "/a")) == refusal
    assert await got(site.at("both", "/a")) == b"xxxx"
    assert await got(site.at("changes", "/a")) == b"xxxx"  # what was judged is what was connected to
    assert await got(site.at("changes", "/a")) == refusal
    assert site.seen == [f"127.0.0.1/to/{site.at(PRIVATE, '/b')}", "both/a", "changes/a"]


ODD = ("its server cannot be reached", "it leads to no http:// or https:// address")


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "0x7f.1", "2130706433"])
async def test_real_private_addresses(address: str) -> None:
    assert await got(f"http://{address}:9/") in ("its host has no public address", *ODD)
    with pytest.raises(OSError, match="public"):
        fetch._socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9)))


async def test_bounds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await got(site.at(PUBLIC, "/a/1000")) == b"x" * 1000
    assert await got(site.at(PUBLIC, "/a/1001")) == "it has more than 1000 bytes"
    assert await got(site.at(PUBLIC, "/chunks")) == "it has more than 1000 bytes"
    assert await got(site.at(PUBLIC, "/again/")) == "it has more than 3 redirects"
    assert await got(site.at(PUBLIC, "/missing")) == "its server answers 404"
    assert await got(site.at(PUBLIC, "/to/ftp://example.com/a")) == "it leads to no http:// or https:// address"
    assert await got("http://") == "it leads to no http:// or https:// address"
    closed = socket.socket()
    closed.bind((PUBLIC, 0))
    assert await got(f"http://{PUBLIC}:{closed.getsockname()[1]}/") == "its server cannot be reached"
    closed.close()
    monkeypatch.setattr(fetch, "SECONDS", 0.05)
    assert await got(site.at(PUBLIC, "/never")) == "it took more than 0.05 seconds"
    monkeypatch.setattr(fetch, "SECONDS", 10)
    monkeypatch.setattr(fetch, "TOGETHER", 0.1)
    urls = [site.at(PUBLIC, "/never"), site.at(PUBLIC, "/a")]
    late, there = (await fetch_all(urls, 1000)).values()
    assert isinstance(late, FetchError)
    assert "more than 0.1 seconds together" in str(late)
    assert there == b"xxxx"


async def test_bytes_need_room(site: Site) -> None:
    def full(nbytes: int) -> None:
        raise MemoryError(nbytes)

    with pytest.raises(MemoryError):
        await fetch_all([site.at(PUBLIC, "/a"), site.at(PUBLIC, "/b")], 1000, full)

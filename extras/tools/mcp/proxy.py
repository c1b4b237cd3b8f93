"""Proxy to a configured MCP server for a page: its own headers, no redirects, bounded in time and bytes."""

from __future__ import annotations

from typing import Final

import aiohttp
from aiohttp import web

from logitless.engine.errors import BadGateway
from logitless.extras.tools.config import McpSettings

PREFIX: Final = "x-llama-server-proxy-header-"  # of headers that are meant for the MCP server
MAX_BYTES: Final = 32 << 20
MAX_SECONDS: Final = 600.0
_FOR_PAGES = ("Content-Type", "Mcp-Session-Id", "Mcp-Protocol-Version")  # headers of an answer that a page gets
_NOT_PASSED = frozenset({"host", "content-length", "transfer-encoding", "connection", "cookie", "upgrade"})


async def pass_through(request: web.Request, server: McpSettings, body: bytes | bytearray) -> web.StreamResponse:
    """The server's answer to the page's request. BadGateway: there is none."""
    named = {name[len(PREFIX) :]: value for name, value in request.headers.items() if name.lower().startswith(PREFIX)}
    headers = {name: value for name, value in named.items() if name and name.lower() not in _NOT_PASSED}
    timeout = aiohttp.ClientTimeout(total=MAX_SECONDS, sock_connect=10, sock_read=server.seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.request(
                request.method,
                server.url,
                data=bytes(body) if request.method == "POST" else None,
                headers={**headers, **server.headers},
                allow_redirects=False,
            ) as answer,
        ):
            lines = {name: answer.headers[name] for name in _FOR_PAGES if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=lines)
            await response.prepare(request)
            n = 0
            async for piece in answer.content.iter_any():
                n += len(piece)
                if n > MAX_BYTES:
                    response.force_close()
                    break
                await response.write(piece)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BadGateway(f"MCP server {server.name!r} does not answer: {type(error).__name__}") from None

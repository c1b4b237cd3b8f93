"""HTTP servers that tests run an application in, on the test's event loop: aiohttp, uvicorn and hypercorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from logitless.server.asgi import ASGIApp

HOSTS = ("aiohttp", "uvicorn", "hypercorn")


@contextlib.asynccontextmanager
async def hosted(app: web.Application, host: str) -> AsyncIterator[str]:
    """The URL of the application while one of HOSTS serves it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serve = {"aiohttp": _aiohttp, "uvicorn": _uvicorn, "hypercorn": _hypercorn}[host]
        async with serve(app, sock):
            yield url


async def nothing() -> None:
    """Start or stop of a model that runs already."""


@contextlib.asynccontextmanager
async def _aiohttp(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _uvicorn(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(ASGIApp(app, nothing, nothing), log_config=None, server_header=False)
    server = Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving


@contextlib.asynccontextmanager
async def _hypercorn(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config, stop = Config(), asyncio.Event()
    config.bind, config.include_server_header = [f"fd://{sock.detach()}"], False
    config.graceful_timeout = 0.2
    application = ASGIApp(app, nothing, nothing)
    serving = asyncio.create_task(serve(application, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    try:
        yield
    finally:
        stop.set()
        await serving

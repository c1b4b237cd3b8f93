"""Running an application until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest, RequestError, ServerFault
from logitless.server.api.context import error_response
from logitless.server.config import ServerConfig

log = logging.getLogger("logitless.http")
BACKLOG = 128  # connections that wait to be accepted


class ExpectationFailed(RequestError):
    """417: the client waits for more than a server can promise."""

    code = 417


class Protocol(web.RequestHandler):
    """aiohttp's. What it refuses by itself is no request that a middleware would see: it gets an error object here."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and refuses where an answer has begun
        reason = " ".join((message or "").split())[:200].removesuffix(":")
        error = InvalidRequest(f"this is no HTTP request: {reason}") if status < 500 else ServerFault("internal error")
        response = error_response(error)
        response.headers["Server"] = "logitless"
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = error_response(ExpectationFailed("header 'Expect': can only be 100-continue"))
        return await super().finish_response(request, resp, start_time)


async def listen(
    app: web.Application,
    config: ServerConfig,
    running: Coroutine[Any, Any, None],
    stop: Callable[[], Awaitable[None]],
) -> None:
    """Answer requests until SIGTERM or SIGINT, or until `running` ends, whose error is raised then.
    `stop` is awaited when no new connection is taken any more, before those that are open are closed."""
    protocol = log.getChild("protocol")
    if not log.isEnabledFor(logging.DEBUG):  # what is no HTTP is answered with 400; a traceback of it tells nobody much
        protocol.setLevel(logging.CRITICAL)
    runner = web.AppRunner(app, handler_cancellation=True, handle_signals=False, shutdown_timeout=0.5)
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # no signals on this platform's loop: Ctrl+C raises KeyboardInterrupt
            loop.add_signal_handler(number, signalled.set)
    await runner.setup()
    server = runner.server
    assert server is not None
    stopping = asyncio.create_task(signalled.wait())
    ending = asyncio.create_task(running)
    listening: asyncio.Server | None = None
    try:
        reuse_port = config.reuse_port or None
        listening = await loop.create_server(
            partial(Protocol, server, loop=loop, logger=protocol, access_log=None),  # type: ignore[arg-type]  # none
            config.host,
            config.port,
            ssl=config.tls,
            backlog=BACKLOG,
            reuse_port=reuse_port,
        )
        log.info("listening on %s", address(listening.sockets[0], config))
        await asyncio.wait([stopping, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
        log.info("shutting down")
    finally:
        if listening is not None:
            listening.close()
        for task in (stopping, ending):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
        await stop()
        await runner.cleanup()


def address(listening: socket.socket, config: ServerConfig) -> str:
    """The URL that the server listens on, with the port that was chosen."""
    scheme = "https" if config.tls else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"

"""Running an application until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from server.config import ServerConfig

log = logging.getLogger("logitless.http")


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
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=protocol,
        handle_signals=False,
        shutdown_timeout=0.5,
    )
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # no signals on this platform's loop: Ctrl+C raises KeyboardInterrupt
            loop.add_signal_handler(number, signalled.set)
    await runner.setup()
    stopping = asyncio.create_task(signalled.wait())
    ending = asyncio.create_task(running)
    try:
        reuse_port = config.reuse_port or None
        site = web.TCPSite(runner, config.host, config.port, ssl_context=config.tls, reuse_port=reuse_port)
        await site.start()
        log.info("listening on %s", address(runner, config))
        await asyncio.wait([stopping, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
        log.info("shutting down")
        await site.stop()
    finally:
        for task in (stopping, ending):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
        await stop()
        await runner.cleanup()


def address(runner: web.AppRunner, config: ServerConfig) -> str:
    """The URL that the server listens on, with the port that was chosen."""
    scheme = "https" if config.tls else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{runner.addresses[0][1]}"

"""The aiohttp application of one model: its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from logitless.engine.async_engine import AsyncEngine
from logitless.server.api.batches.runner import BATCHES, BatchRunner
from logitless.server.api.context import CONTEXT, Context
from logitless.server.api.openai.tuning_context import LISTENERS, SILENCE
from logitless.server.bodies.room import STRIDE_SECONDS
from logitless.server.config import ServerConfig
from logitless.server.listen import accepting, listen
from logitless.server.middleware import Guard
from logitless.server.observing.start_block import log_start
from logitless.server.routes import PUBLIC, routes
from logitless.server.ui.page import PAGE, add_pages


def make_app(service: AsyncEngine, config: ServerConfig) -> web.Application:
    """The application; it may be run before the model has loaded, and answers 503 until then."""
    context = Context(service, config)
    app = Guard(config, context.keys, PUBLIC.union(PAGE)).application()
    app[CONTEXT] = context
    app[LISTENERS], app[SILENCE] = service.listeners, min(config.timeout, STRIDE_SECONDS)
    app[BATCHES] = batches = BatchRunner(service, config)
    app.cleanup_ctx.append(batches.live)
    if config.tools is not None:
        config.tools.add_to(app, config, context.keys)
    prefix = config.api_prefix.rstrip("/")
    for route in routes():
        handler = route.load()
        for path in route.paths:
            app.router.add_route(route.method.upper(), prefix + path, handler)
    add_pages(app, config)
    add_heads(app)
    return app


def add_heads(app: web.Application) -> None:
    """HEAD for each route that has GET: health checks of containers use it."""
    for resource in app.router.resources():
        by_method = {route.method: route for route in resource}
        if isinstance(resource, web.Resource) and "GET" in by_method and "HEAD" not in by_method:
            resource.add_route("HEAD", by_method["GET"].handler)


async def serve(service: AsyncEngine, config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end within five seconds. Raises what ended the engine."""
    await listen(make_app(service, config), config, partial(_running, service, config), partial(service.stop, 2.5))


@asynccontextmanager
async def listening(service: AsyncEngine, config: ServerConfig) -> AsyncIterator[int]:
    """Answer requests while the block runs; gives the port (0 on a Unix socket)."""
    async with accepting(make_app(service, config), config) as sockets:
        where = sockets[0].getsockname()
        yield 0 if isinstance(where, str) else int(where[1])


async def _running(service: AsyncEngine, config: ServerConfig, address: str) -> None:
    """Until the engine ends; by itself it does so with an error only, and a server without one had better end too."""
    log_start(await service.loaded(), config, address)
    await service.ended()

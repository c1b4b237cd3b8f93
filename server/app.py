"""The aiohttp application of one model: its routes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module

from aiohttp import web

from logitless.engine.async_engine import AsyncEngine
from logitless.frontend.config import BUILD_INFO
from logitless.server.api import anthropic, generate, info, vertex
from logitless.server.api.batches.runner import BATCHES, BatchRunner
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.llamacpp import lora, slots, text
from logitless.server.api.openai import embeddings, responses
from logitless.server.api.openai.tuning_context import LISTENERS, SILENCE
from logitless.server.auth import Keys
from logitless.server.bodies.room import STRIDE_SECONDS
from logitless.server.config import ServerConfig
from logitless.server.listen import accepting, listen
from logitless.server.middleware import Guard, Handler
from logitless.server.observing.start_block import log_start
from logitless.server.ui.page import PAGE, add_pages


async def _metrics(request: web.Request) -> web.Response:
    from logitless.server.observing.metrics import metrics  # prometheus_client is imported when someone asks

    return await metrics(request)


async def _openapi(request: web.Request) -> web.Response:
    return description(request.app[CONTEXT].config, request.app[CONTEXT].keys)


_GET: dict[str, Handler] = {
    "/health": info.health,
    "/v1/health": info.health,
    "/models": info.models,
    "/v1/models": info.models,
    "/v1/models/{id:.+}": info.model,
    "/props": info.props,
    "/slots": slots.slots,
    "/metrics": _metrics,
    "/lora-adapters": lora.adapters,
    "/openapi.json": _openapi,
}
_POST: dict[str, Handler] = {
    "/completion": generate.native_completion,
    "/completions": generate.native_completion,
    "/v1/completions": generate.openai_completion,
    "/chat/completions": generate.chat_completion,
    "/v1/chat/completions": generate.chat_completion,
    "/v1/chat/completions/control": generate.control,
    "/chat/completions/input_tokens": responses.chat_input_tokens,
    "/v1/chat/completions/input_tokens": responses.chat_input_tokens,
    "/responses": responses.responses,
    "/v1/responses": responses.responses,
    "/responses/input_tokens": responses.responses_input_tokens,
    "/v1/responses/input_tokens": responses.responses_input_tokens,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/infill": generate.infill,
    "/v1/embeddings": embeddings.openai_embeddings,
    "/embedding": embeddings.native_embeddings,
    "/embeddings": embeddings.native_embeddings,
    "/rerank": embeddings.rerank,
    "/reranking": embeddings.rerank,
    "/v1/rerank": embeddings.rerank,
    "/v1/reranking": embeddings.rerank,
    "/verify": generate.verify,
    "/v1/verify": generate.verify,
    "/tokenize": text.tokenize,
    "/detokenize": text.detokenize,
    "/apply-template": text.apply_template,
    "/props": info.change_props,
    "/slots/{id}": slots.slot_action,
    "/lora-adapters": lora.set_scales,
}
_JOBS, _TALKS = "/v1/fine_tuning/jobs", "/v1/conversations"
_RARE: tuple[tuple[str, str, str], ...] = (  # imported when somebody asks
    ("GET", "/v1/stream", "llamacpp.resume.follow"),
    ("GET", "/v1/stream/{id}", "llamacpp.resume.follow"),
    ("DELETE", "/v1/stream", "llamacpp.resume.stop"),
    ("DELETE", "/v1/stream/{id}", "llamacpp.resume.stop"),
    ("POST", "/v1/streams/lookup", "llamacpp.resume.lookup"),
    ("GET", "/v1/responses/{id}", "openai.responses.response"),
    ("DELETE", "/v1/responses/{id}", "openai.responses.forget"),
    ("GET", "/v1/responses/{id}/input_items", "openai.responses.input_items"),
    ("POST", "/v1/responses/{id}/cancel", "openai.background.cancel"),
    ("POST", _TALKS, "openai.conversations.create"),
    ("GET", f"{_TALKS}/{{id}}", "openai.conversations.conversation"),
    ("POST", f"{_TALKS}/{{id}}", "openai.conversations.update"),
    ("DELETE", f"{_TALKS}/{{id}}", "openai.conversations.delete"),
    ("GET", f"{_TALKS}/{{id}}/items", "openai.conversations.items"),
    ("POST", f"{_TALKS}/{{id}}/items", "openai.conversations.add"),
    ("GET", f"{_TALKS}/{{id}}/items/{{item}}", "openai.conversations.item"),
    ("DELETE", f"{_TALKS}/{{id}}/items/{{item}}", "openai.conversations.remove"),
    ("GET", "/tools", "tools.tools"),
    ("POST", "/tools", "tools.call"),
    ("GET", "/cors-proxy", "tools.proxy"),
    ("POST", "/cors-proxy", "tools.proxy"),
    ("DELETE", "/cors-proxy", "tools.proxy"),
    ("GET", "/tokenizer_info", "llamacpp.text.tokenizer_info"),
    ("GET", "/api/tags", "ollama.models.tags"),
    ("GET", "/api/ps", "ollama.models.ps"),
    ("GET", "/api/v0/models", "ollama.models.lmstudio_models"),
    ("GET", "/api/version", "ollama.models.version"),
    ("POST", "/api/show", "ollama.models.show"),
    ("POST", "/api/generate", "ollama.generate.generate"),
    ("POST", "/api/chat", "ollama.generate.chat"),
    ("POST", "/api/embed", "ollama.generate.embed"),
    ("POST", "/api/embeddings", "ollama.generate.embeddings"),
    ("POST", "/api/pull", "ollama.models.only_in_router"),
    ("POST", "/api/copy", "ollama.models.only_in_router"),
    ("POST", "/api/create", "ollama.models.only_in_router"),
    ("DELETE", "/api/delete", "ollama.models.only_in_router"),
    ("HEAD", "/api/blobs/{id}", "ollama.models.only_in_router"),
    ("POST", "/api/blobs/{id}", "ollama.models.only_in_router"),
    ("POST", "/api/push", "ollama.models.not_here"),
    ("POST", "/v1/completions/render", "generate.render_completion"),
    ("POST", "/v1/chat/completions/render", "generate.render_chat_completion"),
    ("POST", "/v1/score", "score.score"),
    ("POST", "/v1/audio/transcriptions", "transcriptions.transcriptions"),
    ("POST", "/v1/audio/translations", "transcriptions.translations"),
    ("DELETE", "/v1/models/{id:.+}", "openai.fine_tuning.delete_model"),
    ("GET", "/v1/batches", "batches.openai.batches"),
    ("POST", "/v1/batches", "batches.openai.create"),
    ("GET", "/v1/batches/{id}", "batches.openai.batch"),
    ("POST", "/v1/batches/{id}/cancel", "batches.openai.cancel"),
    ("GET", "/v1/messages/batches", "batches.messages.batches"),
    ("POST", "/v1/messages/batches", "batches.messages.create"),
    ("GET", "/v1/messages/batches/{id}", "batches.messages.batch"),
    ("DELETE", "/v1/messages/batches/{id}", "batches.messages.delete"),
    ("POST", "/v1/messages/batches/{id}/cancel", "batches.messages.cancel"),
    ("GET", "/v1/messages/batches/{id}/results", "batches.messages.results"),
    ("GET", "/v1/files", "openai.files.files"),
    ("POST", "/v1/files", "openai.files.upload"),
    ("GET", "/v1/files/{id}", "openai.files.file"),
    ("DELETE", "/v1/files/{id}", "openai.files.delete"),
    ("GET", "/v1/files/{id}/content", "openai.files.content"),
    ("GET", _JOBS, "openai.fine_tuning.jobs"),
    ("POST", _JOBS, "openai.fine_tuning.create"),
    ("GET", f"{_JOBS}/{{id}}", "openai.fine_tuning.job"),
    ("POST", f"{_JOBS}/{{id}}/cancel", "openai.fine_tuning.cancel"),
    ("POST", f"{_JOBS}/{{id}}/pause", "openai.fine_tuning.pause"),
    ("POST", f"{_JOBS}/{{id}}/resume", "openai.fine_tuning.resume"),
    ("GET", f"{_JOBS}/{{id}}/events", "openai.fine_tuning.events"),
    ("GET", f"{_JOBS}/{{id}}/checkpoints", "openai.fine_tuning.checkpoints"),
    ("POST", "/v1/fine_tuning/alpha/graders/run", "openai.graders.run"),
    ("POST", "/v1/fine_tuning/alpha/graders/validate", "openai.graders.validate"),
)
PUBLIC = frozenset(  # no key is asked for
    {"/health", "/v1/health", "/models", "/v1/models", "/api/tags", "/api/version", *PAGE}
)


def make_app(service: AsyncEngine, config: ServerConfig) -> web.Application:
    """The application; it may be run before the model has loaded, and answers 503 until then."""
    context = Context(service, config)
    app = Guard(config, context.keys, PUBLIC).application()
    app[CONTEXT] = context
    app[LISTENERS], app[SILENCE] = service.listeners, min(config.timeout, STRIDE_SECONDS)
    app[BATCHES] = batches = BatchRunner(service, config)
    app.cleanup_ctx.append(batches.live)
    if config.tools or config.tools.proxy:
        import_module("logitless.server.api.tools").add_tools(app, config, context.keys)
    prefix = config.api_prefix.rstrip("/")
    for path, handler in _GET.items():
        app.router.add_get(prefix + path, handler)
    for path, handler in _POST.items():
        app.router.add_post(prefix + path, handler)
    for method, path, name in _RARE:
        app.router.add_route(method, prefix + path, _later(name))
    if vertex.wanted():
        app.router.add_post(prefix + "/predict", vertex.predict)
    add_pages(app, config)
    add_heads(app)
    return app


def add_heads(app: web.Application) -> None:
    """HEAD for each route that has GET: health checks of containers use it."""
    for resource in app.router.resources():
        by_method = {route.method: route for route in resource}
        if isinstance(resource, web.Resource) and "GET" in by_method and "HEAD" not in by_method:
            resource.add_route("HEAD", by_method["GET"].handler)


def endpoints() -> Iterator[tuple[str, str]]:
    """(method, path) of the routes of a model's server, without the page."""
    yield from (("GET", path) for path in _GET)
    yield from (("POST", path) for path in _POST)
    yield from ((method, path) for method, path, _ in _RARE)
    if vertex.wanted():
        yield "POST", "/predict"


def description(config: ServerConfig, keys: Keys) -> web.Response:
    """All of it as an OpenAPI document."""
    from logitless.server.openapi.document import document  # its tables are made when someone asks

    routes = (
        (method.lower(), re.sub(r"{(\w+):[^}]*}", r"{\1}", path)) for method, path in endpoints() if method != "HEAD"
    )
    return json_response(document(BUILD_INFO, routes, prefix=config.api_prefix.rstrip("/"), keys=bool(keys)))


def _later(name: str) -> Handler:
    """A handler of logitless.server.api whose module is imported at its first request."""
    module, _, function = name.rpartition(".")

    async def handle(request: web.Request) -> web.StreamResponse:
        handler: Handler = getattr(import_module(f"logitless.server.api.{module}"), function)
        return await handler(request)

    return handle


async def serve(service: AsyncEngine, config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end within five seconds. Raises what ended the
    engine.
    """
    await listen(make_app(service, config), config, partial(_running, service, config), partial(service.stop, 2.5))


@asynccontextmanager
async def listening(service: AsyncEngine, config: ServerConfig) -> AsyncIterator[int]:
    """Answer requests while the block runs; gives the port (0 on a Unix socket)."""
    async with accepting(make_app(service, config), config) as sockets:
        where = sockets[0].getsockname()
        yield 0 if isinstance(where, str) else int(where[1])


async def _running(service: AsyncEngine, config: ServerConfig, address: str) -> None:
    """Until the engine ends; by itself it does so with an error only, and a server without one had
    better end too.
    """
    log_start(await service.loaded(), config, address)
    await service.ended()

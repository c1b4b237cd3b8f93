"""The aiohttp application: routes, who may enter, how refusals look; and running it until a signal."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from contextlib import suppress
from importlib import import_module
from urllib.parse import urlsplit

from aiohttp import web

from server.config import BUILD_INFO, ServerConfig
from server.errors import Forbidden, NotFound, RequestError, ServerFault, Unauthorized
from server.http import control, embeddings, generate, info, lora, messages, responses, slots, text
from server.http.context import CONTEXT, Context, api_key, error_response, json_response
from server.http.page import PAGE, Handler
from server.keys import same
from server.service import Service

log = logging.getLogger("logitless.http")


async def _metrics(request: web.Request) -> web.Response:
    from server.http.metrics import metrics  # prometheus_client is imported when someone asks

    return await metrics(request)


async def _openapi(request: web.Request) -> web.Response:
    from server.http.openapi import document  # its tables are made when someone asks

    routes = {
        (route.method.lower(), re.sub(r"{(\w+):[^}]*}", r"{\1}", route.resource.canonical))
        for route in request.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    prefix = request.app[CONTEXT].config.api_prefix.rstrip("/")
    pages = {prefix + path for path in PAGE}
    told = ((method, path) for method, path in routes if path not in pages)
    return json_response(document(BUILD_INFO, told, keys=bool(request.app[CONTEXT].keys)))


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
    "/v1/chat/completions/control": control.control,
    "/chat/completions/input_tokens": responses.chat_input_tokens,
    "/v1/chat/completions/input_tokens": responses.chat_input_tokens,
    "/responses": responses.responses,
    "/v1/responses": responses.responses,
    "/responses/input_tokens": responses.responses_input_tokens,
    "/v1/responses/input_tokens": responses.responses_input_tokens,
    "/v1/messages": messages.messages,
    "/v1/messages/count_tokens": messages.count_tokens,
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
_JOBS = "/v1/fine_tuning/jobs"
_RARE: tuple[tuple[str, str, str], ...] = (  # imported when somebody asks
    ("GET", "/v1/stream", "resume.follow"),
    ("GET", "/v1/stream/{id}", "resume.follow"),
    ("DELETE", "/v1/stream", "resume.stop"),
    ("DELETE", "/v1/stream/{id}", "resume.stop"),
    ("POST", "/v1/streams/lookup", "resume.lookup"),
    ("GET", "/v1/responses/{id}", "responses.response"),
    ("DELETE", "/v1/responses/{id}", "responses.forget"),
    ("GET", "/v1/responses/{id}/input_items", "responses.input_items"),
    ("POST", "/v1/score", "score.score"),
    ("GET", "/v1/files", "files.files"),
    ("POST", "/v1/files", "files.upload"),
    ("GET", "/v1/files/{id}", "files.file"),
    ("DELETE", "/v1/files/{id}", "files.delete"),
    ("GET", "/v1/files/{id}/content", "files.content"),
    ("GET", _JOBS, "fine_tuning.jobs"),
    ("POST", _JOBS, "fine_tuning.create"),
    ("GET", f"{_JOBS}/{{id}}", "fine_tuning.job"),
    ("POST", f"{_JOBS}/{{id}}/cancel", "fine_tuning.cancel"),
    ("POST", f"{_JOBS}/{{id}}/pause", "fine_tuning.pause"),
    ("POST", f"{_JOBS}/{{id}}/resume", "fine_tuning.resume"),
    ("GET", f"{_JOBS}/{{id}}/events", "fine_tuning.events"),
    ("GET", f"{_JOBS}/{{id}}/checkpoints", "fine_tuning.checkpoints"),
)
# what is not read here needs the admin key, where there is one
_ADMIN = ("/v1/files", "/v1/fine_tuning/", "/lora-adapters", "/slots/", "/props", "/models")
_PUBLIC = frozenset({"/health", "/v1/health", "/models", "/v1/models", *PAGE})
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def make_app(service: Service, config: ServerConfig) -> web.Application:
    """The application; it may be run before the model has loaded, and answers 503 until then."""
    app = web.Application(client_max_size=config.max_body, middlewares=[_guard])
    app[CONTEXT] = Context(service, config)
    prefix = config.api_prefix.rstrip("/")
    for path, handler in _GET.items():
        app.router.add_get(prefix + path, handler)
    for path, handler in _POST.items():
        app.router.add_post(prefix + path, handler)
    for method, path, name in _RARE:
        app.router.add_route(method, prefix + path, _later(name))
    if config.ui:
        for path, handler in PAGE.items():
            app.router.add_get(prefix + path, handler)
    app.on_response_prepare.append(_add_headers)
    return app


def _later(name: str) -> Handler:
    """A handler of server.http whose module is imported at its first request."""
    module, _, function = name.partition(".")

    async def handle(request: web.Request) -> web.StreamResponse:
        handler: Handler = getattr(import_module(f"server.http.{module}"), function)
        return await handler(request)

    return handle


async def serve(service: Service, config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end within five seconds. Raises what ended the engine."""
    protocol = log.getChild("protocol")
    if not log.isEnabledFor(logging.DEBUG):  # what is no HTTP is answered with 400; a traceback of it tells nobody much
        protocol.setLevel(logging.CRITICAL)
    runner = web.AppRunner(
        make_app(service, config),
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
    running = asyncio.create_task(_running(service))
    try:
        reuse_port = config.reuse_port or None
        site = web.TCPSite(runner, config.host, config.port, ssl_context=config.tls, reuse_port=reuse_port)
        await site.start()
        log.info("listening on %s", address(runner, config))
        await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        log.info("shutting down")
        await site.stop()
    finally:
        for task in (stopping, running):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
        await service.stop(2.5)
        await runner.cleanup()


async def _running(service: Service) -> None:
    """Until the engine ends; by itself it does so with an error only, and a server without one had better end too."""
    served = await service.loaded()
    log.info("model loaded; a request has up to %d tokens", served.info.n_ctx)
    await service.ended()


def address(runner: web.AppRunner, config: ServerConfig) -> str:
    """The URL that the server listens on, with the port that was chosen."""
    scheme = "https" if config.tls else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{runner.addresses[0][1]}"


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Preflights and keys first; then every exception becomes an error object of one line."""
    try:
        if request.method == "OPTIONS":
            return _preflight(request)
        _authorize(request)
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _http_error(request, error)
    except Exception as error:
        log.error(
            "%s %s failed: %s: %s",
            request.method,
            request.rel_url.raw_path,  # still escaped, so that it stays one line
            type(error).__name__,
            " ".join(str(error).split()),
            exc_info=log.isEnabledFor(logging.DEBUG),
        )
        return error_response(ServerFault("internal error; the server's log has the reason"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == 404:
        return error_response(NotFound(f"no such endpoint: {request.path}"))
    refused = RequestError(error.reason)
    refused.code = error.status
    if isinstance(error, web.HTTPMethodNotAllowed):
        refused.message = f"{request.method} is not allowed here"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        refused.message = f"the request is larger than {request.app[CONTEXT].config.max_body} bytes"
    response = error_response(refused)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _authorize(request: web.Request) -> None:
    config, keys = request.app[CONTEXT].config, request.app[CONTEXT].keys
    path = request.path.removeprefix(config.api_prefix.rstrip("/"))
    writes = config.admin_api_key and path.startswith(_ADMIN) and request.method not in ("GET", "HEAD")
    if not writes and (not keys or path in _PUBLIC):
        return
    given = api_key(request)
    if config.admin_api_key and same(given, config.admin_api_key):
        return
    if not keys.match(given):
        raise Unauthorized("Invalid API Key")
    if writes:
        raise Forbidden("this needs the admin key")


def _preflight(request: web.Request) -> web.Response:
    """llama-server's answer, and DELETE for who asks for that, which it does not have."""
    more = ", DELETE" if request.headers.get("Access-Control-Request-Method") == "DELETE" else ""
    methods = {"Access-Control-Allow-Methods": "GET, POST" + more}
    return web.Response(headers={**methods, "Access-Control-Allow-Headers": "*"})


def _origin(request: web.Request) -> str:
    """The value of Access-Control-Allow-Origin, or "" where none is allowed."""
    origin = request.headers.get("Origin", "")
    allowed = request.app[CONTEXT].config.cors_origins
    if allowed == "*":
        return origin
    if not origin:
        return ""
    if allowed == "localhost":
        with suppress(ValueError):
            host = urlsplit(origin if "//" in origin else f"//{origin}").hostname
            return origin if host in _LOCAL else ""
        return ""
    return origin if origin in [item.strip() for item in allowed.split(",")] else ""


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "logitless"
    origin = _origin(request)
    if origin:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Allow-Credentials"] = "true"
        response.headers["Vary"] = "Origin"

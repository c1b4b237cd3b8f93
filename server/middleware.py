"""Middleware: preflights, foreign pages, API keys, and errors as JSON objects of one line."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from logitless.engine.errors import (
    DiskFull,
    Forbidden,
    InvalidRequest,
    NotFound,
    RequestError,
    ServerFault,
    Unauthorized,
    is_full,
)
from logitless.server.api.context import api_key, error_response, is_anthropics
from logitless.server.auth import ApiKeys, owner_of, same
from logitless.server.bodies.room import BODIES, Bodies
from logitless.server.bodies.unpack import RAW_BODIES
from logitless.server.clients import CLIENT, LOCAL_CLIENT, HttpClient
from logitless.server.config import ServerConfig
from logitless.server.observing import tracing
from logitless.server.observing.record import (
    CLIENT_LEFT,
    PROBES,
    RECORD,
    REQUEST_ID,
    TRAFFIC,
    FileAnswer,
    Record,
    Traffic,
)
from logitless.server.origins import Origins
from logitless.server.routes import Handler
from logitless.server.slashes import Slashes, canonical

log = logging.getLogger("logitless.http")

# paths whose requests need the admin key, where there is one, unless they only read
ADMIN_PATHS = (
    *("/v1/files", "/v1/fine_tuning/", "/lora-adapters", "/slots/", "/props", "/models", "/v1/models/"),
    *("/tools", "/cors-proxy"),
    *("/api/pull", "/api/push", "/api/copy", "/api/create", "/api/delete", "/api/blobs/"),
)
_ANYBODY = HttpClient()  # of a server without keys
SKIPPED_TOOLS = "X-Skipped-Tools"  # types of a request's tools that nobody here runs
OPEN_TO_ALL = "open_to_all"  # the name of routes that need no key


class Guard:
    """The middleware of an application, and its signal before a response begins. `application` makes
    an application that has both."""

    def __init__(self, config: ServerConfig, keys: ApiKeys, public: frozenset[str]) -> None:
        """`public`: paths that need no key."""
        self._config, self._keys, self._public = config, keys, public
        self._origins = Origins(config, keys)
        self._prefix = config.api_prefix.rstrip("/")

    def application(self) -> web.Application:
        """A new application behind this guard, without routes. Its connections unpack no body."""
        traffic = Traffic(self._config.model if self._config.behind_router else "")
        traces = tracing.start()
        app = web.Application(middlewares=[self._middleware(traffic, traces)], handler_args=RAW_BODIES)
        app[TRAFFIC] = traffic
        app[BODIES] = Bodies(self._config.max_body, self._config.timeout)
        if traces is not None:
            app[tracing.TRACING] = traces
            app.on_cleanup.append(traces.close)
        app.router.register_resource(Slashes(app.router))
        app.on_response_prepare.append(self._add_headers)
        return app

    def _middleware(self, traffic: Traffic, traces: tracing.Tracing | None) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            route = "" if resource is None else resource.canonical.removeprefix(self._prefix)  # as it was declared
            record = request[RECORD] = Record(request, route)
            if traces is not None and route not in PROBES:
                record.trace = request[tracing.TRACE] = traces.begin(request, record)
            status, response = CLIENT_LEFT, None
            try:
                response = await self._answer(request, handler, route)
                status = response.status
                return response
            except web.HTTPException as other:
                status = other.status
                raise
            finally:
                if isinstance(response, FileAnswer):
                    response.sent = partial(_end, record, traffic)
                else:
                    _end(record, traffic, status)

        return guard

    async def _answer(self, request: web.Request, handler: Handler, route: str) -> web.StreamResponse:
        """Pages, preflights and keys first; then every exception becomes an error object of one line."""
        try:
            path = route or canonical(request.path).removeprefix(self._prefix)
            self._origins.check(request, path)
            _check_coding(request)
            if request.method == "OPTIONS":
                return self._preflight(request)
            request[CLIENT] = self._client(request, path)
            return await handler(request)
        except RequestError as error:
            return error_response(error, request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self._http_error(request, error)
        except ConnectionError as error:
            if request.transport is not None and not request.transport.is_closing():
                return self._failed(request, error)
            raise  # the client has left: aiohttp ends the connection
        except Exception as error:
            if is_full(error):
                return error_response(DiskFull("the server's disk is full"), request)
            return self._failed(request, error)

    def _failed(self, request: web.Request, error: Exception) -> web.Response:
        log.error(
            "%s %s failed: %s: %s",
            request.method,
            request.rel_url.raw_path,  # still escaped, so that it stays one line
            type(error).__name__,
            " ".join(str(error).split()),
            exc_info=log.isEnabledFor(logging.DEBUG),
        )
        return error_response(ServerFault("internal error; the server's log has the reason"), request)

    def _http_error(self, request: web.Request, error: web.HTTPException) -> web.Response:
        if error.status == 404:
            return error_response(NotFound(f"no such endpoint: {request.path}"), request)
        refused = RequestError(error.reason)
        refused.code = error.status
        if isinstance(error, web.HTTPMethodNotAllowed):
            refused.message = f"{request.method} is not allowed here"
        response = error_response(refused, request)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response

    def _client(self, request: web.Request, path: str) -> HttpClient:
        """The client by its key. Unauthorized, Forbidden: it needs another one."""
        config, keys = self._config, self._keys
        local = request.transport.get_extra_info(LOCAL_CLIENT) if request.transport is not None else None
        if isinstance(local, HttpClient):  # a request of this process
            return local
        if not keys.exist and not config.admin_api_key and not config.behind_router:
            return _ANYBODY
        writes = config.admin_api_key and path.startswith(ADMIN_PATHS) and request.method not in ("GET", "HEAD")
        is_open = path in self._public or request.match_info.route.name == OPEN_TO_ALL
        value = api_key(request)
        is_admin = bool(config.admin_api_key) and same(value, config.admin_api_key)
        is_known = is_admin or keys.match(value)
        if not is_known and (writes or (keys.exist and not is_open)):
            raise Unauthorized("Invalid API Key")
        if writes and not is_admin:
            raise Forbidden("this needs the admin key")
        if config.behind_router:
            return HttpClient.passed_on(request)
        owner = owner_of(value) if is_known else ""
        alone = is_known and not config.admin_api_key and not keys.several
        isolated = config.cache_isolation == "on" or (config.cache_isolation == "auto" and keys.several)
        runs_tools = is_admin or not config.admin_api_key
        return HttpClient(owner, alone or is_admin, is_admin, owner if isolated else "", runs_tools)

    def _preflight(self, request: web.Request) -> web.Response:
        """llama-server's answer: --cors-methods, and --cors-headers or those that the browser asks for.

        With credentials `*` would be the name of a header."""
        headers, methods = ", ".join(self._config.cors_headers), ", ".join(self._config.cors_methods)
        if headers == "*":
            headers = request.headers.get("Access-Control-Request-Headers") or "*"
        return web.Response(headers={"Access-Control-Allow-Methods": methods, "Access-Control-Allow-Headers": headers})

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        headers, record = response.headers, request.get(RECORD)
        headers["Server"] = "logitless"
        if record is not None:
            headers[REQUEST_ID] = record.id
            if record.skipped_tools:
                headers[SKIPPED_TOOLS] = ", ".join(dict.fromkeys(record.skipped_tools))
            if is_anthropics(request):
                headers["request-id"] = record.id  # the name that its clients read
        varies = [name.strip() for value in headers.popall("Vary", ()) for name in value.split(",")]
        headers["Vary"] = ", ".join(dict.fromkeys([*varies, "Origin"]))
        origin = self._origins.allowed(request)
        if origin:
            headers["Access-Control-Allow-Origin"] = origin
            if self._config.cors_credentials:
                headers["Access-Control-Allow-Credentials"] = "true"


def _end(record: Record, traffic: Traffic, status: int) -> None:
    """The answer is complete, or the client has left."""
    record.end(status)
    traffic.count(record)
    if record.is_logged:
        asyncio.get_running_loop().call_soon(record.write_line)  # when the answer has been written


def _check_coding(request: web.Request) -> None:
    """InvalidRequest: the body is coded for its transfer otherwise than in chunks, which nobody would undo."""
    coding = ",".join(request.headers.getall("Transfer-Encoding", ()))
    if coding and coding.strip().lower() != "chunked":
        raise InvalidRequest(f"header 'Transfer-Encoding': must be chunked, not {coding[:64]!r}")

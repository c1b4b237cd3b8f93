"""Ingress: the HTTP front of a fleet, which judges keys and finds a request's model.

It passes back the answer of the replica that the model's router picks."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from logitless.engine.errors import BadGateway, InvalidRequest, NotFound, RequestError
from logitless.errors import OptionError
from logitless.extras.ray.config import FleetConfig
from logitless.extras.ray.prefixes import PrefixRoute, route_of
from logitless.frontend.replies.encoding import error_object, sse
from logitless.frontend.workers import compute
from logitless.router.proxy import NOT_BACK, passed_headers
from logitless.server.api.context import client_of, json_response
from logitless.server.asgi import Message
from logitless.server.auth import ApiKeys
from logitless.server.bodies.json_body import json_object
from logitless.server.bodies.room import BODIES
from logitless.server.config import ServerConfig
from logitless.server.middleware import ADMIN_PATHS, Guard
from logitless.server.routes import PUBLIC, routes
from logitless.server.slashes import canonical
from logitless.server.ui.page import PAGE, add_pages

log = logging.getLogger("logitless.extras.ray")
LOST = "the replica ended while it answered; ask again and another one answers"
_LISTS = frozenset(("/v1/models", "/models", "/api/tags"))
_LARGE = 1 << 16  # bytes of a body whose parsing would hold up the streams of others
_ATTEMPTS = 3  # replicas that are asked before a request is lost
Answer = AsyncGenerator[list[Message], None]


class ReplicaEnded(Exception):
    """The replica's process ended before the end of its answer."""


class Replicas(Protocol):
    """Replicas of one model."""

    def ask(self, scope: Message, body: bytes, route: PrefixRoute) -> Answer:
        """The answer of one of them: messages of ASGI. Raises ReplicaEnded, and RequestError where no replica
        takes the request."""


class Ingress:
    """The application in front of the models' replicas."""

    def __init__(self, config: FleetConfig, models: Mapping[str, Replicas]) -> None:
        """`models`: the replicas by the model's name. OptionError: a setting of the server is wrong."""
        self._models = models
        try:
            self._config = replace(ServerConfig(alias=config.models[0].id), **config.server)
        except TypeError as error:
            raise OptionError(f"server: {str(error).partition('() ')[2]}") from None
        self._prefix = self._config.api_prefix.rstrip("/")

    def app(self) -> web.Application:
        """The application."""
        keys = ApiKeys(self._config.api_keys, self._config.api_key_file)
        app = Guard(self._config, keys, PUBLIC.union(PAGE)).application()
        for path in ("/health", "/v1/health"):
            app.router.add_get(self._prefix + path, self._health)
        for path in _LISTS:
            app.router.add_get(self._prefix + path, self._lists)
        for route in routes():  # those added above take precedence
            for path in route.paths:
                for allowed in ("GET", "HEAD") if route.method == "get" else (route.method.upper(),):
                    app.router.add_route(allowed, self._prefix + path, self._pass_on)
        add_pages(app, self._config)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _lists(self, request: web.Request) -> web.StreamResponse:
        """The lists of all models as one, which has the other members of the first."""
        if len(self._models) == 1:
            return await self._pass_on(request)
        whole: dict[str, Any] = {}
        for replicas in self._models.values():
            one = json.loads(await self._body_of(request, replicas))
            for name, value in one.items():
                whole[name] = [*whole.get(name, ()), *value] if isinstance(value, list) else whole.get(name, value)
        return json_response(whole)

    async def _body_of(self, request: web.Request, replicas: Replicas) -> bytes:
        """The body of a model's answer to a request without a body."""
        parts = []
        async with aclosing(self._answer(request, replicas, b"", PrefixRoute())) as answer:
            async for message in answer:
                if message.get("status", 200) >= 500:
                    raise BadGateway("a model does not answer")
                parts.append(message.get("body", b""))
        return b"".join(parts)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass the request to the model of the query or of the body's field `model`."""
        async with request.app[BODIES].read(request, client_of(request)) as body:
            fields = await self._fields(request, body)
            name = request.query.get("model") or fields.get("model") or request.match_info.get("id", "")
            replicas = self._replicas(name if isinstance(name, str) else "")
            route = route_of(fields, request.headers)
            return await self._pass_back(request, self._answer(request, replicas, bytes(body), route))

    async def _fields(self, request: web.Request, body: bytearray) -> dict[str, Any]:
        """The body's members; none if it is no JSON object, which the replica judges."""
        if body.lstrip()[:1] != b"{":
            return {}
        with suppress(InvalidRequest):
            parse = partial(json_object, body)
            return await compute(parse, client_of(request)) if len(body) > _LARGE else parse()
        return {}

    def _replicas(self, name: str) -> Replicas:
        """The replicas of a model, or of a finetune's base. NotFound: there are several models, and no such one."""
        if name in self._models:
            return self._models[name]
        base = name.split(":")[1] if name.startswith("ft:") and name.count(":") > 1 else ""
        if base in self._models or len(self._models) == 1:
            return self._models.get(base) or next(iter(self._models.values()))
        raise NotFound(f"model {name[:200]!r} is none of {', '.join(self._models)}")

    async def _answer(
        self, request: web.Request, replicas: Replicas, body: bytes, route: PrefixRoute
    ) -> AsyncGenerator[Message, None]:
        """The messages of the answer. A replica that ends before the first one is made good by another."""
        path = canonical(request.rel_url.raw_path).removeprefix(self._prefix)
        headers = {name.lower(): value for name, value in passed_headers(request).items()}
        if body:
            headers["content-length"] = str(len(body))
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": request.rel_url.raw_query_string.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers.items()],
            "client": (request.remote, 0),
            "server": None,
        }
        repeatable = request.method in ("GET", "HEAD") or not path.startswith(ADMIN_PATHS)
        for attempt in range(_ATTEMPTS):
            begun = False
            try:
                async with aclosing(replicas.ask(scope, body, route)) as answer:
                    async for messages in answer:
                        for message in messages:
                            begun = True
                            yield message
                return
            except ReplicaEnded:
                log.warning("a replica ended while it answered %s %s", request.method, path)
                if begun or not repeatable or attempt + 1 == _ATTEMPTS:
                    raise BadGateway(LOST) from None

    async def _pass_back(self, request: web.Request, answer: AsyncGenerator[Message, None]) -> web.StreamResponse:
        """Stream the answer to the client. One that breaks off in an event stream ends with an error event."""
        async with aclosing(answer):
            head = await anext(answer)
            response = web.StreamResponse(status=head["status"])
            for name, value in head["headers"]:
                if (key := name.decode()) not in NOT_BACK and not key.startswith("access-control-"):
                    response.headers.add(key, value.decode("utf-8", "surrogateescape"))
                elif key == "content-length":
                    response.content_length = int(value)
            await response.prepare(request)
            try:
                async for message in answer:
                    await response.write(message.get("body", b""))
                await response.write_eof()
            except RequestError as error:
                await self._break_off(request, response, error)
            except ConnectionError:
                log.debug("the client of %s went away", request.rel_url.raw_path)
        return response

    async def _break_off(self, request: web.Request, response: web.StreamResponse, error: RequestError) -> None:
        with suppress(ConnectionError):
            if response.content_type == "text/event-stream":
                await response.write(sse(error_object(error)))
                await response.write_eof()
            elif request.transport is not None:
                request.transport.abort()

"""The router's application: what it answers itself, and the model that a request is passed on to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from server.config import BUILD_INFO, ServerConfig
from server.errors import InvalidRequest, NotSupported, RequestError
from server.fields import json_object
from server.http.context import beside, json_response
from server.http.guard import Guard
from server.http.listen import listen
from server.http.page import PAGE
from server.keys import Keys
from server.router.catalog import CatalogError
from server.router.fleet import LOADED, UNLOADED, UNLOADING, Entry, Fleet, Model
from server.router.process import ServerProcess
from server.router.proxy import Unconnected, forward

_PUBLIC = frozenset({"/health", "/v1/health", "/models", "/v1/models", *PAGE})
_NOT_HERE = ("/v1/files", "/v1/fine_tuning/")
_LARGE = 1 << 16  # bytes of a body whose parsing would hold up the streams of others
_SOON = 5.0  # seconds from a child's last breath to the end of its process
_STARTED = int(time.time())


class Router:
    """The handlers. `read` gives the entries of today (CatalogError)."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        config: ServerConfig,
        read: Callable[[], Sequence[Entry]],
        *,
        autoload: bool,
        limit: int,
    ) -> None:
        self._fleet, self._config, self._read = fleet, config, read
        self._autoload, self._limit = autoload, limit
        self._prefix = config.api_prefix.rstrip("/")
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """The application."""
        config, prefix = self._config, self._prefix
        guard = Guard(config, Keys(config.api_keys, config.api_key_file), _PUBLIC)
        app = web.Application(client_max_size=config.max_body, middlewares=[guard.middleware])
        for path in ("/health", "/v1/health"):
            app.router.add_get(prefix + path, self._health)
        for path in ("/models", "/v1/models"):
            app.router.add_get(prefix + path, self._models)
        app.router.add_get(prefix + "/v1/models/{id:.+}", self._model)
        app.router.add_get(prefix + "/props", self._props)
        app.router.add_post(prefix + "/models/load", self._load)
        app.router.add_post(prefix + "/models/unload", self._unload)
        if config.ui:
            for path, handler in PAGE.items():
                app.router.add_get(prefix + path, handler)
        app.router.add_route("*", prefix + "/{path:.*}", self._pass_on)
        app.on_response_prepare.append(guard.add_headers)
        app.cleanup_ctx.append(self._connections)
        return app

    async def _connections(self, _: web.Application) -> Any:
        """The client of the children: no limit of connections, and no time limit but theirs."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            yield

    # -- what it answers itself

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        """GET /models; ?reload=1 looks at the folder and the presets again."""
        if request.query.get("reload", "").lower() in ("1", "true"):
            try:
                self._fleet.update(await beside(self._read))
            except CatalogError as error:
                raise InvalidRequest(f"the models stay as they were: {error}") from None
        return json_response({"object": "list", "data": [_shown(model) for model in self._fleet.models.values()]})

    async def _model(self, request: web.Request) -> web.Response:
        return json_response(_shown(self._fleet.find(request.match_info["id"])))

    async def _props(self, request: web.Request) -> web.StreamResponse:
        """GET /props of the router; with ?model= those of the model."""
        if request.query.get("model"):
            return await self._pass_on(request)
        return json_response(
            {
                "role": "router",
                "max_instances": self._limit,
                "models_autoload": self._autoload,
                "model_alias": "logitless",
                "model_path": "none",
                "default_generation_settings": {"params": {}, "n_ctx": 0},
                "total_slots": 0,
                "modalities": {"vision": False, "audio": False},
                "endpoint_slots": False,
                "endpoint_props": False,
                "endpoint_metrics": False,
                "ui": self._config.ui,
                "webui": self._config.ui,
                "build_info": BUILD_INFO,
                "is_sleeping": False,
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        """POST /models/load: begins it; GET /models tells how it goes."""
        self._fleet.load(await self._named(request))
        return json_response({"success": True})

    async def _unload(self, request: web.Request) -> web.Response:
        """POST /models/unload: ends it, and what it does."""
        self._fleet.unload(await self._named(request))
        return json_response({"success": True})

    async def _named(self, request: web.Request) -> str:
        return _name(json_object(await request.read()))

    # -- what it passes on

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """To the model that the query names, or the body's field `model`."""
        if request.path.removeprefix(self._prefix).startswith(_NOT_HERE):
            raise NotSupported("files and fine-tuning jobs belong to one model: start a server of it with --data-dir")
        body = await self._body(request)
        name = request.query.get("model", "")
        if not name:
            if request.method != "POST":
                raise InvalidRequest("model name is missing from the request: it is the query's 'model'")
            parse = partial(json_object, body)
            name = _name(await beside(parse) if len(body) > _LARGE else parse())
        path = request.rel_url.raw_path_qs
        path = path[len(self._prefix) :] if path.startswith(self._prefix) else path
        autoload = self._wants_load(request)
        try:
            async with self._fleet.lease(name, autoload=autoload) as child:
                return await forward(self._session, request, child, path, body)
        except Unconnected:  # it has just ended, and the fleet will know in a moment
            with suppress(TimeoutError):
                async with asyncio.timeout(_SOON):
                    await child.ended()
            async with self._fleet.lease(name, autoload=autoload) as child:
                return await forward(self._session, request, child, path, body)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._config.timeout):
                return await request.read()
        except TimeoutError:
            refused = RequestError("the request did not arrive in time")
            refused.code = 408
            raise refused from None

    def _wants_load(self, request: web.Request) -> bool:
        word = request.query.get("autoload", "").lower()
        return self._autoload if word not in ("0", "1", "true", "false") else word in ("1", "true")


def _name(body: dict[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model name is missing from the request: field 'model' must be its name")
    return name


def _shown(model: Model[ServerProcess]) -> dict[str, Any]:
    """One item of /models; llama-server's shape, and beside its `failed` why."""
    entry = model.entry
    state = LOADED if model.state == UNLOADING else model.state
    status: dict[str, Any] = {"value": state, "args": list(entry.args)}
    if state == UNLOADED and model.error:
        status |= {"failed": True, "exit_code": model.exit_code, "error": model.error}
    return {
        "id": entry.name,
        "aliases": [],
        "tags": [],
        "object": "model",
        "created": _STARTED,
        "owned_by": "logitless",
        "path": entry.path,
        "status": status,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }


async def serve(router: Router, fleet: Fleet[ServerProcess], config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end the children."""

    async def run() -> None:
        for name, model in fleet.models.items():
            if model.entry.load_on_startup:
                fleet.load(name)
        await asyncio.get_running_loop().create_future()

    await listen(router.app(), config, run(), fleet.close)

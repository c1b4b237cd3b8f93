"""The router's HTTP application: its own endpoints, and requests passed on to a model's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web

from logitless.engine.errors import BadGateway, InvalidRequest, NotFound, Unavailable
from logitless.router.cached import Cache, CachedModels
from logitless.router.catalog import CatalogError
from logitless.router.desk import RouterDesk
from logitless.router.fleet import LOADED, Entry, Fleet
from logitless.router.listing import Told, events, on_its_way, shown
from logitless.router.process import ServerProcess
from logitless.router.proxy import Unconnected, ask, forward, pass_back, stream_over
from logitless.server.api import anthropic
from logitless.server.api.context import beside, json_response, read_body
from logitless.server.api.generate import CONVERSATION
from logitless.server.api.openai import files, fine_tuning
from logitless.server.api.openai.tuning_context import DESK, LISTENERS, SILENCE, desk_of
from logitless.server.app import PUBLIC, description, endpoints
from logitless.server.auth import Keys
from logitless.server.config import BUILD_INFO, ServerConfig
from logitless.server.listen import listen
from logitless.server.middleware import Guard
from logitless.server.protocol.dialects import ollama
from logitless.server.protocol.fields import json_object
from logitless.server.ui.page import add_pages

_LARGE = 1 << 16  # bytes of a body whose parsing would hold up the streams of others
_SOON = 5.0  # seconds from a child's last breath to the end of its process
_JOBS = "/v1/fine_tuning/jobs"


class Router:
    """The handlers. `read` gives the entries of today (CatalogError)."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        config: ServerConfig,
        read: Callable[[], Sequence[Entry]],
        desk: RouterDesk,
        cache: Cache,
        *,
        autoload: bool,
        limit: int,
    ) -> None:
        self._fleet, self._config, self._read, self._desk = fleet, config, read, desk
        self.autoload, self._limit = autoload, limit
        self._keys = Keys(config.api_keys, config.api_key_file)
        self._prefix = config.api_prefix.rstrip("/")
        self._reading = asyncio.Lock()
        self._told: Told = WeakKeyDictionary()
        self._cached = CachedModels(fleet, cache, self._read_again)
        self.downloads = self._cached.downloads
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """The application."""
        config, prefix = self._config, self._prefix
        app = Guard(config, self._keys, PUBLIC).application()
        for path in ("/health", "/v1/health"):
            app.router.add_get(prefix + path, self._health)
        for path in ("/models", "/v1/models", "/api/tags"):
            app.router.add_get(prefix + path, self._models)
        app.router.add_post(prefix + "/models", self._download)
        app.router.add_delete(prefix + "/models", self._remove)
        app.router.add_get(prefix + "/models/sse", self._events)
        app.router.add_get(prefix + "/v1/models/{id:.+}", self._model)
        app.router.add_get(prefix + "/props", self._props)
        app.router.add_post(prefix + "/models/load", self._load)
        app.router.add_post(prefix + "/models/unload", self._unload)
        self._add_jobs(app)
        for method, path in (
            ("GET", "/v1/stream"),
            ("GET", "/v1/stream/{id}"),
            ("GET", "/v1/responses/{id}"),
            ("GET", "/v1/responses/{id}/input_items"),
            ("DELETE", "/v1/responses/{id}"),
            ("POST", "/v1/chat/completions/control"),
        ):
            app.router.add_route(method, prefix + path, self._ask_around)
        for path in ("/v1/stream", "/v1/stream/{id}"):
            app.router.add_delete(prefix + path, self._stop_stream)
        app.router.add_post(prefix + "/v1/streams/lookup", self._look_up_streams)
        app.router.add_get(prefix + "/openapi.json", self._openapi)
        for method, path in endpoints():  # of those above, what was added first answers
            handler = anthropic.refusing(self._pass_on) if path.startswith("/v1/messages") else self._pass_on
            for allowed in ("GET", "HEAD") if method == "GET" else (method,):
                app.router.add_route(allowed, prefix + path, handler)
        add_pages(app, config)
        app.cleanup_ctx.append(self._connections)
        return app

    def _add_jobs(self, app: web.Application) -> None:
        """Files and jobs: what there is comes from the desk, what is to be done goes to a model's server."""
        app[DESK], app[LISTENERS], app[SILENCE] = self._desk, self._desk.listeners, self._config.timeout
        for method, path, handler in (
            ("GET", "/v1/files", files.files),
            ("POST", "/v1/files", files.upload),
            ("GET", "/v1/files/{id}", files.file),
            ("DELETE", "/v1/files/{id}", files.delete),
            ("GET", "/v1/files/{id}/content", files.content),
            ("GET", _JOBS, fine_tuning.jobs),
            ("POST", _JOBS, self._create_job),
            ("GET", f"{_JOBS}/{{id}}", fine_tuning.job),
            ("POST", f"{_JOBS}/{{id}}/cancel", fine_tuning.cancel),
            ("POST", f"{_JOBS}/{{id}}/pause", fine_tuning.pause),
            ("POST", f"{_JOBS}/{{id}}/resume", self._resume_job),
            ("GET", f"{_JOBS}/{{id}}/events", fine_tuning.events),
            ("GET", f"{_JOBS}/{{id}}/checkpoints", fine_tuning.checkpoints),
        ):
            app.router.add_route(method, self._prefix + path, handler)

    async def _connections(self, _: web.Application) -> Any:
        """The client of the children: no limit of connections, and no time limit but theirs."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with (
            self._desk.watched(),
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
        ):
            self._session = session
            yield

    # -- what it answers itself

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        """GET /models; ?reload=1 looks at the folder and the presets again."""
        if request.query.get("reload", "").lower() in ("1", "true"):
            try:
                if self._reading.locked():  # for somebody else, who need not have a key; once is enough
                    async with self._reading:
                        pass
                else:
                    await self._read_again()
            except CatalogError as error:
                raise InvalidRequest(f"the models stay as they were: {error}") from None
        await self._ask_what_they_are()
        return json_response(ollama.listed(self._listed()))

    async def _ask_what_they_are(self) -> None:
        """What a model's server tells about it (`meta`) is told for it from then on."""

        async def ask_one(child: ServerProcess) -> None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, LookupError, ValueError):
                async with asyncio.timeout(_SOON), self._session.get(f"{child.url}/v1/models") as answer:
                    self._told[child] = (await answer.json())["data"][0]["meta"]

        children = [m.child for m in self._fleet.models.values() if m.state == LOADED and m.child is not None]
        await asyncio.gather(*(ask_one(child) for child in children if child not in self._told))

    async def _read_again(self) -> None:
        async with self._reading:  # one after the other, or an older look could count more than a newer one
            self._fleet.update(await beside(self._read))

    def _listed(self) -> Iterator[dict[str, Any]]:
        yield from (shown(model, self._told) for model in self._fleet.models.values())
        yield from (on_its_way(download) for download in self.downloads.running.values() if download.files)
        for name, base in self._desk.tuned():
            if (model := self._fleet.get(base)) is not None:
                own = model.entry.name
                yield {**shown(model, self._told), "id": name, "aliases": [], "root": own, "parent": own}

    async def _model(self, request: web.Request) -> web.Response:
        for item in self._listed():
            if request.match_info["id"] in (item["id"], *item["aliases"]):
                return json_response(item)
        raise NotFound(f"model {request.match_info['id'][:200]!r} not found")

    async def _openapi(self, _: web.Request) -> web.Response:
        return description(self._config, self._keys)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """GET /models/sse."""
        return await events(request, self._fleet, self.downloads)

    async def _props(self, request: web.Request) -> web.StreamResponse:
        """GET /props of the router; with ?model= those of the model."""
        if request.query.get("model"):
            return await self._pass_on(request)
        return json_response(
            {
                "role": "router",
                "max_instances": self._limit,
                "models_autoload": self.autoload,
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
        """POST /models/unload: ends it, and what it does; of a model that is being downloaded, the download."""
        name = await self._named(request)
        if name in self.downloads.running:
            await self.downloads.cancel(name)
        else:
            self._fleet.unload(name)
        return json_response({"success": True})

    async def _download(self, request: web.Request) -> web.Response:
        """POST /models: begins to download a model of the hub, or of an address; GET /models tells how it goes."""
        await self._cached.download(await self._named(request))
        return json_response({"success": True})

    async def _remove(self, request: web.Request) -> web.Response:
        """DELETE /models?model=: takes a downloaded model away, and its files; ends a download."""
        name = request.query.get("model", "")
        if not name:
            raise InvalidRequest("model name is missing from the request: it is the query's 'model'")
        await self._cached.remove(name)
        return json_response({"success": True})

    async def _named(self, request: web.Request) -> str:
        return await self._name_in(await read_body(request, self._config.timeout))

    async def _name_in(self, body: bytes) -> str:
        parse = partial(json_object, body)
        return _name(await beside(parse) if len(body) > _LARGE else parse())

    # -- what it passes on

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """To the model that the query names, or the body's field `model`."""
        body = await read_body(request, self._config.timeout)
        name = request.query.get("model", "")
        if not name:
            if request.method != "POST":
                raise InvalidRequest("model name is missing from the request: it is the query's 'model'")
            name = await self._name_in(body)
        return await self._to(request, name, body)

    async def _to(self, request: web.Request, name: str, body: bytes) -> web.StreamResponse:
        """To this model, or to the one that a job made this one from."""
        if name in self.downloads.running:
            raise Unavailable(f"model {name!r} is being downloaded")
        if self._fleet.get(name) is None:
            name = self._desk.base_of(name) or name
        path, session = self._path(request), self._session
        outlives = request.method == "POST" and CONVERSATION in request.headers  # its connection, perhaps
        lease = partial(
            self._fleet.lease,
            name,
            autoload=self._wants_load(request),
            uses=request.method not in ("GET", "HEAD"),
            rest=partial(stream_over, session, request) if outlives else None,
        )
        try:
            async with lease() as child:
                return await forward(session, request, child, path, body)
        except Unconnected:  # it has just ended, and the fleet will know in a moment
            with suppress(TimeoutError):
                async with asyncio.timeout(_SOON):
                    await child.ended()
            async with lease() as child:
                return await forward(session, request, child, path, body)

    def _path(self, request: web.Request) -> str:
        path = request.rel_url.raw_path_qs
        return path[len(self._prefix) :] if path.startswith(self._prefix) else path

    async def _create_job(self, request: web.Request) -> web.StreamResponse:
        _ = desk_of(request).store  # or there is no folder for it
        return await self._pass_on(request)

    async def _resume_job(self, request: web.Request) -> web.StreamResponse:
        """Its model's server has to do something, so it is started if need be."""
        job = self._desk.store.get("jobs", request.match_info["id"])
        if job is None:
            return await fine_tuning.job(request)
        return await self._to(request, job["model"], b"")

    # -- what belongs to a model that its client does not name

    async def _answers(self, request: web.Request, body: bytes) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """What the servers that run answer, one after the other."""
        for name in [name for name, model in self._fleet.models.items() if model.state == LOADED]:
            with suppress(InvalidRequest, NotFound, BadGateway):  # it has ended meanwhile
                async with (
                    self._fleet.lease(name, autoload=False, uses=False) as child,
                    await ask(self._session, request, child, self._path(request), body) as answer,
                ):
                    yield answer

    async def _ask_around(self, request: web.Request) -> web.StreamResponse:
        """The first server that knows it; a stream or a response belongs to one."""
        if request.query.get("model"):
            return await self._pass_on(request)
        body = await read_body(request, self._config.timeout)
        async with aclosing(self._answers(request, body)) as answers:
            async for answer in answers:
                if answer.status != 404:
                    return await pass_back(request, answer)
        raise NotFound("no model that is loaded knows of it")

    async def _stop_stream(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/stream/{id}: wherever it is."""
        async with aclosing(self._answers(request, b"")) as answers:
            async for answer in answers:
                if answer.status >= 400:
                    return await pass_back(request, answer)
        return web.Response(status=204)

    async def _look_up_streams(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/streams/lookup: of all models."""
        body = await read_body(request, self._config.timeout)
        found: list[Any] = []
        async with aclosing(self._answers(request, body)) as answers:
            async for answer in answers:
                if answer.status >= 400:
                    return await pass_back(request, answer)
                found += await answer.json()
        return json_response(found)

    def unfinished(self) -> list[str]:
        """The models that fine-tuning jobs wait for, as many as have room."""
        names = [name for name in self._desk.unfinished() if self._fleet.get(name) is not None]
        return names[: self._limit or None]

    def _wants_load(self, request: web.Request) -> bool:
        word = request.query.get("autoload", "").lower()
        return self.autoload if word not in ("0", "1", "true", "false") else word in ("1", "true")


def _name(body: dict[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model name is missing from the request: field 'model' must be its name")
    return name


async def serve(router: Router, fleet: Fleet[ServerProcess], config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end the children."""

    async def run() -> None:
        wanted = [name for name, model in fleet.models.items() if model.entry.load_on_startup]
        for name in dict.fromkeys([*wanted, *(router.unfinished() if router.autoload else ())]):
            fleet.load(name)
        await asyncio.get_running_loop().create_future()

    async def stop() -> None:
        await asyncio.gather(fleet.close(), router.downloads.close())

    await listen(router.app(), config, run(), stop)

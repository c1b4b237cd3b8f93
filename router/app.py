"""The router's HTTP application: its own endpoints, and requests passed on to a model's server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from msgspec import convert
from msgspec.structs import replace

from logitless.engine.errors import BadGateway, InvalidRequest, NotFound, NotSupported, Unavailable
from logitless.engine.finetuning.job import base_of
from logitless.frontend.answers.llamacpp import Done, RouterProps
from logitless.frontend.answers.models import Health, Modality, ModelEntry, ModelMeta
from logitless.frontend.config import BUILD_INFO
from logitless.frontend.fields import read
from logitless.frontend.workers import compute, to_thread
from logitless.router.cached import Cache, CachedModels
from logitless.router.catalog import CatalogError
from logitless.router.conversations import Conversations
from logitless.router.fleet import LOADED, Entry, Fleet
from logitless.router.jobs import RouterJobs
from logitless.router.listing import Known, download_item, events, model_item
from logitless.router.ollama.routes import OllamaRoutes, add_refusals
from logitless.router.ollama.store import CreatorAccess, Fields, ModelStore, Pass
from logitless.router.process import ServerProcess
from logitless.router.proxy import OUTLIVES, Unconnected, ask, pass_back, stream_over
from logitless.server.api import info
from logitless.server.api.context import api_key, client_of, json_response
from logitless.server.api.generate import CONVERSATION
from logitless.server.api.info import description
from logitless.server.api.llamacpp.resume import LookupBody, stream_id
from logitless.server.api.llamacpp.sessions import Place
from logitless.server.api.openai import fine_tuning
from logitless.server.api.openai.tuning_context import DESK, LISTENERS, SILENCE, desk_of
from logitless.server.app import add_heads
from logitless.server.auth import ApiKeys
from logitless.server.bodies.form import form_texts, is_form
from logitless.server.bodies.json_body import json_object
from logitless.server.bodies.room import BODIES, STRIDE_SECONDS
from logitless.server.clients import CLIENT
from logitless.server.config import ServerConfig
from logitless.server.listen import listen
from logitless.server.middleware import Guard
from logitless.server.observing.record import RECORD, TRAFFIC
from logitless.server.routes import AROUND, HERE, PUBLIC, Handler, routes
from logitless.server.slashes import canonical
from logitless.server.ui.page import PAGE, add_pages

_LARGE = 1 << 16  # bytes of a body whose parsing would hold up the streams of others
_AT_ONCE = 0.5  # seconds that a listing waits for servers to say what their models are
_SOON = 5.0  # seconds from a closed connection to the end of the child's process; to the beginning of its answer
_LISTS = frozenset({"/models", "/v1/models"})


class Router:
    """The handlers. `read` reads the catalog's entries (CatalogError); `created`: the store of created models."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        config: ServerConfig,
        read: Callable[[], Sequence[Entry]],
        desk: RouterJobs,
        cache: Cache,
        *,
        autoload: bool,
        limit: int,
        created: ModelStore | None = None,
    ) -> None:
        self._fleet, self._config, self._read, self._desk = fleet, config, read, desk
        self.autoload, self._limit = autoload, limit
        self._keys = ApiKeys(config.api_keys, config.api_key_file)
        self._prefix = config.api_prefix.rstrip("/")
        self._reading = asyncio.Lock()
        self._known: Known = WeakKeyDictionary()
        self._looks: dict[ServerProcess, asyncio.Task[None]] = {}  # servers that are still to say what they are
        self._created = created
        self._cached = CachedModels(fleet, cache, self._read_again, created)
        self.downloads = self._cached.downloads
        self._conversations = Conversations()
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """The application."""
        config, prefix = self._config, self._prefix
        app = Guard(config, self._keys, (PUBLIC.union(PAGE)) - _LISTS - {"/api/tags"}).application()
        app[DESK], app[LISTENERS], app[SILENCE] = self._desk, self._desk.listeners, config.timeout
        app.router.add_post(prefix + "/models", self._download)
        app.router.add_delete(prefix + "/models", self._remove)
        app.router.add_get(prefix + "/models/sse", self._events)
        app.router.add_post(prefix + "/models/load", self._load)
        app.router.add_post(prefix + "/models/unload", self._unload)
        if config.tools is not None:
            config.tools.add_to(app, config, self._keys)
        guarded = bool(config.admin_api_key)
        ollama = OllamaRoutes(self._fleet, self._cached, self._is_known, self._read_body, guarded=guarded)
        ollama.add_to(app, prefix)
        if self._created is not None:
            silence = min(config.timeout, STRIDE_SECONDS)
            access = CreatorAccess(self._fleet, silence, self._read_again, ollama.ours, self._read_body)
            self._created.add_to(app, prefix, access)
        else:
            add_refusals(app, prefix)
        own: dict[str, Handler] = {
            "info.health": self._health,
            "info.models": self._models,
            "info.model": self._model,
            "info.props": self._props,
            "info.metrics": self._metrics,
            "info.openapi": self._openapi,
            "openai.fine_tuning.delete_model": self._delete_model,
            "openai.fine_tuning.create": self._create_job,
            "openai.fine_tuning.resume": self._resume_job,
            "openai.conversations.create": self._new_conversation,
            "llamacpp.resume.follow": self._follow_stream,
            "llamacpp.resume.stop": self._stop_stream,
            "llamacpp.resume.lookup": self._look_up_streams,
        }
        for route in routes():  # those added above take precedence
            other = self._ask_around if route.router == AROUND else self._pass_on
            handler = route.load() if route.router == HERE else own.get(route.handler, other)
            for path in route.paths:
                app.router.add_route(route.method.upper(), prefix + path, handler)
        add_pages(app, config)
        add_heads(app)
        app.cleanup_ctx.append(self._connections)
        return app

    async def _connections(self, _: web.Application) -> Any:
        """HTTP client of the children, without limits of connections and time."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with (
            self._desk.watched(),
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
        ):
            self._session = session
            yield
            await self._conversations.close()

    # -- endpoints of the router itself

    async def _health(self, _: web.Request) -> web.Response:
        return json_response(Health())

    async def _models(self, request: web.Request) -> web.Response:
        """GET /models; ?reload=1 reads the folder and the presets anew."""
        if request.query.get("reload", "").lower() in ("1", "true"):
            try:
                if self._reading.locked():  # a reload is running; one is enough
                    async with self._reading:
                        pass
                else:
                    await self._read_again()
            except CatalogError as error:
                raise InvalidRequest(f"the models stay as they were: {error}") from None
        await self._ask_what_they_are()
        return info.models_response(request, self._listed(request, checkpoints=info.asks_checkpoints(request)))

    async def _ask_what_they_are(self) -> None:
        """Ask each running server for its model's `meta` and modalities, for this listing if it answers at
        once and for later ones. A server that hangs is asked once at a time."""

        async def ask_one(child: ServerProcess) -> None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, LookupError, ValueError):
                async with asyncio.timeout(_SOON), self._session.get(f"{child.url}/v1/models") as answer:
                    model = (await answer.json())["data"][0]
                    self._known[child] = convert(model["meta"], ModelMeta), convert(model["architecture"], Modality)

        children = [m.child for m in self._fleet.models.values() if m.state == LOADED and m.child is not None]
        new = [child for child in children if child not in self._known and child not in self._looks]
        for child in new:
            self._looks[child] = asyncio.create_task(ask_one(child))
        if new:
            await asyncio.wait([self._looks[child] for child in new], timeout=_AT_ONCE)
        self._looks = {child: look for child, look in self._looks.items() if not look.done()}

    async def _read_again(self) -> None:
        async with self._reading:  # in order: an older reading must not replace a newer one
            self._fleet.update(await to_thread(self._read))

    def _listed(self, request: web.Request, *, checkpoints: bool) -> Iterator[ModelEntry]:
        item = partial(model_item, known=self._known, whole=request[CLIENT].is_admin)
        yield from (item(m) for m in self._fleet.models.values() if not m.entry.hidden)
        yield from (download_item(download) for download in self.downloads.running.values() if download.files)
        for name, base in self._desk.tuned(checkpoints=checkpoints):
            if (model := self._fleet.get(base)) is not None:
                own = model.entry.name
                yield replace(item(model), id=name, aliases=[], root=own, parent=own)

    async def _model(self, request: web.Request) -> web.Response:
        for item in self._listed(request, checkpoints=True):
            if request.match_info["id"] in (item.id, *item.aliases):
                return info.model_response(request, item)
        hidden = self._fleet.find(request.match_info["id"])
        return info.model_response(request, model_item(hidden, self._known, whole=request[CLIENT].is_admin))

    async def _openapi(self, _: web.Request) -> web.Response:
        return description(self._config, self._keys)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """GET /models/sse."""
        return await events(request, self._fleet, self.downloads)

    async def _props(self, request: web.Request) -> web.StreamResponse:
        """GET /props: the router's, or with ?model= the model's."""
        if request.query.get("model"):
            return await self._pass_on(request)
        ui = bool(self._config.ui)
        return json_response(
            RouterProps(
                max_instances=self._limit,
                models_autoload=self.autoload,
                endpoint_tools=bool(self._config.tools),
                ui=ui,
                webui=ui,
                ui_settings=self._config.ui_settings,
                webui_settings=self._config.ui_settings,
                build_info=BUILD_INFO,
            )
        )

    async def _load(self, request: web.Request) -> web.Response:
        """POST /models/load: begin to load; GET /models has the state."""
        self._fleet.load(await self._named(request))
        return json_response(Done())

    async def _unload(self, request: web.Request) -> web.Response:
        """POST /models/unload: unload a model with its requests, or cancel its download."""
        name = await self._named(request)
        if name in self.downloads.running:
            await self.downloads.cancel(name)
        else:
            self._fleet.unload(name)
        return json_response(Done())

    async def _download(self, request: web.Request) -> web.Response:
        """POST /models: begin to download a model from the hub or an address; GET /models has the progress."""
        await self._cached.download(await self._named(request))
        return json_response(Done())

    async def _remove(self, request: web.Request) -> web.Response:
        """DELETE /models?model=: delete a downloaded model with its files, or cancel its download."""
        name = request.query.get("model", "")
        if not name:
            raise InvalidRequest("model name is missing from the request: it is the query's 'model'")
        await self._cached.remove(name)
        return json_response(Done())

    async def _named(self, request: web.Request) -> str:
        async with self._body(request) as body:
            return _name(await self._fields(request, body))

    def _body(self, request: web.Request) -> AbstractAsyncContextManager[bytearray]:
        return request.app[BODIES].read(request, client_of(request))

    async def _fields(self, request: web.Request, body: bytes | bytearray) -> dict[str, Any]:
        """The fields of a body, JSON or a form."""
        parse: Callable[[], dict[str, Any]] = partial(json_object, body)
        if is_form(request):
            parse = partial(form_texts, request.headers["Content-Type"], body)
        return await compute(parse, client_of(request)) if len(body) > _LARGE else parse()

    async def _outlives(self, request: web.Request, body: bytes | bytearray) -> str:
        """The name under which a request goes on without its client; "": it does not."""
        named = request.headers.get(CONVERSATION, "")
        behind = b'"background"' in body and canonical(request.path).endswith("/responses")
        if request.method == "POST" and (named or behind):
            with suppress(InvalidRequest):  # the model's server names the fault
                fields = await self._fields(request, body)
                if behind and fields.get("background") is True:
                    return named or f"background_{secrets.token_urlsafe(16)}"
                if fields.get("stream") is True:
                    return named
        return ""

    # -- requests for a model

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass the request to the model of the query or of the body's field `model`."""
        async with self._body(request) as body:
            name = request.query.get("model", "")
            if not name:
                if request.method != "POST":
                    raise InvalidRequest("model name is missing from the request: it is the query's 'model'")
                name = _name(await self._fields(request, body))
            return await self._to(request, name, body)

    async def _to(self, request: web.Request, name: str, body: bytes | bytearray) -> web.StreamResponse:
        """Pass the request to a model, or to the base model of a finetune."""
        if name in self.downloads.running:
            raise Unavailable(f"model {name!r} is being downloaded")
        if self._fleet.get(base := self._base(name)) is not None:
            request[RECORD].model = name
        name = base
        if outlives := await self._outlives(request, body):
            request[OUTLIVES] = outlives
        lease = partial(
            self._fleet.lease,
            name,
            autoload=self._wants_load(request),
            uses=request.method not in ("GET", "HEAD"),
            rest=partial(stream_over, self._session, request) if outlives else None,
        )
        stack = AsyncExitStack()
        begin = self._begin(request, lease, body, stack)
        if outlives:
            place = api_key(request), outlives
            async with self._conversations.begun(place, begin, stack) as answer:
                return await pass_back(request, answer)
        async with stack:
            return await pass_back(request, await begin)

    def _is_known(self, name: str) -> bool:
        return self._fleet.get(self._base(name)) is not None

    async def _read_body(
        self, request: web.Request, answer: Callable[[Fields, Pass], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The answer to a request's fields, which may be passed on."""
        async with self._body(request) as body:
            return await answer(await self._fields(request, body), lambda name: self._to(request, name, body))

    def _base(self, name: str) -> str:
        """The model of this name, or the base model of the finetune."""
        return name if self._fleet.get(name) is not None else self._desk.base_of(name) or name

    async def _begin(
        self,
        request: web.Request,
        lease: Callable[[], AbstractAsyncContextManager[ServerProcess]],
        body: bytes | bytearray,
        stack: AsyncExitStack,
    ) -> aiohttp.ClientResponse:
        """The head of the answer; the stack holds it and the model."""
        for is_last in (False, True):
            child = await stack.enter_async_context(lease())
            try:
                answer = await ask(self._session, request, child, self._path(request), body)
                return await stack.enter_async_context(answer)
            except Unconnected:  # it has just ended, which the fleet notices in a moment
                await stack.aclose()
                if is_last:
                    raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SOON):
                        await child.ended()
        raise AssertionError

    def _path(self, request: web.Request) -> str:
        url = request.rel_url
        path = canonical(url.raw_path).removeprefix(self._prefix)
        return f"{path}?{url.raw_query_string}" if url.raw_query_string else path

    async def _create_job(self, request: web.Request) -> web.StreamResponse:
        _ = desk_of(request).store  # NotSupported: there is none
        return await self._pass_on(request)

    async def _resume_job(self, request: web.Request) -> web.StreamResponse:
        """Pass the request to the server of the job's model, which is started if need be."""
        job = self._desk.store.get("jobs", request.match_info["id"])
        if job is None or not request[CLIENT].may_see(job):
            return await fine_tuning.job(request)
        return await self._to(request, base_of(job), b"")

    async def _delete_model(self, request: web.Request) -> web.StreamResponse:
        """Delete a fine-tuned model, through the server of its base model if that runs."""
        base = self._fleet.get(self._desk.base_of(request.match_info["id"]))
        if base is None or base.child is None:
            return await fine_tuning.delete_model(request)
        return await self._to(request, base.entry.name, b"")

    # -- requests that name no model

    async def _answers(
        self, request: web.Request, body: bytes | bytearray = b""
    ) -> AsyncGenerator[tuple[str, aiohttp.ClientResponse], None]:
        """(model, answer) of all running servers, or that of the query's `model`, as they come. None is started:
        what is looked for would not be there. Those that do not begin to answer soon are left out."""
        chosen = self._fleet.find(self._base(name)) if (name := request.query.get("model", "")) else None
        names = [name for name, m in self._fleet.models.items() if m.state == LOADED and chosen in (None, m)]
        async with AsyncExitStack() as stack:

            async def head(name: str) -> aiohttp.ClientResponse:
                child = await stack.enter_async_context(self._fleet.lease(name, autoload=False, uses=False))
                answer = await ask(self._session, request, child, self._path(request), body)
                return await stack.enter_async_context(answer)

            tasks = {asyncio.create_task(head(name)): name for name in names}
            stack.push_async_callback(_cancelled, tasks)
            waiting, until = set(tasks), time.monotonic() + _SOON
            while waiting:
                rest = max(0.0, until - time.monotonic())
                done, waiting = await asyncio.wait(waiting, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                if not done:  # the others hang
                    return
                for task in done:
                    with suppress(InvalidRequest, NotFound, BadGateway):  # it ended meanwhile
                        yield tasks[task], task.result()

    async def _new_conversation(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/conversations: the server of `model` keeps it, or one that is loaded."""
        async with self._body(request) as body:
            name = request.query.get("model") or (await self._fields(request, body)).get("model")
            loaded = [model.entry.name for model in self._fleet.models.values() if model.state == LOADED]
            if name is None and not loaded:
                raise InvalidRequest("no model is loaded: field 'model' must name the one that the conversation is for")
            return await self._to(request, loaded[0] if name is None else _name({"model": name}), body)

    async def _ask_around(self, request: web.Request) -> web.StreamResponse:
        """The first server that knows the stream, response or completion."""
        async with self._body(request) as body:
            return await self._first(request, body)

    async def _first(self, request: web.Request, body: bytes | bytearray) -> web.StreamResponse:
        async with aclosing(self._answers(request, body)) as answers:
            async for _, answer in answers:
                if answer.status != 404:
                    return await pass_back(request, answer)
        raise NotFound("no model that is loaded knows of it")

    async def _follow_stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/stream/{id} of any server, also of one that still loads for it."""
        await self._conversations.wait(_place(request))
        return await self._first(request, b"")

    async def _stop_stream(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/stream/{id} of any server."""
        self._conversations.end(_place(request))
        async with aclosing(self._answers(request)) as answers:
            async for _, answer in answers:
                if answer.status >= 400:
                    return await pass_back(request, answer)
        return web.Response(status=204)

    async def _look_up_streams(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/streams/lookup over all servers."""
        async with self._body(request) as body:
            ids = read(LookupBody, await self._fields(request, body)).conversation_ids
            rows = self._conversations.rows(api_key(request), ids)
            async with aclosing(self._answers(request, body)) as answers:
                async for _, answer in answers:
                    if answer.status >= 400:
                        return await pass_back(request, answer)
                    rows += await answer.json()
            return json_response(rows)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics of all running servers, or with ?model= of one."""
        if request.query.get("model"):
            return await self._pass_on(request)
        from logitless.router.metrics import AllModels  # prometheus_client is imported when someone asks
        from logitless.server.observing.metrics import response

        texts = {}
        async with aclosing(self._answers(request)) as answers:
            async for name, answer in answers:
                if answer.status == 200:
                    texts[name] = await answer.text()
        texts = {name: texts[name] for name in self._fleet.models if name in texts}
        if not texts and not self._config.metrics:
            raise NotSupported("no model that is loaded has metrics; start the server with --metrics")
        states = [model.state for model in self._fleet.models.values()]
        return response(AllModels(texts, len(states), states.count(LOADED), request.app[TRAFFIC]))

    def unfinished(self) -> list[str]:
        """Load the models that fine-tuning jobs need, as many as have room."""
        names = [name for name in self._desk.unfinished() if self._fleet.get(name) is not None]
        return names[: self._limit or None]

    def _wants_load(self, request: web.Request) -> bool:
        """True if the query's `autoload` says so, else as --models-autoload."""
        word = request.query.get("autoload", "").lower()
        return word not in ("0", "false") if self.autoload else word in ("1", "true")


def _name(body: dict[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model name is missing from the request: field 'model' must be its name")
    return name


def _place(request: web.Request) -> Place:
    return api_key(request), stream_id(request)


async def serve(router: Router, fleet: Fleet[ServerProcess], config: ServerConfig) -> None:
    """Answer requests until SIGTERM or SIGINT, then end the children."""

    async def run(_: str) -> None:
        names = [name for name, model in fleet.models.items() if model.entry.load_on_startup]
        for name in dict.fromkeys([*names, *(router.unfinished() if router.autoload else ())]):
            fleet.load(name)
        await asyncio.get_running_loop().create_future()

    async def stop() -> None:
        await asyncio.gather(fleet.close(), router.downloads.close())

    await listen(router.app(), config, run, stop)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

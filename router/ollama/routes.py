"""Handlers of a router's Ollama API: lists of models, downloads, unloading, deleting, creation and uploads."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web
from msgspec.structs import replace as replace_struct

from logitless.engine.errors import Forbidden, InvalidRequest, NotFound, NotSupported
from logitless.frontend.answers.errors import OllamaError
from logitless.frontend.answers.models import LMStudioModels
from logitless.frontend.answers.ollama import (
    ListedModels,
    OllamaAnswer,
    PullProgress,
)
from logitless.frontend.dialects.ollama import Named, PullBody, ShowBody
from logitless.frontend.dialects.ollama_names import candidates, seconds, timestamp
from logitless.frontend.fields import read
from logitless.frontend.replies.encoding import encode_json
from logitless.frontend.replies.ollama import text_fields
from logitless.frontend.workers import to_thread
from logitless.router.cached import CachedModels
from logitless.router.downloads import Download
from logitless.router.fleet import LOADED, LOADING, Entry, Fleet
from logitless.router.ollama.store import Fields, Pass, Read
from logitless.router.process import ServerProcess
from logitless.server.api.context import json_response
from logitless.server.api.ollama.model_file import ModelFile, model_file, whole_info
from logitless.server.api.ollama.routes import FOREVER, listed, lmstudio_item, not_here, show_answer, version
from logitless.server.clients import CLIENT
from logitless.server.routes import all_routes


class OllamaRoutes:
    """The handlers. `is_known` is true for names of models and finetunes; `read_body` calls a function
    with a request's fields and the way to a model, while the body has its room. `guarded`: unloading
    needs the admin key."""

    def __init__(
        self,
        fleet: Fleet[ServerProcess],
        cached: CachedModels,
        is_known: Callable[[str], bool],
        read_body: Read,
        *,
        guarded: bool,
    ) -> None:
        self._fleet, self._cached, self._is_known, self._read_body = fleet, cached, is_known, read_body
        self._guarded = guarded

    def add_to(self, app: web.Application, prefix: str) -> None:
        """Add the routes; the paths begin with `prefix`."""
        for path, handler in (
            ("tags", self._tags),
            ("ps", self._ps),
            ("version", version),
            ("v0/models", self._lmstudio),
        ):
            app.router.add_get(f"{prefix}/api/{path}", handler)
        for path in ("generate", "chat", "embed", "embeddings"):
            app.router.add_post(f"{prefix}/api/{path}", partial(self._pass_on, key=_EMPTY.get(path, "")))
        app.router.add_post(f"{prefix}/api/show", self._show)
        app.router.add_post(f"{prefix}/api/pull", self._pull)
        app.router.add_delete(f"{prefix}/api/delete", self._delete)
        app.router.add_post(f"{prefix}/api/push", not_here)

    async def _tags(self, _: web.Request) -> web.Response:
        """GET /api/tags."""
        models = [m for m in self._fleet.models.values() if not m.entry.hidden]
        files = await to_thread(lambda: [_file(m.entry) for m in models])
        named = zip(models, files, strict=True)
        return json_response(
            ListedModels([listed(m.entry.name, f, capabilities=list(f.capabilities)) for m, f in named])
        )

    async def _ps(self, _: web.Request) -> web.Response:
        """GET /api/ps."""
        models = [m for m in self._fleet.models.values() if m.state == LOADED]
        files = await to_thread(lambda: [_file(m.entry) for m in models])
        named = zip(models, files, strict=True)
        return json_response(ListedModels([listed(m.entry.name, f, expires_at=FOREVER, size_vram=0) for m, f in named]))

    async def _lmstudio(self, _: web.Request) -> web.Response:
        """GET /api/v0/models: LM Studio's list."""
        models = [m for m in self._fleet.models.values() if not m.entry.hidden]
        files = await to_thread(lambda: [_file(m.entry) for m in models])
        states = {LOADED: "loaded", LOADING: "loading"}
        items = [
            lmstudio_item(m.entry.name, f, states.get(m.state, "not-loaded"))
            for m, f in zip(models, files, strict=True)
        ]
        return json_response(LMStudioModels(items))

    async def _show(self, request: web.Request) -> web.StreamResponse:
        """POST /api/show: what the model's file says; the model is not loaded."""

        async def show(fields: Fields, _: Pass) -> web.StreamResponse:
            body = read(ShowBody, fields)
            entry = self._fleet.find(self.ours(body.model)).entry
            file = await to_thread(lambda: _file(entry))
            info = await to_thread(lambda: whole_info(entry.path)) if body.verbose else file.info
            answer = show_answer(entry.name, file, info)
            return json_response(answer if entry.created is None else entry.created.shown_in(answer))

        return await self._read_body(request, show)

    async def _pass_on(self, request: web.Request, key: str) -> web.StreamResponse:
        """Pass the request to its model. With `keep_alive` 0 the model is unloaded after it. `key`: the
        field without which there is nothing to do but to load or unload the model."""

        async def answer(fields: Fields, to: Pass) -> web.StreamResponse:
            name = self.ours(read(Named, {k: fields[k] for k in ("model", "name") if k in fields}).model)
            keep = fields.get("keep_alive")
            unloads = keep is not None and seconds("keep_alive", keep) == 0
            may_unload = request[CLIENT].is_admin or not self._guarded
            if unloads and key and not fields.get(key):
                if not may_unload:
                    raise Forbidden("unloading a model needs the admin key")
                self._unload(name)
                more = text_fields(key == "messages")
                return json_response(OllamaAnswer(name, timestamp(), **more, done=True, done_reason="unload"))
            response = await to(name)
            if unloads and may_unload:
                self._unload(name)
            return response

        return await self._read_body(request, answer)

    def _unload(self, name: str) -> None:
        """Unload the model if nobody uses it."""
        model = self._fleet.get(name)
        if model is not None and model.state == LOADED and not (model.active or model.n_waiting):
            self._fleet.unload(name)

    async def _pull(self, request: web.Request) -> web.StreamResponse:
        """POST /api/pull: download a model, with a line for each progress. It goes on without its client."""

        async def pull(fields: Fields, _: Pass) -> web.StreamResponse:
            body = read(PullBody, fields)
            names = candidates(body.model)
            is_here = any(self._fleet.get(name) is not None for name in names)
            lines = self._progress(None if is_here else await self._cached.download(names[-1]))
            if body.stream:
                return await stream(request, lines)
            last = [line async for line in lines][-1]
            return json_response(last, 502 if isinstance(last, OllamaError) else 200)

        return await self._read_body(request, pull)

    async def _progress(self, download: Download | None) -> AsyncIterator[PullProgress | OllamaError]:
        """Lines of a download; None: the model is here."""
        yield PullProgress("pulling manifest")
        while download is not None and self._cached.downloads.running.get(download.name) is download:
            for file, counts in download.files.items():
                yield PullProgress(f"pulling {file}", file, counts["total"], counts["done"])
            await self._fleet.changed()
        yield OllamaError(download.error) if download is not None and download.error else PullProgress("success")

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /api/delete: delete a downloaded or created model with its files, or cancel a download."""

        async def delete(fields: Fields, _: Pass) -> web.StreamResponse:
            names = candidates(read(Named, fields).model)
            running = [name for name in names if name in self._cached.downloads.running]
            await self._cached.remove(running[0] if running else self.ours(names[0]))
            return web.Response()

        return await self._read_body(request, delete)

    def ours(self, name: str) -> str:
        """Our name of a client's model. NotFound: there is none."""
        if not name:
            raise InvalidRequest("field 'model': is required")
        for candidate in candidates(name):
            if self._is_known(candidate):
                return candidate
        raise NotFound(f"model '{name[:200]}' not found")


_EMPTY = {"generate": "prompt", "chat": "messages"}


def _file(entry: Entry) -> ModelFile:
    """The details of a model's file; a created model's own settings replace them."""
    file, built = model_file(entry.path), entry.created
    if built is None:
        return file
    template = built.template or file.template
    can = tuple(name for name in file.capabilities if name != "tools" or "tools" in template)
    digest = hashlib.sha256(f"{file.digest} {built.name} {built.created}".encode()).hexdigest()
    details = replace_struct(file.details, parent_model=built.base)
    return replace(file, modified=built.created, digest=digest, details=details, template=template, capabilities=can)


async def stream(request: web.Request, lines: AsyncIterator[PullProgress | OllamaError]) -> web.StreamResponse:
    """The lines as they come."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async for line in lines:
        await response.write(encode_json(line) + b"\n")
    await response.write_eof()
    return response


def add_refusals(app: web.Application, prefix: str) -> None:
    """Add the routes of a router without a folder of models. Those that it has come first."""

    async def no_folder(request: web.Request) -> web.StreamResponse:
        raise NotSupported(
            f"{request.method} {request.path}: needs a folder: start the router with --models-dir FOLDER"
        )

    for route in all_routes():
        if route.handler == "ollama.routes.only_in_router":
            app.router.add_route(route.method.upper(), prefix + route.path, no_folder)

"""Store of created models as a router has it, with the routes of creation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from aiohttp import web

from logitless.engine.errors import RequestError
from logitless.extras.ollama_store.blobs import Blobs
from logitless.extras.ollama_store.create import Creation
from logitless.extras.ollama_store.model_store import CreatedModels
from logitless.frontend.answers.errors import OllamaError
from logitless.frontend.answers.ollama import PullProgress
from logitless.frontend.dialects.ollama import CopyBody, CreateBody
from logitless.frontend.fields import read
from logitless.frontend.replies.encoding import ollamas_error
from logitless.frontend.workers import to_thread
from logitless.router.ollama.routes import stream
from logitless.router.ollama.store import CreatorAccess, Fields, Pass, Read
from logitless.server.api.context import json_response


class OllamaStore(CreatedModels):
    """The created models below a folder (logitless.router.ollama.store.ModelStore)."""

    def add_to(self, app: web.Application, prefix: str, creator: CreatorAccess) -> None:
        """Add the routes of creation."""
        creation = Creation(creator.fleet, self, creator.read_again, creator.ours)
        CreationRoutes(self.blobs, creation, creator.read_body, creator.silence).add_to(app, prefix)


MODEL_STORES = (OllamaStore,)


class CreationRoutes:
    """Handlers of /api/create, /api/copy and /api/blobs. `silence`: maximum seconds for 128 KiB of an upload."""

    def __init__(self, blobs: Blobs, creation: Creation, read_body: Read, silence: float) -> None:
        self._blobs, self._creation, self._read_body = blobs, creation, read_body
        self._silence = silence

    def add_to(self, app: web.Application, prefix: str) -> None:
        """Add the routes; the paths begin with `prefix`."""
        app.router.add_post(f"{prefix}/api/create", self._create)
        app.router.add_post(f"{prefix}/api/copy", self._copy)
        app.router.add_head(f"{prefix}/api/blobs/{{id}}", self._has)
        app.router.add_post(f"{prefix}/api/blobs/{{id}}", self._upload)

    async def _has(self, request: web.Request) -> web.Response:
        """HEAD /api/blobs/{digest}: 200 if the file is here, else 404."""
        path = await to_thread(lambda: self._blobs.path(request.match_info["id"]))
        return web.Response(status=404 if path is None else 200)

    async def _upload(self, request: web.Request) -> web.Response:
        """POST /api/blobs/{digest}: keep the body, whose SHA-256 the path names."""
        await self._blobs.receive(request, request.match_info["id"], self._silence)
        return web.Response(status=201)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        """POST /api/create: the checks come first, so that a stream begins only where a model can be made."""

        async def create(fields: Fields, _: Pass) -> web.StreamResponse:
            body = read(CreateBody, fields)
            plan = await self._creation.plan(body, fields)
            async with aclosing(self._creation.steps(plan)) as steps:
                if body.stream:
                    return await stream(request, _with_error(steps))
                last = [line async for line in steps][-1]
            return json_response(last)

        return await self._read_body(request, create)

    async def _copy(self, request: web.Request) -> web.StreamResponse:
        """POST /api/copy: another name for a model, whose settings may differ then."""

        async def copy(fields: Fields, _: Pass) -> web.StreamResponse:
            body = read(CopyBody, fields)
            await self._creation.copy(body.source, body.destination)
            return web.Response()

        return await self._read_body(request, copy)


async def _with_error(steps: AsyncIterator[PullProgress]) -> AsyncIterator[PullProgress | OllamaError]:
    """The steps, and an error as the last line."""
    try:
        async for line in steps:
            yield line
    except RequestError as error:
        yield ollamas_error(error)

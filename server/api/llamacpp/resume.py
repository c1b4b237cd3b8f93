"""Resumable streams: a client finds a stream (X-Conversation-Id) again after a lost connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import NotFound
from logitless.engine.sampling.params import Param
from logitless.frontend.answers.llamacpp import StreamState
from logitless.frontend.fields import bad_request, read
from logitless.server.api.context import CONTEXT, client_key, json_response
from logitless.server.api.generate import send
from logitless.server.api.llamacpp.sessions import Place


def stream_id(request: web.Request) -> str:
    """The name of the stream that a path or `conv_id` has."""
    id = request.match_info.get("id") or request.query.get("conv_id", "")
    if not id:
        bad_request("conv_id", "is required")
    return str(id)


def _place(request: web.Request) -> Place:
    return client_key(request), stream_id(request)


async def follow(request: web.Request) -> web.StreamResponse:
    """GET /v1/stream/{id}?from=N: the stream from byte N on (default 0), until its end."""
    context = request.app[CONTEXT]
    place, offset = _place(request), request.query.get("from", "0")
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
        bad_request("from", "must be a number of bytes")
    session = context.sessions.find(place)
    if session is None:
        raise NotFound(f"there is no stream {place[1][:64]!r}")
    session.check(int(offset))
    return await send(request, session.read(int(offset)), -1)


async def stop(request: web.Request) -> web.Response:
    """DELETE /v1/stream/{id}: end it and forget it; well if there is none."""
    request.app[CONTEXT].sessions.drop(_place(request))
    return web.Response(status=204)


class LookupBody(Struct, frozen=True, kw_only=True):
    """POST /v1/streams/lookup."""

    conversation_ids: Annotated[Sequence[str], Param("the streams' names", most=1000)]


async def lookup(request: web.Request) -> web.Response:
    """POST /v1/streams/lookup: how the streams of `conversation_ids` are; nobody can list what they cannot name."""
    context = request.app[CONTEXT]

    def parse(body: dict[str, object]) -> list[str]:
        return list(dict.fromkeys(read(LookupBody, body).conversation_ids))

    result = [context.sessions.find((client_key(request), id)) for id in await context.parsed(request, parse)]
    return json_response(
        [
            StreamState(
                conversation_id=session.id,
                is_done=session.done,
                total_bytes=session.total,
                started_at=int(session.started_at),
                completed_at=int(session.completed_at),
            )
            for session in result
            if session is not None
        ]
    )

"""Background responses: generation without a client, polling, resuming of streams, cancellation."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web
from msgspec import to_builtins

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.frontend.answers.responses import Response
from logitless.frontend.fields import bad_request
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.reply import Reply
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.generate import CONVERSATION, begin_session, send
from logitless.server.api.llamacpp.sessions import StreamSession
from logitless.server.api.openai.conversations import owner
from logitless.server.api.openai.stored_responses import UNFINISHED, Earlier, Item, StoredResponses
from logitless.server.observing.record import RECORD, Record
from logitless.server.observing.traffic import TRAFFIC

_NUMBER = re.compile(rb'\ndata: \{"type":"[^"]*","sequence_number":(\d+)')


def _cancelled(store: StoredResponses, key: str, id: str) -> None:
    """Unless it is whole, somebody ended it."""
    row = store.find(key, id)
    if row is not None and row.response["status"] in UNFINISHED:
        store.update(key, {**row.response, "status": "cancelled"})


async def run_behind(
    request: web.Request,
    context: Context,
    job: GenerationJob,
    reply: Reply,
    queued: Response,
    opening: bytes,
    items: list[Item],
    earlier: Earlier,
) -> web.StreamResponse:
    """Begin a response and answer with its state, or with its stream. `opening`: its first events; `items`: its
    input, after `earlier`."""
    _ = context.writer
    key = owner(request)
    record = request[RECORD]
    own = request[RECORD] = Record(request, record.route)  # it ends later than the request
    own.id = record.id

    async def around(lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(lines):
                yield opening
                async for piece in lines:
                    yield piece
        finally:
            _cancelled(context.stored, key, reply.id)
            own.end(200)
            request.app[TRAFFIC].count_generations(own)

    context.stored.keep(key, to_builtins(queued), items, earlier)
    try:
        name = request.headers.get(CONVERSATION, reply.id)
        session = await begin_session(request, context, job, reply, name, around)
    except BaseException:
        context.stored.forget(key, reply.id)
        raise
    context.background[key, reply.id] = session
    if job.params.stream:
        return await send(request, context, session.read(0), -1)
    return json_response(queued)


async def resume(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}?stream=true: its events, from the one after `starting_after` on."""
    context = request.app[CONTEXT]
    session = context.background.get((owner(request), request.match_info["id"]))
    if session is None:
        bad_request("stream", "a response is told again as a whole only, unless it is or was just in the background")
    after = request.query.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < 16):
        bad_request("starting_after", "must be the sequence number of an event")
    return await send(request, context, session.read(_offset(session, int(after))), -1)


def _offset(session: StreamSession, after: int) -> int:
    """The byte at which the next event begins."""
    entries = session.tail
    for result in _NUMBER.finditer(entries):
        if (number := int(result[1])) > after:
            if session.start and number > after + 1:
                raise InvalidRequest(f"'starting_after': only the events after {number - 1} are still kept")
            return session.start + entries.rfind(b"event: ", 0, result.start())
    return session.total


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel: end it if it goes on in the background."""
    context, key, id = request.app[CONTEXT], owner(request), request.match_info["id"]
    row = context.stored.find(key, id)
    if row is None:
        raise NotFound(f"there is no response {id[:64]!r}: it was not stored, or is forgotten")
    if not row.response["background"]:
        raise InvalidRequest("only a response that was asked for with background can be cancelled")
    end(context, key, id)
    row = context.stored.find(key, id)
    assert row is not None
    return json_response(row.response)


def end(context: Context, key: str, id: str) -> None:
    """End a response that goes on in the background, if it does."""
    session = context.background.get((key, id))
    if session is not None:
        session.end()
        _cancelled(context.stored, key, id)

"""OpenAI's Responses API: answers at once or in the background, stored ones, and the counting of input tokens."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web
from msgspec import to_builtins

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.frontend.answers.fine_tuning import Deleted
from logitless.frontend.answers.llamacpp import InputTokens
from logitless.frontend.answers.responses import (
    REPEATED,
    ConversationName,
)
from logitless.frontend.chat.chat import chat_tokens, parse_chat
from logitless.frontend.dialects.responses import ResponsesBody, chat_body, conversation_id
from logitless.frontend.fields import bad_request, read
from logitless.frontend.parser import GenerationJob, RequestParser
from logitless.frontend.replies.responses import Keep, ResponsesReply
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.generate import CONVERSATION, begin_session, run, send
from logitless.server.api.llamacpp.sessions import StreamSession
from logitless.server.api.openai.conversations import owner
from logitless.server.api.openai.files import listed
from logitless.server.api.openai.stored import (
    UNFINISHED,
    Earlier,
    Item,
    StoredResponse,
    StoredResponses,
    as_items,
)
from logitless.server.clients import CLIENT
from logitless.server.observing.record import RECORD, TRAFFIC, Record

_NUMBER = re.compile(rb'\ndata: \{"type":"[^"]*","sequence_number":(\d+)')  # of an event


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    context, key = request.app[CONTEXT], owner(request)
    tools = context.config.tools

    def parse(
        body: dict[str, Any], parser: RequestParser
    ) -> tuple[GenerationJob, dict[str, Any], ParsedResponse] | _WithTools:
        response = read(ResponsesBody, body)
        if tools is not None and tools.runs(response):
            return _WithTools(response, body)
        if response.background and (not response.store or request[CLIENT].batch):
            bad_request("background", "is not there in a batch, nor with store: false")
        body, params, earlier, conversation = prepared(context, key, response, body)
        job = chat_body(response, body, earlier.items).read(lambda chat: parse_chat(chat, parser))
        return job, params, ParsedResponse(as_items(body.get("input")), earlier, conversation)

    parsed = await context.read(request, parse)
    if isinstance(parsed, _WithTools):
        assert tools is not None
        return await tools.respond(request, context, *parsed)
    job, params, items = parsed
    keep = keeper(context, key, items, params)
    follow = partial(context.stored.update, key) if params["background"] else None
    reply = ResponsesReply(job, context.served, context.config, params, keep, follow)
    if params["background"]:
        return await _run_behind(request, reply, items.items, items.earlier)
    return await run(request, reply)


class _WithTools(NamedTuple):
    """A request with tools that the server runs."""

    response: ResponsesBody
    body: dict[str, Any]


class ParsedResponse(NamedTuple):
    """A request's input as items, after those that came earlier; `conversation`: its id, "" for none."""

    items: list[Item]
    earlier: Earlier
    conversation: str


def _earlier(context: Context, key: str, response: ResponsesBody) -> tuple[Earlier, str]:
    """Earlier items of a request's conversation, and its id."""
    conversation = conversation_id(response.conversation)
    if conversation and response.previous_response_id:
        bad_request("conversation", "is not there together with previous_response_id")
    if conversation:
        return context.conversations.before(key, conversation), conversation
    return context.stored.before(key, response.previous_response_id), ""


def prepared(
    context: Context, key: str, response: ResponsesBody, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], Earlier, str]:
    """(the body with the items that it refers to, what the response repeats of it, its conversation and its id)."""
    body = {**body, "input": context.stored.resolved(key, body.get("input"))}
    earlier, conversation = _earlier(context, key, response)
    params = {name: body[name] for name in REPEATED if body.get(name) is not None}
    params |= {"store": response.store, "background": response.background}
    if conversation:
        params["conversation"] = ConversationName(conversation)
    return body, params, earlier, conversation


def keeper(context: Context, key: str, items: ParsedResponse, body: dict[str, Any]) -> Keep | None:
    """A function that remembers the response, where it is to be."""
    return partial(_keep, context, key, items) if body["store"] or items.conversation else None


def _keep(context: Context, key: str, items: ParsedResponse, response: dict[str, Any]) -> None:
    """Remember a whole response, and go on with its conversation."""
    if response["store"]:
        context.stored.keep(key, response, items.items, items.earlier)
    if items.conversation:
        context.conversations.add(key, items.conversation, [*items.items, *response["output"]])


async def response(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}; ?stream=true: its events, of one in the background."""
    if request.query.get("stream", "false") != "false":
        _stored(request)
        return await _resume(request)
    return json_response(_stored(request).response)


async def forget(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}."""
    id = request.match_info["id"]
    _end(request.app[CONTEXT], owner(request), id)
    if not request.app[CONTEXT].stored.forget(owner(request), id):
        raise NotFound(f"there is no response {id[:64]!r}")
    return json_response(Deleted(id=id, object="response"))


async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items: its input items, the last first unless `order` is asc."""
    items = list(_stored(request).input)
    if request.query.get("order") != "asc":
        items.reverse()
    return json_response(listed(request, items))


def _stored(request: web.Request) -> StoredResponse:
    id = request.match_info["id"]
    row = request.app[CONTEXT].stored.find(owner(request), id)
    if row is None:
        raise NotFound(f"there is no response {id[:64]!r}: it was not stored, or is forgotten")
    return row


async def responses_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens."""
    context, key = request.app[CONTEXT], owner(request)

    def parse(body: dict[str, Any], parser: RequestParser) -> int:
        response = read(ResponsesBody, body)
        body = {**body, "input": context.stored.resolved(key, body.get("input"))}
        earlier, _ = _earlier(context, key, response)
        return chat_body(response, body, earlier.items).read(lambda chat: chat_tokens(chat, parser))

    n_tokens = await context.read(request, parse)
    return json_response(InputTokens("response.input_tokens", n_tokens))


async def chat_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/input_tokens."""
    n_tokens = await request.app[CONTEXT].read(request, chat_tokens)
    return json_response(InputTokens("response.input_tokens", n_tokens))


def _cancelled(store: StoredResponses, key: str, id: str) -> None:
    """Mark a response as cancelled, unless it is whole."""
    row = store.find(key, id)
    if row is not None and row.response["status"] in UNFINISHED:
        store.update(key, {**row.response, "status": "cancelled"})


async def _run_behind(
    request: web.Request, reply: ResponsesReply, items: list[Item], earlier: Earlier
) -> web.StreamResponse:
    """Begin a response and answer with its state, or with its stream. `items`: its input, after `earlier`."""
    context = request.app[CONTEXT]
    _ = context.writer
    queued, opening = reply.queued()
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
        session = await begin_session(request, reply, name, around)
    except BaseException:
        context.stored.forget(key, reply.id)
        raise
    context.background[key, reply.id] = session
    if reply.params.stream:
        return await send(request, session.read(0), -1)
    return json_response(queued)


async def _resume(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}?stream=true: its events, from the one after `starting_after` on."""
    context = request.app[CONTEXT]
    session = context.background.get((owner(request), request.match_info["id"]))
    if session is None:
        bad_request("stream", "a response is told again as a whole only, unless it is or was just in the background")
    after = request.query.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < 16):
        bad_request("starting_after", "must be the sequence number of an event")
    return await send(request, session.read(_offset(session, int(after))), -1)


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
    if not _stored(request).response["background"]:
        raise InvalidRequest("only a response that was asked for with background can be cancelled")
    _end(context, key, id)
    return json_response(_stored(request).response)


def _end(context: Context, key: str, id: str) -> None:
    """End a response that goes on in the background, if it does."""
    session = context.background.get((key, id))
    if session is not None:
        session.end()
        _cancelled(context.stored, key, id)

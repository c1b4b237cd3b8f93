"""OpenAI's Responses API: /v1/responses, and the counting of input tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from logitless.engine.errors import NotFound
from logitless.frontend.answers.fine_tuning import Deleted
from logitless.frontend.answers.llamacpp import InputTokens
from logitless.frontend.answers.responses import (
    REPEATED,
    ConversationName,
)
from logitless.frontend.chat.chat import chat_tokens, parse_chat
from logitless.frontend.dialects.responses import ResponsesBody, chat_body, conversation_id
from logitless.frontend.fields import bad_request, read
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.responses import Keep, ResponsesReply
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.generate import run
from logitless.server.api.openai.background import end, resume, run_behind
from logitless.server.api.openai.conversations import owner
from logitless.server.api.openai.files import listed
from logitless.server.api.openai.stored_responses import Earlier, Item, StoredResponse, as_items
from logitless.server.clients import CLIENT


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    context, key = request.app[CONTEXT], owner(request)
    parser, template = context.parser_for(request), context.served.template

    tools = context.config.tools

    def parse(body: dict[str, Any]) -> tuple[GenerationJob, dict[str, Any], ParsedResponse] | _WithTools:
        response = read(ResponsesBody, body)
        if tools is not None and tools.runs(response):
            return _WithTools(response, body)
        if response.background and (not response.store or request[CLIENT].batch):
            bad_request("background", "is not there in a batch, nor with store: false")
        body, params, earlier, conversation = prepared(context, key, response, body)
        job = chat_body(response, body, earlier.items).read(lambda chat: parse_chat(chat, parser, template))
        return job, params, ParsedResponse(as_items(body.get("input")), earlier, conversation)

    parsed = await context.parsed(request, parse)
    if isinstance(parsed, _WithTools):
        assert tools is not None
        return await tools.respond(request, context, *parsed)
    job, params, items = parsed
    keep = keeper(context, key, items, params)
    follow = partial(context.stored.update, key) if params["background"] else None
    reply = ResponsesReply(job, context.served, context.config, params, keep, follow)
    if params["background"]:
        return await run_behind(request, context, job, reply, *reply.queued(), items.items, items.earlier)
    return await run(request, context, job, reply)


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
        return await resume(request)
    return json_response(_stored(request).response)


async def forget(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}."""
    id = request.match_info["id"]
    end(request.app[CONTEXT], owner(request), id)
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
    parser, template = context.parser_for(request), context.served.template

    def parse(body: dict[str, Any]) -> int:
        response = read(ResponsesBody, body)
        body = {**body, "input": context.stored.resolved(key, body.get("input"))}
        earlier, _ = _earlier(context, key, response)
        return chat_body(response, body, earlier.items).read(lambda chat: chat_tokens(chat, parser, template))

    n_tokens = await context.parsed(request, parse)
    return json_response(InputTokens("response.input_tokens", n_tokens))


async def chat_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/input_tokens."""
    context = request.app[CONTEXT]
    parser, template = context.parser_for(request), context.served.template
    n_tokens = await context.parsed(request, lambda body: chat_tokens(body, parser, template))
    return json_response(InputTokens("response.input_tokens", n_tokens))

"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from logitless.frontend.answers.anthropic import CountedTokens
from logitless.frontend.chat.chat import chat_tokens, parse_chat
from logitless.frontend.dialects.anthropic import chat_body
from logitless.frontend.replies.anthropic import MessagesReply
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.generate import run

T = TypeVar("T")


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    context = request.app[CONTEXT]
    job = await _of_chat(request, parse_chat)
    return await run(request, context, job, MessagesReply(job, context.served, context.config))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    return json_response(CountedTokens(await _of_chat(request, chat_tokens)))


async def _of_chat(request: web.Request, parse: Callable[..., T]) -> T:
    """`parse` of the chat that the request's messages are."""
    context = request.app[CONTEXT]
    parser, template = context.parser_for(request), context.served.template
    return await context.parsed(request, lambda body: chat_body(body).read(lambda chat: parse(chat, parser, template)))

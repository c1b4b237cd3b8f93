"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web

from logitless.frontend.answers.anthropic import CountedTokens
from logitless.frontend.chat.chat import chat_tokens, parse_chat
from logitless.frontend.dialects.anthropic import chat_body
from logitless.frontend.replies.anthropic import MessagesReply
from logitless.server.api.context import CONTEXT, Parse, json_response
from logitless.server.api.generate import run

T = TypeVar("T")


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    return await run(request, await request.app[CONTEXT].reply(request, _of_messages(parse_chat), MessagesReply))


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens."""
    return json_response(CountedTokens(await request.app[CONTEXT].read(request, _of_messages(chat_tokens))))


def _of_messages(parse: Parse[T]) -> Parse[T]:
    """`parse` of the chat that a request's messages are."""
    return lambda body, parser: chat_body(body).read(lambda chat: parse(chat, parser))

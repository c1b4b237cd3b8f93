"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from logitless.frontend.answers.anthropic import (
    CountedTokens,
)
from logitless.frontend.chat.chat import chat_tokens, parse_chat
from logitless.frontend.dialects.anthropic import chat_body
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.anthropic import MessagesReply
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.generate import run


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    context = request.app[CONTEXT]
    parser, template = context.parser_for(request), context.served.template

    def parse(body: dict[str, Any]) -> GenerationJob:
        return chat_body(body).read(lambda chat: parse_chat(chat, parser, template))

    job = await context.parsed(request, parse)
    return await run(request, context, job, MessagesReply(job, context.served, context.config))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    context = request.app[CONTEXT]
    parser, template = context.parser_for(request), context.served.template

    def parse(body: dict[str, Any]) -> int:
        return chat_body(body).read(lambda chat: chat_tokens(chat, parser, template))

    n_tokens = await context.parsed(request, parse)
    return json_response(CountedTokens(n_tokens))

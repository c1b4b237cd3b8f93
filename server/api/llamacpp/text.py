"""Endpoints that need the tokenizer or the chat template but no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Struct

from logitless.engine.sampling.params import Param
from logitless.models.tokenizer import Tokenizer
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.protocol.chat.chat import render_chat
from logitless.server.protocol.fields import as_integer, bad_request, read


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    content: Annotated[Any, Param("a text, or an array of texts and token ids")] = None
    add_special: Annotated[bool, Param("add what the vocabulary puts before and after a text")] = False
    parse_special: Annotated[bool, Param("special tokens may be written as text")] = True
    with_pieces: Annotated[bool, Param("show each token's text, or its bytes where they are no text")] = False


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[Sequence[Any], Param("token ids")] = ()


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: `with_pieces` adds each token's text, or its bytes where they are no text."""
    context = request.app[CONTEXT]
    tokenizer = context.served.tokenizer

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        asked = read(TokenizeBody, body)
        content = asked.content
        ids: list[int] = []
        for i, part in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(part, str):
                ids += tokenizer.encode(
                    part, add_special=asked.add_special and i == 0, parse_special=asked.parse_special
                )
            elif part is not None:
                ids.append(_token("content", part, tokenizer))
        if not asked.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": id, "piece": _piece(tokenizer.piece(id))} for id in ids]}

    return json_response(await context.parsed(request, reply))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    context = request.app[CONTEXT]
    tokenizer = context.served.tokenizer

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        ids = [_token("tokens", id, tokenizer) for id in read(DetokenizeBody, body).tokens]
        return {"content": tokenizer.pieces(ids).decode("utf-8", "replace")}

    return json_response(await context.parsed(request, reply))


async def apply_template(request: web.Request) -> web.Response:
    """POST /apply-template: the prompt that a chat request would have."""
    context = request.app[CONTEXT]
    parser, template = context.parser, context.served.template
    prompt = await context.parsed(request, lambda body: render_chat(body, parser, template))
    return json_response({"prompt": prompt.text})


def _token(name: str, value: object, tokenizer: Tokenizer) -> int:
    id = as_integer(name, value)
    if not 0 <= id < tokenizer.n_vocab:
        bad_request(name, f"token {str(id)[:20]} is outside the vocabulary of {tokenizer.n_vocab}")
    return id


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

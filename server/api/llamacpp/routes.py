"""llama-server's endpoints: completion, infill, verification of drafts, tokens of texts, templates, adapters.

/tokenize and /detokenize have llama-server's fields, and vLLM's (`prompt` or `messages`), which
lm-eval's remote tokenizer sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import InvalidRequest, TooLarge
from logitless.engine.kv_cache.slot_actions import tokens_of
from logitless.engine.sampling.params import Param
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.llamacpp import (
    Adapter,
    DetokenizedText,
    Done,
    RenderedPrompt,
    TokenIds,
    TokenizedPrompt,
    TokenizerInfo,
    TokenPiece,
    TokenPieces,
)
from logitless.frontend.chat.chat import ChatPrompt, render_chat
from logitless.frontend.fields import as_integer, as_text, bad_request, read
from logitless.frontend.lora import Scales, lora_scales
from logitless.frontend.parser import RequestParser
from logitless.frontend.replies.native import NativeReply, VerifyReply
from logitless.frontend.texts.infill import parse_infill
from logitless.frontend.texts.verify import parse_verify, slot_to_continue
from logitless.frontend.workers import check, compute
from logitless.models.tokenizer import Tokenizer
from logitless.server.api.context import CONTEXT, Context, client_of, json_response
from logitless.server.api.generate import run
from logitless.server.bodies.json_body import json_value
from logitless.server.clients import CLIENT

MAX_TEXT = 1 << 20  # characters, or tokens, that are taken however small the context is
CHARACTERS_PER_TOKEN = 8  # of a context that is larger


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    content: Annotated[
        Any, Param("a text, an array of texts and token ids, or {prompt_string, multimodal_data}, whose rows are -1")
    ] = None
    add_special: Annotated[bool, Param("add BOS and EOS as the vocabulary defines")] = False
    parse_special: Annotated[bool, Param("special tokens may be written as text")] = True
    with_pieces: Annotated[bool, Param("show each token's text, or its bytes where they are no text")] = False


class CountBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize, with vLLM's fields. With `messages` it also has the fields of a chat."""

    prompt: Annotated[str | None, Param("a text")] = None
    add_special_tokens: Annotated[
        bool | None, Param("add BOS and EOS as the vocabulary defines; default: to a prompt, not to a chat")
    ] = None
    return_token_strs: Annotated[bool, Param("show the tokens' texts")] = False


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[Sequence[Any], Param("token ids")] = ()


async def native_completion(request: web.Request) -> web.StreamResponse:
    """POST /completion."""
    context = request.app[CONTEXT]
    return await run(request, await context.reply(request, lambda body, parser: parser.native(body), NativeReply))


async def infill(request: web.Request) -> web.StreamResponse:
    """POST /infill."""
    return await run(request, await request.app[CONTEXT].reply(request, parse_infill, NativeReply))


async def verify(request: web.Request) -> web.StreamResponse:
    """POST /v1/verify: how far the model agrees with a draft, and the token that it would choose next."""
    context = request.app[CONTEXT]
    parser = context.parser_for(request)
    id, body = await context.parsed(request, lambda body: (slot_to_continue(body, context.config), body))
    owner = request[CLIENT].slots
    known = None if id is None else await context.service.ask(lambda scheduler: tokens_of(scheduler, id, owner))
    job = await compute(lambda: parse_verify(body, parser, known), client_of(request))
    return await run(request, VerifyReply(job, context.served, context.config))


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: `with_pieces` adds each token's text, or its bytes where they are no text."""
    context = request.app[CONTEXT]
    tokenizer, parser = context.served.tokenizer, context.parser_for(request)

    most = max(MAX_TEXT, context.served.info.n_ctx * CHARACTERS_PER_TOKEN)

    def reply(body: dict[str, Any]) -> web.Response:
        if "content" not in body and ("prompt" in body or "messages" in body):
            return json_response(_count(body, context, parser, most))
        params = read(TokenizeBody, body)
        content = params.content
        parts = content if isinstance(content, list) else [] if content is None else [content]
        ids: list[int] = []
        if isinstance(params.content, dict):
            ids = _with_media(params.content, most, parser, add_special=params.add_special)
            parts = [] if ids else [params.content.get("prompt_string")]
        if sum(len(part) for part in parts if isinstance(part, str)) > most:
            raise TooLarge(f"field 'content': a text has at most {most} characters here")
        for i, part in enumerate(parts):
            if isinstance(part, str):
                special = params.add_special and i == 0
                for some in tokenizer.encode_parts(part, add_special=special, parse_special=params.parse_special):
                    check()
                    ids += some
            else:
                ids.append(_token("content", part, tokenizer))
        if not params.with_pieces:
            return json_response(TokenIds(ids))
        pieces = {id: TokenPiece(id, _piece(tokenizer.piece(id)) if id >= 0 else "") for id in set(ids)}
        return json_response(TokenPieces([pieces[id] for id in ids]))

    return await context.parsed(request, reply)


def _with_media(content: Mapping[str, Any], most: int, parser: RequestParser, *, add_special: bool) -> list[int]:
    """Token ids of a prompt with media, whose rows are −1; none: it has no media."""
    if not content.get("multimodal_data"):
        as_text("content.prompt_string", content.get("prompt_string"))
        return []
    if len(as_text("content.prompt_string", content.get("prompt_string"))) > most:
        raise TooLarge(f"field 'content': a text has at most {most} characters here")
    return _rows(parser.multimodal(content, "content", add_special=add_special).ids)


def _count(body: dict[str, Any], context: Context, parser: RequestParser, most: int) -> TokenizedPrompt:
    """Tokens of vLLM's `prompt`, or of its `messages`."""
    params, served = read(CountBody, body), context.served
    is_chat = params.prompt is None
    prompt = render_chat(body, parser) if is_chat else ChatPrompt(as_text("prompt", params.prompt))
    text = prompt.text
    if len(text) > most:
        raise TooLarge(f"field '{'messages' if is_chat else 'prompt'}': a text has at most {most} characters here")
    special = not is_chat if params.add_special_tokens is None else params.add_special_tokens
    ids: list[int] = []
    if prompt.media:
        ids += _rows(parser.media.prompt("messages", text, list(prompt.media), add_special=special)[0])
    else:
        for some in served.tokenizer.encode_parts(text, add_special=special, parse_special=True):
            check()
            ids += some
    texts = [_text(served.tokenizer, id) for id in ids] if params.return_token_strs else None
    return TokenizedPrompt(len(ids), served.info.n_ctx, ids, texts)


def _rows(ids: Iterable[int]) -> list[int]:
    """Token ids of a prompt; rows of media are −1."""
    return [max(id, -1) for id in ids]


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece(id).decode("utf-8", "replace") if id >= 0 else ""


def special_text(tokenizer: Tokenizer, id: int | None) -> str | None:
    """Text of a special token; None: the vocabulary has none."""
    return None if id is None else tokenizer.piece(id).decode("utf-8", "replace")


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info, as vLLM has it."""
    served = request.app[CONTEXT].served
    tokenizer = served.tokenizer
    return json_response(
        TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=tokenizer.n_vocab,
            model_max_length=served.info.n_ctx,
            bos_token=special_text(tokenizer, tokenizer.bos_id),
            eos_token=special_text(tokenizer, tokenizer.eos_id),
            pad_token=special_text(tokenizer, tokenizer.pad_id),
            add_bos_token=tokenizer.add_bos,
            add_eos_token=tokenizer.add_eos,
            chat_template=served.template.source if served.template else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    context = request.app[CONTEXT]
    tokenizer = context.served.tokenizer

    most = max(MAX_TEXT, context.served.info.n_ctx)

    def reply(body: dict[str, Any]) -> web.Response:
        params = read(DetokenizeBody, body).tokens
        if len(params) > most:
            raise TooLarge(f"field 'tokens': at most {most} are taken here, got {len(params)}")
        ids = [_token("tokens", id, tokenizer) for id in params]
        text = tokenizer.pieces(ids).decode("utf-8", "replace")
        return json_response(DetokenizedText(text, text))

    return await context.parsed(request, reply)


async def apply_template(request: web.Request) -> web.Response:
    """POST /apply-template: the prompt that a chat request would have."""
    return json_response(RenderedPrompt((await request.app[CONTEXT].read(request, render_chat)).text))


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


async def adapters(request: web.Request) -> web.Response:
    """GET: every adapter with the scale that requests get which do not say."""
    known = request.app[CONTEXT].served.adapters
    return json_response(
        [
            Adapter(
                id=entry.id,
                path=entry.path,
                scale=entry.scale,
                task_name=entry.metadata.get("task_name", ""),
                prompt_prefix=entry.metadata.get("prompt_prefix", ""),
                model=entry.name or UNSET,
            )
            for entry in (known.entries if known is not None else ())
            if not (entry.whole or entry.removed)
        ]
    )


async def set_scales(request: web.Request) -> web.Response:
    """POST: the scales from now on; adapters that are not listed get 0."""
    context = request.app[CONTEXT]
    known = context.served.adapters

    def parse(raw: bytearray) -> dict[int, float]:
        body = json_value(raw) if raw.strip() else []
        if not isinstance(body, list):
            raise InvalidRequest("the body must be an array of {id, scale}")
        return lora_scales(read(Scales, {"body": body}).body, known, "body")

    scales = await context.parsed_value(request, parse)
    if known is not None:
        await context.service.ask(lambda _: known.set_scales(scales), wakes=False)
    return json_response(Done())

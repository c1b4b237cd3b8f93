"""Ollama's generation endpoints: /api/generate, /api/chat, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.errors import Forbidden
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.ollama import OllamaAnswer, OllamaVector, OllamaVectors
from logitless.frontend.dialects.ollama import (
    EmbedBody,
    EmbeddingsBody,
    OllamaJob,
    embed_texts,
    options_of,
    parse_generate,
    parse_ollama_chat,
)
from logitless.frontend.dialects.ollama_names import seconds, timestamp
from logitless.frontend.fields import bad_request, read
from logitless.frontend.lora import parse_lora
from logitless.frontend.replies.encoding import lazy
from logitless.frontend.replies.ollama import OllamaReply, nanoseconds, text_fields
from logitless.frontend.texts.embeddings import normalized
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.generate import run, send_json
from logitless.server.api.ollama.models import model_of
from logitless.server.api.openai.embeddings import embedder_for_texts, vectors_of
from logitless.server.clients import CLIENT

_LONG = 1 << 10  # tokens of texts whose vectors take long to write

Parse = Callable[..., OllamaJob]


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate."""
    return await _generated(request, parse_generate, chat=False)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat."""
    return await _generated(request, parse_ollama_chat, chat=True)


async def _generated(request: web.Request, parse: Parse, *, chat: bool) -> web.StreamResponse:
    context = request.app[CONTEXT]
    parser, template, find = context.parser_for(request), context.served.template, partial(model_of, context)
    params = await context.parsed(request, lambda body: parse(body, parser, template, find), slow=True)
    if params.job is None:
        return await _loaded(request, params, chat=chat)
    reply = OllamaReply(params.job, params.model, context.served, context.config, chat=chat)
    response = await run(request, context, params.job, reply)
    if params.keep == 0 and _may_unload(request):
        _unload(request)
    return response


async def _loaded(request: web.Request, job: OllamaJob, *, chat: bool) -> web.Response:
    """The answer to an empty prompt, which loads the model, or unloads it."""
    if job.keep == 0:
        _unload(request)
    else:
        await request.app[CONTEXT].service.ask(lambda _: None)
    reason = "unload" if job.keep == 0 else "load"
    return json_response(OllamaAnswer(job.model, timestamp(), **text_fields(chat), done=True, done_reason=reason))


def _unload(request: web.Request) -> None:
    """Put the model to sleep unless others use it; a router does so itself. Forbidden: the client may not."""
    context = request.app[CONTEXT]
    if not _may_unload(request):
        raise Forbidden("unloading a model needs the admin key")
    if not context.config.behind_router:
        context.service.unload()


def _may_unload(request: web.Request) -> bool:
    return request[CLIENT].is_admin or not request.app[CONTEXT].config.admin_api_key


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /api/embed: vectors of length 1."""
    began = time.monotonic()

    def texts(body: dict[str, Any]) -> tuple[EmbedBody, str | list[str]]:
        params = read(EmbedBody, body)
        return params, params.input if isinstance(params.input, str) else list(params.input)

    params, n_tokens, result = await _vectors(request, texts, "input", 2)
    total = nanoseconds((time.monotonic() - began) * 1e3)
    count = n_tokens if result else UNSET
    vectors = OllamaVectors(params.model, result, total, 0, count)
    if n_tokens > _LONG:
        return await send_json(request, request.app[CONTEXT], lambda: vectors)
    return json_response(vectors)


async def embeddings(request: web.Request) -> web.Response:
    """POST /api/embeddings: one vector, as the model makes it."""

    def text(body: dict[str, Any]) -> tuple[EmbeddingsBody, str]:
        params = read(EmbeddingsBody, body)
        return params, params.prompt

    _, _, result = await _vectors(request, text, "prompt", -1)
    return json_response(OllamaVector(next(iter(result), [])))


async def _vectors(
    request: web.Request, texts: Callable[[dict[str, Any]], Any], name: str, norm: int
) -> tuple[Any, int, list[list[float]]]:
    """(body, tokens, a vector for each text); none for an empty text, which asks to load the model."""
    context = request.app[CONTEXT]
    embedder, pooling = embedder_for_texts(context)
    parser = context.parser_for(request)

    def parse(body: dict[str, Any]) -> Any:
        params, value = texts(body)
        ours = model_of(context, params.model)
        keep = None if params.keep_alive is None else seconds("keep_alive", params.keep_alive)
        options_of(params)
        dimensions = getattr(params, "dimensions", None)
        if dimensions is not None and dimensions > embedder.n_embd:
            bad_request("dimensions", f"must be at most {embedder.n_embd}, the size of the model's vectors")
        ids = embed_texts(value, name, parser, embedder.n_ctx, params.truncate) if value else []
        return params, ids, parse_lora(ours, None, parser.adapters)[1], dimensions, keep

    params, ids, lora, dimensions, keep = await context.parsed(request, parse)
    await context.embeds(request, "", ids)
    built = await vectors_of(context, embedder, ids, pooling, lora) if ids else []
    if keep == 0 and (not ids or _may_unload(request)):
        _unload(request)

    entries: list[list[float]] = lazy(lambda: (normalized(vector[:dimensions], norm).tolist() for vector in built))
    return params, sum(map(len, ids)), entries if built else []

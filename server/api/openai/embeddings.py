"""Embeddings, reranking and scores: vectors of texts, documents by relevance, likelihoods of texts."""

from __future__ import annotations

import base64
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from logitless.engine.batch import StepFailed
from logitless.engine.errors import InvalidRequest, ServerFault
from logitless.engine.requests import Lora
from logitless.engine.runner.embedder import F32, Embedder
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.vectors import (
    Embedding,
    Embeddings,
    NativeEmbedding,
    PromptUsage,
    RankedDocument,
    RankedText,
    Ranking,
    Scores,
    TeiRankedDocument,
    TextScore,
)
from logitless.frontend.fields import read
from logitless.frontend.lora import parse_lora
from logitless.frontend.parser import RequestParser
from logitless.frontend.replies.encoding import lazy
from logitless.frontend.texts.embeddings import (
    EmbeddingJob,
    normalized,
    parse_embeddings,
    parse_rerank,
    rank_or_refuse,
)
from logitless.frontend.texts.score import ScoreBody, parse_examples
from logitless.models.media.prompt_media import PromptMedia
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.api.generate import send_json

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.training.data.tokenize_rows import Example
    from logitless.training.score import Score

log = logging.getLogger("logitless.http")
MOST_NUMBERS = 1 << 25  # of the vectors of an answer: 128 MiB
_LARGE = 1 << 14  # numbers of a reply whose writing would hold up the streams of others


async def openai_embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings."""
    context = request.app[CONTEXT]
    embedder, pooling = embedder_for_texts(context)
    job = await context.read(request, partial(parse_embeddings, embedder=embedder, pooling=pooling))
    await context.embeds(request, job.model, job.texts)
    vectors = await vectors_of(context, embedder, job.texts, pooling, job.lora, job.media)
    n_tokens = sum(map(len, job.texts))
    model = job.model or context.config.model

    def item(i: int) -> Embedding:
        return Embedding(index=i, embedding=_encoded(_sized(vectors[i], job), job.base64))

    data = lazy(lambda: map(item, range(len(vectors))))
    return await _written(request, Embeddings(data=data, model=model, usage=PromptUsage(n_tokens, n_tokens)), vectors)


async def native_embeddings(request: web.Request) -> web.StreamResponse:
    """POST /embedding and /embeddings: rows of vectors for each text; one a token, as they are, without pooling."""
    context = request.app[CONTEXT]
    embedder, pooling = _embedder(context)
    job = await context.read(request, partial(parse_embeddings, embedder=embedder, pooling=pooling))
    if pooling == "none" and sum(map(len, job.texts)) * embedder.n_embd > MOST_NUMBERS:
        most = MOST_NUMBERS // embedder.n_embd
        raise InvalidRequest(f"field 'input': without pooling one request has at most {most} tokens, a vector each")
    await context.embeds(request, job.model, job.texts)
    vectors = await vectors_of(context, embedder, job.texts, pooling, job.lora, job.media)
    items = lazy(lambda: (NativeEmbedding(i, _rows(v, job)) for i, v in enumerate(vectors)))
    return await _written(request, items, vectors)


async def rerank(request: web.Request) -> web.Response:
    """POST /v1/rerank."""
    context = request.app[CONTEXT]
    embedder, pooling = _embedder(context)
    rank_or_refuse(embedder, pooling == "rank")
    job = await context.read(request, partial(parse_rerank, embedder=embedder))
    await context.embeds(request, job.model, job.pairs)
    scores = [float(v[0]) for v in await vectors_of(context, embedder, job.pairs, "rank", job.lora)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: job.top_n]
    n_tokens = sum(map(len, job.pairs))
    if job.tei:
        texts = [job.documents[i] if job.return_text else UNSET for i in order]
        return json_response([TeiRankedDocument(i, scores[i], t) for i, t in zip(order, texts, strict=True)])
    documents = [RankedText(job.documents[i]) if job.return_text else UNSET for i in order]
    results = [RankedDocument(i, scores[i], d) for i, d in zip(order, documents, strict=True)]
    usage = PromptUsage(n_tokens, n_tokens)
    return json_response(Ranking(model=job.model or context.config.model, usage=usage, results=results))


def embedder_for_texts(context: Context) -> tuple[Embedder, str]:
    """The same where a text has one vector."""
    embedder, pooling = _embedder(context)
    if pooling == "none":
        if context.config.pooling:
            raise InvalidRequest(
                "pooling type 'none' gives a vector for each token, which this endpoint cannot tell: start the "
                "server with another --pooling, or use /embedding"
            )
        pooling = embedder.for_texts
        _log_pooling(pooling)
    return embedder, pooling


def _embedder(context: Context) -> tuple[Embedder, str]:
    """The loaded model's, and how vectors of tokens become one here."""
    embedder = context.served.embedder
    if embedder is None:
        raise InvalidRequest("this model makes no vectors of texts")
    return embedder, context.config.pooling or embedder.default


async def vectors_of(
    context: Context,
    embedder: Embedder,
    texts: Sequence[Sequence[int]],
    pooling: str,
    lora: Lora | None,
    media: Mapping[int, PromptMedia] = {},
) -> list[F32]:
    """A vector for each text. Every group of them is computed between two steps of the generations;
    `media`, by the texts that have some, are encoded between several."""
    served = context.served

    def embed(group: list[int], _: Scheduler) -> list[F32] | None:
        return served.embed([texts[i] for i in group], pooling, lora, media.get(group[0]))

    result: dict[int, F32] = {}
    for group in embedder.groups(texts, media):
        try:
            while (vectors := await context.service.ask(partial(embed, group))) is None:
                pass
        except StepFailed as error:
            raise ServerFault(f"the device could not compute this request: {error}") from None
        result |= dict(zip(group, vectors, strict=True))
    return [result[i] for i in range(len(texts))]


def _rows(vector: F32, job: EmbeddingJob) -> list[list[float] | str]:
    if job.pooling == "none":
        return lazy(lambda: (_encoded(row[: job.dimensions], job.base64) for row in vector))
    return [_encoded(vector if job.pooling == "rank" else _sized(vector, job), job.base64)]


def _sized(vector: F32, job: EmbeddingJob) -> F32:
    """The leading numbers of a vector that the request asks for, normalized."""
    return normalized(vector[: job.dimensions], job.normalize)


@functools.cache
def _log_pooling(pooling: str) -> None:
    """Say once that the server chose the pooling."""
    log.info("the model's file names no pooling of embeddings: it is %s (--pooling chooses another)", pooling)


def _encoded(vector: F32, as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


async def _written(request: web.Request, answer: object, vectors: Sequence[F32]) -> web.StreamResponse:
    if sum(v.size for v in vectors) > _LARGE:
        return await send_json(request, lambda: answer)
    return json_response(answer)


async def score(request: web.Request) -> web.Response:
    """`input`: a text, token ids, a training row (text, prompt and completion, messages), or an array of these."""
    context = request.app[CONTEXT]
    served = context.writer
    if (engine := served.engine) is None:
        raise InvalidRequest("this server cannot score texts")

    def parse(body: dict[str, Any], parser: RequestParser) -> tuple[list[Example], bool, str, Lora | None]:
        params = read(ScoreBody, body)
        name, lora = parse_lora(params.model, params.lora, served.adapters)
        n_ctx = engine.hparams.n_ctx_whole
        examples = parse_examples(params.input, parser, n_ctx)
        return examples, params.gradient_norm, name or context.config.model, lora

    served.info.check_trainable()
    examples, gradient, model, lora = await context.read(request, parse)
    await context.embeds(request, model, [example.tokens.tolist() for example in examples])
    scores = [await context.service.ask(partial(_score, engine, e, gradient, lora)) for e in examples]
    n_tokens = sum(len(e.tokens) for e in examples)
    data = [text_score(i, e, s) for i, (e, s) in enumerate(zip(examples, scores, strict=True))]
    return json_response(Scores(model=model, data=data, usage=PromptUsage(n_tokens, n_tokens)))


def _score(engine: ModelRunner, example: Example, gradient: bool, lora: Lora | None, scheduler: Scheduler) -> Score:
    """Score of an example between two steps, with the weights and adapters that a request of this kind has."""
    from logitless.training.score import score

    return score(engine.tuned(scheduler.resolve_lora(lora)), example, gradient=gradient)


def text_score(index: int, example: Example, score: Score) -> TextScore:
    """One item of the reply. JSON has no infinity and no NaN: those are null."""
    return TextScore(
        index=index,
        tokens=example.tokens.tolist(),
        token_logprobs=[None, *map(_finite, score.log_probs.tolist())],
        counted=example.learn.tolist(),
        loss=_finite(score.loss),
        n_counted=score.n_counted,
        gradient_norm=UNSET if score.gradient_norm is None else _finite(score.gradient_norm),
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None

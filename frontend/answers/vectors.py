"""Answers of embeddings, reranking and scoring."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc


class PromptUsage(Struct):
    """Token counts of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, kw_only=True):
    """A text's vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[list[float] | str, doc("numbers, or base64 of little-endian float32")]


class Embeddings(Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class NativeEmbedding(Struct):
    """One text of llama-server's /embedding."""

    index: int
    embedding: Annotated[list[list[float] | str], doc("one vector; without pooling one for each token")]


class RankedText(Struct):
    """A document's text."""

    text: str


class RankedDocument(Struct):
    """A document's relevance to the query."""

    index: Annotated[int, doc("in the request")]
    relevance_score: float
    document: Annotated[Opt[RankedText], doc("with return_text")] = UNSET


class Ranking(Struct, kw_only=True):
    """Answer of /rerank, the most relevant first."""

    model: str
    object: Literal["list"] = "list"
    usage: PromptUsage
    results: list[RankedDocument]


class TeiRankedDocument(Struct):
    """A document's relevance in the form of text-embeddings-inference (requests with `texts`)."""

    index: Annotated[int, doc("in the request")]
    score: float
    text: Annotated[Opt[str], doc("with return_text")] = UNSET


class TextScore(Struct, kw_only=True):
    """Likelihood of one text; null: not finite."""

    index: int
    object: Literal["score"] = "score"
    tokens: list[int]
    token_logprobs: Annotated[list[float | None], doc("of each token; of the first null")]
    counted: Annotated[list[bool], doc("whether the loss counts the token")]
    loss: Annotated[float | None, doc("mean of the counted tokens, in nats")]
    n_counted: int
    gradient_norm: Annotated[Opt[float | None], doc("with gradient_norm")] = UNSET


class Scores(Struct, kw_only=True):
    """Answer of /v1/score."""

    object: Literal["list"] = "list"
    model: str
    data: list[TextScore]
    usage: PromptUsage

"""Bodies of embedding and rerank requests → token ids. Every 400 names its field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitless.engine.errors import ExceedsContext, NotSupported
from logitless.engine.requests import Lora
from logitless.engine.runner.embedder import F32, Embedder
from logitless.server.protocol.completions import MAX_RESULTS, RequestParser
from logitless.server.protocol.fields import Fields, article, refuse
from logitless.server.protocol.lora import parse_lora, tuned_name

NORMS = (-1, 2**15)  # of `embd_normalize`


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts to make vectors of."""

    texts: tuple[tuple[int, ...], ...]
    pooling: str
    normalize: int = 2  # -1: as it is; 0: the largest is 32760; p: the p-norm is 1
    base64: bool = False
    lora: Lora | None = None
    model: str = ""  # the finetune that was asked for by name


@dataclass(frozen=True, slots=True)
class RerankJob:
    """Pairs of a query and a document, as the model was trained to read them."""

    pairs: tuple[tuple[int, ...], ...]
    documents: tuple[str, ...]
    top_n: int
    tei: bool = False  # the reply has the shape of Text Embeddings Inference
    return_text: bool = False
    lora: Lora | None = None
    model: str = ""  # as above


def parse_embeddings(body: Mapping[str, Any], parser: RequestParser, embedder: Embedder, pooling: str) -> EmbeddingJob:
    """POST /v1/embeddings and /embedding."""
    fields = Fields(body)
    name, value = fields.find("input", "content")
    prompts, _ = parser.prompts(value, name)
    if len(prompts) > MAX_RESULTS:
        refuse(name, f"one request has at most {MAX_RESULTS} texts, not {len(prompts)}")
    texts = tuple(parser.tokens(prompt, name) for prompt in prompts)
    for ids in texts:
        _fits(ids, embedder)
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        refuse("encoding_format", "must be float or base64")
    if fields.body.get("dimensions") is not None:
        refuse("dimensions", "the model's vectors have one size only")
    low, high = NORMS
    normalize = fields.integer("embd_normalize", default=2, low=low, high=high, hard=True)
    lora, model = parse_lora(fields, parser.adapters), tuned_name(fields, parser.adapters)
    return EmbeddingJob(texts, pooling, normalize, encoding == "base64", lora, model)


def parse_rerank(body: Mapping[str, Any], parser: RequestParser, embedder: Embedder) -> RerankJob:
    """POST /v1/rerank: Jina's shape (`documents`) or that of Text Embeddings Inference (`texts`)."""
    fields = Fields(body)
    query = body.get("query")
    if not isinstance(query, str):
        refuse("query", f"expected a string, got {article(query)}")
    tei = body.get("documents") is None and body.get("texts") is not None
    name = "texts" if tei else "documents"
    given = fields.array(name)
    if not given:
        refuse(name, "must be a non-empty array of strings")
    if len(given) > MAX_RESULTS:
        refuse(name, f"one request has at most {MAX_RESULTS} documents, not {len(given)}")
    documents = []
    for i, document in enumerate(given):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            refuse(f"{name}[{i}]", f"expected a string, got {article(text)}")
        documents.append(text)
    top_n = fields.integer("top_n", default=len(documents), low=1, hard=True)
    if embedder.template:
        pairs = tuple(_filled(parser, embedder.template, query, document) for document in documents)
    else:
        asked = parser.encode(query)
        pairs = tuple(_pair(parser, asked, parser.encode(document)) for document in documents)
    for pair in pairs:
        _fits(pair, embedder)
    return_text = fields.boolean("return_text" if tei else "return_documents")
    lora, model = parse_lora(fields, parser.adapters), tuned_name(fields, parser.adapters)
    return RerankJob(pairs, tuple(documents), top_n, tei, return_text, lora, model)


def _filled(parser: RequestParser, template: str, query: str, document: str) -> tuple[int, ...]:
    """llama-server's other form, of files that have one: {query} and {document} stand for the texts."""
    texts = {"{query}": query, "{document}": document}
    text = re.sub(r"\{query\}|\{document\}", lambda match: texts[match[0]], template)
    return tuple(parser.encode(text, parse_special=True))


def _pair(parser: RequestParser, query: list[int], document: list[int]) -> tuple[int, ...]:
    """llama-server's form: [BOS] query [EOS] [SEP] document [EOS], each where the vocabulary wants it."""
    vocab, tokenizer = parser.tokenizer.vocab, parser.tokenizer
    bos, sep = tokenizer.bos_id, tokenizer.sep_id
    eos = tokenizer.eos_id if tokenizer.eos_id is not None else sep
    end = [eos] if vocab.add_eos and eos is not None else []
    begin = [bos] if vocab.add_bos and bos is not None else []
    middle = [sep] if vocab.add_sep and sep is not None else []
    return (*begin, *query, *end, *middle, *document, *end)


def _fits(ids: tuple[int, ...], embedder: Embedder) -> None:
    n, n_ctx = len(ids), embedder.n_ctx
    if n > n_ctx:
        raise ExceedsContext(
            f"input ({n} tokens) exceeds the available context size ({n_ctx} tokens)", n_prompt_tokens=n, n_ctx=n_ctx
        )


def rank_or_refuse(embedder: Embedder, reranking: bool) -> None:
    """501 where the model or the server does not rank."""
    if not reranking or not embedder.ranks:
        why = "start it with --reranking" if embedder.ranks else "its model has no head that ranks"
        raise NotSupported(f"this server does not support reranking: {why}")


def normalized(x: F32, kind: int) -> F32:
    """llama.cpp's `embd_normalize`: -1 as it is, 0 so that the largest is 32760, p so that the p-norm is 1."""
    if kind < 0:
        return x
    wide = np.abs(x.astype(np.float64))
    if kind == 0:
        size = wide.max() / 32760.0
    else:
        top = wide.max() or 1.0  # so that no power overflows
        size = top * float(((wide / top) ** kind).sum()) ** (1.0 / kind)
    return (x * (1.0 / size if size > 0 else 0.0)).astype(np.float32)

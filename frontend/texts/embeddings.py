"""Bodies of embedding and rerank requests → token ids. Every 400 names its field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Struct

from logitless.engine.errors import InvalidRequest, NotSupported
from logitless.engine.params import LoraScale
from logitless.engine.requests import Lora
from logitless.engine.runner.embedder import F32, Embedder
from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.chat.messages import part_texts
from logitless.frontend.fields import article, bad_request, read
from logitless.frontend.lora import parse_lora
from logitless.frontend.media.media import Medium
from logitless.frontend.parser import MAX_RESULTS, Prompt, RequestParser, Room
from logitless.models.media.prompt_media import PromptMedia


class Embedded(Struct, frozen=True, kw_only=True):
    """Common fields of embeddings, reranking and scores."""

    model: Annotated[str, Param("the model's name, or that of an adapter or a fine-tuned model")] = ""
    lora: Annotated[Sequence[LoraScale] | None, Param("adapters by id, with their scales")] = None


class EmbeddingBody(Embedded, frozen=True, kw_only=True):
    """POST /v1/embeddings and /embedding."""

    input: Annotated[
        Any,
        Param(
            "a text, token ids, a prompt with media as of /completion, {content: [parts]}, or an array of these",
            required=True,
            instead=("content",),
        ),
    ] = None
    content: Annotated[Any, Param("llama-server's name of input")] = None
    encoding_format: Annotated[str, Param("of the vectors", choices=("float", "base64"))] = "float"
    dimensions: Annotated[
        int | None, Param("numbers of a vector: the first ones, normalized", 1, INT_MAX, hard=True)
    ] = None
    embd_normalize: Annotated[
        int, Param("-1: none; 0: the largest is 32760; p: the p-norm is 1", -1, 2**15, hard=True)
    ] = 2


class Document(Struct, frozen=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankBody(Embedded, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    query: Annotated[str, Param("the text to compare with")]
    documents: Annotated[
        Sequence[str | Document] | None,
        Param("texts, or objects with a text", most=MAX_RESULTS, required=True, instead=("texts",)),
    ] = None
    texts: Annotated[
        Sequence[str | Document] | None, Param("the same in the form of Text Embeddings Inference", most=MAX_RESULTS)
    ] = None
    top_n: Annotated[int | None, Param("documents to return", 1, INT_MAX, hard=True)] = None
    return_documents: Annotated[bool, Param("return the documents too")] = False
    return_text: Annotated[bool, Param("the same, where texts are given")] = False


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts to make vectors of."""

    texts: tuple[tuple[int, ...], ...]
    pooling: str
    normalize: int = 2  # -1: as it is; 0: the largest is 32760; p: the p-norm is 1
    base64: bool = False
    lora: Lora | None = None
    model: str = ""  # the finetune that was asked for by name
    dimensions: int | None = None  # leading numbers of each vector; None: all
    media: Mapping[int, PromptMedia] = field(default_factory=dict)  # by the indices of their texts


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
    params = read(EmbeddingBody, body, defaults={"embd_normalize": parser.config.embd_normalize})
    name = "content" if body.get("input") is None and params.content is not None else "input"
    prompts, _ = parser.prompts(getattr(params, name), name)
    room = Room(embedder.n_ctx, what="input")
    read_prompts = [room.take(_prompt(prompt, name, parser)) for prompt in prompts]
    texts = tuple(prompt.ids for prompt in read_prompts)
    media = {i: prompt.media for i, prompt in enumerate(read_prompts) if prompt.media is not None}
    if params.dimensions is not None and params.dimensions > embedder.n_embd:
        bad_request("dimensions", f"must be at most {embedder.n_embd}, the size of the model's vectors")
    model, lora = parse_lora(params.model, params.lora, parser.adapters)
    base64 = params.encoding_format == "base64"
    return EmbeddingJob(texts, pooling, params.embd_normalize, base64, lora, model, params.dimensions, media)


def _prompt(prompt: object, name: str, parser: RequestParser) -> Prompt:
    """One input: a text, token ids, {prompt_string, multimodal_data}, or {content: [parts]}, whose texts are joined."""
    result: list[Medium] = []
    if isinstance(prompt, dict) and "content" in prompt:
        content = prompt["content"]
        if not isinstance(content, list):
            bad_request(f"{name}.content", f"expected an array of parts, got {article(content)}")
        prompt = "".join(part_texts(content, f"{name}.content", parser.media, result))
    if result:
        assert isinstance(prompt, str)
        return Prompt(*parser.media.prompt(f"{name}.content", prompt, result))
    return parser.prompt(prompt, name)


def parse_rerank(body: Mapping[str, Any], parser: RequestParser, embedder: Embedder) -> RerankJob:
    """POST /v1/rerank: Jina's shape (`documents`) or that of Text Embeddings Inference (`texts`)."""
    params = read(RerankBody, body)
    query = params.query
    tei = params.documents is None and params.texts is not None
    name, value = ("texts", params.texts) if tei else ("documents", params.documents)
    if not value:
        bad_request(name, "must be a non-empty array of strings")
    documents = [document if isinstance(document, str) else document.text for document in value]
    top_n = len(documents) if params.top_n is None else params.top_n
    if embedder.template:
        pairs = (_filled(parser, embedder.template, query, document) for document in documents)
    else:
        encoded = parser.encode(query)
        pairs = (_pair(parser, encoded, parser.encode(document)) for document in documents)
    room = Room(embedder.n_ctx, what="input")
    fitting = tuple(room.take(Prompt(pair)).ids for pair in pairs)
    return_text = params.return_text if tei else params.return_documents
    model, lora = parse_lora(params.model, params.lora, parser.adapters)
    return RerankJob(fitting, tuple(documents), top_n, tei, return_text, lora, model)


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


def rank_or_refuse(embedder: Embedder, reranking: bool) -> None:
    """400 where the model does not rank, 501 where the server was started without."""
    if not embedder.ranks:
        raise InvalidRequest("this model has no head that ranks texts")
    if not reranking:
        raise NotSupported("this server does not rank texts; start it with --reranking")


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

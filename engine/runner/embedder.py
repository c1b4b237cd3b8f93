"""Embedder: embeddings and rerank scores of texts by pooling hidden states.

Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.engine.batch import UBatch, bucket
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.graph.ops.attention.encoder_attention import mean_rows
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.ops.gather import get_rows
from logitless.graph.tensor import Tensor, feed
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from logitless.models.batch import Batch, PagedMemory, Sequences, Texts
from logitless.models.hparams.hparams import Hparams
from logitless.models.media.prompt_media import PromptMedia
from logitless.models.model import AdaptedModel

F32 = npt.NDArray[np.float32]
Tokens = Sequence[int]


class Embedder:
    """Embeds texts in batches.

    Texts do not attend to each other, so a result does not depend on its batch."""

    def __init__(
        self,
        tuned: Callable[[AdapterChoice], AdaptedModel],
        h: Hparams,
        n_ubatch: int,
        n_ctx: int,
        template: str = "",
        encoder: Callable[[], MediaEncoder | None] = lambda: None,
    ) -> None:
        """`template`: the model's rerank template for query and document; "": concatenate them.
        `encoder`: the model's encoder of images and sounds; None: it reads none."""
        self._encoder = encoder
        self.template = template
        self._has_decoder = h.n_encoder > 0
        self.causal = h.causal and not self._has_decoder
        self._most = h.n_ctx_whole if h.indexer or not self.causal else None
        self.set_context(n_ctx)
        self.default = h.pooling
        self._of_mean = ("mean", "rank") if h.architecture.ranking.of_mean else ("mean",)
        self.ranks = tuned(BASE).model(0).ranks
        self._tuned = tuned  # called for each run, for the model moves when a device is lost
        self._n_ubatch = n_ubatch

    def set_context(self, n_ctx: int) -> None:
        """Set the most tokens of a text."""
        self.n_ctx = n_ctx if self._most is None else min(n_ctx, self._most)

    @property
    def for_texts(self) -> str:
        """Pooling to one vector a text: the model's, else the last token of causal models, the mean of others."""
        if self.default != "none":
            return self.default
        return "last" if self.causal else "mean"

    @cached_property
    def n_embd(self) -> int:
        """Numbers of an embedding."""
        return self.graph(1, bucket(1), "mean").shape[-1]

    def groups(self, texts: Sequence[Tokens], apart: Collection[int] = ()) -> Iterator[list[int]]:
        """Yield batches of text indices: a power of two of texts in one length bucket; texts in
        `apart` (with images) one by one."""
        yield from ([i] for i in apart)
        by_length: dict[int, list[int]] = {}
        for i, text in enumerate(texts):
            if i in apart:
                continue
            by_length.setdefault(bucket(len(text)), []).append(i)
        for length, indices in sorted(by_length.items()):
            most = max(1, self._n_ubatch // length)
            while indices:
                n = 1 << (min(most, len(indices)).bit_length() - 1)
                yield indices[:n]
                indices = indices[n:]

    def embed(
        self, texts: Sequence[Tokens], pooling: str, choice: AdapterChoice = BASE, media: PromptMedia | None = None
    ) -> list[F32]:
        """Embed one group of texts, by these weights and adapters. `media`: those of the only text,
        which have been encoded.

        Returns (n_embd,) for each text, (n_tokens, n_embd) with pooling "none", or the scores of
        the classification head with "rank"."""
        n, length = len(texts), bucket(len(texts[0]))
        tokens, pos = np.zeros((n, length), np.int32), np.zeros((n, length), np.int32)
        for i, text in enumerate(texts):
            tokens[i, : len(text)] = text
            pos[i, : len(text)] = np.arange(len(text))
        first, count = np.arange(n) * length, np.array([len(text) for text in texts])
        feeds: dict[str, Any] = {"tokens": tokens.reshape(-1), "pos": pos.reshape(-1)}
        if self.causal:
            feeds["start"] = np.zeros(n * length, np.int32)
            if media is not None:
                feeds |= self._media_feeds(media, len(texts[0]), length)
                feeds["tokens"] = np.maximum(feeds["tokens"], 0)  # ids of image rows are negative
        else:
            feeds["count"] = count
            feeds["types"] = np.zeros(n * length)  # all of the first segment, as in llama.cpp
        if pooling in self._of_mean:
            feeds |= {"first": first, "size": count}
        elif pooling != "none":
            last = pooling == "last" or (pooling == "rank" and self.causal)
            feeds["first"] = first + count - 1 if last else first
        floats = {name: array for name, array in feeds.items() if array.dtype == np.float32}
        feeds = {name: array.astype(np.int32) for name, array in feeds.items()} | floats
        tuned = self._tuned(choice)
        mrope, bounded = media is not None and media.mrope, media is not None and not media.causal
        key = ("embed", n, length, pooling, tuned.name, media is not None, mrope, bounded)
        feeds |= tuned.feeds(n * length)
        pools = self._pools() if media is not None else ()
        build = partial(self.graph, n, length, pooling, choice, pools, mrope=mrope, bounded=bounded)
        (vectors,) = tuned.session.run(key, lambda: [build()], feeds)
        if pooling != "none":
            return [vectors[i].copy() for i in range(n)]
        return [vectors[i * length : i * length + len(text)].copy() for i, text in enumerate(texts)]

    def write_sources(self, batch: UBatch, memory: PagedMemory) -> None:
        """Have the encoder read the prompts of a batch."""
        for slot, tokens, cells in batch.sources:
            self._write_source(tokens, cells, AdapterChoice(batch.weights, batch.mixes.get(slot, ())), memory)

    def load_source(self, memory: PagedMemory) -> None:
        """Load the encoder's weights by a run of one token, if there is a decoder behind it."""
        if self._has_decoder:
            self._write_source([0], [(memory.full.n - 1) * PAGE], BASE, memory)

    def of_sources(self, memory: PagedMemory, n: int) -> list[Callable[[], list[Tensor]]]:
        """Graph of reading a prompt of n tokens, if there is a decoder behind the encoder."""
        return [partial(self._source, bucket(n), BASE, memory)] if self._has_decoder else []

    def _write_source(self, tokens: Tokens, cells: Sequence[int], choice: AdapterChoice, memory: PagedMemory) -> None:
        """Have the encoder read a prompt, and write the keys and values of cross-attention to `cells`."""
        n, tuned = len(tokens), self._tuned(choice)
        size = bucket(n)
        feeds = {name: np.zeros(size, np.int32) for name in ("tokens", "pos", "types")}
        feeds["tokens"][:n], feeds["pos"][:n], feeds["count"] = tokens, np.arange(n), np.array([n], np.int32)
        # padding goes to the spare block
        feeds["slot_mapping"] = np.full(size, (memory.full.n - 1) * PAGE, np.int32)
        feeds["slot_mapping"][:n] = cells
        plan = tuned.session.cached_plan(("source", size, tuned.name), partial(self._source, size, choice, memory))
        plan.run(feeds | tuned.feeds(size), [0] * plan.n_fetches)

    def _source(self, size: int, choice: AdapterChoice, memory: PagedMemory) -> list[Tensor]:
        """Graph of `_write_source` for prompts of up to `size` tokens."""
        return self._tuned(choice).model(size).encoded(Texts.feeds(1, size), Batch.feeds(size), memory)

    def everything(self) -> list[Tensor]:
        """Graphs that together contain every op of any run."""
        length = bucket(min(64, self.n_ctx))
        return [self.graph(1, length, pooling) for pooling in ("mean", "rank" if self.ranks else "cls")]

    def load(self) -> None:
        """Load the weights by a run of one token."""
        self.embed([[0]], "rank" if self.ranks else "cls")

    def _pools(self) -> Sequence[Tensor]:
        encoder = self._encoder()
        assert encoder is not None
        return encoder.pools

    def _media_feeds(self, media: PromptMedia, n: int, length: int) -> dict[str, npt.NDArray[Any]]:
        """Inputs of MediaRows for n tokens, padded to `length`."""
        encoder = self._encoder()
        assert encoder is not None
        rows, is_text = np.zeros(length, np.int32), np.ones(length, np.float32)
        for span in media.spans:
            first = encoder.first_row(span.tile)
            assert first is not None
            rows[span.start : span.end] = np.arange(first, first + span.tile.n_rows)
            is_text[span.start : span.end] = 0
        feeds: dict[str, npt.NDArray[Any]] = {"media.ids": rows, "media.is_text": is_text}
        if media.mrope:
            feeds["media.positions"] = media.positions(0, length)
        if not media.causal:
            feeds["media.bounds"] = np.array([[0] * length, media.last_seen(0, length)], np.int32)
        return feeds

    def graph(
        self,
        n: int,
        length: int,
        pooling: str,
        choice: AdapterChoice = BASE,
        media: Sequence[Tensor] = (),
        *,
        mrope: bool = False,
        bounded: bool = False,
    ) -> Tensor:
        """Graph of the embeddings of n texts, up to `length` tokens each. `media`: the pools of image
        rows; `mrope`: with positions of their own; `bounded`: rows of an image see each other."""
        rows = self._rows(n, length, media, mrope=mrope, bounded=bounded)
        model = self._tuned(choice).model(n * length)
        x = model.hidden(rows, rows)
        if pooling == "none":
            return x
        first = feed("first", (n,), "i32")
        x = mean_rows(x, first, feed("size", (n,), "i32")) if pooling in self._of_mean else get_rows(x, first)
        return model.scores(x, first) if pooling == "rank" else model.projected(x)

    def _rows(self, n: int, length: int, media: Sequence[Tensor], *, mrope: bool, bounded: bool) -> Sequences | Texts:
        if not self.causal:
            return Texts.feeds(n, length)
        rows = Sequences.feeds(n, length, media, mrope=mrope)
        return replace(rows, bounds=feed("media.bounds", (2, n * length), "i32")) if bounded else rows

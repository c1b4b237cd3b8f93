"""What every architecture is given beside its weights: rows of tokens, and a memory that they attend to.

A server's rows are a `Batch` of any sequences and their memory the paged cache; a trainer's are whole `Sequences`,
which are each other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from graph.backend import Bytes
from graph.ops.attention import PAGE, attention, copy_pages, store_k, store_v
from graph.ops.causal import causal_attention
from graph.ops.elementwise import broadcast_to
from graph.ops.encoder import full_attention
from graph.ops.latent import latent_attention
from graph.ops.recurrent import causal_conv, causal_conv_kept, gated_delta_rule, gated_delta_rule_kept, text_begins
from graph.ops.sinks import attention_sinks, causal_attention_sinks
from graph.session import Session
from graph.tensor import Tensor, const, feed
from models.hparams import Hparams

KV_TYPES = ("f32", "f16", "q8_0")


def cache_types(h: Hparams, type_k: str, type_v: str) -> tuple[str, ...]:
    """Of what is kept of a token in each layer: keys and values, or rows that are both."""
    return (type_k,) if h.latent else (type_k, type_v)


@dataclass(frozen=True)
class Out:
    """The R rows of a batch whose logits are wanted, where these are not all: only they ask in the last layer that
    keeps keys and values, and in those after it."""

    ids: Tensor  # (R,) i32: indices into the batch
    pos: Tensor  # (R,) i32: theirs
    slot: Tensor  # (R,) i32: theirs


class Rows(Protocol):
    """T tokens, and which of them need logits (None: all)."""

    @property
    def tokens(self) -> Tensor: ...  # (T,) i32
    @property
    def pos(self) -> Tensor: ...  # (T,) i32
    @property
    def out(self) -> Out | None: ...


class Weighing(NamedTuple):
    """How queries and keys make weights: graph/ops/attention.py, graph/ops/sinks.py."""

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None  # (H,)


class Memory(Protocol):
    """What a row's query meets: keys and values of its own sequence up to its position. From the last layer on that
    keeps keys and values only the rows of `out` ask, where not all are wanted."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: Weighing) -> Tensor:
        """q (T, H, D), or (R, H, D) where only some ask, k and v (T, H_kv, D) of these rows → as q. v None: values are
        the keys, and there is nothing but the scale to weigh them by."""


@runtime_checkable
class States(Protocol):
    """What layers go on from that keep a state of each sequence. Texts that are seen as a whole have none."""

    def convolve(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        """x (T, C), w (C, 1, K) → (T, C): graph.ops.recurrent.causal_conv, going on from each sequence's last row."""

    def recall(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """q and k (T, H_k, D), v (T, H, D), decay and beta (T, H) → as v: graph.ops.recurrent.gated_delta_rule."""


@dataclass(frozen=True)
class Batch:
    """T tokens of any sequences, and the rows whose logits are wanted."""

    tokens: Tensor  # (T,) i32
    pos: Tensor  # (T,) i32
    slot: Tensor  # (T,) i32: the row of `tables` that holds the token's sequence
    cells: Tensor  # (T,) i32: where the token's key and value go
    begin: Tensor  # (T,) i32: the state that it goes on from, -1: what the row before leaves (graph.ops.recurrent)
    end: Tensor  # (T,) i32: the state that keeps what it leaves, or -1
    out: Out | None

    @classmethod
    def feeds(cls, n_tokens: int, n_out: int | None = None) -> Batch:
        """`n_out` None: logits of every row."""
        tokens, pos, slot, cells, begin, end = (
            feed(name, (n_tokens,), "i32") for name in ("tokens", "pos", "slot", "cells", "begin", "end")
        )
        if n_out is None:
            return cls(tokens, pos, slot, cells, begin, end, None)
        ids, out_pos, out_slot = (feed(name, (n_out,), "i32") for name in ("out", "out.pos", "out.slot"))
        return cls(tokens, pos, slot, cells, begin, end, Out(ids, out_pos, out_slot))


@dataclass(frozen=True)
class PagedMemory:
    """The KV cache as states: keys (pages, H_kv, D, 16) and values (pages, H_kv, 16, D) of each layer that keeps some,
    and page tables; of layers that keep a state of a sequence, rows of such (graph/ops/recurrent.py), of which the
    first stays zero."""

    keys: Mapping[int, Tensor]  # by layer
    values: Mapping[int, Tensor]  # none where they are the keys
    keepers: tuple[int, ...]  # of each layer: which has the keys and values that it sees
    tables: Tensor  # (S, pages per table) i32
    convs: Mapping[int, Tensor]  # (N, K - 1, C)
    deltas: Mapping[int, Tensor]  # (N, H, D, D)

    @classmethod
    def define(
        cls,
        session: Session,
        h: Hparams,
        n_pages: int,
        table_shape: tuple[int, int],
        type_k: str,
        type_v: str,
        n_states: int = 0,
    ) -> PagedMemory:
        keys, values, convs, deltas = {}, {}, {}, {}
        for i in range(h.n_kept):
            size = h.sizes(i)
            if r := h.recurrent_of(i):
                convs[i] = session.define(f"conv.{i}", (n_states, *r.conv_shape))
                if r.n_heads:
                    deltas[i] = session.define(f"delta.{i}", (n_states, *r.delta_shape))
                continue
            keys[i] = session.define(f"k.{i}", (n_pages, size.n_head_kv, size.head_dim, PAGE), type_k)
            if not h.latent:
                values[i] = session.define(f"v.{i}", (n_pages, size.n_head_kv, PAGE, size.head_dim), type_v)
        return cls(
            keys,
            values,
            tuple(h.keeper(i) for i in range(h.n_layer)),
            session.define("tables", table_shape, "i32", by_host=True),
            convs,
            deltas,
        )

    @property
    def n_kept(self) -> int:
        """How many layers keep something: the first."""
        return sum(layer == keeper for layer, keeper in enumerate(self.keepers))

    @property
    def caches(self) -> list[Tensor]:
        """What has pages."""
        return [*self.keys.values(), *self.values.values()]

    def copied(self, pairs: Tensor) -> list[Tensor]:
        """The caches after whole pages were copied; pairs (C, 2) i32: (from, to)."""
        return [copy_pages(cache, pairs) for cache in self.caches]

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """Its keys, and its values where they are others."""
        return self.keys[layer], *([self.values[layer]] if layer in self.values else [])

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return sum(size for _, size in self._parts)

    @cached_property
    def _parts(self) -> list[tuple[str, int]]:
        """Of a page, in the order of its bytes: states, and how many bytes they have of it."""
        states = [t for layer in self.keys for t in self.of_layer(layer)]
        return [(t.name, t.nbytes // t.shape[0]) for t in states]

    def read_page(self, session: Session, page: int, into: Bytes | None = None) -> Bytes:
        """A copy of a page, layer by layer, keys before values, as the device keeps them; on request `into` memory for
        `page_nbytes`."""
        data, at = np.empty(self.page_nbytes, np.uint8) if into is None else into, 0
        for name, size in self._parts:
            session.read_bytes(name, page * size, size, data[at : at + size])
            at += size
        return data

    def write_page(self, session: Session, page: int, data: Bytes) -> None:
        """Overwrite a page with what `read_page` gave."""
        at = 0
        for name, size in self._parts:
            session.write(name, data[at : at + size], page * size)
            at += size


@dataclass(frozen=True)
class Cached:
    """The paged memory as a batch sees it: its keys and values go in, then it attends to its own pages."""

    memory: PagedMemory
    batch: Batch
    stored: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, what has to run for what it keeps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: Weighing) -> Tensor:
        batch, memory = self.batch, self.memory
        keeper = memory.keepers[layer]
        if keeper == layer:
            self.stored[layer] = [
                store(cache, new, batch.cells)
                for store, cache, new in zip((store_k, store_v), memory.of_layer(layer), (k, v), strict=False)
                if new is not None
            ]
        asking = batch.out or batch if layer >= memory.n_kept - 1 else batch
        seen = *self.stored[keeper], memory.tables, asking.slot, asking.pos
        if v is None:
            return latent_attention(q, *seen, scale=how.scale)
        if how.sinks is not None:
            return attention_sinks(q, *seen, how.sinks, scale=how.scale, window=how.window)
        return attention(q, *seen, scale=how.scale, window=how.window, cap=how.cap)

    def convolve(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        y = causal_conv_kept(x, w, self.memory.convs[layer], self.batch.begin, self.batch.end)
        self.stored.setdefault(layer, []).append(y)
        return y

    def recall(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        states, batch = self.memory.deltas[layer], self.batch
        y = gated_delta_rule_kept(q, k, v, decay, beta, states, batch.begin, batch.end, scale=q.shape[2] ** -0.5)
        self.stored.setdefault(layer, []).append(y)
        return y


def zeros(*shape: int) -> Tensor:
    """A state that nothing has been added to."""
    return broadcast_to(const(0.0), shape=shape)


@dataclass(frozen=True)
class Sequences:
    """Windows of `length` tokens each, all of them new: rows and memory in one. Gradients pass through."""

    length: int
    tokens: Tensor  # (T,) i32, T a multiple of length
    pos: Tensor  # (T,) i32
    start: Tensor  # (T,) i32: the first row of its window that a row sees; where texts are packed, its own text's
    out: None = None

    @classmethod
    def feeds(cls, n_sequences: int, length: int) -> Sequences:
        tokens, pos, start = (feed(name, (n_sequences * length,), "i32") for name in ("tokens", "pos", "start"))
        return cls(length, tokens, pos, start)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: Weighing) -> Tensor:
        size, scale, window, v = self.length, how.scale, how.window, k if v is None else v
        if how.sinks is not None:
            return causal_attention_sinks(q, k, v, self.start, how.sinks, length=size, scale=scale, window=window)
        return causal_attention(q, k, v, self.start, length=size, scale=scale, window=window, cap=how.cap)

    def convolve(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        return causal_conv(x, w, zeros(1, w.shape[2] - 1, x.shape[1]), self._begin)

    def recall(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        before = zeros(1, v.shape[1], q.shape[2], v.shape[2])
        return gated_delta_rule(q, k, v, decay, beta, before, self._begin, scale=q.shape[2] ** -0.5)

    @cached_property
    def _begin(self) -> Tensor:
        return text_begins(self.start, length=self.length)


@dataclass(frozen=True)
class Texts:
    """Windows of `length` tokens, each a text and what fills the window up: rows and memory of models that see a text
    as a whole."""

    length: int
    tokens: Tensor  # (T,) i32, T a multiple of length
    pos: Tensor  # (T,) i32
    types: Tensor  # (T,) i32: which segment a token is of
    count: Tensor  # (T / length,) i32: the text's part of a window
    out: None = None

    @classmethod
    def feeds(cls, n_texts: int, length: int) -> Texts:
        tokens, pos, types = (feed(name, (n_texts * length,), "i32") for name in ("tokens", "pos", "types"))
        return cls(length, tokens, pos, types, feed("count", (n_texts,), "i32"))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: Weighing) -> Tensor:
        reach = how.window // 2 if how.window else -1
        return full_attention(q, k, k if v is None else v, self.count, length=self.length, scale=how.scale, reach=reach)

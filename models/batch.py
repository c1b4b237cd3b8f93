"""What every architecture is given beside its weights: rows of tokens, and a memory that they attend to.

A server's rows are a `Batch` of any sequences and their memory the paged cache; a trainer's are whole `Sequences`,
which are each other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.attention_sinks import attention_sinks, causal_attention_sinks
from logitless.graph.ops.attention.causal_attention import causal_attention
from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.attention.mla import latent_attention
from logitless.graph.ops.attention.paged_attention import PAGE, attention, store_k, store_v
from logitless.graph.ops.elementwise import broadcast_to
from logitless.graph.ops.linear_attention import (
    causal_conv,
    causal_conv_kept,
    linear_attention,
    linear_attention_kept,
    text_begins,
)
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.hparams.hparams import Hparams
from logitless.models.kv_pool import PagePool, Pool

KV_TYPES = ("f32", "f16", "q8_0")


def cache_types(h: Hparams, type_k: str, type_v: str) -> tuple[str, ...]:
    """Of what is kept of a token in each layer: keys and values, or rows that are both."""
    return (type_k,) if h.mla else (type_k, type_v)


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


class AttentionParams(NamedTuple):
    """How queries and keys make weights: graph/ops/attention/paged_attention.py,
    graph/ops/attention/attention_sinks.py.
    """

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None  # (H,)


class LinearAttentionParams(NamedTuple):
    """How layers that keep a state learn and recall: graph/ops/linear_attention.py."""

    scale: float = 1.0
    delta: bool = False
    grouped: bool = False


class Memory(Protocol):
    """What a row's query meets: keys and values of its own sequence up to its position. From the last layer on that
    keeps keys and values only the rows of `out` ask, where not all are wanted."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: AttentionParams) -> Tensor:
        """q (T, H, D), or (R, H, D) where only some ask, k and v (T, H_kv, D) of these rows → as q. v None: values are
        the keys, and there is nothing but the scale to weigh them by."""


@runtime_checkable
class RecurrentMemory(Protocol):
    """What layers go on from that keep a state of each sequence. Texts that are seen as a whole have none."""

    def causal_conv(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        """x (T, C), w (C, 1, K) → (T, C): logitless.graph.ops.linear_attention.causal_conv, going on from each
        sequence's last row.
        """

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, how: LinearAttentionParams
    ) -> Tensor:
        """q and k (T, H_k, D), v (T, H, E), decay and beta (T, H) → as v:
        logitless.graph.ops.linear_attention.linear_attention.
        """


@dataclass(frozen=True)
class Batch:
    """T tokens of any sequences, and the rows whose logits are wanted."""

    tokens: Tensor  # (T,) i32
    pos: Tensor  # (T,) i32
    slot: Tensor  # (T,) i32: the row of `tables` that holds the token's sequence
    cells: Tensor  # (T,) i32: where the token's key and value go
    near: Tensor  # (T,) i32: and where in layers with a window, when these have pages of their own
    # (T,) i32: the state that it goes on from, -1: what the row before leaves (logitless.graph.ops.linear_attention)
    begin: Tensor
    end: Tensor  # (T,) i32: the state that keeps what it leaves, or -1
    out: Out | None

    @classmethod
    def feeds(cls, n_tokens: int, n_out: int | None = None) -> Batch:
        """`n_out` None: logits of every row."""
        tokens, pos, slot, cells, near, begin, end = (
            feed(name, (n_tokens,), "i32") for name in ("tokens", "pos", "slot", "cells", "near", "begin", "end")
        )
        out = None
        if n_out is not None:
            out = Out(*(feed(name, (n_out,), "i32") for name in ("out", "out.pos", "out.slot")))
        return cls(tokens, pos, slot, cells, near, begin, end, out)


@dataclass(frozen=True)
class PagedMemory:
    """The KV cache as states: pages of each layer that keeps keys and values; of layers that keep a state of a
    sequence, rows of such (graph/ops/linear_attention.py), of which the first stays zero."""

    far: PagePool  # of layers that see everything, and of those with a window unless these have their own
    near: PagePool | None  # of layers with a window
    kv_sources: tuple[int, ...]  # of each layer: which has the keys and values that it sees
    convs: Mapping[int, Tensor]  # (N, K - 1, C)
    recurrent: Mapping[int, Tensor]  # (N, H, D, E)

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
        n_near: int = 0,
        nextn: bool = False,
    ) -> PagedMemory:
        """`n_near`: pages of layers with a window; 0: as many as all. `nextn`: with those of the block that predicts
        one token more."""
        convs, recurrent = {}, {}
        far: dict[int, list[Tensor]] = {}
        near: dict[int, list[Tensor]] = {}
        for i in (*range(h.n_layer_kv), *((h.n_layer,) if nextn else ())):
            size = h.sizes(i)
            if r := h.recurrent_of(i):
                convs[i] = session.define(f"conv.{i}", (n_states, *r.conv_shape))
                if r.n_heads:
                    recurrent[i] = session.define(f"recurrent.{i}", (n_states, *r.state_shape))
            if not h.attends(i):
                continue
            layers, n = (near, n_near) if n_near and h.is_local(i) else (far, n_pages)
            layers[i] = [session.define(f"k.{i}", (n, size.n_head_kv, size.head_dim, PAGE), type_k)]
            if not h.mla:
                layers[i].append(session.define(f"v.{i}", (n, size.n_head_kv, PAGE, size.head_dim), type_v))
        tables = session.define("tables", table_shape, "i32", host_written=True)
        pool = None
        if n_near:
            pool = PagePool(near, n_near, session.define("tables.near", table_shape, "i32", host_written=True))
        return cls(
            PagePool(far, n_pages, tables),
            pool,
            tuple(h.kv_source(i) for i in range(h.n_layer + nextn)),
            convs,
            recurrent,
        )

    @property
    def n_layer_kv(self) -> int:
        """How many layers there are up to the last that keeps something."""
        return sum(layer == kv_source for layer, kv_source in enumerate(self.kv_sources))

    @property
    def states(self) -> Pool:
        """The rows."""
        layers = {i: [t for t in (conv, self.recurrent.get(i)) if t is not None] for i, conv in self.convs.items()}
        return Pool(layers, next(iter(self.convs.values())).shape[0])

    @property
    def pools(self) -> list[PagePool]:
        return [self.far] if self.near is None else [self.far, self.near]


@dataclass(frozen=True)
class Cached:
    """The paged memory as a batch sees it: its keys and values go in, then it attends to its own pages."""

    memory: PagedMemory
    batch: Batch
    stored: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, its keys and values
    left: dict[int, list[Tensor]] = field(default_factory=dict)  # and what has to run for the states that it leaves

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: AttentionParams) -> Tensor:
        batch, memory = self.batch, self.memory
        kv_source = memory.kv_sources[layer]
        pool, _ = self._room(kv_source)
        if kv_source == layer:
            self.store(layer, k, v)
        asking = batch.out or batch if layer >= memory.n_layer_kv - 1 else batch
        seen = *self.stored[kv_source], pool.tables, asking.slot, asking.pos
        if v is None:
            return latent_attention(q, *seen, scale=how.scale)
        if how.sinks is not None:
            return attention_sinks(q, *seen, how.sinks, scale=how.scale, window=how.window)
        return attention(q, *seen, scale=how.scale, window=how.window, cap=how.cap)

    def store(self, layer: int, k: Tensor, v: Tensor | None) -> list[Tensor]:
        """A layer's keys and values of these rows, where they are from now on."""
        pool, cells = self._room(layer)
        self.stored[layer] = [
            store(cache, new, cells)
            for store, cache, new in zip((store_k, store_v), pool.layers[layer], (k, v), strict=False)
            if new is not None
        ]
        return self.stored[layer]

    def _room(self, layer: int) -> tuple[PagePool, Tensor]:
        """The pages of a layer's keys and values, and the rows' cells in them."""
        memory, batch = self.memory, self.batch
        if memory.near is not None and layer in memory.near.layers:
            return memory.near, batch.near
        return memory.far, batch.cells

    def causal_conv(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        y = causal_conv_kept(x, w, self.memory.convs[layer], self.batch.begin, self.batch.end)
        self.left.setdefault(layer, []).append(y)
        return y

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, how: LinearAttentionParams
    ) -> Tensor:
        states, batch = self.memory.recurrent[layer], self.batch
        y = linear_attention_kept(q, k, v, decay, beta, states, batch.begin, batch.end, **how._asdict())
        self.left.setdefault(layer, []).append(y)
        return y

    def kept(self, layer: int) -> list[Tensor]:
        """All that has to run for what a layer keeps."""
        return self.stored.get(layer, []) + self.left.get(layer, [])


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: AttentionParams) -> Tensor:
        size, scale, window, v = self.length, how.scale, how.window, k if v is None else v
        if how.sinks is not None:
            return causal_attention_sinks(q, k, v, self.start, how.sinks, length=size, scale=scale, window=window)
        return causal_attention(q, k, v, self.start, length=size, scale=scale, window=window, cap=how.cap)

    def causal_conv(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        return causal_conv(x, w, zeros(1, w.shape[2] - 1, x.shape[1]), self._begin)

    def linear_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, how: LinearAttentionParams
    ) -> Tensor:
        before = zeros(1, v.shape[1], q.shape[2], v.shape[2])
        return linear_attention(q, k, v, decay, beta, before, self._begin, **how._asdict())

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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, how: AttentionParams) -> Tensor:
        reach = how.window // 2 if how.window else -1
        return full_attention(q, k, k if v is None else v, self.count, length=self.length, scale=how.scale, reach=reach)

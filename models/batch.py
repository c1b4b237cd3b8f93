"""What every architecture is given beside its weights: rows of tokens, and a memory that they attend to.

A server's rows are a `Batch` of any sequences and their memory the paged cache; a trainer's are whole `Sequences`,
which are each other's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from graph.backend import Bytes
from graph.ops.attention import PAGE, attention, copy_pages, store_k, store_v
from graph.ops.causal import causal_attention
from graph.ops.encoder import full_attention
from graph.ops.sinks import attention_sinks, causal_attention_sinks
from graph.session import Session
from graph.tensor import Tensor, feed
from models.hparams import Hparams

KV_TYPES = ("f32", "f16", "q8_0")


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing) -> Tensor:
        """q (T, H, D), or (R, H, D) where only some ask, k and v (T, H_kv, D) of these rows → as q."""


@dataclass(frozen=True)
class Batch:
    """T tokens of any sequences, and the rows whose logits are wanted."""

    tokens: Tensor  # (T,) i32
    pos: Tensor  # (T,) i32
    slot: Tensor  # (T,) i32: the row of `tables` that holds the token's sequence
    cells: Tensor  # (T,) i32: where the token's key and value go
    out: Out | None

    @classmethod
    def feeds(cls, n_tokens: int, n_out: int | None = None) -> Batch:
        """`n_out` None: logits of every row."""
        tokens, pos, slot, cells = (feed(name, (n_tokens,), "i32") for name in ("tokens", "pos", "slot", "cells"))
        if n_out is None:
            return cls(tokens, pos, slot, cells, None)
        ids, out_pos, out_slot = (feed(name, (n_out,), "i32") for name in ("out", "out.pos", "out.slot"))
        return cls(tokens, pos, slot, cells, Out(ids, out_pos, out_slot))


@dataclass(frozen=True)
class PagedMemory:
    """The KV cache as states: keys (pages, H_kv, D, 16) and values (pages, H_kv, 16, D) of each layer that keeps some,
    and page tables."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    keepers: tuple[int, ...]  # of each layer: which has the keys and values that it sees
    tables: Tensor  # (S, pages per table) i32

    @classmethod
    def define(
        cls, session: Session, h: Hparams, n_pages: int, table_shape: tuple[int, int], type_k: str, type_v: str
    ) -> PagedMemory:
        sizes = [(h.sizes(i).n_head_kv, h.sizes(i).head_dim) for i in range(h.n_kept)]
        return cls(
            tuple(session.define(f"k.{i}", (n_pages, n, d, PAGE), type_k) for i, (n, d) in enumerate(sizes)),
            tuple(session.define(f"v.{i}", (n_pages, n, PAGE, d), type_v) for i, (n, d) in enumerate(sizes)),
            tuple(h.keeper(i) for i in range(h.n_layer)),
            session.define("tables", table_shape, "i32", by_host=True),
        )

    def copied(self, pairs: Tensor) -> list[Tensor]:
        """The caches after whole pages were copied; pairs (C, 2) i32: (from, to)."""
        return [copy_pages(cache, pairs) for cache in (*self.keys, *self.values)]

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return sum(size for _, size in self._parts)

    @cached_property
    def _parts(self) -> list[tuple[str, int]]:
        """Of a page, in the order of its bytes: states, and how many bytes they have of it."""
        return [(t.name, t.nbytes // t.shape[0]) for pair in zip(self.keys, self.values, strict=True) for t in pair]

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
    stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # each keeper's cache afterwards

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing) -> Tensor:
        batch, memory = self.batch, self.memory
        keeper = memory.keepers[layer]
        if keeper == layer:
            keys, values = memory.keys[layer], memory.values[layer]
            self.stored[layer] = store_k(keys, k, batch.cells), store_v(values, v, batch.cells)
        asking = batch.out or batch if layer >= len(memory.keys) - 1 else batch
        seen = *self.stored[keeper], memory.tables, asking.slot, asking.pos
        if how.sinks is not None:
            return attention_sinks(q, *seen, how.sinks, scale=how.scale, window=how.window)
        return attention(q, *seen, scale=how.scale, window=how.window, cap=how.cap)


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing) -> Tensor:
        size, scale, window = self.length, how.scale, how.window
        if how.sinks is not None:
            return causal_attention_sinks(q, k, v, self.start, how.sinks, length=size, scale=scale, window=window)
        return causal_attention(q, k, v, self.start, length=size, scale=scale, window=window, cap=how.cap)


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Weighing) -> Tensor:
        reach = how.window // 2 if how.window else -1
        return full_attention(q, k, v, self.count, length=self.length, scale=how.scale, reach=reach)

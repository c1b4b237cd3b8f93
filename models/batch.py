"""What every architecture is given beside its weights: one batch, and the paged memory of what came before."""

from __future__ import annotations

from dataclasses import dataclass

from graph.ops.attention import PAGE, copy_pages, store_k, store_v
from graph.session import Session
from graph.tensor import Tensor, feed
from models.hparams import Hparams

KV_TYPES = ("f32", "f16", "q8_0")


@dataclass(frozen=True)
class Batch:
    """T tokens of any sequences, and the R rows whose logits are wanted."""

    tokens: Tensor  # (T,) i32
    pos: Tensor  # (T,) i32
    slot: Tensor  # (T,) i32: the row of `tables` that holds the token's sequence
    cells: Tensor  # (T,) i32: where the token's key and value go
    out: Tensor  # (R,) i32: indices into the batch
    copies: Tensor | None = None  # (C, 2) i32: pages to copy first, (from, to)

    @classmethod
    def feeds(cls, n_tokens: int, n_out: int, n_copies: int = 0) -> Batch:
        tokens, pos, slot, cells = (feed(name, (n_tokens,), "i32") for name in ("tokens", "pos", "slot", "cells"))
        copies = feed("copies", (n_copies, 2), "i32") if n_copies else None
        return cls(tokens, pos, slot, cells, feed("out", (n_out,), "i32"), copies)


@dataclass(frozen=True)
class PagedMemory:
    """The KV cache as states: per layer keys (pages, H_kv, D, 16) and values (pages, H_kv, 16, D), and page tables."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tables: Tensor  # (S, pages per table) i32

    @classmethod
    def define(
        cls, session: Session, h: Hparams, n_pages: int, table_shape: tuple[int, int], type_k: str, type_v: str
    ) -> PagedMemory:
        k, v = (n_pages, h.n_head_kv, h.head_dim, PAGE), (n_pages, h.n_head_kv, PAGE, h.head_dim)
        return cls(
            tuple(session.define(f"k.{i}", k, type_k) for i in range(h.n_layer)),
            tuple(session.define(f"v.{i}", v, type_v) for i in range(h.n_layer)),
            session.define("tables", table_shape, "i32"),
        )

    def extend(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The layer's cache with this batch's keys and values (T, H_kv, D) in it."""
        keys, values = self.keys[layer], self.values[layer]
        if batch.copies is not None:
            keys, values = copy_pages(keys, batch.copies), copy_pages(values, batch.copies)
        return store_k(keys, k, batch.cells), store_v(values, v, batch.cells)

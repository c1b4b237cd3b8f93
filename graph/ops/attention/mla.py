"""Attention of MLA (DeepSeek-AI, 2024): cached rows that all heads share as keys and as values.

Heads' weights are multiplied with queries instead of keys (models/architectures/mla.py), so one
cache is enough. It may be sparse (DeepSeek-AI, 2025: V3.2): an indexer chooses the cells that a token
attends to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.op import Array, Case, Variable, op, require
from logitless.graph.ops.attention.paged_attention import (
    PAGE,
    attention,
    attention_back,
    attention_case,
    random_sinks,
)
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.shape import split_rows
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor

HIDDEN = -1e30  # added to scores of cells that are not chosen
BLOCK = 32  # masks have whole blocks of so many cells
TURNED = (0, 1, 3, 2)  # a cache of keys as one of values


@op(
    "q f32 (T, H, D)",
    "k cache (pages, 1, D, 16)",
    "tables i32 (S, P)",
    "slot i32 (T)",
    "pos i32 (T)",
    "sinks f32 (H)?",
    gives="q",
)
def latent_attention(
    q: Array, k: Array, tables: Array, slot: Array, pos: Array, sinks: Array | None = None, *, scale: float
) -> Array:
    """`attention` whose values are the keys: q (T, H, D) and the cache k (pages, 1, D, 16) → (T, H, D)."""
    return attention.reference(q, k, k.transpose(TURNED), tables, slot, pos, sinks, scale=scale)


@latent_attention.vjp
def _(
    g: Tensor, y: Tensor, q: Tensor, k: Tensor, tables: Tensor, slot: Tensor, pos: Tensor, *sinks: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    require(not sinks, "latent_attention", "attention sinks have no gradient", q)
    v = transpose(k, axes=TURNED)
    dq, dk, dv = split_rows(attention_back(g, q, k, v, tables, slot, pos, scale=scale), (q, k, v))
    return dq, add(dk, transpose(dv, axes=TURNED)), None, None, None


def _case(dtype: str, heads: int, size: int, with_sinks: bool = False) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        (q, k, _, *rest), attrs = attention_case(f"{dtype}/f32", heads, 1, size)(r)
        assert isinstance(k, Variable)
        return [q, k, *rest, *([random_sinks(r, heads)] if with_sinks else [])], attrs

    return make


for _dtype, _heads, _size in (("f32", 4, 40), ("f16", 13, 576), ("q5_0", 1, 288)):
    latent_attention.case(_case(_dtype, _heads, _size))
latent_attention.case(_case("f16", 13, 40, True))


def mask_width(tables: Tensor | Array) -> int:
    """Columns of a mask: the cells of tables (S, P) in whole blocks."""
    return -(-tables.shape[1] * PAGE // BLOCK) * BLOCK


@op(
    "q f32 (T, H, D)",
    "weights f32 (T, H)",
    "k cache (pages, 1, D, 16)",
    "tables i32 (S, P)",
    "slot i32 (T)",
    "pos i32 (T)",
    gives="f32 (T, mask_width(tables))",
    needs="n > 0",
)
def chosen_cells(q: Array, weights: Array, k: Array, tables: Array, slot: Array, pos: Array, *, n: int) -> Array:
    """Masks (T, cells): 0 for the n cells of each token's sequence, up to its position, whose scores are the greatest,
    of equal ones the first; else HIDDEN.

    A score is Σ weights[t, h] · max(0, q[t, h] · k) over the heads of q (T, H, D); cache k (pages, 1, D, 16)."""
    out = np.full((len(q), mask_width(tables)), HIDDEN, q.dtype)
    for t in range(len(q)):
        where = np.arange(int(pos[t]) + 1)
        keys = k[tables[slot[t]][where // PAGE], 0, :, where % PAGE]
        scores = (np.maximum(keys @ q[t].T, 0) * weights[t]).sum(1)
        out[t, np.argsort(-scores, kind="stable")[:n]] = 0
    return out


@op(
    "q f32 (T, H, D)",
    "k cache (pages, 1, D, 16)",
    "tables i32 (S, P)",
    "slot i32 (T)",
    "pos i32 (T)",
    "mask f32 (T, C)",
    gives="q",
    needs="C == mask_width(tables)",
)
def sparse_latent_attention(
    q: Array, k: Array, tables: Array, slot: Array, pos: Array, mask: Array, *, scale: float
) -> Array:
    """`latent_attention` whose scores of a token's cells have the token's row of mask (T, cells) added."""
    out = np.empty_like(q)
    for t in range(len(q)):
        where = np.arange(int(pos[t]) + 1)
        rows = k[tables[slot[t]][where // PAGE], 0, :, where % PAGE]
        s = rows @ q[t].T * scale + mask[t, where][:, None]
        e = np.exp(s - s.max(0))
        out[t] = (e / e.sum(0)).T @ rows
    return out


def _chosen_case(dtype: str, heads: int, size: int, n: int) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        (q, k, _, *rest), _ = attention_case(f"{dtype}/f32", heads, 1, size)(r)
        return [q, r.normal(size=q.shape[:2]), k, *rest], {"n": n}

    return make


def _sparse_case(dtype: str, heads: int, size: int) -> Callable[[np.random.Generator], Case]:
    """Rows of two sequences of 19 pages, which see a tenth of their cells; two see nothing for more than 256."""

    def make(r: np.random.Generator) -> Case:
        k = r.normal(size=(38, 1, size, PAGE)).astype(np.float16).astype(np.float64)
        tables, slot = r.permutation(38).reshape(2, 19), np.array([0, 0, 0, 1, 1])
        pos = np.array([3, 299, 300, 290, 17])
        mask = np.where(r.random((5, 320)) < 0.1, 0, HIDDEN)
        mask[:, :290], mask[np.arange(5), pos] = np.where(pos[:, None] > 290, HIDDEN, mask[:, :290]), 0
        return [r.normal(size=(5, heads, size)), Variable(k, dtype), tables, slot, pos, mask], {"scale": size**-0.5}

    return make


for _dtype, _heads, _size, _n in (("f32", 4, 64, 5), ("f16", 9, 32, 16), ("f32", 1, 40, 64)):
    chosen_cells.case(_chosen_case(_dtype, _heads, _size, _n))
for _dtype, _heads, _size in (("f32", 4, 40), ("f16", 13, 40)):
    sparse_latent_attention.case(_sparse_case(_dtype, _heads, _size))


@chosen_cells.case
def _(r: np.random.Generator) -> Case:
    """Cells of equal scores, of which the first are chosen, in a sequence of several blocks."""
    k = np.repeat(r.normal(size=(19, 1, 32, PAGE // 4)).astype(np.float16).astype(np.float64), 4, axis=3)
    q, weights, pos = r.normal(size=(3, 3, 32)), np.abs(r.normal(size=(3, 3))), np.array([300, 50, 298])
    return [q, weights, Variable(k, "f16"), r.permutation(19)[None], 0 * pos, pos], {"n": 50}

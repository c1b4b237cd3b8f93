"""Attention of MLA (DeepSeek-AI, 2024), whose cached rows all heads share as keys and as values, and sparse attention.

Heads' weights are multiplied with queries instead of keys (models/architectures/mla.py), so one cache is enough.

Where attention is sparse (DeepSeek-AI, 2025: V3.2), an indexer chooses the cells that a token attends to. A choice is a
list of cells, (T, G, N) for each token one for all heads (G = 1) or one for each key head: positions in their order,
−1 behind the last. They are f32, so that rows can be gathered; numbers below 2^24 are exact."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, Case, Variable, op, require
from logitless.graph.ops.attention.paged_attention import (
    CACHES,
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

KEYS_AS_VALUES = (0, 1, 3, 2)  # a cache of keys as one of values


LATENT = "k cache (pages, 1, D, 16)", "tables i32 (S, P) in :pages", "slot i32 (T) in :S"


@op("q f32 (T, H, D)", *LATENT, "pos i32 (T) in :P * 16", "sinks f32 (H)?", gives="q")
def latent_attention(
    q: Array, k: Array, tables: Array, slot: Array, pos: Array, sinks: Array | None = None, *, scale: float
) -> Array:
    """`attention` whose values are the keys: q (T, H, D) and the cache k (pages, 1, D, 16) → (T, H, D)."""
    return attention.reference(q, k, k.transpose(KEYS_AS_VALUES), tables, slot, pos, sinks, scale=scale)


@latent_attention.vjp
def _(
    g: Tensor, y: Tensor, q: Tensor, k: Tensor, tables: Tensor, slot: Tensor, pos: Tensor, *sinks: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    require(not sinks, "latent_attention", "there is no gradient with sinks", q)
    require(k.dtype == "f32", "latent_attention", "there is no gradient with a cache that is not f32", q, k)
    v = transpose(k, axes=KEYS_AS_VALUES)
    dq, dk, dv = split_rows(attention_back(g, q, k, v, tables, slot, pos, scale=scale), (q, k, v))
    return dq, add(dk, transpose(dv, axes=KEYS_AS_VALUES)), None, None, None


def _case(r: np.random.Generator, dtype: str, heads: int, size: int, with_sinks: bool = False) -> Case:
    (q, k, _, *rest), attrs = attention_case(r, f"{dtype}/f32", heads, 1, size)
    assert isinstance(k, Variable)
    return [q, k, *rest, *([random_sinks(r, heads)] if with_sinks else [])], attrs


for _dtype, _heads, _size in (("f32", 4, 40), ("f16", 13, 576), ("q5_0", 1, 288)):
    latent_attention.case(_case, _dtype, _heads, _size)
latent_attention.case(_case, "f16", 13, 40, True)


def _best(scores: Array, n: int) -> Array:
    """Indices of the n greatest, of equal ones the first, in order."""
    return np.sort(np.argsort(-scores, kind="stable")[:n])


def _cells_of(blocks: Array, size: int) -> Array:
    return (blocks[:, None] * size + np.arange(size)).reshape(-1)


@op(
    "q f32 (T, H, D)",
    "weights f32 (T, H)",
    *LATENT,
    "pos i32 (T) in :P * 16",
    gives="f32 (T, 1, (n + 1) * pool - 1)",
    needs="n > 0 and pool > 0",
)
def chosen_cells(
    q: Array, weights: Array, k: Array, tables: Array, slot: Array, pos: Array, *, n: int, pool: int
) -> Array:
    """Choices (T, 1, N) of the n pools with the greatest scores, of equal ones the first, among the whole pools of
    `pool` cells up to each token's position; and of the cells behind the last whole pool.

    A score is Σ weights[t, h] · max(0, q[t, h] · k) over the heads of q (T, H, D), with the key in the pool's last
    cell, of the cache k (pages, 1, D, 16)."""
    out = np.full((len(q), 1, (n + 1) * pool - 1), -1.0, q.dtype)
    for t in range(len(q)):
        whole = (int(pos[t]) + 1) // pool
        where = np.arange(1, whole + 1) * pool - 1
        keys = k[tables[slot[t]][where // PAGE], 0, :, where % PAGE]
        scores = (np.maximum(keys @ q[t].T, 0) * weights[t]).sum(1)
        behind = np.arange(whole * pool, int(pos[t]) + 1)
        cells = np.concatenate([_cells_of(_best(scores, n), pool), behind])
        out[t, 0, : len(cells)] = cells
    return out


@op(
    "q f32 (T, H, D)",
    *LATENT,
    "pos i32 (T) in :P * 16",
    gives="f32 (T, H, n * block)",
    needs="n > 0 and block > 0 and last >= 0",
)
def chosen_blocks(
    q: Array, k: Array, tables: Array, slot: Array, pos: Array, *, n: int, block: int, last: int
) -> Array:
    """Choices (T, H, n · block) of each head's n blocks of cells with the greatest scores, of equal ones the first,
    up to each token's position, among them the `last` ones (MiniMax M3).

    A score is the greatest q[t, h] · k of the block's cells; cache k (pages, 1, D, 16)."""
    rows, heads, _ = q.shape
    out = np.full((rows, heads, n * block), -1.0, q.dtype)
    for t in range(rows):
        where = np.arange(int(pos[t]) + 1)
        keys = k[tables[slot[t]][where // PAGE], 0, :, where % PAGE]
        for h in range(heads):
            scores = np.maximum.reduceat(keys @ q[t, h], where[::block])
            scores[max(0, len(scores) - last) :] = 1e30
            cells = _cells_of(_best(scores, n), block)
            cells = cells[cells <= pos[t]]
            out[t, h, : len(cells)] = cells
    return out


@op("q f32 (T, H, D)", *CACHES, "chosen f32 (T, L, N)", "sinks f32 (H)?", gives="q", needs="H % G == 0 and L in (1, G)")
def sparse_attention(
    q: Array, k: Array, v: Array, tables: Array, slot: Array, chosen: Array, sinks: Array | None = None, *, scale: float
) -> Array:
    """`attention` over the cells that are chosen for each token: lists (T, G, N)."""
    out, group = np.empty_like(q), q.shape[1] // k.shape[1]
    for t in range(len(q)):
        for h in range(q.shape[1]):
            head = h // group
            own = chosen[t, head if chosen.shape[1] > 1 else 0]
            where = own[own >= 0].astype(np.int64)
            pages = tables[slot[t]][where // PAGE]
            s = k[pages, head, :, where % PAGE] @ q[t, h] * scale
            top = s.max() if sinks is None else max(s.max(), sinks[h])
            e = np.exp(s - top)
            total = e.sum() if sinks is None else e.sum() + np.exp(sinks[h] - top)
            out[t, h] = e @ v[pages, head, where % PAGE] / total
    return out


@op("q f32 (T, H, D)", *LATENT, "chosen f32 (T, 1, N)", "sinks f32 (H)?", gives="q")
def sparse_latent_attention(
    q: Array, k: Array, tables: Array, slot: Array, chosen: Array, sinks: Array | None = None, *, scale: float
) -> Array:
    """`sparse_attention` whose values are the keys: q (T, H, D), cache k (pages, 1, D, 16), lists (T, 1, N)."""
    values = k.transpose(KEYS_AS_VALUES)
    return sparse_attention.reference(q, k, values, tables, slot, chosen, sinks, scale=scale)


def _index_case(r: np.random.Generator, dtype: str, heads: int, size: int, **attrs: int) -> Case:
    (q, k, _, *rest), _ = attention_case(r, f"{dtype}/f32", heads, 1, size)
    weights = [] if "block" in attrs else [r.normal(size=q.shape[:2])]
    return [q, *weights, k, *rest], attrs


for _dtype, _heads, _size, _attrs in (
    ("f32", 4, 64, {"n": 5, "pool": 1}),
    ("f16", 9, 32, {"n": 16, "pool": 1}),
    ("f32", 1, 40, {"n": 64, "pool": 1}),
    ("f32", 4, 64, {"n": 3, "pool": 4}),
    ("f16", 9, 32, {"n": 2, "pool": 6}),
):
    chosen_cells.case(_index_case, _dtype, _heads, _size, **_attrs)
for _dtype, _heads, _size, _attrs in (
    ("f32", 4, 64, {"n": 2, "block": 4, "last": 1}),
    ("f16", 9, 32, {"n": 3, "block": 10, "last": 0}),
    ("f32", 1, 40, {"n": 4, "block": 2, "last": 2}),
):
    chosen_blocks.case(_index_case, _dtype, _heads, _size, **_attrs)


@chosen_cells.case
def _(r: np.random.Generator) -> Case:
    """Cells of equal scores, of which the first are chosen, in a sequence of several blocks."""
    k = np.repeat(r.normal(size=(19, 1, 32, PAGE // 4)).astype(np.float16).astype(np.float64), 4, axis=3)
    q, weights, pos = r.normal(size=(3, 3, 32)), np.abs(r.normal(size=(3, 3))), np.array([300, 50, 298])
    return [q, weights, Variable(k, "f16"), r.permutation(19)[None], 0 * pos, pos], {"n": 50, "pool": 1}


def _sparse_case(
    r: np.random.Generator,
    types: str,
    heads: int,
    kv_heads: int,
    size: int,
    *,
    lists: int = 1,
    latent: bool = False,
    with_sinks: bool = False,
) -> Case:
    """Rows of two sequences of 19 pages, which see a tenth of their cells; one has a whole page."""
    k, v = (
        r.normal(size=(38, kv_heads, *shape)).astype(np.float16).astype(np.float64)
        for shape in ((size, PAGE), (PAGE, size))
    )
    type_k, type_v = types.split("/")
    tables, slot, pos = r.permutation(38).reshape(2, 19), np.array([0, 0, 0, 1, 1]), [3, 299, 300, 290, 17]
    cells = np.full((5, lists, 70), -1.0)
    for t in range(5):
        for i in range(lists):
            n = min(70 - 9 * i, 1 + pos[t] // 4)
            own = np.sort(r.permutation(pos[t] + 1)[:n])
            cells[t, i, :n] = np.arange(16, 16 + n) if t == 2 else own
    values = [] if latent else [Variable(v, type_v)]
    sinks = [random_sinks(r, heads)] if with_sinks else []
    q = r.normal(size=(5, heads, size))
    return [q, Variable(k, type_k), *values, tables, slot, cells, *sinks], {"scale": size**-0.5}


sparse_latent_attention.case(_sparse_case, "f32/", 4, 1, 40, latent=True)
sparse_latent_attention.case(_sparse_case, "f16/", 13, 1, 40, latent=True, with_sinks=True)
sparse_attention.case(_sparse_case, "f32/f32", 4, 2, 32, lists=2)
sparse_attention.case(_sparse_case, "f16/f16", 6, 1, 40, with_sinks=True)
sparse_attention.case(_sparse_case, "q5_0/q5_0", 9, 1, 32)

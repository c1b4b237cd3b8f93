"""Compressed attention (DeepSeek V4): a token sees rows of the last tokens, and one row for each block of tokens.

A block's row is made when its last token comes: a softmax for each element over the tokens of the
block, or of two. Cached rows are keys and values of all heads. A page of 16 tokens has a cell for
each of them in the window's cache, and one for each of the blocks that end in it in the cache of blocks,
one where a block is longer than a page. Each cell is a row by itself, (pages, cells, 1, D)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.op import Array, Case, Variable, op
from logitless.graph.ops.attention.paged_attention import PAGE, random_sinks

# Signature of ops that read caches of rows, behind these
PLACES = ("tables i32 (S, P) in :pages", "slot i32 (T) in :S", "pos i32 (T) in :P * 16")


def cells_per_page(size: int) -> int:
    """Cells of a page for blocks of so many tokens; 0 unless they divide a page or are a multiple of it."""
    return max(1, PAGE // size) if size > 0 and (PAGE % size == 0 or size % PAGE == 0) else 0


@op("pos i32 (T) in :limit", gives="pos in :limit", needs="size > 0")
def block_starts(pos: Array, *, size: int, limit: int) -> Array:
    """(T,) i32: the first position of the block of `size` that each position (T,), below `limit`, lies in."""
    return pos // size * size


block_starts.case(lambda r: ([np.array([0, 3, 4, 127, 128, 7001], np.int32)], {"size": 4, "limit": 7002}))


@op(
    "pos i32 (T)",
    "cells i32 (T) in :(spare + 1) * (size if size < 16 else 16)",
    gives="pos in :spare + 1",
    needs="cells_per_page(size) > 0 and spare >= 0",
)
def block_cells(pos: Array, cells: Array, *, size: int, spare: int) -> Array:
    """(T,) i32: cells of the blocks that end with these tokens, at positions pos (T,) and in cells (T,); `spare` for
    a token that ends none."""
    return np.where((pos + 1) % size == 0, cells // min(size, PAGE), spare).astype(np.int32)


for _size in (4, 128):
    block_cells.case(
        lambda r, size=_size: (
            [np.array([0, 3, 4, 127, 127, 255], np.int32), np.array([16, 19, 20, 15, 211, 31], np.int32)],
            {"size": size, "spare": 60},
        )
    )


@op(
    "cache cache (pages, N, 1, D)",
    "rows f32 (T, 1, D)",
    "cells i32 (T) in :pages * N",
    gives="cache",
    writes=(0,),
)
def store_blocks(cache: Array, rows: Array, cells: Array) -> Array:
    """Write the rows (T, 1, D) into their cells (T,) of the cache (pages, N, 1, D)."""
    for row, cell in zip(rows, cells, strict=True):
        cache[cell // cache.shape[1], cell % cache.shape[1]] = row
    return cache


store_blocks.tolerance = 5e-4  # f16 has 11 bits


def _store_case(dtype: str, n: int, width: int) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        cache = r.normal(size=(6, n, 1, width)).astype(np.float16).astype(np.float64)
        return [Variable(cache, dtype), r.normal(size=(3, 1, width)), np.array([5, 0, 3])], {}

    return make


for _dtype, _size, _width in (("f32", 1, 8), ("f16", 4, 8), ("q8_0", 4, 64), ("q5_1", 1, 64), ("iq4_nl", 4, 128)):
    store_blocks.case(_store_case(_dtype, _size, _width))


def _positions(pos: int, size: int, overlap: bool) -> Array:
    """Positions of the block that ends at `pos`, behind those of the block before with `overlap`."""
    return np.arange(max(0, pos + 1 - size * (1 + overlap)), pos + 1)


@op(
    "k f32 (pages, 1, 16, W)",
    "bias f32 (B, 1, C)",
    *PLACES,
    gives="f32 (T, C // (1 + overlap))",
    needs="W == 2 * C and C % (1 + overlap) == 0",
)
def block_pool(k: Array, bias: Array, tables: Array, slot: Array, pos: Array, *, overlap: bool) -> Array:
    """(T, D): of each token that ends a block, the sum of the block's values, weighted by the softmax of each element's
    scores over the block's tokens; else 0.

    Values and scores lie side by side in the cells of k (pages, 1, 16, 2 C), f32; to the scores is added bias
    (size, 1, C), by the token's place in its block of `size`. With `overlap` C is 2 D: the first halves count for the
    block behind the token's own, the others for its own."""
    size, _, width = bias.shape
    half = width // (1 + overlap)
    out = np.zeros((len(pos), half), k.dtype)
    for t in range(len(pos)):
        p = int(pos[t])
        if (p + 1) % size:
            continue
        where = _positions(p, size, overlap)
        own = k[tables[slot[t]][where // PAGE], 0, where % PAGE]
        values, scores = own[:, :width], own[:, width:] + bias[where % size, 0]
        if overlap:
            ours = (where > p - size)[:, None]
            values, scores = (np.where(ours, x[:, half:], x[:, :half]) for x in (values, scores))
        e = np.exp(scores - scores.max(0))
        out[t] = (e * values).sum(0) / e.sum(0)
    return out


def _pool_case(size: int, width: int, overlap: bool) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        rows, bias = r.normal(size=(40, 1, PAGE, 2 * width)) * 3, r.normal(size=(size, 1, width))
        tables, slot = r.permutation(40).reshape(2, 20), np.array([0, 0, 1, 1, 0])
        pos = np.array([size - 1, 2 * size, size - 1, 320 // size * size - 1, 11])
        return [Variable(rows, "f32"), bias, tables, slot, pos], {"overlap": overlap}

    return make


block_pool.case(_pool_case(4, 24, True))
block_pool.case(_pool_case(128, 20, False))


def _block_rows(cache: Array, table: Array, blocks: Array, size: int) -> Array:
    """The rows (n, D) of blocks (n,) of a sequence."""
    last = blocks * size + size - 1
    return cache[table[last // PAGE], last % PAGE // min(size, PAGE), 0]


@op(
    "q f32 (T, H, D)",
    "weights f32 (T, H)",
    "k cache (pages, N, 1, D)",
    *PLACES,
    gives="f32 (T, n)",
    needs="n > 0 and N == cells_per_page(size)",
)
def chosen_rows(
    q: Array, weights: Array, k: Array, tables: Array, slot: Array, pos: Array, *, n: int, size: int
) -> Array:
    """(T, n): the n blocks, of `size` tokens, of each token's sequence that end up to its position and whose scores
    are the greatest, of equal ones the first; in their order, and then −1 where there are fewer.

    A score is Σ weights[t, h] · max(0, q[t, h] · k) over the heads of q (T, H, D); cache k (pages, N, 1, D)."""
    out = np.full((len(q), n), -1.0)
    for t in range(len(q)):
        blocks = np.arange((int(pos[t]) + 1) // size)
        keys = _block_rows(k, tables[slot[t]], blocks, size)
        scores = (np.maximum(keys @ q[t].T, 0) * weights[t]).sum(1)
        some = np.sort(np.argsort(-scores, kind="stable")[:n])
        out[t, : len(some)] = some
    return out


@op(
    "q f32 (T, H, D)",
    "k cache (pages, 16, 1, D)",
    *PLACES,
    "sinks f32 (H)",
    "blocks cache (pages_of_blocks, N, 1, D)?",
    "block_tables i32 (S, P)? in :pages_of_blocks",
    "chosen f32 (T, n)?",
    gives="q",
    needs="window > 0 and (blocks is None or block_tables is not None and blocks.dtype == k.dtype and "
    "N == cells_per_page(size))",
)
def compressed_attention(
    q: Array,
    k: Array,
    tables: Array,
    slot: Array,
    pos: Array,
    sinks: Array,
    blocks: Array | None = None,
    block_tables: Array | None = None,
    chosen: Array | None = None,
    *,
    scale: float,
    window: int,
    size: int = 1,
) -> Array:
    """One softmax over the last `window` rows of k (pages, 16, 1, D) and the rows of blocks (pages, N, 1, D); rows are
    keys and values: q (T, H, D) → (T, H, D).

    Seen are blocks of `size` tokens that end up to the position, or those in `chosen` (T, n), up to the first −1.
    `sinks` (H,): a score of each head that takes part and has no value."""
    out = np.empty_like(q)
    for t in range(len(q)):
        p = int(pos[t])
        where = np.arange(max(0, p + 1 - window), p + 1)
        rows = k[tables[slot[t]][where // PAGE], where % PAGE, 0]
        if blocks is not None:
            assert block_tables is not None
            some = np.arange((p + 1) // size) if chosen is None else chosen[t][chosen[t] >= 0].astype(np.int64)
            rows = np.concatenate([rows, _block_rows(blocks, block_tables[slot[t]], some, size)])
        s = rows @ q[t].T * scale
        top = np.maximum(s.max(0), sinks)
        e = np.exp(s - top)
        out[t] = (e / (e.sum(0) + np.exp(sinks - top))).T @ rows
    return out


def _caches(r: np.random.Generator, dtype: str, width: int, size: int) -> tuple[Variable, Variable]:
    shapes = ((44, PAGE, 1, width), (44, cells_per_page(size), 1, width))
    rows, blocks = (r.normal(size=shape).astype(np.float16).astype(np.float64) for shape in shapes)
    return Variable(rows, dtype), Variable(blocks, dtype)


def _attention_case(dtype: str, heads: int, width: int, size: int, n: int = 0) -> Callable[[np.random.Generator], Case]:
    """Tokens of two sequences of 20 pages; without `size` of windows only, with n of chosen blocks."""

    def make(r: np.random.Generator) -> Case:
        rows, blocks = _caches(r, dtype, width, size or 4)
        tables, others = r.permutation(44)[:40].reshape(2, 20), r.permutation(44)[:40].reshape(2, 20)
        slot, pos = np.array([0, 0, 0, 1, 1]), np.array([2, 299, 300, 255, 17])
        chosen = np.full((5, n or 1), -1.0)
        for row, p in zip(chosen, pos, strict=True):
            some = np.sort(r.permutation((p + 1) // (size or 4))[:n])
            row[: len(some)] = some
        src = [r.normal(size=(5, heads, width)), rows, tables, slot, pos, random_sinks(r, heads)]
        src += [blocks, others, *([chosen] if n else [])] if size else []
        return src, {"scale": width**-0.5, "window": 37, **({"size": size} if size else {})}

    return make


def _choice_case(dtype: str, heads: int, width: int, n: int) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        _, blocks = _caches(r, dtype, width, 4)
        tables, slot = r.permutation(44)[:40].reshape(2, 20), np.array([0, 0, 0, 1, 1])
        pos = np.array([2, 299, 300, 255, 17])
        return [r.normal(size=(5, heads, width)), r.normal(size=(5, heads)), blocks, tables, slot, pos], {
            "n": n,
            "size": 4,
        }

    return make


for _dtype, _heads, _width, _size, _n in (
    ("f16", 13, 40, 4, 9),
    ("f32", 4, 40, 128, 0),
    ("f16", 3, 64, 0, 0),
    ("bf16", 2, 64, 4, 0),
    ("q8_0", 3, 64, 4, 9),
    ("q5_1", 3, 64, 128, 0),
    ("iq4_nl", 3, 64, 4, 0),
):
    compressed_attention.case(_attention_case(_dtype, _heads, _width, _size, _n))
for _dtype, _heads, _width, _n in (
    ("f32", 4, 64, 5),
    ("f16", 9, 32, 16),
    ("f32", 1, 40, 100),
    ("q4_0", 9, 64, 16),
    ("q8_0", 9, 64, 16),
):
    chosen_rows.case(_choice_case(_dtype, _heads, _width, _n))

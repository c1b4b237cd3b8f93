"""Paged attention: attention scores and values over the KV cache, and the ops that write it.

A page holds 16 cells; position p of a sequence is cell p % 16 of page `tables[slot][p // 16]`. Keys
are kept with the cells last, (pages, H_kv, D, 16), values with the elements last, (pages, H_kv, 16,
D): both are read in lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, Variable, op, require
from logitless.graph.ops.shape import split_rows
from logitless.graph.tensor import Shape, Tensor

PAGE = 16
# Signature of ops that read the KV cache, between their queries and positions
CACHES = ("k cache (pages, G, D, 16)", "v cache (pages, G, 16, D)", "tables i32 (S, P) in :pages", "slot i32 (T) in :S")


@op("cache cache (pages, H, D, 16)", "k f32 (T, H, D)", "cells i32 (T) in :pages * 16", gives="cache", writes=(0,))
def store_k(cache: Array, k: Array, cells: Array) -> Array:
    """Write the keys (T, H_kv, D) of T tokens into their cells (T,) of the cache (pages, H_kv, D, 16)."""
    for row, cell in zip(k, cells, strict=True):
        cache[cell // PAGE, :, :, cell % PAGE] = row
    return cache


@op("cache cache (pages, H, 16, D)", "v f32 (T, H, D)", "cells i32 (T) in :pages * 16", gives="cache", writes=(0,))
def store_v(cache: Array, v: Array, cells: Array) -> Array:
    """Write the values (T, H_kv, D) of T tokens into their cells (T,) of the cache (pages, H_kv, 16, D)."""
    for row, cell in zip(v, cells, strict=True):
        cache[cell // PAGE, :, cell % PAGE] = row
    return cache


def _store_case(r: np.random.Generator, shape: Shape, dtype: str) -> Case:
    cells = np.array([17, 3, 40])
    return [
        Variable(r.normal(size=shape).astype(np.float16).astype(np.float64), dtype),
        r.normal(size=(3, 2, max(n for n in shape[2:] if n != PAGE))),
        cells,
    ], {}


def _rounding_case(r: np.random.Generator, shape: Shape) -> Case:
    """Values near the next number of f16: rounding toward zero exceeds the tolerance."""
    steps = r.integers(0, 16, (3, 2, 8)) + r.choice([0.1, 0.5, 0.9], (3, 2, 8))
    return [Variable(np.zeros(shape), "f16"), 1 + steps / 1024, np.array([17, 3, 40])], {}


store_k.case(_rounding_case, (3, 2, 8, PAGE))
store_v.case(_rounding_case, (3, 2, PAGE, 8))
for _dtype in ("f32", "f16"):
    store_k.case(_store_case, (3, 2, 8, PAGE), _dtype)
    store_v.case(_store_case, (3, 2, PAGE, 8), _dtype)
# of blocks: rounding is the test's, too
for _dtype in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"):
    store_k.case(_store_case, (3, 2, 32, PAGE), _dtype)
for _dtype in ("bf16", "q8_0", "q5_1", "iq4_nl"):
    store_v.case(_store_case, (3, 2, PAGE, 64), _dtype)
store_k.tolerance = store_v.tolerance = 5e-4  # f16 has 11 bits


@op("cache cache (pages, H, D, 16)", "cells i32 (T) in :pages * 16", gives="f32 (T, H, D)")
def load_k(cache: Array, cells: Array) -> Array:
    """The keys (T, H_kv, D) in the cells (T,) of the cache (pages, H_kv, D, 16)."""
    return cache[cells // PAGE, :, :, cells % PAGE]


@op("cache cache (pages, H, 16, D)", "cells i32 (T) in :pages * 16", gives="f32 (T, H, D)")
def load_v(cache: Array, cells: Array) -> Array:
    """The values (T, H_kv, D) in the cells (T,) of the cache (pages, H_kv, 16, D)."""
    return cache[cells // PAGE, :, cells % PAGE]


def _load_case(r: np.random.Generator, shape: Shape, dtype: str) -> Case:
    cells = np.array([17, 3, 40, 3])
    return [Variable(r.normal(size=shape).astype(np.float16).astype(np.float64), dtype), cells], {}


for _dtype in ("f32", "f16"):
    load_k.case(_load_case, (3, 2, 8, PAGE), _dtype)
    load_v.case(_load_case, (3, 2, PAGE, 8), _dtype)
for _dtype in ("bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"):
    load_k.case(_load_case, (3, 2, 64, PAGE), _dtype)
for _dtype in ("q5_0", "q4_1"):
    load_v.case(_load_case, (3, 2, PAGE, 32), _dtype)


@op("cache cache (pages, …)", "pairs i32 (n, 2) in :pages", gives="cache", writes=(0,))
def copy_pages(cache: Array, pairs: Array) -> Array:
    """Copy whole pages, (from, to) a row of pairs (n, 2), in order: copy on write of a shared last page."""
    for source, destination in pairs:
        cache[destination] = cache[source]
    return cache


copy_pages.case(lambda r: ([Variable(r.normal(size=(5, 2, 8, PAGE)), "f32"), np.array([[0, 3], [4, 1], [2, 2]])], {}))


@op(
    "q f32 (T, H, D)",
    *CACHES,
    "pos i32 (T)|(2, T) in :P * 16",
    "sinks f32 (H)?",
    gives="q",
    needs="H % G == 0 and window >= 0 and cap >= 0",
)
def attention(
    q: Array,
    k: Array,
    v: Array,
    tables: Array,
    slot: Array,
    pos: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Array:
    """softmax(scale · q·k) · v for each token over its own sequence up to its position: (T, H, D) →
    (T, H, D).

    tables (S, pages) i32, slot (T,) and pos (T,) say where the sequence's cells lie. Query head i
    reads key head i · H_kv // H. `sinks` (H,): a score of each query head that takes part in its
    softmax and has no value (gpt-oss). `window` > 0 sees only the last `window` positions; `cap` >
    0 bounds the scores (Gemma 2). pos (2, T): the last positions that tokens see, and the positions
    from which their windows count, which are not behind those (bidirectional images)."""
    out = np.empty_like(q)
    for t, h, keys, values in visible_cells(q, k, v, tables, slot, pos, window):
        s = keys @ q[t, h] * scale
        s = cap * np.tanh(s / cap) if cap else s
        top = s.max() if sinks is None else max(s.max(), sinks[h])
        e = np.exp(s - top)
        out[t, h] = e @ values / (e.sum() if sinks is None else e.sum() + np.exp(sinks[h] - top))
    return out


def visible_cells(
    q: Array, k: Array, v: Array, tables: Array, slot: Array, pos: Array, window: int
) -> Iterator[tuple[int, int, Array, Array]]:
    """Token, query head, visible keys and values (n, D) of its sequence, for all tokens and heads."""
    group = q.shape[1] // k.shape[1]
    last, own = pos if pos.ndim == 2 else (pos, pos)
    for t in range(q.shape[0]):
        where = np.arange(max(0, int(own[t]) - window + 1) if window else 0, int(last[t]) + 1)
        pages = tables[slot[t]][where // PAGE]
        keys, values = k[pages, :, :, where % PAGE], v[pages, :, where % PAGE]  # (n, H_kv, D)
        for h in range(q.shape[1]):
            yield t, h, keys[:, h // group], values[:, h // group]


def attention_case(
    r: np.random.Generator,
    types: str,
    heads: int,
    kv_heads: int,
    size: int,
    *,
    with_sinks: bool = False,
    own_positions: bool = False,
    **attrs: float,
) -> Case:
    type_k, type_v = types.split("/")
    held_k, held_v = (np.float16 if t == "f16" else np.float64 for t in (type_k, type_v))
    k = r.normal(size=(7, kv_heads, size, PAGE)).astype(held_k).astype(np.float64)
    v = r.normal(size=(7, kv_heads, PAGE, size)).astype(held_v).astype(np.float64)
    # two sequences share their first page
    tables = np.array([[6, 1, 3, 0], [6, 5, 0, 0], [4, 0, 0, 0]])
    slot = np.array([0, 0, 0, 1, 1, 2, 0])
    pos = np.array([33, 34, 47, 15, 16, 0, 3])
    if own_positions:  # tokens 1 and 2 see the third, too; so do the first and the last see more
        pos = np.array([[36, 47, 47, 15, 16, 0, 45], [33, 34, 47, 2, 16, 0, 3]])
    q = r.normal(size=(7, heads, size))
    sinks = [random_sinks(r, heads)] if with_sinks else []
    return [q, Variable(k, type_k), Variable(v, type_v), tables, slot, pos, *sinks], {"scale": size**-0.5, **attrs}


def random_sinks(r: np.random.Generator, heads: int) -> Array:
    """Attention sinks, of which one takes next to nothing and one takes all of its head."""
    sinks = r.normal(size=heads) * 3
    sinks[:2] = -200, 150
    return sinks


for _types, _heads, _kv_heads, _size, _attrs in (  # the CPU compiles a kernel of each shape, for 3 s
    ("f32/f32", 4, 2, 8, {}),
    ("f16/f16", 4, 4, 16, {}),
    ("f16/f16", 8, 2, 16, {"window": 20}),
    ("f32/f32", 2, 1, 80, {"cap": 5.0, "window": 5}),
    ("f16/f16", 2, 1, 512, {}),
    ("f16/f16", 4, 2, 64, {"window": 20}),
    ("f32/f32", 4, 2, 32, {"with_sinks": True}),
    ("f16/f32", 10, 1, 32, {"with_sinks": True}),
    ("f16/f16", 8, 2, 16, {"own_positions": True, "window": 20}),
    ("f32/f32", 4, 2, 32, {"own_positions": True, "with_sinks": True, "window": 3}),
    ("bf16/bf16", 8, 1, 16, {"with_sinks": True, "window": 20}),
    ("q5_1/iq4_nl", 4, 2, 32, {"window": 20}),
    ("iq4_nl/q5_1", 3, 1, 64, {"with_sinks": True}),
):
    attention.case(attention_case, _types, _heads, _kv_heads, _size, **_attrs)


@attention.case
def _(r: np.random.Generator) -> Case:
    """Enough rows for tiles of tokens on a GPU: two prompts, and tokens of several sequences between them."""
    slot = np.repeat([0, 1, 2, 1], [61, 1, 1, 65])
    pos = np.concatenate([np.arange(61), [66, 3], np.arange(65)])
    tables, heads = r.permutation(15).reshape(3, 5), (32, 8)
    k, v = (r.normal(size=(15, heads[1], *s)).astype(np.float16).astype(np.float64) for s in ((16, PAGE), (PAGE, 16)))
    return [r.normal(size=(128, heads[0], 16)), Variable(k, "f16"), Variable(v, "f16"), tables, slot, pos], {
        "scale": 16**-0.5,
        "window": 40,
    }


@op(
    "q f32 (T, H, D)",
    *CACHES,
    "pos i32 (T)|(2, T) in :P * 16",
    "bias f32 (B)",
    gives="q",
    needs="H % G == 0 and window >= 0 and B == H * P * PAGE",
)
def biased_attention(
    q: Array, k: Array, v: Array, tables: Array, slot: Array, pos: Array, bias: Array, *, scale: float, window: int = 0
) -> Array:
    """`attention` with biases of scores by the distance of token and cell: bias (H · cells of a table), of which
    each head's last is of the token itself (ALiBi; Press et al., 2022; T5; Raffel et al., 2020)."""
    out = np.empty_like(q)
    for t, h, keys, values in visible_cells(q, k, v, tables, slot, pos, window):
        n = bias.shape[0] // q.shape[1] * (h + 1)
        s = keys @ q[t, h] * scale + bias[n - len(keys) : n]
        e = np.exp(s - s.max())
        out[t, h] = e @ values / e.sum()
    return out


def _biased_case(r: np.random.Generator, *case: Any, **attrs: Any) -> Case:
    src, attributes = attention_case(r, *case, **attrs)
    src.append(r.normal(size=src[0].shape[1] * src[3].shape[1] * PAGE) * 2)
    return src, attributes


biased_attention.case(_biased_case, "f32/f32", 4, 2, 32)
biased_attention.case(_biased_case, "f16/f16", 4, 4, 16, own_positions=True, window=1)


@op(
    "cache f32 (pages, H, _, _)",
    "cells i32 (T) in :pages * 16",
    gives="cache",
    needs="cache.shape[3 if keys else 2] == PAGE",
)
def clear_cells(cache: Array, cells: Array, *, keys: bool) -> Array:
    """The cache with zeros in these cells: the gradient of what was there before a store."""
    out = cache.copy()
    if keys:
        out[cells // PAGE, :, :, cells % PAGE] = 0
    else:
        out[cells // PAGE, :, cells % PAGE] = 0
    return out


clear_cells.inplace = (0,)
for _keys, _layout in ((True, (3, 2, 8, PAGE)), (False, (3, 2, PAGE, 8))):
    clear_cells.case(lambda r, s, k: ([r.normal(size=s), np.array([17, 3, 40])], {"keys": k}), _layout, _keys)


store_k.vjp(lambda g, y, cache, k, cells: (clear_cells(g, cells, keys=True), load_k(g, cells), None))
store_v.vjp(lambda g, y, cache, v, cells: (clear_cells(g, cells, keys=False), load_v(g, cells), None))


@op(
    "g f32 (T, H, D)",
    "q f32 (T, H, D)",
    *CACHES,
    "pos i32 (T) in :P * 16",
    gives="f32 (T * H + 2 * pages * G * PAGE, D)",
    needs=attention.needs,
)
def attention_back(
    g: Array,
    q: Array,
    k: Array,
    v: Array,
    tables: Array,
    slot: Array,
    pos: Array,
    *,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Array:
    """The gradients of q (T, H, D) and of the caches k and v, one after the other, as rows of D."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = np.zeros_like(q), np.zeros(k.shape, q.dtype), np.zeros(v.shape, q.dtype)
    for t in range(q.shape[0]):
        p = int(pos[t])
        where = np.arange(max(0, p - window + 1) if window else 0, p + 1)
        pages, cells = tables[slot[t]][where // PAGE], where % PAGE
        keys, values = k[pages, :, :, cells], v[pages, :, cells]  # (n, H_kv, D)
        for h in range(q.shape[1]):
            i = h // group
            s = keys[:, i] @ q[t, h] * scale
            slope = np.full_like(s, scale)
            if cap:
                slope = scale * (1 - np.tanh(s / cap) ** 2)
                s = cap * np.tanh(s / cap)
            e = np.exp(s - s.max())
            weights = e / e.sum()
            dp = values[:, i] @ g[t, h]
            ds = weights * (dp - weights @ dp) * slope
            dq[t, h] = ds @ keys[:, i]
            # one page may stand for several in a table
            np.add.at(dk, (pages, i, slice(None), cells), np.outer(ds, q[t, h]))  # type: ignore[arg-type]
            np.add.at(dv, (pages, i, cells), np.outer(weights, g[t, h]))
    return np.concatenate([x.reshape(-1, q.shape[2]) for x in (dq, dk, dv)])


@attention.vjp
def _(
    g: Tensor,
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    slot: Tensor,
    pos: Tensor,
    *sinks: Tensor,
    **attrs: Any,
) -> tuple[Tensor | None, ...]:
    require(not sinks, "attention", "there is no gradient with sinks", y, *sinks)
    require(len(pos.shape) == 1, "attention", "there is no gradient with two positions of a token", y, pos)
    return (*split_rows(attention_back(g, q, k, v, tables, slot, pos, **attrs), (q, k, v)), None, None, None)


def _back_case(r: np.random.Generator, *case: Any, **attrs: Any) -> Case:
    src, attributes = attention_case(r, *case, **attrs)
    return [r.normal(size=src[0].shape), *src], attributes


attention_back.case(_back_case, "f32/f32", 4, 2, 8)
attention_back.case(_back_case, "f16/f16", 8, 4, 16, window=20)
attention_back.case(_back_case, "f32/f32", 3, 1, 24, cap=5.0, window=5)


@op("pos i32 (T) in :limit", gives="i32 (2, T) in :limit, :limit + size", needs="size > 0")
def chunk_ends(pos: Array, *, size: int, limit: int) -> Array:
    """(2, T) i32: positions (T,) below `limit`, and the last position of each one's chunk of `size`.

    `attention` with a window of `size` that counts from there sees the chunk up to the position."""
    return np.stack([pos, pos // size * size + size - 1]).astype(np.int32)


@op("start i32 (T) in :length", gives="start in :length", needs="size > 0 and length > 0 and T % length == 0")
def chunk_starts(start: Array, *, length: int, size: int) -> Array:
    """(T,) i32: the first row of each row's chunk, whose text begins in row start (T,) of its window
    of `length` rows."""
    at = np.arange(len(start)) % length
    return (start + np.maximum(at - start, 0) // size * size).astype(np.int32)


chunk_ends.case(lambda r: ([np.array([0, 6, 7, 8, 13, 14, 7001, 0], np.int32)], {"size": 7, "limit": 7002}))
chunk_starts.case(
    lambda r: ([np.array([0, 0, 0, 3, 3, 3, 3, 0, 1, 1, 1, 1, 1, 6], np.int32)], {"length": 7, "size": 2})
)

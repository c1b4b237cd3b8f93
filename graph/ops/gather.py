"""Gather and scatter-add of rows by their indices, or by hashes of n-grams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.dtype import DTYPES
from logitless.graph.op import Array, Case, Weight, op


@op("table weight (N, K)", "ids i32 (T) in :N", gives="f32 (T, K)")
def get_rows(table: Array, ids: Array) -> Array:
    """table (N, K) at ids (T,), as f32 whatever the table's type."""
    return table[ids]


@op("rows f32 (T, …)", "ids i32 (T) in :n", gives="f32 (n, *rows.shape[1:])")
def add_rows(rows: Array, ids: Array, *, n: int) -> Array:
    """(n, K) of zeros with each of `rows` (T, K) added at its id."""
    out = np.zeros((n, *rows.shape[1:]), rows.dtype)
    np.add.at(out, ids, rows)
    return out


get_rows.vjp(lambda g, y, table, ids: (add_rows(g, ids, n=table.shape[0]), None))
add_rows.vjp(lambda g, y, rows, ids, n: (get_rows(g, ids), None))


@op("x f32 (n, …)", "rows f32 (T, …)", "ids i32 (T) in :n", gives="x", needs="rows.shape[1:] == x.shape[1:]")
def add_rows_to(x: Array, rows: Array, ids: Array) -> Array:
    """x (n, K) with each of `rows` (T, K) added at its id: `add_rows` and `add` without the zeros between them."""
    out = x.copy()
    np.add.at(out, ids, rows)
    return out


add_rows_to.vjp(lambda g, y, x, rows, ids: (g, get_rows(g, ids), None))
add_rows_to.inplace = (0,)


add_rows_to.case(lambda r: ([r.normal(size=(150, 9)), r.normal(size=(4, 9)), np.array([1, 140, 1, 0], np.int32)], {}))


add_rows.case(lambda r: ([r.normal(size=(3, 4)), np.array([1, 5, 1], np.int32)], {"n": 7}))
get_rows.case(lambda r: ([r.normal(size=(7, 3)), np.array([1, 5, 1], np.int32)], {}))


def _case(dtype: str) -> Callable[[np.random.Generator], Case]:
    ids = np.array([0, 36, 5, 17, 5], np.int32)
    return lambda r: ([Weight(r.normal(size=(37, 512)), dtype), ids], {})


for _dtype in (name for name in DTYPES if name not in ("i32", "u32") and not name.endswith("_act")):
    get_rows.case(_case(_dtype))


@op("table i32 (N, 1, K)", "ids i32 (T) in :N", gives="i32 (T, K) in :limit", needs="limit > 0")
def get_ids(table: Array, ids: Array, *, limit: int) -> Array:
    """table (N, 1, K) i32 at ids (T,): indices (T, K) below `limit`, the nearest for what is not."""
    return np.clip(table[ids, 0], 0, limit - 1)


@get_ids.case
def _(r: np.random.Generator) -> Case:
    return [r.integers(-1, 7, (9, 1, 3)).astype(np.int32), np.array([8, 0, 5, 8], np.int32)], {"limit": 6}


@op("tokens i32 (T)", gives="f32 (T, n)")
def token_columns(tokens: Array, *, n: int) -> Array:
    """(T, n): tokens (T,) plus 1 in each of n columns, as a short convolution keeps them; 0 stands for no token."""
    return np.repeat(tokens[:, None] + 1.0, n, axis=1)


token_columns.case(lambda r: ([np.array([0, 7, 151935], np.int32)], {"n": 2}))


@op(
    "tokens i32 (T)",
    "before f32 (T, M)",
    "hashes i32 (R)",
    gives="i32 (T * (R // 2 - M - 1),) in :n_rows",
    needs="R // 2 > M + 1 and (R // 2 - M - 1) % M == 0",
)
def ngram_rows(tokens: Array, before: Array, hashes: Array, *, n_rows: int, stop: int) -> Array:
    """Rows (T · H,) i32, of n_rows, by n-grams that end with tokens (T,): for n = 2 … N, H / (N − 1) hashes of each.

    before (T, N − 1): the tokens before, the nearest first, as `token_columns` has them. Behind a token `stop` or the
    beginning all are `stop`. hashes (2 · (N + H),): N factors of 64 bits, as words with the lower first; size and
    first row of H heads. A hash is tokens · factors, joined by exclusive or, modulo the head's size."""
    n = before.shape[1] + 1
    factors = np.ascontiguousarray(hashes[: 2 * n], np.int32).view(np.uint64)
    heads = hashes[2 * n :].reshape(-1, 2).astype(np.int64)
    context, cut = [tokens.astype(np.uint64)], np.zeros(len(tokens), bool)
    for column in before.T.astype(np.int64) - 1:
        cut = cut | (column < 0) | (column == stop)
        context.append(np.where(cut, stop, column).astype(np.uint64))
    products = [token * factor for token, factor in zip(context, factors, strict=True)]
    rows = []
    for h, (size, first) in enumerate(heads):
        mixed = np.bitwise_xor.reduce(products[: h * (n - 1) // len(heads) + 2])
        rows.append((mixed % np.uint64(size)).astype(np.int64) + first)
    return np.stack(rows, 1).reshape(-1).astype(np.int32)


@ngram_rows.case
def _(r: np.random.Generator) -> Case:
    before = np.array([[0, 0], [4, 0], [9, 4], [3, 9], [3, 3], [200000, 3]], np.float64)
    factors = [[0x7F4A7C15, -1640531527], [3, 0], [668265295, -1028477379]]
    heads = [[101, 0], [97, 101], [2**31 - 400, 198], [83, 287]]
    hashes = np.array(factors + heads, np.int32).reshape(-1)
    return [np.array([3, 8, 2, 2, 199999, 5], np.int32), before, hashes], {"n_rows": 2**31 - 1, "stop": 2}

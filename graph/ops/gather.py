"""Gather and scatter-add of rows by their indices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.dtype import DTYPES
from logitless.graph.op import Array, Case, Weight, op, require
from logitless.graph.tensor import Shape, Tensor


@op
def get_rows(table: Array, ids: Array) -> Array:
    """table (N, K) at ids (T,), as f32 whatever the table's type."""
    return table[ids]


get_rows.takes("table weight (N, K)", "ids i32 (T)")


@get_rows.shape
def _(table: Tensor, ids: Tensor) -> tuple[Shape, str]:
    require(len(table.shape) == 2 and len(ids.shape) == 1, "get_rows", "expected table (N, K) and ids (T,)", table, ids)
    require(ids.dtype == "i32", "get_rows", "ids must be i32", table, ids)
    return (*ids.shape, table.shape[1]), "f32"


@get_rows.vjp
def _(g: Tensor, y: Tensor, table: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
    return add_rows(g, ids, n=table.shape[0]), None


@op
def add_rows(rows: Array, ids: Array, *, n: int) -> Array:
    """(n, K) of zeros with each of `rows` (T, K) added at its id."""
    out = np.zeros((n, *rows.shape[1:]), rows.dtype)
    np.add.at(out, ids, rows)
    return out


add_rows.takes("rows f32 (T, …)", "ids i32 (T)")


@add_rows.shape
def _(rows: Tensor, ids: Tensor, n: int) -> tuple[Shape, str]:
    require(rows.shape[:1] == ids.shape, "add_rows", "expected one id for each row", rows, ids)
    return (n, *rows.shape[1:]), rows.dtype


@add_rows.vjp
def _(g: Tensor, y: Tensor, rows: Tensor, ids: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return get_rows(g, ids), None


@op
def add_rows_to(x: Array, rows: Array, ids: Array) -> Array:
    """x (n, K) with each of `rows` (T, K) added at its id: `add_rows` and `add` without the zeros between them."""
    out = x.copy()
    np.add.at(out, ids, rows)
    return out


add_rows_to.takes("x f32 (n, …)", "rows f32 (T, …)", "ids i32 (T)")


@add_rows_to.shape
def _(x: Tensor, rows: Tensor, ids: Tensor) -> tuple[Shape, str]:
    ok = rows.shape[:1] == ids.shape and rows.shape[1:] == x.shape[1:]
    require(ok, "add_rows_to", "expected x (n, K), rows (T, K) and one id for each row", x, rows, ids)
    return x.shape, x.dtype


@add_rows_to.vjp
def _(g: Tensor, y: Tensor, x: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
    return g, get_rows(g, ids), None


add_rows_to.inplace = (0,)


@add_rows_to.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(150, 9)), r.normal(size=(4, 9)), np.array([1, 140, 1, 0], np.int32)], {}


add_rows.case(lambda r: ([r.normal(size=(3, 4)), np.array([1, 5, 1], np.int32)], {"n": 7}))
get_rows.case(lambda r: ([r.normal(size=(7, 3)), np.array([1, 5, 1], np.int32)], {}))


def _case(dtype: str) -> Callable[[np.random.Generator], Case]:
    ids = np.array([0, 36, 5, 17, 5], np.int32)
    return lambda r: ([Weight(r.normal(size=(37, 512)), dtype), ids], {})


for _dtype in (name for name in DTYPES if name not in ("i32", "u32") and not name.endswith("_act")):
    get_rows.case(_case(_dtype))

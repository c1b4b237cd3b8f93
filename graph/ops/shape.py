"""Shape ops: reshape, slice and pad, as views of bytes where possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from logitless.graph.op import Array, op, require
from logitless.graph.tensor import Shape, Tensor


@op("x any")
def reshape(x: Array, *, shape: Shape) -> Array:
    """x in another shape of as many elements; one entry may be -1. Aliases x."""
    return x.reshape(shape)


@reshape.shape
def _(x: Tensor, shape: Shape) -> tuple[Shape, str]:
    total = x.size
    known = math.prod(n for n in shape if n != -1)
    ok = known > 0 and shape.count(-1) <= 1 and min(shape, default=1) >= -1
    full = tuple(total // known if n == -1 else n for n in shape) if ok else ()
    require(ok and math.prod(full) == total, "reshape", f"cannot become {shape}", x)
    return full, x.dtype


reshape.vjp(lambda g, y, x, shape: (reshape(g, shape=x.shape),))
reshape.case(lambda r: ([r.normal(size=(4, 6))], {"shape": (2, -1)}))


@op("x any (N, …)", gives="x (stop - start, *x.shape[1:])", needs="0 <= start < stop <= N")
def slice_rows(x: Array, *, start: int, stop: int) -> Array:
    """Rows start…stop of the first axis. Aliases its source."""
    return x[start:stop]


slice_rows.case(lambda r: ([r.normal(size=(6, 3))], {"start": 2, "stop": 5}))


def split_rows(x: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """Split the rows of x into tensors of the shapes of these."""
    result, start = [], 0
    for t in of:
        stop = start + t.size // x.shape[1]
        result.append(reshape(slice_rows(x, start=start, stop=stop), shape=t.shape))
        start = stop
    return result


@op("x f32 (N, …)", gives="f32 (before + N + after, *x.shape[1:])", needs="before >= 0 and after >= 0")
def pad_rows(x: Array, *, before: int, after: int) -> Array:
    """Zero rows before and after."""
    return np.pad(x, [(before, after)] + [(0, 0)] * (x.ndim - 1))


slice_rows.vjp(lambda g, y, x, start, stop: (pad_rows(g, before=start, after=x.shape[0] - stop),))
pad_rows.vjp(lambda g, y, x, before, after: (slice_rows(g, start=before, stop=before + x.shape[0]),))
pad_rows.case(lambda r: ([r.normal(size=(3, 4))], {"before": 2, "after": 1}))


@op("x any", "*others any", gives="x")
def after(x: Array, *others: Array) -> Array:
    """x, once the others are computed: an ordering that saves memory. Aliases x."""
    return x


after.vjp(lambda g, y, x, *others: (g, *(None for _ in others)))
after.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(3,))], {}))


@op("x any")
def detached(x: Array) -> Array:
    """x, without a gradient. Aliases x."""
    return x


detached.vjp(lambda g, y, x: (None,))
detached.case(lambda r: ([r.normal(size=(4, 6))], {}))

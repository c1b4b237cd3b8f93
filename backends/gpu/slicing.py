"""Strided copies: transposes, broadcasts, slices out of and into arrays, diagonals."""

from __future__ import annotations

import math

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import At, Dispatch, bits, dispatch, lower, lower_plain
from logitless.graph.dtype import DTYPES
from logitless.graph.tensor import Tensor, broadcast_strides, strides

WG, MAX_DIMS = 128, 4
Axes = tuple[int, ...]

# n elements in n0 × n1 × n2 × n3: from x_at + i·a to y_at + i·b, as words or (for `move_add`) added
# as floats.
for _name, _type, _how in (("move", "u32", "Y[to] = X[from]"), ("move_add", "f32", "Y[to] = Y[to] + X[from]")):
    Kernel(
        _name,
        f"{_type} X, {'w' if _name == 'move' else 'rw'} {_type} Y",
        "uint n n1 n2 n3 x_at y_at a0 a1 a2 a3 b0 b1 b2 b3",
        f"""
  FOR_EACH(i, n) {{
    uint i3 = i % n3, r = i / n3, i2 = r % n2; r /= n2;
    uint i1 = r % n1, i0 = r / n1;
    uint from = x_at + i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3, to = y_at + i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3;
    {_how};
  }}""",
        wg=WG,
    )
Kernel(
    "causal_mask",
    "f32 X, w f32 Y",
    "uint n rows columns past, float fill",
    "  FOR_EACH(i, n) Y[i] = i % columns > i / columns % rows + past ? fill : X[i];",
    wg=WG,
)

# Cells of a cache of f32: cell c of a page is its last axis (keys) or the one before (values).
Kernel(
    "zero_cells",
    "i32 CELLS, w f32 Y",
    "uint n heads size keys",
    """
  FOR_EACH(i, n) {
    uint d = i % size, h = i / size % heads, cell = UINT(CELLS[i / size / heads]), c = cell % 16u;
    uint at = (cell / 16u * heads + h) * size * 16u + (keys != 0u ? d * 16u + c : c * size + d);
    Y[at] = 0.0f;
  }""",
    wg=WG,
)


def _move(
    x: Tensor | At, y: Tensor | At, sizes: Axes, a: Axes, b: Axes, shape: Shape, at: tuple[int, int], name: str = "move"
) -> Dispatch:
    def four(values: Axes, fill: int) -> Axes:
        return (fill,) * (MAX_DIMS - len(values)) + values

    n, full = math.prod(sizes), four(sizes, 1)
    return dispatch(name, shape, (x, y), (n, *full[1:], *at, *four(a, 0), *four(b, 0)))


def _fits(*tensors: Tensor) -> bool:
    return all(len(t.shape) <= MAX_DIMS and DTYPES[t.dtype].nbytes == 4 and DTYPES[t.dtype].block == 1 for t in tensors)


@lower("transpose")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x = t.src[0]
    if not _fits(x):
        return None
    own = strides(x.shape)
    return [_move(x, t, t.shape, tuple(own[i] for i in t.attrs["axes"]), strides(t.shape), shape, (0, 0))]


@lower("broadcast_to")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    if not _fits(t):
        return None
    return [_move(t.src[0], t, t.shape, broadcast_strides(t.src[0].shape, t.shape), strides(t.shape), shape, (0, 0))]


@lower("take_block")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x = t.src[0]
    if not _fits(x):
        return None
    own = strides(x.shape)
    return [_move(x, t, t.shape, own, strides(t.shape), shape, (_offset(t, own), 0))]


def _offset(t: Tensor, steps: Axes) -> int:
    return sum(s * step for s, step in zip(t.attrs["start"], steps, strict=True))


def _into_block(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x, part = t.src
    if not _fits(x, part) or (t.op == "add_block" and t.dtype != "f32"):
        return None
    n, own = x.size, strides(x.shape)
    name = "move_add" if t.op == "add_block" else "move"
    whole = _move(x, t, (n,), (1,), (1,), shape, (0, 0))
    return [whole, _move(part, t, part.shape, strides(part.shape), own, shape, (0, _offset(t, own)), name)]


lower("set_block")(_into_block)
lower("add_block")(_into_block)


@lower("concat")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    if not _fits(*t.src):
        return None
    own, at, launches = strides(t.shape), 0, []
    for part in t.src:
        launches.append(_move(part, t, part.shape, strides(part.shape), own, shape, (0, at)))
        at += part.shape[1] * own[1]
    return launches


@lower("diagonal")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    n = t.shape[0]
    return [_move(t.src[0], t, (n,), (n + 1,), (1,), shape, (0, 0))] if _fits(t) else None


@lower("diag")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    n, x = t.shape[0], t.src[0]
    if not _fits(x):
        return None
    zeros = dispatch("fill", shape, (t,), (n * n, 0))
    return [zeros, _move(x, t, (n,), (1,), (n + 1,), shape, (0, 0))]


@lower("add_rows_to")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    x, rows, ids = t.src
    n = t.size
    k = n // t.shape[0]
    words = (k, rows.shape[0])
    return [_move(x, t, (n,), (1,), (1,), shape, (0, 0)), dispatch("add_rows", shape, (rows, ids, t), words)]


lower_plain(causal_mask=lambda x, T, S, past, fill, **_: (x.size, T, S, past, bits(fill)))


@lower("clear_cells")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    cache, cells = t.src
    if t.dtype != "f32":
        return None
    whole, keys = t.size, t.attrs["keys"]
    heads, size = t.shape[1], t.shape[2 if keys else 3]
    n = cells.shape[0] * heads * size
    return [
        _move(cache, t, (whole,), (1,), (1,), shape, (0, 0)),
        dispatch("zero_cells", shape, (cells, t), (n, heads, size, keys)),
    ]

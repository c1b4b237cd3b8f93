"""Transpose, slices of blocks (read, replace, add), causal mask and diagonals."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, op, require
from logitless.graph.ops.elementwise import broadcast_to
from logitless.graph.tensor import Shape, Tensor, const


@op("x word (…, _)")
def transpose(x: Array, *, axes: tuple[int, ...]) -> Array:
    """x with its axes in another order, as a copy (np.transpose)."""
    return np.ascontiguousarray(x.transpose(axes))


@transpose.shape
def _(x: Tensor, axes: tuple[int, ...]) -> tuple[Shape, str]:
    require(sorted(axes) == list(range(len(x.shape))), "transpose", f"axes {axes} do not fit", x)
    return tuple(x.shape[i] for i in axes), x.dtype


transpose.vjp(lambda g, y, x, axes: (transpose(g, axes=tuple(int(i) for i in np.argsort(axes))),))


for _axes in ((1, 0), (2, 0, 1), (0, 2, 1, 3), (3, 1, 0, 2)):
    transpose.case(lambda r, a: ([r.normal(size=(33, 4, 5, 6)[: len(a)])], {"axes": a}), _axes)


def _where(start: tuple[int, ...], shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def is_inside(x: Tensor, start: tuple[int, ...], shape: Shape) -> bool:
    """True for a block of this shape at `start` within x."""
    fits = len(start) == len(shape) == len(x.shape)
    return fits and all(s >= 0 and s + n <= m for s, n, m in zip(start, shape, x.shape, strict=True))


@op("x word (…, _)", gives="x shape", needs="is_inside(x, start, shape)")
def take_block(x: Array, *, start: tuple[int, ...], shape: Shape) -> Array:
    """A copy of the block of this shape that begins at `start`."""
    return x[_where(start, shape)].copy()


def take_columns(x: Tensor, start: int, n: int) -> Tensor:
    """(R, n) of x (R, K)."""
    return take_block(x, start=(0, start), shape=(x.shape[0], n))


@op("x word (…, _)", "part word (…, _)", gives="x", needs="is_inside(x, start, part.shape) and x.dtype == part.dtype")
def set_block(x: Array, part: Array, *, start: tuple[int, ...]) -> Array:
    """x with a block replaced (ggml's SET); of which gradients pass to what is left of x, and to the block."""
    out = x.copy()
    out[_where(start, part.shape)] = part
    return out


@set_block.vjp
def _(g: Tensor, y: Tensor, x: Tensor, part: Tensor, start: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    nothing = broadcast_to(const(0.0), shape=part.shape)
    return set_block(g, nothing, start=start), take_block(g, start=start, shape=part.shape)


@op("x f32 (…, _)", "part f32 (…, _)", gives="x", needs="is_inside(x, start, part.shape)")
def add_block(x: Array, part: Array, *, start: tuple[int, ...]) -> Array:
    """x with a block added to (ggml's ACC)."""
    out = x.copy()
    out[_where(start, part.shape)] += part
    return out


take_block.vjp(lambda g, y, x, start, shape: (add_block(broadcast_to(const(0.0), shape=x.shape), g, start=start),))
add_block.vjp(lambda g, y, x, part, start: (g, take_block(g, start=start, shape=part.shape)))
set_block.inplace = add_block.inplace = (0,)
BLOCKS: tuple[tuple[Shape, Shape, Shape], ...] = (
    ((40,), (3,), (20,)),
    ((5, 33), (1, 16), (3, 17)),
    ((4, 5, 6), (0, 2, 1), (4, 2, 5)),
    ((2, 3, 4, 5), (1, 0, 2, 1), (1, 3, 1, 3)),
)
for _whole, _start, _part in BLOCKS:
    take_block.case(lambda r, x, s, p: ([r.normal(size=x)], {"start": s, "shape": p}), _whole, _start, _part)
    for _put in (set_block, add_block):
        _put.case(lambda r, x, s, p: ([r.normal(size=x), r.normal(size=p)], {"start": s}), _whole, _start, _part)


@op("*parts word (…, _)")
def concat(*parts: Array) -> Array:
    """Arrays (n, m_i, …) side by side along the second axis (np.concatenate)."""
    return np.concatenate(parts, 1)


@concat.shape
def _(*parts: Tensor) -> tuple[Shape, str]:
    first = parts[0]
    alike = all(len(p.shape) > 1 and p.dtype == first.dtype for p in parts)
    alike = alike and len({(p.shape[0], *p.shape[2:]) for p in parts}) == 1
    require(alike, "concat", "parts differ beside their second axis", *parts)
    return (first.shape[0], sum(p.shape[1] for p in parts), *first.shape[2:]), first.dtype


@concat.vjp
def _(g: Tensor, y: Tensor, *parts: Tensor) -> tuple[Tensor | None, ...]:
    ends, rest = np.cumsum([p.shape[1] for p in parts]).tolist(), [0] * (len(y.shape) - 2)
    pairs = zip(parts, ends, strict=True)
    return tuple([take_block(g, start=(0, end - p.shape[1], *rest), shape=p.shape) for p, end in pairs])


concat.case(lambda r: ([r.normal(size=(5, n)) for n in (33, 64, 7)], {}))
concat.case(lambda r: ([r.normal(size=(3, n, 8)) for n in (2, 5)], {}))


@op("x f32 (…, T, S)", gives="x", needs="past >= 0")
def causal_mask(x: Array, *, fill: float, past: int = 0) -> Array:
    """x (…, T, S) with everything after column t + past of row t replaced by `fill` (−inf before a softmax, or 0)."""
    rows, columns = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    return np.where(columns > rows + past, fill, x)


causal_mask.vjp(lambda g, y, x, fill, past=0: (causal_mask(g, fill=0.0, past=past),))
causal_mask.inplace = (0,)


causal_mask.case(lambda r: ([r.normal(size=(2, 5, 9))], {"fill": 0.0, "past": 3}))
causal_mask.case(lambda r: ([r.normal(size=(33, 33))], {"fill": -5.0}))


@op("x word (n)", gives="x (n, n)")
def diag(x: Array) -> Array:
    """(n,) → (n, n) with x on the diagonal and zeros elsewhere."""
    return np.diag(x)


@op("x word (n, n)", gives="x (n,)")
def diagonal(x: Array) -> Array:
    """(n, n) → its diagonal (n,)."""
    return np.diagonal(x).copy()


diag.vjp(lambda g, y, x: (diagonal(g),))
diagonal.vjp(lambda g, y, x: (diag(g),))
diag.case(lambda r: ([r.normal(size=7)], {}))
diagonal.case(lambda r: ([r.normal(size=(7, 7))], {}))

"""Convolution and pooling of images (N, H, W, C): a convolution is a matrix product of patches."""

from __future__ import annotations

from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, op, require
from logitless.graph.ops.linear import linear
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Shape, Tensor


def conv2d(x: Tensor, w: Tensor, *, size: tuple[int, int], stride: int = 1, padding: int = 0) -> Tensor:
    """x (N, H, W, C) and w (C_out, height · width · C) → (N, H', W', C_out).

    H' = (H + 2·padding − height) // stride + 1, and so W'."""
    columns = patches(x, size=size, stride=stride, padding=padding)
    height, width = _out(x.shape, size, stride, padding)
    return reshape(linear(columns, w), shape=(x.shape[0], height, width, w.shape[0]))


def _out(shape: Shape, size: tuple[int, int], stride: int, padding: int) -> tuple[int, int]:
    return tuple((n + 2 * padding - k) // stride + 1 for n, k in zip(shape[1:3], size, strict=True))  # type: ignore[return-value]


def _places(shape: Shape, size: tuple[int, int], stride: int) -> list[tuple[int, int, slice, slice]]:
    """Each place within a patch, and where the (padded) image meets it."""
    height, width = _out(shape, size, stride, 0)
    return [
        (i, j, slice(i, i + stride * height, stride), slice(j, j + stride * width, stride))
        for i in range(size[0])
        for j in range(size[1])
    ]


@op("x f32 (N, H, W, C)")
def patches(x: Array, *, size: tuple[int, int], stride: int = 1, padding: int = 0) -> Array:
    """Every patch of an image as a row: (N, H, W, C) → (N · H' · W', height · width · C), zeros outside."""
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = _out(x.shape, size, stride, 0)
    out = np.empty((x.shape[0], height, width, *size, x.shape[3]), x.dtype)
    for i, j, rows, columns in _places(x.shape, size, stride):
        out[:, :, :, i, j] = x[:, rows, columns]
    return out.reshape(x.shape[0] * height * width, -1)


@patches.shape
def _(x: Tensor, size: tuple[int, int], stride: int = 1, padding: int = 0) -> tuple[Shape, str]:
    require(len(x.shape) == 4, "patches", "expected x (N, H, W, C)", x)
    return _rows("patches", x.shape, size, stride, padding, x), x.dtype


def _rows(name: str, shape: Shape, size: tuple[int, int], stride: int, padding: int, t: Tensor) -> Shape:
    """The shape of the patches of images of this shape; ValueError where they do not fit."""
    ok = len(shape) == 4 and min(size) > 0 and stride > 0 and padding >= 0
    height, width = _out(shape, size, stride, padding) if ok else (0, 0)
    require(height > 0 and width > 0, name, f"patches of {size} in steps of {stride} do not fit into {shape}", t)
    return shape[0] * height * width, size[0] * size[1] * shape[3]


@op("g f32 (_, _)")
def patches_back(g: Array, *, shape: Shape, size: tuple[int, int], stride: int = 1, padding: int = 0) -> Array:
    """Each patch added to where it came from: (N · H' · W', height · width · C) → (N, H, W, C) = shape."""
    n, h, w, c = shape
    out = np.zeros((n, h + 2 * padding, w + 2 * padding, c), g.dtype)
    height, width = _out(shape, size, stride, padding)
    g = g.reshape(n, height, width, *size, c)
    for i, j, rows, columns in _places(out.shape, size, stride):
        out[:, rows, columns] += g[:, :, :, i, j]
    return out[:, padding : padding + h, padding : padding + w]


patches.vjp(lambda g, y, x, **attrs: (patches_back(g, shape=x.shape, **attrs),))


@patches_back.shape
def _(g: Tensor, shape: Shape, size: tuple[int, int], stride: int = 1, padding: int = 0) -> tuple[Shape, str]:
    rows = _rows("patches_back", shape, size, stride, padding, g)
    require(g.shape == rows, "patches_back", f"the patches of {shape} have the shape {rows}", g)
    return shape, g.dtype


patches_back.vjp(lambda g, y, x, shape, **attrs: (patches(g, **attrs),))


@op("x f32 (N, H, W, C)", gives="f32 (N, H // size, W // size, C)", needs="0 < size <= min(H, W)")
def max_pool(x: Array, *, size: int) -> Array:
    """The largest of each size × size square: (N, H, W, C) → (N, H // size, W // size, C)."""
    n, h, w, c = x.shape
    x = x[:, : h // size * size, : w // size * size]
    return x.reshape(n, h // size, size, w // size, size, c).max((2, 4))


@op("g f32 (N, P, Q, C)", "x f32 (N, H, W, C)", gives="x", needs="size > 0 and (P, Q) == (H // size, W // size)")
def max_pool_back(g: Array, x: Array, *, size: int) -> Array:
    """g at the first largest element of each square, zeros elsewhere."""
    n, h, w, c = x.shape
    out = np.zeros_like(x)
    rows, columns = h // size, w // size
    squares = x[:, : rows * size, : columns * size].reshape(n, rows, size, columns, size, c)
    squares = squares.transpose(0, 1, 3, 5, 2, 4).reshape(n, rows, columns, c, size * size)
    first = squares.argmax(-1)
    i, p, q, k = np.indices(first.shape)
    out[i, p * size + first // size, q * size + first % size, k] = g
    return out


max_pool.vjp(lambda g, y, x, size: (max_pool_back(g, x, size=size),))


def _back_case(r: np.random.Generator, shape: Shape, **attrs: Any) -> Case:
    rows = patches.reference(np.zeros(shape), **attrs)
    return [r.normal(size=rows.shape)], {"shape": shape, **attrs}


def _pool_case(r: np.random.Generator, shape: Shape, size: int) -> Case:
    """Rounded numbers: some squares have two largest elements."""
    n, h, w, c = shape
    return [r.normal(size=(n, h // size, w // size, c)), r.normal(size=shape).round(1)], {"size": size}


for _shape, _attrs in (
    ((2, 7, 6, 3), {"size": (3, 3), "padding": 1}),
    ((3, 5, 5, 17), {"size": (2, 3)}),
    ((1, 9, 8, 2), {"size": (3, 3), "stride": 2, "padding": 1}),
):
    patches.case(lambda r, shape, **attrs: ([r.normal(size=shape)], attrs), _shape, **_attrs)
    patches_back.case(_back_case, _shape, **_attrs)
for _shape, _size in (((2, 7, 6, 5), 2), ((3, 14, 12, 29), 2), ((2, 7, 6, 5), 3)):
    max_pool.case(lambda r, shape, size: ([r.normal(size=shape)], {"size": size}), _shape, _size)
    max_pool_back.case(_pool_case, _shape, _size)

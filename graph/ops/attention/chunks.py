"""Bounds of chunked attention, where a token sees its own chunk of the sequence (Llama 4)."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, op, require
from logitless.graph.tensor import Shape, Tensor


@op
def chunk_ends(pos: Array, *, size: int, limit: int) -> Array:
    """(2, T) i32: positions (T,) below `limit`, and the last position of each one's chunk of `size`.

    `attention` with a window of `size` that counts from there sees the chunk up to the position."""
    return np.stack([pos, pos // size * size + size - 1]).astype(np.int32)


chunk_ends.takes("pos i32 (T)")


@chunk_ends.shape
def _(pos: Tensor, size: int, limit: int) -> tuple[Shape, str]:
    require(len(pos.shape) == 1 and pos.dtype == "i32" and size > 0, "chunk_ends", "expected pos (T,)", pos)
    return (2, *pos.shape), "i32"


@op
def chunk_starts(start: Array, *, length: int, size: int) -> Array:
    """(T,) i32: the first row of each row's chunk, whose text begins in row start (T,) of its window
    of `length` rows."""
    at = np.arange(len(start)) % length
    return (start + np.maximum(at - start, 0) // size * size).astype(np.int32)


chunk_starts.takes("start i32 (T)")


@chunk_starts.shape
def _(start: Tensor, length: int, size: int) -> tuple[Shape, str]:
    ok = len(start.shape) == 1 and start.dtype == "i32" and size > 0 and length > 0 and start.shape[0] % length == 0
    require(ok, "chunk_starts", f"expected start (T,) of windows of {length}", start)
    return start.shape, "i32"


chunk_ends.case(lambda r: ([np.array([0, 6, 7, 8, 13, 14, 7001, 0], np.int32)], {"size": 7, "limit": 7002}))
chunk_starts.case(
    lambda r: ([np.array([0, 0, 0, 3, 3, 3, 3, 0, 1, 1, 1, 1, 1, 6], np.int32)], {"length": 7, "size": 2})
)

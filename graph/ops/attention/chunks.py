"""Bounds of chunked attention, where a token sees its own chunk of the sequence (Llama 4)."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, op


@op("pos i32 (T)", gives="i32 (2, T)", needs="size > 0")
def chunk_ends(pos: Array, *, size: int, limit: int) -> Array:
    """(2, T) i32: positions (T,) below `limit`, and the last position of each one's chunk of `size`.

    `attention` with a window of `size` that counts from there sees the chunk up to the position."""
    return np.stack([pos, pos // size * size + size - 1]).astype(np.int32)


@op("start i32 (T)", gives="start", needs="size > 0 and length > 0 and T % length == 0")
def chunk_starts(start: Array, *, length: int, size: int) -> Array:
    """(T,) i32: the first row of each row's chunk, whose text begins in row start (T,) of its window
    of `length` rows."""
    at = np.arange(len(start)) % length
    return (start + np.maximum(at - start, 0) // size * size).astype(np.int32)


chunk_ends.case(lambda r: ([np.array([0, 6, 7, 8, 13, 14, 7001, 0], np.int32)], {"size": 7, "limit": 7002}))
chunk_starts.case(
    lambda r: ([np.array([0, 0, 0, 3, 3, 3, 3, 0, 1, 1, 1, 1, 1, 6], np.int32)], {"length": 7, "size": 2})
)

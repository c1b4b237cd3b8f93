"""Kernels of the bounds of chunked attention (graph/ops/attention/paged_attention.py)."""

from __future__ import annotations

from logitless.backends.cpu.kernels.ir.registry import i32p, kernel


@kernel("chunk_ends")
def chunk_ends(pos_at, y_at, n, size, begin, end, scratch):
    """Positions, and the last of each one's chunk. A unit is a token."""
    pos, y = i32p(pos_at), i32p(y_at)
    for t in range(begin, end):
        y[t] = pos[t]
        y[n + t] = pos[t] // size * size + size - 1


@kernel("chunk_starts")
def chunk_starts(start_at, y_at, length, size, begin, end, scratch):
    """First row of each row's chunk. A unit is a row."""
    start, y = i32p(start_at), i32p(y_at)
    for t in range(begin, end):
        y[t] = start[t] + max(t % length - start[t], 0) // size * size

"""Kernels of the bounds of chunked attention (graph/ops/attention/chunks.py)."""

from __future__ import annotations

from logitless.backends.cpu.kernels.ir.registry import i32p, kernel


@kernel("chunk_ends")
def chunk_ends():
    """Positions, and the last of each one's chunk. a: pos, y, T, size. A unit is a token."""

    def run(a, begin, end, scratch):
        pos, y, n, size = i32p(a[0]), i32p(a[1]), a[2], a[3]
        for t in range(begin, end):
            y[t] = pos[t]
            y[n + t] = pos[t] // size * size + size - 1

    return run


@kernel("chunk_starts")
def chunk_starts():
    """First row of each row's chunk. a: start, y, length, size. A unit is a row."""

    def run(a, begin, end, scratch):
        start, y, length, size = i32p(a[0]), i32p(a[1]), a[2], a[3]
        for t in range(begin, end):
            y[t] = start[t] + max(t % length - start[t], 0) // size * size

    return run

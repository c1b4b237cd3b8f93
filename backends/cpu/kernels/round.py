"""Rows rounded to bf16, in the order in which products read them (layout.py): `round_act:k` and `round_act:tiles`, and
`round_experts` where each row meets experts of its own.

Two numbers of 16 bits that lie beside each other are moved as the f32 that they would be together.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from backends.cpu.kernels.experts import panel_at
from backends.cpu.kernels.gemm import pack_rows
from backends.cpu.kernels.registry import f32p, kernel, u32p
from backends.cpu.kernels.tile import MT

STRETCH = 64  # pairs of a unit
LESS_THAN_HALF, INFINITE, QUIET = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x400000)
SIZE, UPPER, ONE, HALF = np.uint32(0x7FFFFFFF), np.uint32(0xFFFF0000), np.uint32(1), np.uint32(16)


@njit(forceinline=True)
def upper_bits(x):
    """Of an f32 its bits, rounded to the upper 16: to the nearest, of two the even one. NaN stays NaN."""
    rounded = np.uint32(x + LESS_THAN_HALF + ((x >> HALF) & ONE))
    return (x | QUIET if (x & SIZE) > INFINITE else rounded) & UPPER


@njit(forceinline=True)
def round_pairs(x, y, n, apart):
    """2·n numbers of x → n words, `apart` words apart."""
    source, out = u32p(x), u32p(y)
    for i in range(n):
        out[i * apart] = (upper_bits(source[2 * i]) >> HALF) | upper_bits(source[2 * i + 1])


@kernel("round_act")
def round_act(layout):
    """a: x (M, K), y, M, K. STRETCH pairs of all rows are a unit, or a tile, whose scratch is its rows, rounded."""

    def stretches(a, begin, end, scratch):
        m, pairs = a[2], a[3] // 2
        first, last = begin * STRETCH, min(pairs, end * STRETCH)
        for r in range(m):
            x, y = a[0] + (r * pairs + first) * 8, a[1] + (first * m + r) * 4
            if m == 1:
                round_pairs(x, y, last - first, 1)
            else:
                round_pairs(x, y, last - first, m)

    def tiles(a, begin, end, scratch):
        m, pairs = a[2], a[3] // 2
        for t in range(begin, end):
            rows = min(MT, m - t * MT)
            for r in range(rows):
                round_pairs(a[0] + (t * MT + r) * pairs * 8, scratch + r * pairs * 4, pairs, 1)
            y = a[1] + t * MT * pairs * 4
            pack_rows(scratch, pairs * 4, rows, pairs - 1, y)  # its last store reaches into the column that is left
            last = f32p(y + (pairs - 1) * MT * 4)
            for r in range(MT):
                last[r] = f32p(scratch + r * pairs * 4)[pairs - 1] if r < rows else np.float32(0)

    return stretches if layout == "k" else tiles


@kernel("round_experts")
def round_experts():
    """a: x, order, y (R, K), R, pairs of a row, R over x's rows (0: these are at their places). A place is a unit."""

    def run(a, begin, end, scratch):
        rows, pairs = a[3], a[4]
        for place in range(begin, end):
            first, panel, row = panel_at(a[1], place, rows, a[5])
            round_pairs(a[0] + row * pairs * 8, a[2] + (first * pairs + place - first) * 4, pairs, panel)

    return run

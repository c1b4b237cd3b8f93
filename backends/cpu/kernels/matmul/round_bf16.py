"""Rows rounded to bf16, in the order in which products read them (layout.py): `round_act:k` and `round_act:tiles`, and
`round_experts` where each row meets experts of its own.

Two numbers of 16 bits that lie beside each other are moved as the f32 that they would be together.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.registry import kernel, u32p
from logitless.backends.cpu.kernels.matmul.gemm import pack_whole_rows
from logitless.backends.cpu.kernels.matmul.gemm_tile import MT
from logitless.backends.cpu.kernels.matmul.moe_matmul import into_panels
from logitless.backends.cpu.kernels.matmul.quantize_activations import STRETCH

LESS_THAN_HALF, INFINITE, QUIET = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x400000)
SIZE, UPPER, ONE, HALF = np.uint32(0x7FFFFFFF), np.uint32(0xFFFF0000), np.uint32(1), np.uint32(16)


@njit(forceinline=True)
def upper_bits(x):
    """Of an f32 its bits, rounded to the upper 16: to the nearest, of two the even one. NaN stays NaN."""
    rounded = np.uint32(x + LESS_THAN_HALF + ((x >> HALF) & ONE))
    return (x | QUIET if (x & SIZE) > INFINITE else rounded) & UPPER


@njit(forceinline=True)
def round_pairs(x, y, stride, count):
    """2·count numbers of x → count words, `stride` bytes apart."""
    source, out = u32p(x), u32p(y)
    for i in range(count):
        out[i * (stride // 4)] = (upper_bits(source[2 * i]) >> HALF) | upper_bits(source[2 * i + 1])


@kernel("round_act")
def round_act(layout):
    """a: x (M, K), y, M, K. STRETCH pairs of all rows are a unit, or a tile, whose scratch is its rows, rounded."""

    def stretches(a, begin, end, scratch):
        m, pairs = a[2], a[3] // 2
        first, last = begin * STRETCH, min(pairs, end * STRETCH)
        for r in range(m):
            x, y = a[0] + (r * pairs + first) * 8, a[1] + (first * m + r) * 4
            round_pairs(x, y, m * 4, last - first)

    def tiles(a, begin, end, scratch):
        m, pairs = a[2], a[3] // 2
        for t in range(begin, end):
            rows = min(MT, m - t * MT)
            for r in range(rows):
                round_pairs(a[0] + (t * MT + r) * pairs * 8, scratch + r * pairs * 4, 4, pairs)
            pack_whole_rows(scratch, pairs * 4, rows, pairs, a[1] + t * MT * pairs * 4)

    return stretches if layout == "k" else tiles


@kernel("round_experts")
def round_experts():
    """into_panels (experts.py), pair by pair."""
    return into_panels(round_pairs, 8, 4)

"""Cast of activations to bf16, in the order that GEMMs read (layout.py).

`round_act:k` and `round_act:tiles` cast rows; `round_experts` sorts them by expert, too. Two
neighbouring bf16 are moved like one f32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.registry import kernel, u32p
from logitless.backends.cpu.kernels.matmul.gemm import pack_a_exact
from logitless.backends.cpu.kernels.matmul.gemm_tile import MT
from logitless.backends.cpu.kernels.matmul.moe_matmul import panel_packer
from logitless.backends.cpu.kernels.matmul.quantize_activations import K_CHUNK

LESS_THAN_HALF, INFINITY_BITS, QUIET_NAN = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x400000)
MAGNITUDE, UPPER_HALF, ONE, HALF = np.uint32(0x7FFFFFFF), np.uint32(0xFFFF0000), np.uint32(1), np.uint32(16)


@njit(forceinline=True)
def to_bf16(x):
    """Upper 16 bits of an f32, rounded to nearest even. NaN stays NaN."""
    rounded = np.uint32(x + LESS_THAN_HALF + ((x >> HALF) & ONE))
    return (x | QUIET_NAN if (x & MAGNITUDE) > INFINITY_BITS else rounded) & UPPER_HALF


@njit(forceinline=True)
def cast_pairs(x, y, stride, count):
    """Cast 2·count floats of x to `count` words, `stride` bytes apart."""
    source, out = u32p(x), u32p(y)
    for i in range(count):
        out[i * (stride // 4)] = (to_bf16(source[2 * i]) >> HALF) | to_bf16(source[2 * i + 1])


@kernel("round_act")
def round_act(layout):
    """Cast to bf16. A unit is K_CHUNK pairs of all rows, or a tile.

    Scratch of a tile: its rows as bf16.
    """

    def chunks(x_at, y_at, m, k, begin, end, scratch):
        pairs = k // 2
        first, last = begin * K_CHUNK, min(pairs, end * K_CHUNK)
        for r in range(m):
            x, y = x_at + (r * pairs + first) * 8, y_at + (first * m + r) * 4
            cast_pairs(x, y, m * 4, last - first)

    def tiles(x_at, y_at, m, k, begin, end, scratch):
        pairs = k // 2
        for t in range(begin, end):
            rows = min(MT, m - t * MT)
            for r in range(rows):
                cast_pairs(x_at + (t * MT + r) * pairs * 8, scratch + r * pairs * 4, 4, pairs)
            pack_a_exact(scratch, pairs * 4, rows, pairs, y_at + t * MT * pairs * 4)

    return chunks if layout == "k" else tiles


@kernel("round_experts")
def round_experts():
    """bf16 activations by expert (`panel_packer`), pair by pair."""
    return panel_packer(cast_pairs, 8, 4)

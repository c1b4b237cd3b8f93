"""Activations as the matmul reads them (layout.py): `quantize_act` to 8 bits, `pack_act` as they are, in panels.

NaN or inf in a block of 32 make its scale, and so the results that it enters, NaN or inf.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from backends.cpu.kernels.layout import ACT_BLOCK, ACT_HALF, ACT_OFFSET, ACT_SCALE, ACT_SUM
from backends.cpu.kernels.registry import bits_of, f32p, from_bits, i8p, i32p, kernel, max_f32, min_f32, rint_f32

TINY = np.float32(2.0**-100)  # blocks below this are zero: 127 / max would overflow
STRETCH = 64  # k of a unit of `pack_act`


@njit(forceinline=True)
def quantize_block(x, y, scale, inverse):
    q = i8p(y)
    for i in range(32):
        q[i] = np.int8(np.int32(min_f32(max_f32(rint_f32(x[i] * inverse), np.float32(-127)), np.float32(127))))
    first, second = np.int32(0), np.int32(0)
    for i in range(16):
        first += np.int32(q[i])
        second += np.int32(q[16 + i])
    f32p(y + ACT_SCALE)[0] = scale
    f32p(y + ACT_SUM)[0] = scale * np.float32(first + second)
    i32p(y + ACT_HALF)[0] = np.int32(-128) * first
    i32p(y + ACT_HALF)[1] = np.int32(-128) * second
    i32p(y + ACT_OFFSET)[0] = np.int32(-128) * (first + second)


@kernel("quantize_act")
def quantize_act(group_size):
    """a: x, y, m, blocks of a row, panel rows, panels. The blocks of 32 that share a scale are a unit.

    The scale of a group of 256 has the opposite sign of its first largest element, as in llama.cpp's q8_K: which way a
    tie is rounded depends on it.
    """
    group = int(group_size)
    n_blocks, signed = group // 32, group > 32

    def run(a, begin, end, scratch):
        m, count, panel_rows, n_panels = a[2], a[3], a[4], a[5]
        for unit in range(begin, end):
            x = f32p(a[0] + unit * group * 4)
            top = np.int32(0)  # of the bit patterns of |x|: they are ordered as the numbers, NaN above all
            for i in range(group):
                top = max(top, bits_of(x[i]) & np.int32(0x7FFFFFFF))
            largest = from_bits(top)
            if largest < TINY:
                scale, inverse = np.float32(0), np.float32(0)
            elif signed:
                first = 0
                while bits_of(x[first]) & np.int32(0x7FFFFFFF) != top:
                    first += 1
                inverse = np.float32(-127) / x[first]
                scale = np.float32(1) / inverse
            else:
                scale, inverse = largest / np.float32(127), np.float32(127) / largest
            row, block = unit * n_blocks // count, unit * n_blocks % count
            panel = min(row // panel_rows, n_panels - 1)
            r0 = panel * panel_rows
            rows = m - r0 if panel == n_panels - 1 else panel_rows
            for i in range(n_blocks):
                y = a[1] + (r0 * count + (block + i) * rows + row - r0) * ACT_BLOCK
                quantize_block(f32p(a[0] + (unit * group + i * 32) * 4), y, scale, inverse)

    return run


@kernel("pack_act")
def pack_act():
    """a: x, y, m, k, panel rows, panels. STRETCH elements of all rows of a panel are a unit."""

    def run(a, begin, end, scratch):
        m, k, panel_rows, n_panels = a[2], a[3], a[4], a[5]
        stretches = (k + STRETCH - 1) // STRETCH
        for unit in range(begin, end):
            panel, k0 = unit // stretches, unit % stretches * STRETCH
            r0 = panel * panel_rows
            rows = m - r0 if panel == n_panels - 1 else panel_rows
            x, y = f32p(a[0] + r0 * k * 4), f32p(a[1] + r0 * k * 4)
            for i in range(k0, min(k, k0 + STRETCH)):
                for r in range(rows):
                    y[i * rows + r] = x[r * k + i]

    return run

"""Activations to 8 bits: 32 values to a block of layout.py, one block a unit. NaN or inf make its scale NaN or inf."""

from __future__ import annotations

import numpy as np

from backends.cpu.kernels.layout import ACT_BLOCK, ACT_HALF, ACT_OFFSET, ACT_SCALE, ACT_SUM
from backends.cpu.kernels.registry import bits_of, f32p, from_bits, i8p, i32p, kernel, max_f32, min_f32, rint_f32

TINY = np.float32(2.0**-100)  # blocks below this are zero: 127 / max would overflow


@kernel("quantize_act")
def quantize_act():
    """a: x (f32), y (q8_act)."""

    def run(a, begin, end, scratch):
        for block in range(begin, end):
            x, y = f32p(a[0] + block * 128), a[1] + block * ACT_BLOCK
            q = i8p(y)
            top = np.int32(0)  # of the bit patterns of |x|: they are ordered as the numbers, NaN above all
            for i in range(32):
                top = max(top, bits_of(x[i]) & np.int32(0x7FFFFFFF))
            largest = from_bits(top)
            if largest < TINY:
                scale, inverse = np.float32(0), np.float32(0)
            else:
                scale, inverse = largest / np.float32(127), np.float32(127) / largest
            first, total = np.int32(0), np.int32(0)
            for i in range(32):
                v = min_f32(max_f32(rint_f32(x[i] * inverse), np.float32(-127)), np.float32(127))
                q[i] = np.int8(np.int32(v))
            for i in range(16):
                first += np.int32(q[i])
            for i in range(32):
                total += np.int32(q[i])
            f32p(y + ACT_SCALE)[0] = scale
            f32p(y + ACT_SUM)[0] = scale * np.float32(total)
            i32p(y + ACT_HALF)[0] = np.int32(-128) * first
            i32p(y + ACT_OFFSET)[0] = np.int32(-128) * total

    return run

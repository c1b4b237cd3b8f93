"""Rows of a table by number: `get_rows:<type>` decodes them from a packed weight, `get_rows:rows` copies plain ones."""

from __future__ import annotations

import numpy as np

from backends.cpu.kernels.layout import LAYOUTS
from backends.cpu.kernels.registry import bf16_to_f32, f16_to_f32, f32p, i8p, i32p, kernel, u8p, u16p


@kernel("get_rows")
def get_rows(dtype):
    """a: table, ids (i32), y (f32), row length, bytes of a packed group. A row is a unit."""
    if dtype == "rows":
        return copy_rows
    layout = LAYOUTS[dtype]
    if layout.block == 1:
        return float_rows(dtype)
    return quantised_rows(layout)


def copy_rows(a, begin, end, scratch):
    k = a[3]
    for t in range(begin, end):
        x, y = f32p(a[0] + i32p(a[1])[t] * k * 4), f32p(a[2] + t * k * 4)
        for i in range(k):
            y[i] = x[i]


def float_rows(dtype):
    def run(a, begin, end, scratch):
        k, group_nbytes = a[3], a[4]
        for t in range(begin, end):
            row = np.int64(i32p(a[1])[t])
            lane = row % 16
            group, y = a[0] + row // 16 * group_nbytes, f32p(a[2] + t * k * 4)
            for i in range(k):
                j = i * 16 + lane
                if dtype == "f32":
                    y[i] = f32p(group)[j]
                elif dtype == "f16":
                    y[i] = f16_to_f32(u16p(group)[j])
                else:
                    y[i] = bf16_to_f32(u16p(group)[j])

    return run


def quantised_rows(layout):
    block, quants, high, fine, coarse = layout.block, layout.quants, layout.high, layout.fine, layout.coarse
    mins = layout.mins
    offset = 0 if mins else 128 >> layout.shift

    def run(a, begin, end, scratch):
        k, group_nbytes = a[3], a[4]
        n_blocks = k // 32
        for t in range(begin, end):
            row = np.int64(i32p(a[1])[t])
            lane = row % 16
            group = a[0] + row // 16 * group_nbytes
            for i in range(n_blocks):
                y = f32p(a[2] + (t * k + i * 32) * 4)
                q = u8p(group + i * quants + lane * 4)
                h = u8p(group + n_blocks * quants + i * high + lane * 4)
                f = group + n_blocks * (quants + high) + i * fine + lane
                c = group + n_blocks * (quants + high + fine) + i * 32 // block * coarse + lane * 2
                d = f16_to_f32(u16p(c)[0])
                m = np.float32(0)
                if mins:
                    m = f16_to_f32(u16p(c)[16])
                    if fine:
                        d *= np.float32(u8p(f)[0])
                        m *= -np.float32(u8p(f)[16])
                for step in range(8):
                    scale = d * np.float32(i8p(f)[step // 4 * 16]) if high == 128 else d
                    for e in range(4):
                        if quants == 512:
                            v = np.int32(q[step * 64 + e])
                        else:
                            v = np.int32(q[step % 4 * 64 + e]) >> (step // 4 * 4) & 15
                            if high == 64:
                                v |= (np.int32(h[e]) >> step & 1) << 4
                            elif high == 128:
                                v |= (np.int32(h[step // 4 * 64 + e]) >> (step % 4 * 2) & 3) << 4
                        y[step * 4 + e] = scale * np.float32(v - offset) + m

    return run

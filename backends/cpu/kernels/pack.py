"""GGUF blocks to packed groups (layout.py): `pack:<type>`. A group of 16 rows is a unit; sources may be unaligned.

In GGUF a q4_0 … q5_1 block of 32 has element j and j+16 in the halves of byte j, which is our order too. The K types
hold 64 (q4_k, q5_k) or 128 (q6_k) elements side by side, and are taken apart into blocks of 32.
"""

from __future__ import annotations

from numba import njit

from backends.cpu.kernels.layout import LAYOUTS
from backends.cpu.kernels.registry import kernel, u8p, u16p, u32p


@kernel("pack")
def pack(dtype):
    """a: source, destination, n, k, bytes of a packed group."""
    layout = LAYOUTS[dtype]
    if layout.block == 1:
        return pack_floats(layout)
    block, source_nbytes = layout.block, layout.source
    fill = FILL[dtype](layout)

    def run(a, begin, end, scratch):
        n, k, group_nbytes = a[2], a[3], a[4]
        row_nbytes = k // block * source_nbytes
        for group in range(begin, end):
            out = a[1] + group * group_nbytes
            rows = min(16, n - group * 16)
            if rows < 16:
                zeros = u32p(out)
                for i in range(group_nbytes // 4):
                    zeros[i] = 0
            source = a[0] + group * 16 * row_nbytes
            for i in range(k // block):
                for r in range(rows):
                    fill(source + r * row_nbytes + i * source_nbytes, out, i, r, k // 32)

    return run


def pack_floats(layout):
    width = layout.source

    def run(a, begin, end, scratch):
        n, k, group_nbytes = a[2], a[3], a[4]
        for group in range(begin, end):
            out = a[1] + group * group_nbytes
            source = a[0] + group * 16 * k * width
            rows = min(16, n - group * 16)
            for i in range(k):
                for r in range(16):
                    if width == 4:
                        u32p(out)[i * 16 + r] = u32p(source)[r * k + i] if r < rows else 0
                    else:
                        u16p(out)[i * 16 + r] = u16p(source)[r * k + i] if r < rows else 0

    return run


def fill_q8_0(layout):
    """Block: f16 d, 32 i8."""

    @njit(inline="always")
    def fill(block, out, i, r, n_blocks):
        to = u32p(out + i * 512 + r * 4)
        q = u32p(block + 2)
        for step in range(8):
            to[step * 16] = q[step] ^ 0x80808080
        u16p(out + n_blocks * 512 + i * 32)[r] = u16p(block)[0]

    return fill


FILL = {"q8_0": fill_q8_0}
_ = u8p

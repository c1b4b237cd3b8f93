"""Activations as the matmul reads them (layout.py): `quantize_act` to 8 bits, `pack_act` as they are, in panels.

NaN or inf in a block of 32 make its scale, and so the results that it enters, NaN or inf.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.emit_math import tree
from backends.cpu.kernels.layout import ACT_BLOCK, ACT_HALF, ACT_OFFSET, ACT_SCALE, ACT_SUM
from backends.cpu.kernels.registry import f32p, from_bits, i32p, kernel

TINY = np.float32(2.0**-100)  # blocks below this are zero: 127 / max would overflow
ZERO = np.int32(e.DOT_ZERO)
STRETCH = 64  # k of a unit of `pack_act`


BITS = 0x7FFFFFFF  # of |x|


def largest_of(n):
    """intrinsic f(x): bits of the greatest |x| of n floats, and the first place where it stands, in the upper half."""

    @intrinsic
    def find(typingctx, x):
        def codegen(ctx, b, sig, args):
            X = b.inttoptr(args[0], e.I8P)
            sizes = [b.and_(e.load(b, e.at(b, X, 64 * i), e.V16I, 4), e.each(BITS)) for i in range(n // 16)]
            top = sizes[0]
            for v in sizes[1:]:  # the bit patterns are ordered as the numbers are, NaN above all
                top = b.select(b.icmp_signed(">", v, top), v, top)
            top = tree(b, top, lambda b, u, v: b.select(b.icmp_signed(">", v, u), v, u))
            place = ir.Constant(e.I32, 0)
            for i, v in reversed(list(enumerate(sizes))):
                here = b.zext(b.bitcast(b.icmp_signed("==", v, e.splat(b, top)), e.I16), e.I32)
                lane = b.cttz(here, ir.Constant(ir.IntType(1), 0))
                found = b.icmp_signed("!=", here, ir.Constant(e.I32, 0))
                place = b.select(found, b.add(lane, ir.Constant(e.I32, 16 * i)), place)
            both = b.shl(b.zext(place, e.I64), e.i64(32))
            return b.or_(both, b.zext(top, e.I64))

        return types.int64(types.int64), codegen

    return find


@intrinsic
def round_block(typingctx, x, y, inverse):
    """32 floats times `inverse` → int8; the sums of the first and (in the upper half) of the second 16."""

    def codegen(ctx, b, sig, args):
        X, Y = b.inttoptr(args[0], e.I8P), b.inttoptr(args[1], e.I8P)
        sums = []
        for i in range(2):
            v = b.fmul(e.load(b, e.at(b, X, 64 * i), e.V16F, 4), e.splat(b, args[2]))
            v = e.call(b, "llvm.rint.v16f32", e.V16F, [v])
            v = b.select(b.fcmp_ordered(">", v, e.each(-127.0)), v, e.each(-127.0))  # NaN becomes −127
            v = b.select(b.fcmp_ordered("<", v, e.each(127.0)), v, e.each(127.0))
            q = b.fptosi(v, e.V16I)
            e.store(b, b.trunc(q, e.V16I8), e.at(b, Y, 16 * i))
            sums.append(b.zext(tree(b, q, lambda b, u, v: b.add(u, v)), e.I64))
        return b.or_(sums[0], b.shl(sums[1], e.i64(32)))

    return types.int64(types.int64, types.int64, types.float32), codegen


@njit(forceinline=True)
def quantize_block(x, y, scale, inverse):
    sums = round_block(x, y, inverse)
    first, second = np.int32(sums & 0xFFFFFFFF), np.int32(sums >> 32)
    f32p(y + ACT_SCALE)[0] = scale
    f32p(y + ACT_SUM)[0] = scale * np.float32(first + second)
    i32p(y + ACT_HALF)[0] = ZERO - np.int32(128) * first
    i32p(y + ACT_HALF)[1] = ZERO - np.int32(128) * second
    i32p(y + ACT_OFFSET)[0] = ZERO - np.int32(128) * (first + second)


@njit(forceinline=True)
def panel_of(row, m, panel_rows, n_panels):
    """The first row of a row's panel, and how many rows the panel has."""
    panel = min(row // panel_rows, n_panels - 1)
    r0 = panel * panel_rows
    return r0, m - r0 if panel == n_panels - 1 else panel_rows


@kernel("quantize_act")
def quantize_act(group_size):
    """a: x, y, m, blocks of a row, panel rows, panels. The blocks of 32 that share a scale are a unit.

    The scale of a group of 256 has the opposite sign of its first largest element, as in llama.cpp's q8_K: which way a
    tie is rounded depends on it.
    """
    group = int(group_size)
    n_blocks, signed = group // 32, group > 32
    find = largest_of(group)

    def run(a, begin, end, scratch):
        m, count, panel_rows, n_panels = a[2], a[3], a[4], a[5]
        row, block = begin * n_blocks // count, begin * n_blocks % count  # divisions cost more than rounding a block
        r0, rows = panel_of(row, m, panel_rows, n_panels)
        for unit in range(begin, end):
            if block == count:
                row, block = row + 1, 0
                r0, rows = panel_of(row, m, panel_rows, n_panels)
            x = a[0] + unit * group * 4
            found = find(x)
            largest = from_bits(np.int32(found & 0x7FFFFFFF))
            if largest < TINY:
                scale, inverse = np.float32(0), np.float32(0)
            elif signed:
                inverse = np.float32(-127) / f32p(x)[found >> 32]
                scale = np.float32(1) / inverse
            else:
                scale, inverse = largest / np.float32(127), np.float32(127) / largest
            for i in range(n_blocks):
                y = a[1] + (r0 * count + (block + i) * rows + row - r0) * ACT_BLOCK
                quantize_block(x + i * 128, y, scale, inverse)
            block += n_blocks

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

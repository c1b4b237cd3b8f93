"""Activations as the matmul reads them (layout.py): `quantize_act` to 8 bits in panels, `pack_act` as they are.

NaN or inf in a block of 32 make its scale, and so the results that it enters, NaN or inf.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.int_dot import DOT_FLOAT, DOT_ZERO
from logitless.backends.cpu.kernels.ir.math import tree, trees
from logitless.backends.cpu.kernels.ir.registry import f32p, from_bits, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, ACT_SCALE

TINY = np.float32(2.0**-100)  # blocks below this are zero: 127 / max would overflow
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


def round_blocks(b, x, y, stride, scales, inverses):
    """Blocks of 32 floats, a lane of the scales for each → q8_act blocks `stride` bytes apart (layout.py).

    Added to 1.5 · 2^23 a number is rounded to an integer, ties to even, that stands in the low bits (DOT_ZERO).
    """
    count = scales.type.count
    lane = lambda v, i: b.extract_element(v, ir.Constant(e.I32, i))
    halves, places = [], [e.at(b, y, b.mul(stride, e.i64(i))) for i in range(count)]
    for n, place in enumerate(places):
        for i in range(2):
            v = b.fmul(e.load(b, e.at(b, x, 128 * n + 64 * i), e.V16F, 4), e.splat(b, lane(inverses, n)))
            halves.append(b.bitcast(b.fadd(v, e.each(DOT_FLOAT)), e.V16I))
            e.store(b, b.trunc(halves[-1], e.V16I8), e.at(b, place, 16 * i))
    words = ir.VectorType(e.I32, count)
    every = lambda value: ir.Constant(words, [value] * count)
    pick = lambda v, lanes: b.shuffle_vector(v, v, ir.Constant(ir.VectorType(e.I32, len(lanes)), lanes))
    sums = trees(b, halves, lambda b, u, v: b.add(u, v))
    first, second = (b.sub(pick(sums, list(range(i, 2 * count, 2))), every(16 * DOT_ZERO % 2**32)) for i in range(2))
    whole = b.add(first, second)
    starts = [b.sub(every(DOT_ZERO), b.shl(part, every(7))) for part in (whole, first, second)]
    columns = [b.bitcast(v, words) for v in (scales, b.sitofp(whole, scales.type))] + starts
    for n, place in enumerate(places):
        row = ir.Constant(ir.VectorType(e.I32, 4), ir.Undefined)
        for i, column in enumerate(columns[:4]):
            row = b.insert_element(row, lane(column, n), ir.Constant(e.I32, i))
        e.store(b, row, e.at(b, place, ACT_SCALE), 4)
        e.store(b, lane(columns[4], n), e.at(b, place, ACT_SCALE + 16), 4)


def round_each(n):
    """intrinsic f(x, y, stride): n blocks, a power of two, each with its own scale max|x| / 127."""
    kind = ir.VectorType(e.F32, n)
    constant = lambda value: ir.Constant(kind, [value] * n)

    @intrinsic
    def quantize(typingctx, x, y, stride):
        def codegen(ctx, b, sig, args):
            X, Y = (b.inttoptr(v, e.I8P) for v in args[:2])
            larger = lambda b, u, v: b.select(b.icmp_signed(">", v, u), v, u)
            sizes = [b.and_(e.load(b, e.at(b, X, 64 * i), e.V16I, 4), e.each(BITS)) for i in range(2 * n)]
            pairs = [larger(b, u, v) for u, v in zip(sizes[::2], sizes[1::2], strict=True)]
            top = b.bitcast(trees(b, pairs, larger), kind)
            tiny = b.fcmp_ordered("<", top, constant(TINY))
            scales = b.select(tiny, constant(0.0), b.fdiv(top, constant(127.0)))
            inverses = b.select(tiny, constant(0.0), b.fdiv(constant(127.0), top))
            round_blocks(b, X, Y, args[2], scales, inverses)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return quantize


def round_alike(n):
    """intrinsic f(x, y, stride, scale, inverse): n blocks, a power of two, of one scale."""

    @intrinsic
    def quantize(typingctx, x, y, stride, scale, inverse):
        def codegen(ctx, b, sig, args):
            X, Y = (b.inttoptr(v, e.I8P) for v in args[:2])
            round_blocks(b, X, Y, args[2], *(e.splat(b, v, n) for v in args[3:]))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, types.float32), codegen

    return quantize


@njit(forceinline=True)
def panel_of(row, m, panel_rows, n_panels):
    """The first row of a row's panel, and how many rows the panel has."""
    panel = min(row // panel_rows, n_panels - 1)
    r0 = panel * panel_rows
    return r0, m - r0 if panel == n_panels - 1 else panel_rows


def row_rounder(group):
    """f(x, y, stride, count): a row of `count` blocks of 32 floats → q8_act blocks; `group` elements share a scale.

    The scale of a group of 256 has the opposite sign of its first largest element, as in llama.cpp's q8_K: which way a
    tie is rounded depends on it.
    """
    signed = group > 32
    find = largest_of(group)
    round4, round1, alike = round_each(4), round_each(1), round_alike(8)

    @njit(forceinline=True)
    def round_row(x, y, stride, count):
        block = 0
        while block < count:
            if signed:
                found = find(x)
                largest = from_bits(np.int32(found & 0x7FFFFFFF))
                scale, inverse = np.float32(0), np.float32(0)
                if not largest < TINY:
                    inverse = np.float32(-127) / f32p(x)[found >> 32]
                    scale = np.float32(1) / inverse
                alike(x, y, stride, scale, inverse)
                done = 8
            elif count - block >= 4:
                round4(x, y, stride)
                done = 4
            else:
                round1(x, y, stride)
                done = 1
            block, x, y = block + done, x + done * 128, y + done * stride

    return round_row


@kernel("quantize_act")
def quantize_act(group_size):
    """a: x, y, m, blocks of a row, panel rows, panels. A row is a unit; `group_size` elements share a scale."""
    round_row = row_rounder(int(group_size))

    def run(a, begin, end, scratch):
        m, count, panel_rows, n_panels = a[2], a[3], a[4], a[5]
        for row in range(begin, end):
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            y = a[1] + (r0 * count + row - r0) * ACT_BLOCK
            round_row(a[0] + row * count * 128, y, rows * ACT_BLOCK, count)

    return run


@kernel("pack_act")
def pack_act():
    """a: x, y, m, k. STRETCH elements of all rows are a unit."""

    def run(a, begin, end, scratch):
        m, k = a[2], a[3]
        x, y = f32p(a[0]), f32p(a[1])
        for i in range(begin * STRETCH, min(k, end * STRETCH)):
            for r in range(m):
                y[i * m + r] = x[r * k + i]

    return run

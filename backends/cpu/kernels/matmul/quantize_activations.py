"""Packing of activations (layout.py): `quantize_act` to int8 panels, `pack_act` as f32.

NaN or inf in a block of 32 makes its scale NaN or inf, and so every result that uses it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.dot import DOT_FLOAT, DOT_ZERO
from logitless.backends.cpu.kernels.ir.math import tree, trees
from logitless.backends.cpu.kernels.ir.registry import f32p, from_bits, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, ACT_SCALE

TINY = np.float32(2.0**-100)  # smaller blocks become zero: 127 / max would overflow
K_CHUNK = 64  # k of a unit of `pack_act`
BITS = 0x7FFFFFFF  # mask of |x|


def abs_max_of(n):
    """intrinsic f(x): bits of the greatest |x| of n floats; its first index in the upper half."""

    @intrinsic
    def find(typingctx, x):
        def codegen(ctx, b, sig, args):
            X = b.inttoptr(args[0], e.I8P)
            magnitudes = [b.and_(e.load(b, e.at(b, X, 64 * i), e.V16I, 4), e.constant(BITS)) for i in range(n // 16)]
            top = magnitudes[0]
            for v in magnitudes[1:]:  # bit patterns are ordered like the numbers, NaN above all
                top = b.select(b.icmp_signed(">", v, top), v, top)
            top = tree(b, top, lambda b, u, v: b.select(b.icmp_signed(">", v, u), v, u))
            place = ir.Constant(e.I32, 0)
            for i, v in reversed(list(enumerate(magnitudes))):
                here = b.zext(b.bitcast(b.icmp_signed("==", v, e.splat(b, top)), e.I16), e.I32)
                lane = b.cttz(here, ir.Constant(ir.IntType(1), 0))
                any_lane = b.icmp_signed("!=", here, ir.Constant(e.I32, 0))
                place = b.select(any_lane, b.add(lane, ir.Constant(e.I32, 16 * i)), place)
            index = b.shl(b.zext(place, e.I64), e.i64(32))
            return b.or_(index, b.zext(top, e.I64))

        return types.int64(types.int64), codegen

    return find


def quantize_blocks(b, x, y, stride, scales, inverses):
    """Quantise blocks of 32 floats, with one lane of scales each, to q8_act blocks `stride` bytes
    apart.

    Added to 1.5 · 2^23, a number is rounded to an integer, ties to even, in the low bits
    (DOT_ZERO).
    """
    count = scales.type.count
    lane = lambda v, i: b.extract_element(v, ir.Constant(e.I32, i))
    rounded, places = [], [e.at(b, y, b.mul(stride, e.i64(i))) for i in range(count)]
    for n, place in enumerate(places):
        for i in range(2):
            v = b.fmul(e.load(b, e.at(b, x, 128 * n + 64 * i), e.V16F, 4), e.splat(b, lane(inverses, n)))
            rounded.append(b.bitcast(b.fadd(v, e.constant(DOT_FLOAT)), e.V16I))
            e.store(b, b.trunc(rounded[-1], e.V16I8), e.at(b, place, 16 * i))
    words = ir.VectorType(e.I32, count)
    every = lambda value: ir.Constant(words, [value] * count)
    pick = lambda v, lanes: b.shuffle_vector(v, v, ir.Constant(ir.VectorType(e.I32, len(lanes)), lanes))
    sums = trees(b, rounded, lambda b, u, v: b.add(u, v))
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


def block_quantizer(n):
    """intrinsic f(x, y, stride): n blocks (a power of two), each with its own scale max|x| / 127."""
    kind = ir.VectorType(e.F32, n)
    constant = lambda value: ir.Constant(kind, [value] * n)

    @intrinsic
    def quantize(typingctx, x, y, stride):
        def codegen(ctx, b, sig, args):
            X, Y = (b.inttoptr(v, e.I8P) for v in args[:2])
            larger = lambda b, u, v: b.select(b.icmp_signed(">", v, u), v, u)
            magnitudes = [b.and_(e.load(b, e.at(b, X, 64 * i), e.V16I, 4), e.constant(BITS)) for i in range(2 * n)]
            pairs = [larger(b, u, v) for u, v in zip(magnitudes[::2], magnitudes[1::2], strict=True)]
            top = b.bitcast(trees(b, pairs, larger), kind)
            tiny = b.fcmp_ordered("<", top, constant(TINY))
            scales = b.select(tiny, constant(0.0), b.fdiv(top, constant(127.0)))
            inverses = b.select(tiny, constant(0.0), b.fdiv(constant(127.0), top))
            quantize_blocks(b, X, Y, args[2], scales, inverses)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return quantize


def group_quantizer(n):
    """intrinsic f(x, y, stride, scale, inverse): n blocks (a power of two) with one scale."""

    @intrinsic
    def quantize(typingctx, x, y, stride, scale, inverse):
        def codegen(ctx, b, sig, args):
            X, Y = (b.inttoptr(v, e.I8P) for v in args[:2])
            quantize_blocks(b, X, Y, args[2], *(e.splat(b, v, n) for v in args[3:]))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, types.float32), codegen

    return quantize


@njit(forceinline=True)
def panel_of(row, m, panel_rows, n_panels):
    """First row of a row's panel, and the number of its rows."""
    panel = min(row // panel_rows, n_panels - 1)
    r0 = panel * panel_rows
    return r0, m - r0 if panel == n_panels - 1 else panel_rows


def row_quantizer(group):
    """f(x, y, stride, count): quantise a row of `count` blocks; `group` elements share a scale.

    The scale of a group of 256 has the opposite sign of its first largest element, as in
    llama.cpp's q8_K: the sign decides how a tie is rounded.
    """
    signed = group > 32
    abs_max = abs_max_of(group)
    quantize4, quantize1, quantize_group = block_quantizer(4), block_quantizer(1), group_quantizer(8)

    @njit(forceinline=True)
    def quantize_row(x, y, stride, count):
        block = 0
        while block < count:
            if signed:
                packed_max = abs_max(x)
                largest = from_bits(np.int32(packed_max & 0x7FFFFFFF))
                scale, inverse = np.float32(0), np.float32(0)
                if not largest < TINY:
                    inverse = np.float32(-127) / f32p(x)[packed_max >> 32]
                    scale = np.float32(1) / inverse
                quantize_group(x, y, stride, scale, inverse)
                n_blocks = 8
            elif count - block >= 4:
                quantize4(x, y, stride)
                n_blocks = 4
            else:
                quantize1(x, y, stride)
                n_blocks = 1
            block, x, y = block + n_blocks, x + n_blocks * 128, y + n_blocks * stride

    return quantize_row


@kernel("quantize_act")
def quantize_act(group_size):
    """Quantise activations. A unit is a row.

    `group_size` elements share a scale.
    """
    quantize_row = row_quantizer(int(group_size))

    def run(x_at, y_at, m, count, panel_rows, n_panels, begin, end, scratch):
        for row in range(begin, end):
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            y = y_at + (r0 * count + row - r0) * ACT_BLOCK
            quantize_row(x_at + row * count * 128, y, rows * ACT_BLOCK, count)

    return run


@kernel("pack_act")
def pack_act(x_at, y_at, m, k, begin, end, scratch):
    """Pack f32 activations. A unit is K_CHUNK elements of all rows."""
    x, y = f32p(x_at), f32p(y_at)
    for i in range(begin * K_CHUNK, min(k, end * K_CHUNK)):
        for r in range(m):
            y[i * m + r] = x[r * k + i]

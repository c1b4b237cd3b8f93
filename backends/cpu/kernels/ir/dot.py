"""Dot products: int8 on every ISA with the same bits, and bf16 pairs (AVX512-BF16).

Integer dots multiply quants (matmul/layout.py) by int8 activations. A dot starts at the bits of 1.5
· 2^23. Within ±2^22 around it, adding n to the bits adds n to the float, so a sum of integers is a
float without a conversion."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from logitless.backends.cpu.kernels.ir.builder import (
    I8,
    I32,
    I64,
    V16F,
    V16I,
    V16I16,
    at,
    call,
    concat,
    constant,
    extract_lanes,
    fma,
    load,
    splat,
)
from logitless.backends.cpu.kernels.ir.grid import trit_place
from logitless.backends.host import NEON, isa

DOT_FLOAT, DOT_ZERO = 1.5 * 2**23, 0x4B400000

V2L, V4I, V8I = ir.VectorType(I64, 2), ir.VectorType(I32, 4), ir.VectorType(I32, 8)
V16B, V32B, V64B = ir.VectorType(I8, 16), ir.VectorType(I8, 32), ir.VectorType(I8, 64)
HALVES = range(2)  # of a vector, with 32-byte registers
QUARTERS = range(4)  # with 16-byte registers
FLIP = -0x7F7F7F80  # 0x80 in each byte: unsigned bytes minus 128, as signed ones


def dots_take_signed():
    """True when dots take signed bytes, or nearly so (AVX2).

    Quants then stay as small as they are, and those of 8 bits lose their 128 (codes have none)."""
    return isa() in ("avx2", *NEON)


def uses_matrices():
    """True where products of small matrices replace the dots of several rows (NEON's smmla)."""
    return isa() == "neon_i8mm"


def late_shift(layout, step, *, lone=False):
    """Bits by which the dots of a step are shifted instead of its quants.

    On AVX2 two products have to fit into 16 bits, on NEON quants into 7. For a `lone` row, quants
    stay at one of two places in a byte everywhere, and its chain of dots becomes two short ones."""
    if dots_take_signed():
        return layout.shift
    if not lone or layout.codes or layout.grid:
        return 0
    in_place = layout.shift - trit_place(step) if layout.trits else layout.shift_left(step)
    return max(0, in_place) % (2 * layout.low_bits)


def pair_room(bits):
    """AVX2: steps whose pairs of products, of quants of so many bits, have a sum that fits into 16 bits."""
    return (1 << 15) // (2 * 127 * ((1 << bits) - 1)) or 1


def start_of(b, layout, offset, *, signed=False):
    """Start value of dots of unsigned quants, or with `signed` of those that are signed bytes where they have 8 bits,
    in 16 lanes; `offset`: see DotAccumulator."""
    if layout.mins or (signed and layout.bits == 8):
        return constant(DOT_ZERO)
    if layout.zero == 64:
        zero = ir.Constant(I32, DOT_ZERO)
        offset = b.add(b.ashr(b.sub(offset, zero), ir.Constant(I32, 1)), zero)
    return splat(b, offset)


class DotAccumulator:
    """Accumulator of integer dots: 16 lanes of weight bytes times bytes of one activation row.

    `offset` (i32) is the start value for quants that are biased by 128: DOT_ZERO − 128·sum(x);
    half of that sum is for those biased by 64.

    AVX2 adds `pairs` of products in 16 bits as long as there is `room`, then widens them to 32
    bits; 4-bit quants fit a whole block. 8-bit quants do not even fit once (2·255·127), so |q| is
    multiplied by x with q's sign. NEON multiplies signed bytes."""

    def __init__(self, b, layout, offset):
        self.b, self.biased = b, not layout.codes
        self.signed = dots_take_signed() and layout.bits == 8
        start = start_of(b, layout, offset, signed=self.signed)
        self.sums = {0: start}  # by left shift
        self.room = pair_room(layout.bits)
        self.pairs, self.n_pending = [], 0

    def add(self, u, x, late):
        """Add the products of 4 unsigned bytes of u per lane and the 4 signed bytes of the i32 x.

        The sum is shifted left by `late` at the end."""
        b = self.b
        if isa() != "avx2":
            u = b.xor(u, constant(FLIP)) if self.signed and self.biased else u
            self.sums[late] = dot_step(b, self.sums.get(late, constant(0)), u, x)
            return
        xs = splat(b, x)
        if self.signed:
            u, xs = transfer_sign(b, b.xor(u, constant(FLIP)) if self.biased else u, xs)
        self.pairs = add_pairs(b, self.pairs, u, xs)
        self.n_pending += 1
        self.late = late  # the same for all quants of a dtype here
        if self.n_pending == self.room:
            self._flush()

    def value(self):
        """Bits of the float DOT_FLOAT + the dot."""
        self._flush()
        whole = self.sums[0]
        for late in sorted(self.sums)[1:]:
            whole = self.b.add(self.b.shl(self.sums[late], constant(late)), whole)
        return whole

    def _flush(self):
        if self.n_pending:
            self.sums[0] = self.b.add(self.sums[0], widen_pairs(self.b, self.pairs, self.late))
            self.pairs, self.n_pending = [], 0


def dot_step(b, dot, u, x):
    """dot + the products of 4 bytes per lane, on all but AVX2; NEON takes u as signed."""
    if isa() == "plain":
        for t in range(4):
            xt = b.ashr(b.shl(x, ir.Constant(I32, 24 - 8 * t)), ir.Constant(I32, 24))
            ut = b.and_(b.lshr(u, constant(8 * t)), constant(255))
            dot = b.add(dot, b.mul(ut, splat(b, xt)))
        return dot
    xs = splat(b, x)
    if isa() == "avx512_vnni":
        t = _operand(V16I, V64B)
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, [dot, b.bitcast(u, t), b.bitcast(xs, t)])
    if isa() in NEON:
        quarters = [
            (extract_lanes(b, dot, q, 4), *(b.bitcast(extract_lanes(b, v, q, 4), V16B) for v in (u, xs)))
            for q in QUARTERS
        ]
        sums = [call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", V4I, quarter) for quarter in quarters]
        return concat(b, sums)
    t = _operand(V8I, V32B)
    halves = [[_half(b, dot, h), b.bitcast(_half(b, u, h), t), b.bitcast(_half(b, xs, h), t)] for h in HALVES]
    return concat(b, [call(b, "llvm.x86.avx512.vpdpbusd.256", V8I, half) for half in halves])


def pair_steps(b, layout, u, v):
    """NEON: the bytes of two steps as two vectors of 8 outputs times 8 k, signed."""
    if layout.bits == 8 and not layout.codes:
        u, v = (b.xor(x, constant(FLIP)) for x in (u, v))
    return [b.shuffle_vector(u, v, _lanes(*(i for k in range(8 * h, 8 * h + 8) for i in (k, 16 + k)))) for h in HALVES]


def matrix_dots(b, quants_at, xs, steps, left):
    """NEON: dots of rows, an even number, with the expanded quants at an address, shifted left.

    One instruction multiplies two rows by two outputs, of 8 k each. Half of the outputs at a time, since both need
    registers for their sums."""
    dots = [[] for _ in xs]
    for half in HALVES:
        sums = [[ir.Constant(V4I, None)] * 4 for _ in xs[::2]]
        for p in range(steps.start // 2, steps.stop // 2):
            quants = [load(b, at(b, quants_at, 128 * p + 64 * half + 16 * c), V16B) for c in QUARTERS]
            for j, of_pair in enumerate(sums):
                x = ir.Constant(V2L, ir.Undefined)
                for i, row in enumerate(xs[2 * j : 2 * j + 2]):
                    x = b.insert_element(x, load(b, at(b, row, 8 * p), I64, 4), ir.Constant(I32, i))
                x = b.bitcast(x, V16B)
                name = "llvm.aarch64.neon.smmla.v4i32.v16i8"
                sums[j] = [call(b, name, V4I, [s, x, q]) for s, q in zip(of_pair, quants, strict=True)]
        for j, of_pair in enumerate(sums):
            for i in range(2):  # [row, output] of each product, from which a row's are taken
                lanes = _lanes(2 * i, 2 * i + 1, 4 + 2 * i, 5 + 2 * i)
                dots[2 * j + i] += [b.shuffle_vector(*of_pair[c : c + 2], lanes) for c in (0, 2)]
    return [b.shl(concat(b, parts), constant(left)) if left else concat(b, parts) for parts in dots]


def _lanes(*indices):
    return ir.Constant(ir.VectorType(I32, len(indices)), list(indices))


def pair_products(b, u, xs):
    """AVX2: sums of two neighbouring products in 16 bits, of each half."""
    halves = [[b.bitcast(_half(b, v, h), V32B) for v in (u, xs)] for h in HALVES]
    return [call(b, "llvm.x86.avx2.pmadd.ub.sw", V16I16, half) for half in halves]


def add_pairs(b, pairs, u, xs):
    """AVX2: sums of pairs, two halves of 16 bits each, plus the products of a step; []: there are no sums yet."""
    products = pair_products(b, u, xs)
    return [b.add(p, q) for p, q in zip(pairs, products, strict=True)] if pairs else products


def widen_pairs(b, pairs, left):
    """AVX2: sums of neighbouring pairs in 32 bits, shifted left."""
    factors = ir.Constant(V16I16, [1 << left] * 16)
    return concat(b, [call(b, "llvm.x86.avx2.pmadd.wd", V8I, [half, factors]) for half in pairs])


def transfer_sign(b, u, xs):
    """AVX2: |u| of signed bytes, and xs with the sign of u."""
    magnitudes, signed = [], []
    for h in HALVES:
        q, xh = (b.bitcast(_half(b, v, h), V32B) for v in (u, xs))
        magnitudes.append(b.bitcast(call(b, "llvm.abs.v32i8", V32B, [q, ir.Constant(ir.IntType(1), 0)]), V8I))
        signed.append(b.bitcast(call(b, "llvm.x86.avx2.psign.b", V32B, [xh, q]), V8I))
    return concat(b, magnitudes), concat(b, signed)


def peak_step(b, dot, x):
    """Step of the fastest dots alone, for kernels/runtime/peaks.py; `dot` serves as the quants."""
    if isa() != "avx2":
        return dot_step(b, dot, dot, x)
    pairs = [b.bitcast(_half(b, dot, h), V16I16) for h in HALVES]
    sums = [b.add(p, q) for p, q in zip(pairs, pair_products(b, dot, splat(b, x)), strict=True)]
    return concat(b, [b.bitcast(s, V8I) for s in sums])


def scaled_dot(b, dot, scale):
    """A dot's value times a scale of at most 22 significant bits, rounded once, unconverted."""
    if isa() == "plain":  # without FMA the large zero would swallow the dot
        return b.fmul(b.fsub(b.bitcast(dot, V16F), constant(DOT_FLOAT)), scale)
    return fma(b, b.bitcast(dot, V16F), scale, b.fmul(scale, constant(-DOT_FLOAT)))


def dot_value(b, start):
    """A dot's start value (i32 bits) as the float that it adds, in 16 lanes."""
    return b.fsub(b.bitcast(splat(b, start), V16F), constant(DOT_FLOAT))


def accumulate_scaled(b, acc, dot, scale):
    """acc + (DOT_FLOAT + a dot) · scale, rounded once. `subtract_zeros` subtracts the DOT_FLOATs later."""
    return fma(b, b.bitcast(dot, V16F), scale, acc)


def accumulate_exact(b, acc, dot, scale):
    """acc + a dot · scale, rounded once. For small quants: beside their dots, a rounding to ones is not small."""
    return fma(b, b.fsub(b.bitcast(dot, V16F), constant(DOT_FLOAT)), scale, acc)


def subtract_zeros(b, acc, scales):
    """Sum of accumulated dots without their DOT_FLOATs; `scales` is the sum of their scales."""
    return fma(b, scales, constant(-DOT_FLOAT), acc)


def _operand(words, octets):
    return octets if llvm.llvm_version_info[0] >= 22 else words


def _half(b, value, h):
    return extract_lanes(b, value, h, 8)


class BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's bf16 type, which llvmlite lacks."""

    def __str__(self):
        return "bfloat"


V32BF = ir.VectorType(BFloat(), 32)


def bf16_dot(b, x, y, acc):
    """acc + both products of x's and y's bf16 in each lane, added one after the other.

    Products are exact; each addition is rounded to f32, and results below 2^-126 become 0. x and y
    are any vectors of 512 bits."""
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [acc, b.bitcast(x, V32BF), b.bitcast(y, V32BF)])

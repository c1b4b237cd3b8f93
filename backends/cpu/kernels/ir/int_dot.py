"""Integer dots of quants (layout.py) and rounded activations: the same numbers in every instruction set.

A dot starts at the bits of 1.5 · 2^23: within ±2^22 around it, the bits of n more are those of the float n more, so a
sum of integers is a float without a conversion.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from logitless.backends.cpu.kernels.ir.builder import I8, I32, V16F, V16I, V16I16, call, each, fma, joined, part, splat
from logitless.backends.host import isa

DOT_FLOAT, DOT_ZERO = 1.5 * 2**23, 0x4B400000

V4I, V8I = ir.VectorType(I32, 4), ir.VectorType(I32, 8)
V16B, V32B, V64B = ir.VectorType(I8, 16), ir.VectorType(I8, 32), ir.VectorType(I8, 64)
HALVES = range(2)  # of a vector, where 32 bytes are a register
QUARTERS = range(4)  # where 16 are
FLIP = -0x7F7F7F80  # 0x80 in each byte: unsigned bytes less 128, as signed ones


def of_signed():
    """Whether dots take signed bytes, or nearly (AVX2): quants are left as small as they are, and those of 8 bits lose
    their 128 (codes have none)."""
    return isa() in ("avx2", "neon_dot")


def late_shift(layout, step, *, lone=False):
    """By how much the dots of a step are shifted instead of its quants: with AVX2 two products have to fit into 16
    bits, with NEON quants into 7. Quants that a `lone` row meets are shifted for it alone: low nibbles stay where they
    are, and its chain of dots becomes two short ones.
    """
    return layout.shift if of_signed() or (lone and layout.nibbles and step < 4) else 0


class Dot:
    """An integer dot in the making: of each lane of 16, with bytes of weights and those of a row of activations.

    `offset`, an i32, is where it starts if the quants are biased by 128: DOT_ZERO − 128·sum(x).

    AVX2 adds up `pairs` of products in 16 bits as often as there is `room`, then 32 bits take them in: of quants of 4
    bits those of a whole block. With 8 bits not even one has room (2·255·127): |q| is multiplied by x with q's sign.
    NEON multiplies signed bytes.
    """

    def __init__(self, b, layout, offset):
        self.b, self.biased = b, not layout.codes
        self.signed = of_signed() and layout.bits == 8
        start = splat(b, offset) if not (layout.mins or self.signed) else each(DOT_ZERO)
        self.sums = {0: start}  # by how much they are to be shifted left
        self.room = (1 << 15) // (2 * 127 * ((1 << layout.bits) - 1)) or 1
        self.pairs, self.held = [], 0

    def add(self, u, x, late):
        """The products of 4 unsigned bytes of u in each lane and the 4 signed bytes of the i32 x, shifted when all are
        there that are to be shifted so."""
        b = self.b
        if isa() != "avx2":
            u = b.xor(u, each(FLIP)) if self.signed and self.biased else u
            self.sums[late] = products_added(b, self.sums.get(late, each(0)), u, x)
            return
        xs = splat(b, x)
        if self.signed:
            u, xs = without_sign(b, b.xor(u, each(FLIP)) if self.biased else u, xs)
        products = products_of_pairs(b, u, xs)
        self.pairs = [b.add(p, q) for p, q in zip(self.pairs, products, strict=True)] if self.held else products
        self.held += 1
        self.late = late  # the same for all of a type here
        if self.held == self.room:
            self._take_in()

    def value(self):
        """Its bits, which are those of the float DOT_FLOAT + the dot."""
        self._take_in()
        whole = self.sums[0]
        for late in sorted(self.sums)[1:]:
            whole = self.b.add(self.b.shl(self.sums[late], each(late)), whole)
        return whole

    def _take_in(self):
        if self.held:
            ones = ir.Constant(V16I16, [1] * 16)
            parts = [call(self.b, "llvm.x86.avx2.pmadd.wd", V8I, [pairs, ones]) for pairs in self.pairs]
            self.sums[self.late] = self.b.add(self.sums.get(self.late, each(0)), joined(self.b, parts))
            self.held = 0


def products_added(b, dot, u, x):
    """dot + the products of 4 bytes in each lane, on all but AVX2; NEON takes those of u as signed."""
    if isa() == "plain":
        for t in range(4):
            xt = b.ashr(b.shl(x, ir.Constant(I32, 24 - 8 * t)), ir.Constant(I32, 24))
            ut = b.and_(b.lshr(u, each(8 * t)), each(255))
            dot = b.add(dot, b.mul(ut, splat(b, xt)))
        return dot
    xs = splat(b, x)
    if isa() == "avx512_vnni":
        t = _operand(V16I, V64B)
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, [dot, b.bitcast(u, t), b.bitcast(xs, t)])
    if isa() == "neon_dot":
        quarters = [(part(b, dot, q, 4), *(b.bitcast(part(b, v, q, 4), V16B) for v in (u, xs))) for q in QUARTERS]
        sums = [call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", V4I, quarter) for quarter in quarters]
        return joined(b, sums)
    t = _operand(V8I, V32B)
    halves = [[_half(b, dot, h), b.bitcast(_half(b, u, h), t), b.bitcast(_half(b, xs, h), t)] for h in HALVES]
    return joined(b, [call(b, "llvm.x86.avx512.vpdpbusd.256", V8I, half) for half in halves])


def products_of_pairs(b, u, xs):
    """AVX2: the sums of two neighbouring products in 16 bits; of each half."""
    halves = [[b.bitcast(_half(b, v, h), V32B) for v in (u, xs)] for h in HALVES]
    return [call(b, "llvm.x86.avx2.pmadd.ub.sw", V16I16, half) for half in halves]


def without_sign(b, u, xs):
    """AVX2: |u| of signed bytes, and xs where u is not negative, −xs where it is."""
    sizes, signed = [], []
    for h in HALVES:
        q, xh = (b.bitcast(_half(b, v, h), V32B) for v in (u, xs))
        sizes.append(b.bitcast(call(b, "llvm.abs.v32i8", V32B, [q, ir.Constant(ir.IntType(1), 0)]), V8I))
        signed.append(b.bitcast(call(b, "llvm.x86.avx2.psign.b", V32B, [xh, q]), V8I))
    return joined(b, sizes), joined(b, signed)


def busiest_step(b, dot, x):
    """What the fastest dots do in a step, with nothing beside it (kernels/peaks.py); `dot` is its own quants."""
    if isa() != "avx2":
        return products_added(b, dot, dot, x)
    pairs = [b.bitcast(_half(b, dot, h), V16I16) for h in HALVES]
    sums = [b.add(p, q) for p, q in zip(pairs, products_of_pairs(b, dot, splat(b, x)), strict=True)]
    return joined(b, [b.bitcast(s, V8I) for s in sums])


def times(b, dot, scale):
    """A dot's value times a scale of at most 22 significant bits, rounded once: one instruction, no conversion."""
    if isa() == "plain":  # without a fused multiply-add the large zero would swallow the dot
        return b.fmul(b.fsub(b.bitcast(dot, V16F), each(DOT_FLOAT)), scale)
    return fma(b, b.bitcast(dot, V16F), scale, b.fmul(scale, each(-DOT_FLOAT)))


def added(b, acc, dot, scale):
    """acc + (DOT_FLOAT + a dot) · scale, rounded once: of several dots `less_zeros` takes DOT_FLOAT away."""
    return fma(b, b.bitcast(dot, V16F), scale, acc)


def less_zeros(b, acc, scales):
    """What `added` made of dots whose scales are `scales` in sum, without the DOT_FLOATs."""
    return fma(b, scales, each(-DOT_FLOAT), acc)


def _operand(words, octets):
    return octets if llvm.llvm_version_info[0] >= 22 else words


def _half(b, value, h):
    return part(b, value, h, 8)

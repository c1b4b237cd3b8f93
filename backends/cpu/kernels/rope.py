"""RoPE kernels: the angles of a step, and their application to a token's heads."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel


@kernel("rope_angles")
def rope_angles(pos_at, frequency_at, y_at, half, magnitude_bits, begin, end, scratch):
    """Cosines, then sines, of angles in f64. A unit is a token."""
    pos, frequency, magnitude = i32p(pos_at), f32p(frequency_at), bits_f32(magnitude_bits)
    for t in range(begin, end):
        y = f32p(y_at + t * half * 8)
        for i in range(half):
            angle = np.float64(pos[t]) * np.float64(frequency[i])
            y[i] = np.float32(math.cos(angle)) * magnitude
            y[half + i] = np.float32(math.sin(angle)) * magnitude


@kernel("mrope_angles")
def mrope_angles(pos_at, frequency_at, component_at, y_at, half, n, magnitude_bits, begin, end, scratch):
    """`rope_angles` by component; pos (S, T). A unit is a token."""
    pos, frequency, component = i32p(pos_at), f32p(frequency_at), i32p(component_at)
    magnitude = bits_f32(magnitude_bits)
    for t in range(begin, end):
        y = f32p(y_at + t * half * 8)
        for i in range(half):
            angle = np.float64(pos[component[i] * n + t]) * np.float64(frequency[i])
            y[i] = np.float32(math.cos(angle)) * magnitude
            y[half + i] = np.float32(math.sin(angle)) * magnitude


def rope_function(*, interleaved):
    """intrinsic f(x, y, angles, heads, size, half, sign): RoPE of each head; y may be x.

    A pair is two neighbours (`interleaved`), or the same index of the first and second `half`.
    Angles: `half` cosines, then the sines. Eight pairs at a time, whose angles stay in registers
    for all heads."""

    def rotate(b, x, y, half, c, s):
        """Rotate the pairs from x on, as many as c has lanes."""
        n = c.type.count
        lanes = lambda kind: ir.Constant(ir.VectorType(e.I32, 2 * n), [kind(i) for i in range(2 * n)])
        if interleaved:
            pairs = e.load(b, x, m.vector(2 * n), 4)
            swapped = b.shuffle_vector(pairs, pairs, lanes(lambda i: i ^ 1))
            twice = b.shuffle_vector(c, c, lanes(lambda i: i // 2))
            signed = b.shuffle_vector(b.fneg(s), s, lanes(lambda i: i // 2 + i % 2 * n))
            e.store(b, m.fma(b, swapped, signed, b.fmul(pairs, twice)), y, 4)
            return
        second = b.shl(half, e.i64(2))
        left, right = (e.load(b, p, c.type, 4) for p in (x, e.at(b, x, second)))
        e.store(b, m.fma(b, right, b.fneg(s), b.fmul(left, c)), y, 4)
        e.store(b, m.fma(b, left, s, b.fmul(right, c)), e.at(b, y, second), 4)

    @intrinsic
    def run(typingctx, x, y, angles, heads, size, half, sign):
        def codegen(ctx, b, sig, args):
            X, Y, angles = (b.inttoptr(v, e.I8P) for v in args[:3])
            heads, size, half, sign = args[3:]
            done = e.i64(0)
            for n in (8, 1):
                stop = b.and_(half, e.i64(-n))
                with b.if_then(b.icmp_signed("<", done, stop)):

                    def chunk(k, _, n=n, done=done):
                        i = b.add(done, b.mul(k, e.i64(n)))
                        c, s = (
                            e.load(b, e.at(b, angles, b.shl(p, e.i64(2))), m.vector(n), 4) for p in (i, b.add(half, i))
                        )
                        s = b.fmul(s, e.splat(b, sign, n))
                        first = b.shl(i, e.i64(3 if interleaved else 2))

                        def head(h, _):
                            at = b.add(first, b.shl(b.mul(h, size), e.i64(2)))
                            rotate(b, e.at(b, X, at), e.at(b, Y, at), half, c, s)
                            return []

                        e.loop(b, e.i64(0), heads, [], head)
                        return []

                    e.loop(b, e.i64(0), b.sdiv(b.sub(stop, done), e.i64(n)), [], chunk)
                done = stop
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6, types.float32), codegen

    return run


@kernel("rope")
def rope(layout):
    """RoPE. A unit is a token.

    `layout`: interleaved or halves."""
    rotate = rope_function(interleaved=layout == "interleaved")

    def run(x_at, angles_at, y_at, heads, size, half, sign_bits, begin, end, scratch):
        sign = bits_f32(sign_bits)
        for t in range(begin, end):
            x_row, y_row = x_at + t * heads * size * 4, y_at + t * heads * size * 4
            rotate(x_row, y_row, angles_at + t * half * 8, heads, size, half, sign)
            if 2 * half < size:
                for h in range(heads):
                    x, y = f32p(x_row + h * size * 4), f32p(y_row + h * size * 4)
                    for i in range(2 * half, size):
                        y[i] = x[i]

    return run

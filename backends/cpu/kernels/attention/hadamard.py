"""Hadamard rotation: the fast Walsh-Hadamard transform of blocks, in registers."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import kernel


def _transform(size):
    """intrinsic f(x, y): a block of `size` floats; y may be x."""

    @intrinsic
    def run(typingctx, x, y):
        def codegen(ctx, b, sig, args):
            X, Y = (b.inttoptr(v, e.I8P) for v in args)
            v = [e.load(b, e.at(b, X, e.i64(64 * i)), e.V16F, 4) for i in range(size // 16)]
            lanes = lambda kind: ir.Constant(ir.VectorType(e.I32, 16), [kind(i) for i in range(16)])
            for step in (1, 2, 4, 8):
                other = lanes(lambda i, step=step: i ^ step)
                sign = lanes(lambda i, step=step: i + (16 if i & step else 0))
                v = [
                    b.fadd(b.shuffle_vector(u, u, other), b.shuffle_vector(u, b.fneg(u), sign), flags=m.STRICT)
                    for u in v
                ]
            step = 1
            while step < len(v):
                add = [b.fadd(v[i & ~step], v[i | step], flags=m.STRICT) for i in range(len(v))]
                sub = [b.fsub(v[i & ~step], v[i | step], flags=m.STRICT) for i in range(len(v))]
                v = [sub[i] if i & step else add[i] for i in range(len(v))]
                step *= 2
            for i, u in enumerate(v):
                e.store(b, b.fmul(u, m.fill(16, 1 / math.sqrt(size))), e.at(b, Y, e.i64(64 * i)), 4)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return run


@kernel("hadamard")
def hadamard(size):
    """A unit is a block of `size` elements."""
    transform, nbytes = _transform(int(size)), 4 * int(size)

    def run(x_at, y_at, begin, end, scratch):
        for i in range(begin, end):
            transform(x_at + i * nbytes, y_at + i * nbytes)

    return run

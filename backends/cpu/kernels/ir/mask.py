"""Vector IR of up to 16 f32 in memory: lanes that a mask leaves out are neither read nor written, and read as zero."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e

MASK = ir.VectorType(ir.IntType(1), 16)
LANES = ir.Constant(e.V16I, list(range(16)))


def lanes_below(b, n):
    """The mask of the first n (an i64) lanes."""
    return b.icmp_signed("<", LANES, e.splat(b, b.trunc(n, e.I32)))


def masked_load(b, pointer, mask):
    where = b.bitcast(pointer, e.V16F.as_pointer())
    args = [where, ir.Constant(e.I32, 4), mask, e.each(0.0)]
    return e.call(b, "llvm.masked.load.v16f32.p0", e.V16F, args)


def masked_store(b, value, pointer, mask):
    where = b.bitcast(pointer, e.V16F.as_pointer())
    e.call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, where, ir.Constant(e.I32, 4), mask])


@intrinsic
def move_within(typingctx, x, first, last, y, n):
    """y[i] = x[i] for first ≤ i < last and 0 for other i < n; n ≤ 16."""

    def codegen(ctx, b, sig, args):
        source, target = b.inttoptr(args[0], e.I8P), b.inttoptr(args[3], e.I8P)
        first, last, n = (lanes_below(b, args[i]) for i in (1, 2, 4))
        masked_store(b, masked_load(b, source, b.and_(last, b.not_(first))), target, n)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen

"""Products of bf16 in pairs, of the processors that have them (AVX512-BF16)."""

from __future__ import annotations

from llvmlite import ir

from logitless.backends.cpu.kernels.ir.builder import V16F, call


class BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not know."""

    def __str__(self):
        return "bfloat"


V32BF = ir.VectorType(BFloat(), 32)


def pairs_added(b, x, y, acc):
    """acc + the two products of x's and y's bf16 in each lane: exact, added one after the other, rounded to f32 each
    time; what is less than 2^-126 is 0. x and y are any vectors of 512 bits."""
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [acc, b.bitcast(x, V32BF), b.bitcast(y, V32BF)])

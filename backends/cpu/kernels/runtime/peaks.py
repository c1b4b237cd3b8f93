"""Roofline kernels: memory reads only, or multiply-adds in registers only."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.dot import bf16_dot, peak_step
from logitless.backends.cpu.kernels.ir.registry import kernel
from logitless.backends.cpu.kernels.matmul.layout import peak_chains
from logitless.backends.host import isa

CHAINS = peak_chains(isa())


def busy_loop(step, n_vectors, kind):
    """intrinsic(address, iterations): repeat `step(b, i, vectors, address)`, store the vectors' sum."""

    @intrinsic
    def run(typingctx, address, iterations):
        def codegen(ctx, b, sig, a):
            pointer = b.inttoptr(a[0], e.I8P)
            start = [b.add(e.load(b, pointer, e.V16I), e.constant(i)) for i in range(n_vectors)]
            if kind == e.V16F:
                start = [b.sitofp(v, kind) for v in start]
            out = e.loop(b, e.i64(0), a[1], start, lambda i, vectors: step(b, i, vectors, pointer))
            total = out[0]
            for v in out[1:]:
                total = b.fadd(total, v) if kind == e.V16F else b.add(total, v)
            e.store(b, total, pointer)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return run


@kernel("peak_read")
def peak_read():
    """Read memory. a: memory, bytes of a unit (a multiple of 1024). Scratch: 64 bytes."""

    @intrinsic
    def stream(typingctx, source, nbytes, out):
        def codegen(ctx, b, sig, a):
            pointer = b.inttoptr(a[0], e.I8P)

            def step(i, sums):
                line = e.at(b, pointer, b.mul(i, e.i64(1024)))
                loaded = [e.load(b, e.at(b, line, 64 * j), e.V16I) for j in range(16)]
                return [b.xor(b.xor(s, loaded[2 * j]), loaded[2 * j + 1]) for j, s in enumerate(sums)]

            sums = e.loop(b, e.i64(0), b.lshr(a[1], e.i64(10)), [e.constant(0)] * 8, step)
            total = sums[0]
            for s in sums[1:]:
                total = b.xor(total, s)
            e.store(b, total, b.inttoptr(a[2], e.I8P))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    def run(a, begin, end, scratch):
        stream(a[0] + begin * a[1], (end - begin) * a[1], scratch)

    return run


@kernel("peak_int8")
def peak_int8():
    """Integer dots. a: iterations of a unit, each CHAINS · 64 multiply-adds. Scratch: 64 bytes."""

    def step(b, i, sums, pointer):
        x = e.load(b, pointer, e.I32, 4)  # stays in a register: a splat takes a dot product's slot
        # varies, or it would be hoisted out of the loop
        return [peak_step(b, s, x) for s in sums]

    burn = busy_loop(step, CHAINS, e.V16I)

    def run(a, begin, end, scratch):
        burn(scratch, (end - begin) * a[0])

    return run


@kernel("peak_bf16")
def peak_bf16():
    """bf16 dots. a: iterations of a unit, each CHAINS · 32 multiply-adds. Scratch: 64 bytes."""

    def step(b, i, sums, pointer):
        return [*(bf16_dot(b, sums[-1], sums[-1], s) for s in sums[:-1]), sums[-1]]

    burn = busy_loop(step, CHAINS + 1, e.V16F)

    def run(a, begin, end, scratch):
        burn(scratch, (end - begin) * a[0])

    return run


@kernel("peak_f32")
def peak_f32():
    """f32 FMA. a: iterations of a unit, each CHAINS · 16 multiply-adds. Scratch: 64 bytes."""

    def step(b, i, sums, pointer):
        return [*(e.fma(b, s, sums[-1], e.constant(1.0)) for s in sums[:-1]), sums[-1]]

    burn = busy_loop(step, CHAINS + 1, e.V16F)

    def run(a, begin, end, scratch):
        burn(scratch, (end - begin) * a[0])

    return run

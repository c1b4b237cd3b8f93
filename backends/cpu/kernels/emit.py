"""Building blocks of LLVM IR: vectors (of 16 lanes unless said), broadcasts, each ISA's integer dot product, loops."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backends.cpu.isa import isa

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
I8P = I8.as_pointer()
V16I, V16F, V16H = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(ir.HalfType(), 16)
V16I8, V16I16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
V8I, V32B, V64B, V16S = ir.VectorType(I32, 8), ir.VectorType(I8, 32), ir.VectorType(I8, 64), ir.VectorType(I16, 16)


# Integer dots start at the bits of 1.5 · 2^23: within ±2^22 around it, the bits of n more are those of the float n more
DOT_FLOAT, DOT_ZERO = 1.5 * 2**23, 0x4B400000


def i64(value):
    return ir.Constant(I64, value)


def each(value):
    """A constant vector of 16 equal lanes: f32 of a float, i32 of an int."""
    return ir.Constant(V16F if isinstance(value, float) else V16I, [value] * 16)


def splat(b, scalar, n=16):
    t = ir.VectorType(scalar.type, n)
    one = b.insert_element(ir.Constant(t, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(t, ir.Undefined), ir.Constant(ir.VectorType(I32, n), [0] * n))


def at(b, pointer, offset):
    """The pointer `offset` bytes further on."""
    return b.gep(pointer, [i64(offset) if isinstance(offset, int) else offset])


def keep_order(b):
    """The compiler, not the processor, may not move loads across: halves of a block would compete for registers."""
    b.fence("seq_cst", "singlethread")


def prefetch(b, pointer, *, write=False, near=True):
    """Ask for a cache line that is read (or written) later; an address that does not exist is no fault.

    Not `near`: not into the first-level cache, whose lines under way are few and are wanted by loads.
    """
    function = b.module.globals.get("llvm.prefetch.p0")
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32]), "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(I32, v) for v in (int(write), 3 if near else 1, 1))])


@intrinsic
def fetch(typingctx, address):
    """The same for kernels: have the core read a cache line into its second-level cache."""

    def codegen(ctx, b, sig, a):
        prefetch(b, b.inttoptr(a[0], I8P), near=False)
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


def for_x86(b):
    """Whether the code is for such a processor, with 32 bits or 64."""
    return "x86" in b.module.triple or "i686" in b.module.triple


@intrinsic
def written(typingctx):
    """What was written past the caches is in memory before anything that is written later."""

    def codegen(ctx, b, sig, a):
        if for_x86(b):
            call(b, "llvm.x86.sse.sfence", ir.VoidType(), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


def smaller(b, x, y):
    return b.select(b.icmp_signed("<", x, y), x, y)


def load(b, pointer, t, align=1):
    value = b.load(b.bitcast(pointer, t.as_pointer()))
    value.align = align
    return value


def store(b, value, pointer, align=1):
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = align


def call(b, name, result, args):
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def fma(b, x, y, z):
    """x·y + z, rounded once where the processor can; `plain` may have to round twice."""
    return call(b, "llvm.fmuladd.v16f32" if isa() == "plain" else "llvm.fma.v16f32", V16F, [x, y, z])


def half(b, pointer):
    """16 f16 as f32."""
    return b.fpext(load(b, pointer, V16H, 2), V16F)


def floats(b, pointer, dtype):
    """16 numbers of a float type as f32."""
    if dtype == "f32":
        return load(b, pointer, V16F, 4)
    if dtype == "f16":
        return half(b, pointer)
    return b.bitcast(b.shl(b.zext(load(b, pointer, V16I16, 2), V16I), each(16)), V16F)


def bits_to(b, value, left, mask):
    """Every byte's bits moved `left` (right when negative) and masked; a mask keeps out the neighbouring bytes."""
    if left:
        value = b.shl(value, each(left)) if left > 0 else b.lshr(value, each(-left))
    return b.and_(value, each(mask * 0x01010101))


def dot_start(b, offset, biased):
    """The first value of an integer dot: DOT_ZERO, or `offset`, which holds it and −128·sum(x) for biased quants."""
    return each(DOT_ZERO) if not biased or isa() == "avx2" else splat(b, offset)


def late_shift(layout):
    """How much of the shift of a type's quants waits until their products are added up: all where sums of two products
    of a shifted quant, which has no sign, would not fit into 16 bits."""
    return layout.shift if layout.mins and isa() == "avx2" else 0


def dot_shifted(b, dot, left):
    """An integer dot times 2^left."""
    return b.add(b.shl(dot, each(left)), each((DOT_ZERO - (DOT_ZERO << left)) % 2**32)) if left else dot


def dot_value(b, dot):
    """An integer dot as f32; exact."""
    return b.fsub(b.bitcast(dot, V16F), each(DOT_FLOAT))


def dot_times(b, dot, scale):
    """An integer dot times a scale of at most 22 significant bits, rounded once: one instruction, no conversion."""
    if isa() == "plain":  # without a fused multiply-add the large zero would swallow the dot
        return b.fmul(dot_value(b, dot), scale)
    return fma(b, b.bitcast(dot, V16F), scale, b.fmul(scale, each(-DOT_FLOAT)))


def dot_added(b, acc, dot, scale):
    """acc + (DOT_FLOAT + an integer dot) · scale, rounded once: of several dots `less_zeros` takes DOT_FLOAT away."""
    return fma(b, b.bitcast(dot, V16F), scale, acc)


def less_zeros(b, acc, scales):
    """What `dot_added` made of dots whose scales are `scales` in sum, without the DOT_FLOATs."""
    return fma(b, scales, each(-DOT_FLOAT), acc)


def dot(b, acc, u, x, biased):
    """acc + the products of 4 unsigned bytes of u in each lane and the 4 signed bytes of the i32 x; exact on every ISA.

    `biased`: u is 128 + a signed quant, and `dot_start` took care of the 128.
    """
    kind = isa()
    if kind == "plain":
        for t in range(4):
            xt = b.ashr(b.shl(x, ir.Constant(I32, 24 - 8 * t)), ir.Constant(I32, 24))
            ut = b.and_(b.lshr(u, each(8 * t)), each(255))
            acc = b.add(acc, b.mul(ut, splat(b, xt)))
        return acc
    xs = splat(b, x)
    if kind == "avx512_vnni":
        t = _dot_operand(V16I, V64B)
        return call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, [acc, b.bitcast(u, t), b.bitcast(xs, t)])
    parts = []
    for h in range(2):
        a, uh, xh = (_half_of(b, v, h) for v in (acc, u, xs))
        if kind == "avx_vnni":
            t = _dot_operand(V8I, V32B)
            parts.append(call(b, "llvm.x86.avx512.vpdpbusd.256", V8I, [a, b.bitcast(uh, t), b.bitcast(xh, t)]))
            continue
        uh, xh = b.bitcast(uh, V32B), b.bitcast(xh, V32B)
        if biased:  # u·x of 255·127 would saturate the 16-bit sums: multiply |w| by x with the sign of w instead
            w = b.xor(uh, ir.Constant(V32B, [-128] * 32))
            uh = call(b, "llvm.abs.v32i8", V32B, [w, ir.Constant(ir.IntType(1), 0)])
            xh = call(b, "llvm.x86.avx2.psign.b", V32B, [xh, w])
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", V16S, [uh, xh])
        ones = ir.Constant(V16S, [1] * 16)
        parts.append(b.add(a, call(b, "llvm.x86.avx2.pmadd.wd", V8I, [pairs, ones])))
    return b.shuffle_vector(*parts, ir.Constant(V16I, list(range(16))))


def _dot_operand(words, octets):
    return octets if llvm.llvm_version_info[0] >= 22 else words


def _half_of(b, value, h):
    lanes = ir.Constant(V8I, list(range(8 * h, 8 * h + 8)))
    return b.shuffle_vector(value, ir.Constant(V16I, ir.Undefined), lanes)


def loop(b, begin, end, start, body, step=1):
    """`values = body(i, values)` for i in begin…end by `step` (at least once); returns the last values.

    `start` are the first.
    """
    entry, block, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(block)
    b.position_at_end(block)
    i = b.phi(I64)
    phis = [b.phi(v.type) for v in start]
    out = body(i, phis)
    following = b.add(i, i64(step))
    i.add_incoming(begin, entry)
    i.add_incoming(following, b.block)
    for phi, first, last in zip(phis, start, out, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, b.block)
    b.cbranch(b.icmp_signed("<", following, end), block, done)
    b.position_at_end(done)
    return out


def loop_from_zero(b, n, start, body):
    """`loop` over 0…n, which may be none."""
    entry, some, done = b.block, b.append_basic_block("some"), b.append_basic_block("none")
    b.cbranch(b.icmp_signed(">", n, i64(0)), some, done)
    b.position_at_end(some)
    out = loop(b, i64(0), n, start, body)
    end = b.block
    b.branch(done)
    b.position_at_end(done)
    phis = [b.phi(v.type) for v in start]
    for phi, first, last in zip(phis, start, out, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, end)
    return phis

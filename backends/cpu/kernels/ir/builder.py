"""Building blocks of LLVM IR: vectors (of 16 lanes unless said), broadcasts, loops."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.host import isa

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
I8P = I8.as_pointer()
V16I, V16F, V16H = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(ir.HalfType(), 16)
V16I8, V16I16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)


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


def prefetch(b, pointer, *, write=False, near=True, past=False):
    """Ask for a cache line that is read (or written) later; an address that does not exist is no fault.

    Not `near`: not into the first-level cache, whose lines under way are few and are wanted by loads. `past`: into no
    other, for it is read once.
    """
    function = b.module.globals.get("llvm.prefetch.p0")
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32]), "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(I32, v) for v in (int(write), 0 if past else 3 if near else 1, 1))])


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


def floats(b, line, dtype, n):
    """The first n k of a line of a packed group of floats (layout.py) as f32, 16 numbers each."""
    if dtype == "bf16":
        both = load(b, line, V16I)
        return [b.bitcast(v, V16F) for v in (b.shl(both, each(16)), b.and_(both, each(-1 << 16)))][:n]
    return [load(b, line, V16F, 4)] if dtype == "f32" else [half(b, at(b, line, 32 * k)) for k in range(n)]


def part(b, value, i, n):
    """Lanes i·n to i·n + n−1 of 16 i32."""
    lanes = ir.Constant(ir.VectorType(I32, n), list(range(i * n, i * n + n)))
    return b.shuffle_vector(value, ir.Constant(V16I, ir.Undefined), lanes)


def joined(b, parts):
    """16 i32 of two halves or four quarters."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, n), list(range(n)))
        parts = [b.shuffle_vector(*parts[i : i + 2], lanes) for i in range(0, len(parts), 2)]
    return parts[0]


def bits_to(b, value, left, mask):
    """Every byte's bits moved `left` (right when negative) and masked; a mask keeps out the neighbouring bytes."""
    if left:
        value = b.shl(value, each(left)) if left > 0 else b.lshr(value, each(-left))
    return b.and_(value, each(mask * 0x01010101))


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


def unrolled(b, begin, end, start, body_of, n):
    """`body_of(n)` for begin…end as often as n goes into it, then `body_of(1)` for each that is left."""
    count, by = b.sub(end, begin), i64(n)
    left = b.srem(count, by)
    first_left, together, one = b.sub(end, left), body_of(n), body_of(1)
    some = lambda i, values: together(b.add(begin, b.mul(i, by)), values)
    values = loop_from_zero(b, b.sdiv(count, by), start, some)
    return loop_from_zero(b, left, values, lambda i, values: one(b.add(first_left, i), values))


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

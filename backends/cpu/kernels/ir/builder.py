"""LLVM IR building blocks: vectors (16 lanes unless stated), loops, masks, prefetch."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.host import isa

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
I8P = I8.as_pointer()
V16I, V16F, V16H = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(ir.HalfType(), 16)
V16I8, V16I16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
MASK = ir.VectorType(ir.IntType(1), 16)
LANE_INDEX = ir.Constant(V16I, list(range(16)))


def i64(value):
    return ir.Constant(I64, value)


def constant(value):
    """A constant vector of 16 equal lanes: f32 from a float, i32 from an int."""
    return ir.Constant(V16F if isinstance(value, float) else V16I, [value] * 16)


def splat(b, scalar, n=16):
    t = ir.VectorType(scalar.type, n)
    one = b.insert_element(ir.Constant(t, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(t, ir.Undefined), ir.Constant(ir.VectorType(I32, n), [0] * n))


def at(b, pointer, offset):
    """Pointer plus `offset` bytes."""
    return b.gep(pointer, [i64(offset) if isinstance(offset, int) else offset])


def keep_order(b):
    """Compiler barrier: loads are not moved across it, which would raise the register pressure."""
    b.fence("seq_cst", "singlethread")


def prefetch(b, pointer, *, write=False, l1=True, nontemporal=False):
    """Prefetch a cache line for a later read (or write). An invalid address is no fault.

    Not `l1`: into the L2 cache, because the L1 cache has few misses in flight, which loads need.
    `nontemporal`: into the L1 cache alone, for data that is read once."""
    function = b.module.globals.get("llvm.prefetch.p0")
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32]), "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(I32, v) for v in (int(write), 0 if nontemporal else 3 if l1 else 1, 1))])


@intrinsic
def prefetch_l2(typingctx, address):
    """Prefetch a cache line into the L2 cache, for kernels."""

    def codegen(ctx, b, sig, a):
        prefetch(b, b.inttoptr(a[0], I8P), l1=False)
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


def is_x86(b):
    """True when the code is for x86, 32 or 64 bits."""
    return "x86" in b.module.triple or "i686" in b.module.triple


@intrinsic
def store_fence(typingctx):
    """Store fence: non-temporal stores are in memory before any later store."""

    def codegen(ctx, b, sig, a):
        if is_x86(b):
            call(b, "llvm.x86.sse.sfence", ir.VoidType(), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


def minimum(b, x, y):
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
    """x·y + z, rounded once where the processor has FMA; `plain` may round twice."""
    return call(b, "llvm.fmuladd.v16f32" if isa() == "plain" else "llvm.fma.v16f32", V16F, [x, y, z])


def load_f16(b, pointer):
    """16 f16 as f32."""
    return b.fpext(load(b, pointer, V16H, 2), V16F)


def triple_octets(b, words):
    """Each byte of 16 i32 times 3, modulo 256."""
    value = b.bitcast(words, ir.VectorType(I8, 64))
    tripled = b.bitcast(b.add(b.add(value, value), value), V16F)
    # LLVM would multiply by 9 and 27, which processors of x86 cannot
    return b.bitcast(call(b, "llvm.arithmetic.fence.v16f32", V16F, [tripled]) if is_x86(b) else tripled, V16I)


def half_bits(b, octets, left):
    """16 bytes, shifted left, as the bits of f16: f32."""
    words = b.zext(octets, ir.VectorType(I16, 16))
    return b.fpext(b.bitcast(b.shl(words, ir.Constant(words.type, [left] * 16)), V16H), V16F)


def load_floats(b, line, dtype, n):
    """First n k of a line of a packed group of floats (layout.py), as f32 vectors of 16."""
    if dtype == "bf16":
        both = load(b, line, V16I)
        return [b.bitcast(v, V16F) for v in (b.shl(both, constant(16)), b.and_(both, constant(-1 << 16)))][:n]
    return [load(b, line, V16F, 4)] if dtype == "f32" else [load_f16(b, at(b, line, 32 * k)) for k in range(n)]


def extract_lanes(b, value, i, n):
    """Lanes i·n to i·n + n−1 of 16 i32."""
    lanes = ir.Constant(ir.VectorType(I32, n), list(range(i * n, i * n + n)))
    return b.shuffle_vector(value, ir.Constant(V16I, ir.Undefined), lanes)


def concat(b, parts):
    """16 i32 out of two halves or four quarters."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, n), list(range(n)))
        parts = [b.shuffle_vector(*parts[i : i + 2], lanes) for i in range(0, len(parts), 2)]
    return parts[0]


def shift_mask(b, value, left, mask):
    """Shift `left` (right if negative), then mask every byte. The mask clears neighbours' bits."""
    if left:
        value = b.shl(value, constant(left)) if left > 0 else b.lshr(value, constant(-left))
    return b.and_(value, constant(mask * 0x01010101))


def loop(b, begin, end, start, body, step=1, *, rolled=False):
    """Loop: `values = body(i, values)` for i in begin…end by `step`, at least once.

    `start` holds the initial values. Returns the final ones. `rolled`: LLVM does not unroll it."""
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
    branch = b.cbranch(b.icmp_signed("<", following, end), block, done)
    if rolled:
        keep = b.module.add_metadata([ir.MetaDataString(b.module, "llvm.loop.unroll.disable")])
        this = b.module.add_metadata([keep])
        this.operands = (this, keep)  # LLVM wants a loop's metadata to begin with itself
        branch.set_metadata("llvm.loop", this)
    b.position_at_end(done)
    return out


def unrolled(b, begin, end, start, body_of, n):
    """Loop over begin…end with `body_of(n)` while n steps remain, then `body_of(1)`."""
    count, by = b.sub(end, begin), i64(n)
    remainder = b.srem(count, by)
    remainder_start, several, one = b.sub(end, remainder), body_of(n), body_of(1)
    repeat = lambda i, values: several(b.add(begin, b.mul(i, by)), values)
    values = loop_from_zero(b, b.sdiv(count, by), start, repeat)
    return loop_from_zero(b, remainder, values, lambda i, values: one(b.add(remainder_start, i), values))


def loop_from_zero(b, n, start, body):
    """`loop` over 0…n, where n may be 0."""
    entry, nonempty, done = b.block, b.append_basic_block("some"), b.append_basic_block("none")
    b.cbranch(b.icmp_signed(">", n, i64(0)), nonempty, done)
    b.position_at_end(nonempty)
    out = loop(b, i64(0), n, start, body)
    end = b.block
    b.branch(done)
    b.position_at_end(done)
    phis = [b.phi(v.type) for v in start]
    for phi, first, last in zip(phis, start, out, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, end)
    return phis


def lanes_below(b, n):
    """Mask of the first n (an i64) lanes."""
    return b.icmp_signed("<", LANE_INDEX, splat(b, b.trunc(n, I32)))


def masked_load(b, pointer, mask):
    where = b.bitcast(pointer, V16F.as_pointer())
    args = [where, ir.Constant(I32, 4), mask, constant(0.0)]
    return call(b, "llvm.masked.load.v16f32.p0", V16F, args)


def masked_store(b, value, pointer, mask):
    where = b.bitcast(pointer, V16F.as_pointer())
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, where, ir.Constant(I32, 4), mask])


@intrinsic
def move_within(typingctx, x, first, last, y, n):
    """y[i] = x[i] for first ≤ i < last, 0 for other i < n; n ≤ 16."""

    def codegen(ctx, b, sig, args):
        source, target = b.inttoptr(args[0], I8P), b.inttoptr(args[3], I8P)
        first, last, n = (lanes_below(b, args[i]) for i in (1, 2, 4))
        masked_store(b, masked_load(b, source, b.and_(last, b.not_(first))), target, n)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen

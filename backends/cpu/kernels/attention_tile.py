"""The two inner loops of attention as vector code: scores of one page, and the weighted sum of its values.

Both take `rows` query rows at once. Each row's additions happen in the same order whatever `rows` is: scores in four
partial sums over d modulo 4, values cell by cell. Layout of one page of one head (D = head size, 16 cells):
    f32, f16   keys [D][16 cells] · values [16 cells][D]
    q8_0       keys int8 [D][16], then f16 scales [D/32][16] · values int8 [16][D], then f16 scales [16][D/32]
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

PAGE = 16
F32, F16, I8, I64 = ir.FloatType(), ir.HalfType(), ir.IntType(8), ir.IntType(64)
BYTES = {"f32": 4, "f16": 2, "q8_0": 1}
ELEMENT = {"f32": F32, "f16": F16, "q8_0": I8}


def page_nbytes(dtype: str, size: int) -> int:
    """Bytes of one page of one head."""
    return size * PAGE * BYTES[dtype] + (size // 32 * PAGE * 2 if dtype == "q8_0" else 0)


def _vector(n):
    return ir.VectorType(F32, n)


def _load(b, base, offset, dtype, n):
    """n elements at a byte offset, as f32."""
    kind = ir.VectorType(ELEMENT[dtype], n)
    value = b.load(b.bitcast(b.gep(base, [offset]), kind.as_pointer()))
    value.align = 1
    if dtype == "f16":
        return b.fpext(value, _vector(n))
    return b.sitofp(value, _vector(n)) if dtype == "q8_0" else value


def _splat(b, scalar, n):
    one = b.insert_element(ir.Constant(_vector(n), ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), n), [0] * n)
    return b.shuffle_vector(one, ir.Constant(_vector(n), ir.Undefined), mask)


def _scalar(b, base, offset, kind=F32):
    value = b.load(b.bitcast(b.gep(base, [offset]), kind.as_pointer()))
    value.align = 1
    return value


def _fma(b, x, y, z):
    name = f"llvm.fma.v{x.type.count}f32"
    f = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return b.call(f, [x, y, z])


def scores(dtype, size, rows):
    """intrinsic f(q, k, out): out[r][16] = q[r]·k for rows of q that are `size` floats apart."""

    @intrinsic
    def tile(typingctx, q, k, out):
        def codegen(ctx, b, sig, args):
            Q, K, OUT = (b.inttoptr(v, I8.as_pointer()) for v in args)
            c = lambda v: ir.Constant(I64, v)
            zero = ir.Constant(_vector(PAGE), [0.0] * PAGE)
            ways = 4 if size % 4 == 0 else 2
            block = 32 if dtype == "q8_0" else size
            total = [zero] * rows
            for start in range(0, size, block):
                entry = b.block
                loop, done = b.append_basic_block(f"scores{start}"), b.append_basic_block(f"scored{start}")
                b.branch(loop)
                b.position_at_end(loop)
                d = b.phi(I64)
                d.add_incoming(c(start), entry)
                acc = [[b.phi(_vector(PAGE)) for _ in range(ways)] for _ in range(rows)]
                for way in (w for row in acc for w in row):
                    way.add_incoming(zero, entry)
                new = [[None] * ways for _ in range(rows)]
                for w in range(ways):
                    at = b.add(d, c(w))
                    keys = _load(b, K, b.mul(at, c(PAGE * BYTES[dtype])), dtype, PAGE)
                    for r in range(rows):
                        x = _splat(b, _scalar(b, Q, b.add(b.mul(at, c(4)), c(r * size * 4))), PAGE)
                        new[r][w] = _fma(b, x, keys, acc[r][w])
                following = b.add(d, c(ways))
                d.add_incoming(following, b.block)
                for r in range(rows):
                    for w in range(ways):
                        acc[r][w].add_incoming(new[r][w], b.block)
                b.cbranch(b.icmp_signed("<", following, c(start + block)), loop, done)
                b.position_at_end(done)
                for r in range(rows):
                    part = [b.fadd(new[r][i], new[r][i + 1]) for i in range(0, ways, 2)]
                    whole = b.fadd(part[0], part[1]) if ways == 4 else part[0]
                    if dtype == "q8_0":
                        scale = _load(b, K, c(size * PAGE + start // 32 * PAGE * 2), "f16", PAGE)
                        total[r] = _fma(b, whole, scale, total[r])
                    else:
                        total[r] = whole
            for r in range(rows):
                b.store(total[r], b.bitcast(b.gep(OUT, [c(r * PAGE * 4)]), _vector(PAGE).as_pointer())).align = 4
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return tile


def weighted_sum(dtype, size, rows):
    """intrinsic f(p, v, out, corr, lo, hi): out[r] = out[r]·corr[r] + Σ p[r][cell]·v[cell] for cells lo…hi−1, in order.

    Rows of p are 16 floats apart, rows of out `size` floats, rows of corr one float.
    """
    width = next(w for w in (16, 8, 4, 2, 1) if size % w == 0)
    n_chunks = size // width
    held = max(1, 16 // rows)  # chunks whose sums stay in registers

    @intrinsic
    def tile(typingctx, p, v, out, corr, lo, hi):
        def codegen(ctx, b, sig, args):
            P, V, OUT, CORR = (b.inttoptr(x, I8.as_pointer()) for x in args[:4])
            LO, HI = args[4:]
            c = lambda x: ir.Constant(I64, x)
            vector = _vector(width)
            for first in range(0, n_chunks, held):
                chunks = range(first, min(n_chunks, first + held))
                where = {(r, j): b.bitcast(b.gep(OUT, [c((r * size + j * width) * 4)]), vector.as_pointer())
                         for r in range(rows) for j in chunks}
                start = {}
                for (r, j), pointer in where.items():
                    value = b.load(pointer)
                    value.align = 4
                    start[r, j] = b.fmul(value, _splat(b, _scalar(b, CORR, c(4 * r)), width))
                entry = b.block
                loop, done = b.append_basic_block(f"sum{first}"), b.append_basic_block(f"summed{first}")
                b.cbranch(b.icmp_signed("<", LO, HI), loop, done)
                b.position_at_end(loop)
                cell = b.phi(I64)
                cell.add_incoming(LO, entry)
                acc = {key: b.phi(vector) for key in where}
                for key in where:
                    acc[key].add_incoming(start[key], entry)
                new = {}
                weights = [_scalar(b, P, b.add(b.mul(cell, c(4)), c(r * PAGE * 4))) for r in range(rows)]
                for j in chunks:
                    offset = b.add(b.mul(cell, c(size * BYTES[dtype])), c(j * width * BYTES[dtype]))
                    values = _load(b, V, offset, dtype, width)
                    if dtype == "q8_0":
                        at = b.add(b.mul(cell, c(size // 32 * 2)), c(size * PAGE + j * width // 32 * 2))
                        scale = b.fpext(_scalar(b, V, at, F16), F32)
                        values = b.fmul(values, _splat(b, scale, width))
                    for r in range(rows):
                        new[r, j] = _fma(b, _splat(b, weights[r], width), values, acc[r, j])
                following = b.add(cell, c(1))
                cell.add_incoming(following, b.block)
                for key in where:
                    acc[key].add_incoming(new[key], b.block)
                b.cbranch(b.icmp_signed("<", following, HI), loop, done)
                last = b.block
                b.position_at_end(done)
                for key, pointer in where.items():
                    result = b.phi(vector)
                    result.add_incoming(start[key], entry)
                    result.add_incoming(new[key], last)
                    where[key] = (result, pointer)
                for result, pointer in where.values():
                    b.store(result, pointer).align = 4
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def row_sum():
    """intrinsic f(p): the sum of 16 floats as a fixed tree."""

    @intrinsic
    def total(typingctx, p):
        def codegen(ctx, b, sig, args):
            v = b.load(b.inttoptr(args[0], _vector(PAGE).as_pointer()))
            v.align = 4
            n = PAGE
            while n > 1:
                n //= 2
                index = ir.VectorType(ir.IntType(32), n)
                undefined = ir.Constant(v.type, ir.Undefined)
                low = b.shuffle_vector(v, undefined, ir.Constant(index, list(range(n))))
                high = b.shuffle_vector(v, undefined, ir.Constant(index, list(range(n, 2 * n))))
                v = b.fadd(low, high)
            return b.extract_element(v, ir.Constant(ir.IntType(32), 0))

        return types.float32(types.int64), codegen

    return total

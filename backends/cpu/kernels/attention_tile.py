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

from backends.cpu.kernels.emit_math import exp, fill, fma, larger, splat, tanh, tree, vector

PAGE = 16
F32, F16, I8, I64 = ir.FloatType(), ir.HalfType(), ir.IntType(8), ir.IntType(64)
BYTES = {"f32": 4, "f16": 2, "q8_0": 1}
ELEMENT = {"f32": F32, "f16": F16, "q8_0": I8}


def page_nbytes(dtype: str, size: int) -> int:
    """Bytes of one page of one head."""
    return size * PAGE * BYTES[dtype] + (size // 32 * PAGE * 2 if dtype == "q8_0" else 0)


def _load(b, base, offset, dtype, n):
    """n elements at a byte offset, as f32."""
    kind = ir.VectorType(ELEMENT[dtype], n)
    value = b.load(b.bitcast(b.gep(base, [offset]), kind.as_pointer()))
    value.align = 1
    if dtype == "f16":
        return b.fpext(value, vector(n))
    return b.sitofp(value, vector(n)) if dtype == "q8_0" else value


def _scalar(b, base, offset, kind=F32):
    value = b.load(b.bitcast(b.gep(base, [offset]), kind.as_pointer()))
    value.align = 1
    return value


def scores(dtype, size, rows):
    """intrinsic f(q, k, out): out[r][16] = q[r]·k for rows of q that are `size` floats apart."""

    @intrinsic
    def tile(typingctx, q, k, out):
        def codegen(ctx, b, sig, args):
            Q, K, OUT = (b.inttoptr(v, I8.as_pointer()) for v in args)
            c = lambda v: ir.Constant(I64, v)
            zero = ir.Constant(vector(PAGE), [0.0] * PAGE)
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
                acc = [[b.phi(vector(PAGE)) for _ in range(ways)] for _ in range(rows)]
                for way in (w for row in acc for w in row):
                    way.add_incoming(zero, entry)
                new = [[None] * ways for _ in range(rows)]
                for w in range(ways):
                    at = b.add(d, c(w))
                    keys = _load(b, K, b.mul(at, c(PAGE * BYTES[dtype])), dtype, PAGE)
                    for r in range(rows):
                        x = splat(b, _scalar(b, Q, b.add(b.mul(at, c(4)), c(r * size * 4))), PAGE)
                        new[r][w] = fma(b, x, keys, acc[r][w])
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
                        total[r] = fma(b, whole, scale, total[r])
                    else:
                        total[r] = whole
            for r in range(rows):
                b.store(total[r], b.bitcast(b.gep(OUT, [c(r * PAGE * 4)]), vector(PAGE).as_pointer())).align = 4
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
            lanes = vector(width)
            for first in range(0, n_chunks, held):
                chunks = range(first, min(n_chunks, first + held))
                where = {
                    (r, j): b.bitcast(b.gep(OUT, [c((r * size + j * width) * 4)]), lanes.as_pointer())
                    for r in range(rows)
                    for j in chunks
                }
                start = {}
                for (r, j), pointer in where.items():
                    value = b.load(pointer)
                    value.align = 4
                    start[r, j] = b.fmul(value, splat(b, _scalar(b, CORR, c(4 * r)), width))
                entry = b.block
                loop, done = b.append_basic_block(f"sum{first}"), b.append_basic_block(f"summed{first}")
                b.cbranch(b.icmp_signed("<", LO, HI), loop, done)
                b.position_at_end(loop)
                cell = b.phi(I64)
                cell.add_incoming(LO, entry)
                acc = {key: b.phi(lanes) for key in where}
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
                        values = b.fmul(values, splat(b, scale, width))
                    for r in range(rows):
                        new[r, j] = fma(b, splat(b, weights[r], width), values, acc[r, j])
                following = b.add(cell, c(1))
                cell.add_incoming(following, b.block)
                for key in where:
                    acc[key].add_incoming(new[key], b.block)
                b.cbranch(b.icmp_signed("<", following, HI), loop, done)
                last = b.block
                b.position_at_end(done)
                for key, pointer in where.items():
                    result = b.phi(lanes)
                    result.add_incoming(start[key], entry)
                    result.add_incoming(new[key], last)
                    where[key] = (result, pointer)
                for result, pointer in where.values():
                    b.store(result, pointer).align = 4
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def softmax_step(rows):
    """intrinsic f(s, m, l, corr, lo, hi, scale, cap): one page's scores → weights, in place, for `rows` rows.

    Cells outside lo…hi−1 weigh 0. m, l and corr (a float per row) are the running maximum and sum, and the factor by
    which this page's maximum shrinks what was summed before. cap 0 is none.
    """

    @intrinsic
    def step(typingctx, s, m, l, corr, lo, hi, scale, cap):
        def codegen(ctx, b, sig, args):
            S, M, L, CORR = (b.inttoptr(x, I8.as_pointer()) for x in args[:4])
            i32 = ir.IntType(32)
            cells = ir.Constant(ir.VectorType(i32, PAGE), list(range(PAGE)))
            lo, hi = (splat(b, b.trunc(x, i32), PAGE) for x in args[4:6])
            seen = b.and_(b.icmp_signed(">=", cells, lo), b.icmp_signed("<", cells, hi))
            scale, cap = splat(b, args[6], PAGE), splat(b, args[7], PAGE)
            at = lambda base, r, size=4: b.gep(base, [ir.Constant(I64, r * size)])
            pointers = [b.bitcast(at(S, r, PAGE * 4), vector(PAGE).as_pointer()) for r in range(rows)]
            with b.if_then(b.fcmp_ordered("!=", args[7], ir.Constant(F32, 0.0)), likely=False):
                for p in pointers:
                    x = b.load(p)
                    x.align = 4
                    bounded = b.fmul(cap, tanh(b, b.fdiv(b.fmul(x, scale), cap)))
                    b.store(b.fdiv(bounded, scale), p).align = 4
            for r, p in enumerate(pointers):
                x = b.load(p)
                x.align = 4
                x = b.select(seen, b.fmul(x, scale), fill(PAGE, float("-inf")))
                old, total = _scalar(b, M, ir.Constant(I64, 4 * r)), _scalar(b, L, ir.Constant(I64, 4 * r))
                top = larger(b, splat(b, old, 1), splat(b, tree(b, x, larger), 1))
                new = b.extract_element(top, ir.Constant(i32, 0))
                weights = exp(b, b.fsub(x, splat(b, new, PAGE)))
                shrink = b.extract_element(exp(b, splat(b, b.fsub(old, new), 1)), ir.Constant(i32, 0))
                b.store(weights, p).align = 4
                whole = b.fadd(b.fmul(total, shrink), tree(b, weights, lambda b, u, v: b.fadd(u, v)))
                for base, value in ((M, new), (L, whole), (CORR, shrink)):
                    b.store(value, b.bitcast(at(base, r), F32.as_pointer()))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6, types.float32, types.float32), codegen

    return step

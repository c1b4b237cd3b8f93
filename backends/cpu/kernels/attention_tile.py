"""The inner loops of attention as vector code, over a block of 32 cells: two pages of keys and values as f32.

All take `rows` query rows at once, and a row's additions happen in the same order whatever `rows` is: scores in two
partial sums over d modulo 2, values cell by cell. A cell that a row does not see weighs 0.

Layout of one page of one head (D = head size, 16 cells), in the cache:
    f32, f16   keys [D][16 cells] · values [16 cells][D]
    q8_0       keys int8 [D][16], then f16 scales [D/32][16] · values int8 [16][D], then f16 scales [16][D/32]
and as f32 in scratch: keys [2 pages][D][16], values [32][D].
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.emit_math import exp_of_negative, fill, fma, larger, tanh, trees, vector

PAGE = 16
BLOCK = 32  # cells that share a maximum
UNROLL = 4
LINE = 64  # bytes that the processor fetches at a time
LOWEST = -3e38  # below every score, and finite: minus infinity less itself would be NaN
F16 = ir.HalfType()
BYTES = {"f32": 4, "f16": 2, "q8_0": 1}
ELEMENT = {"f32": e.F32, "f16": F16, "q8_0": e.I8}


def page_nbytes(dtype: str, size: int) -> int:
    """Bytes of one page of one head."""
    return size * PAGE * BYTES[dtype] + (size // 32 * PAGE * 2 if dtype == "q8_0" else 0)


def read(b, base, offset, kind=e.F32):
    """A value of this type at a byte offset, wherever that is."""
    return e.load(b, e.at(b, base, offset), kind)


def write(b, value, base, offset):
    e.store(b, value, e.at(b, base, offset), 4)


def as_f32(b, value):
    kind = vector(value.type.count)
    if value.type.element == e.F32:
        return value
    return b.fpext(value, kind) if value.type.element == F16 else b.sitofp(value, kind)


def widen(dtype, size, *, keys):
    """intrinsic f(page, out): a page of keys or of values as f32, in the same order."""
    width = PAGE if keys else next(w for w in (16, 8, 4, 2, 1) if size % w == 0)
    kind = ir.VectorType(ELEMENT[dtype], width)

    @intrinsic
    def convert(typingctx, page, out):
        def codegen(ctx, b, sig, args):
            P, OUT = (b.inttoptr(v, e.I8P) for v in args)

            def body(i, _):  # i: index of the first of `width` elements
                values = as_f32(b, read(b, P, b.mul(i, e.i64(BYTES[dtype])), kind))
                if dtype == "q8_0":
                    scales = size * PAGE
                    if keys:  # d = i / 16
                        at = b.add(b.mul(b.sdiv(i, e.i64(PAGE * 32)), e.i64(PAGE * 2)), e.i64(scales))
                        scale = as_f32(b, read(b, P, at, ir.VectorType(F16, PAGE)))
                    else:
                        at = b.add(b.mul(b.sdiv(i, e.i64(32)), e.i64(2)), e.i64(scales))
                        scale = e.splat(b, b.fpext(read(b, P, at, F16), e.F32), width)
                    values = b.fmul(values, scale)  # exact: 7 bits times 11
                write(b, values, OUT, b.mul(i, e.i64(4)))
                return []

            e.loop(b, e.i64(0), e.i64(size * PAGE), [], body, width)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return convert


def scores(size, rows, ahead):
    """intrinsic f(q, k, out, k0, k1, v0, v1): out[r][32] = q[r]·k for rows of q that are `size` floats apart.

    Meanwhile the core fetches `ahead` bytes each of the two pages at k0 and k1 and of those at v0 and v1.
    """
    ways = 2 if size % 2 == 0 else 1
    at_once = ways if rows * 2 * ways <= 16 else 1  # partial sums: side by side, or for many rows one after the other
    step = ways * (UNROLL if size % (UNROLL * ways) == 0 else 1)
    parts = [-(-nbytes * step // size // LINE) for nbytes in ahead]  # lines to fetch with each step

    @intrinsic
    def tile(typingctx, q, k, out, k0, k1, v0, v1):
        def codegen(ctx, b, sig, args):
            Q, K, OUT, *pages = (b.inttoptr(v, e.I8P) for v in args)
            places = [(r, page) for r in range(rows) for page in range(2)]

            def fetch(d):
                for page, lines in zip(pages, (parts[0], parts[0], parts[1], parts[1]), strict=True):
                    done = b.mul(b.sdiv(d, e.i64(step)), e.i64(lines * LINE))
                    for line in range(lines):
                        e.prefetch(b, e.at(b, page, b.add(done, e.i64(line * LINE))))

            def body(d, sums, fetches):
                if fetches:
                    fetch(d)
                for element in range(0, step, ways):
                    result = []
                    for way in range(at_once):
                        at = b.add(d, e.i64(element + way))
                        cells = b.mul(at, e.i64(PAGE * 4))
                        keys = [
                            read(b, K, b.add(cells, e.i64(page * size * PAGE * 4)), vector(PAGE)) for page in range(2)
                        ]
                        for r in range(rows):
                            x = e.splat(b, read(b, Q, b.add(b.mul(at, e.i64(4)), e.i64(r * size * 4))), PAGE)
                            for page in range(2):
                                result.append(fma(b, x, keys[page], sums[len(result)]))
                    sums = result
                return sums

            total = []
            for way in range(0, ways, at_once):
                turn = partial(body, fetches=way == 0)
                sums = e.loop(b, e.i64(way), e.i64(size), [fill(PAGE, 0.0)] * (len(places) * at_once), turn, step)
                if way:  # the first sums wait in their place: registers are few
                    total = [read(b, OUT, (r * BLOCK + page * PAGE) * 4, vector(PAGE)) for r, page in places]
                for part in range(0, len(sums), len(places)):
                    new = sums[part : part + len(places)]
                    total = [b.fadd(u, v) for u, v in zip(total, new, strict=True)] if total else new
                for (r, page), value in zip(places, total, strict=True):
                    write(b, value, OUT, (r * BLOCK + page * PAGE) * 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def weighted_sum(size, rows, *, whole):
    """intrinsic f(p, v, out, corr, lo, hi): out[r] = out[r]·corr[r] + Σ p[r][cell]·v[cell] for cells lo…hi−1, in order.

    Rows of p are 32 floats apart, rows of out `size` floats, rows of corr one float. lo < hi. `whole`: all cells.
    """
    width = next(w for w in (16, 8, 4, 2, 1) if size % w == 0)
    n_chunks = size // width
    held = max(1, 16 // rows)  # chunks whose sums stay in registers

    @intrinsic
    def tile(typingctx, p, v, out, corr, lo, hi):
        def codegen(ctx, b, sig, args):
            P, V, OUT, CORR = (b.inttoptr(x, e.I8P) for x in args[:4])
            lanes = vector(width)
            for first in range(0, n_chunks, held):
                chunks = range(first, min(n_chunks, first + held))
                places = [(r, j) for r in range(rows) for j in chunks]
                at = {(r, j): (r * size + j * width) * 4 for r, j in places}
                shrink = [e.splat(b, read(b, CORR, 4 * r), width) for r in range(rows)]
                start = [b.fmul(read(b, OUT, at[r, j], lanes), shrink[r]) for r, j in places]

                def body(cell, sums, chunks=chunks, places=places):
                    for step in range(UNROLL if whole else 1):
                        base = b.mul(b.add(cell, e.i64(step)), e.i64(size * 4))
                        values = {j: read(b, V, b.add(base, e.i64(j * width * 4)), lanes) for j in chunks}
                        weight = b.mul(b.add(cell, e.i64(step)), e.i64(4))
                        weights = [read(b, P, b.add(weight, e.i64(r * BLOCK * 4))) for r in range(rows)]
                        splats = [e.splat(b, w, width) for w in weights]
                        sums = [fma(b, splats[r], values[j], acc) for (r, j), acc in zip(places, sums, strict=True)]
                    return sums

                begin, end, by = (e.i64(0), e.i64(BLOCK), UNROLL) if whole else (*args[4:6], 1)
                for place, value in zip(places, e.loop(b, begin, end, start, body, by), strict=True):
                    write(b, value, OUT, at[place])
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def softmax_step(rows, *, masked):
    """intrinsic f(s, m, l, corr, seen, scale, cap): a block's scores → weights, in place, for `rows` rows.

    seen: i32 (first, last + 1) cell that each row sees, in the block; the others weigh 0. Not `masked`: all see all.
    m, l and corr (a float per row) are the running maximum and sum, and the factor by which this block's maximum
    shrinks what was summed before. cap 0 is none.
    """

    @intrinsic
    def step(typingctx, s, m, l, corr, seen, scale, cap):
        def codegen(ctx, b, sig, args):
            S, M, L, CORR, SEEN = (b.inttoptr(x, e.I8P) for x in args[:5])
            scale, cap = e.splat(b, args[5], PAGE), e.splat(b, args[6], PAGE)
            cells = [ir.Constant(ir.VectorType(e.I32, PAGE), list(range(i, i + PAGE))) for i in range(0, BLOCK, PAGE)]
            parts = range(BLOCK // PAGE)
            at = lambda r, part: (r * BLOCK + part * PAGE) * 4
            with b.if_then(b.fcmp_ordered("!=", args[6], ir.Constant(e.F32, 0.0)), likely=False):
                for r in range(rows):
                    for part in parts:
                        x = b.fmul(read(b, S, at(r, part), vector(PAGE)), scale)
                        write(b, b.fdiv(b.fmul(cap, tanh(b, b.fdiv(x, cap))), scale), S, at(r, part))
            xs = []  # of each row, side by side: one row's chain of operations is longer than the processor looks ahead
            for r in range(rows):
                xs.append([b.fmul(read(b, S, at(r, part), vector(PAGE)), scale) for part in parts])
                if masked:
                    lo, hi = (e.splat(b, read(b, SEEN, 8 * r + 4 * i, e.I32), PAGE) for i in range(2))
                    inside = [b.and_(b.icmp_signed(">=", i, lo), b.icmp_signed("<", i, hi)) for i in cells]
                    xs[-1] = [
                        b.select(seen, x, fill(PAGE, float("-inf"))) for seen, x in zip(inside, xs[-1], strict=True)
                    ]
            old, total = read(b, M, 0, vector(rows)), read(b, L, 0, vector(rows))
            new = larger(b, old, trees(b, [larger(b, *x) for x in xs], larger))
            shrink = exp_of_negative(b, b.fsub(old, new))
            tops = [e.splat(b, b.extract_element(new, ir.Constant(e.I32, r)), PAGE) for r in range(rows)]
            weights = [[exp_of_negative(b, b.fsub(x, top)) for x in row] for row, top in zip(xs, tops, strict=True)]
            for r in range(rows):
                for part in parts:
                    write(b, weights[r][part], S, at(r, part))
            sums = trees(b, [b.fadd(*w) for w in weights], lambda b, u, v: b.fadd(u, v))
            for base, value in ((M, new), (L, b.fadd(b.fmul(total, shrink), sums)), (CORR, shrink)):
                write(b, value, base, 0)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5, types.float32, types.float32), codegen

    return step

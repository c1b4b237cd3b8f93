"""Inner loops of attention as vector IR, over a block of 32 cells: two pages of keys and values.

Each takes `rows` query rows at once. A row's additions happen in the same order for any `rows`:
scores in two partial sums over d modulo 2, values cell by cell. A masked cell has weight 0.

Scores are powers of two (queries are multiplied by log2 e). Weights are relative to a row's *top*:
the maximum of its first block, or of the last block that exceeded the top by more than HEADROOM.
Only then are the row's sums rescaled, which is rare; the exact maximum would have to be searched in
every block.

Pages in the cache lie as graph/dtype.py says (`KVType`), as f32 in scratch: keys [2 pages][D][16],
values [32][D].
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.math import STRICT, exp2, fill, fma, maximum, tanh, tree, vector
from logitless.backends.cpu.kernels.matmul.unpack_blocks import look_up_bytes
from logitless.backends.host import target_host
from logitless.graph.dtype import DTYPES, KV_TYPES

PAGE = 16
BLOCK = 32  # cells
UNROLL = 4
# vectors of sums; with f32 inputs as many as registers hold, since reloading them is cheap
SUMS = 16
F32_SUMS = SUMS if target_host().has_512_bits else 4
LINE = 64  # bytes of a cache line
HEADROOM = 16.0  # weights are at most 2^16
LOWEST = -3e38  # below every score, and finite: minus infinity less itself would be NaN
F16 = ir.HalfType()


def page_nbytes(dtype: str, size: int) -> int:
    """Bytes of one page of one head."""
    return size * (KV_TYPES[dtype].page or PAGE * DTYPES[dtype].nbytes)


def read(b, base, offset, kind=e.F32):
    """Load a value of this type at an unaligned byte offset."""
    return e.load(b, e.at(b, base, offset), kind)


def write(b, value, base, offset):
    e.store(b, value, e.at(b, base, offset), 4)


def read_floats(b, base, offset, dtype, n):
    """n numbers of a plain type at a byte offset, as f32."""
    if dtype == "f32":
        return read(b, base, offset, vector(n))
    if dtype == "f16":
        return b.fpext(read(b, base, offset, ir.VectorType(F16, n)), vector(n))
    word = b.zext(read(b, base, offset, ir.VectorType(e.I16, n)), ir.VectorType(e.I32, n))
    return b.bitcast(b.shl(word, e.splat(b, ir.Constant(e.I32, 16), n)), vector(n))


def numbers(b, kind, quants, fifth, scale, low):
    """f32 lanes of values of quants (i32 lanes). `scale`: of each lane; `fifth()`: bits above quants of 5 bits;
    `low()`: minima."""
    n = quants.type.count
    each = lambda x: e.splat(b, ir.Constant(e.I32, x), n)
    if kind.bits == 5:
        quants = b.or_(quants, b.shl(fifth(), each(4)))
    if kind.codes:
        codes = look_up_bytes(b, b.trunc(quants, ir.VectorType(e.I8, n)), kind.codes)
        quants = b.sext(codes, quants.type)
    elif kind.offset:
        quants = b.sub(quants, each(kind.offset))
    values = b.sitofp(quants, vector(n))
    # products are exact: at most 8 bits times 11
    return fma(b, values, scale, low()) if kind.mins else b.fmul(values, scale)


def keys_at(b, page, dtype, size, d, group):
    """Element d of sixteen cells of a page of keys, as f32; `group` is d // 32."""
    kind = KV_TYPES[dtype]
    if not kind.bits:
        return read_floats(b, page, b.mul(d, e.i64(PAGE * DTYPES[dtype].nbytes)), dtype, PAGE)
    lanes = ir.VectorType(e.I32, PAGE)
    every = lambda x: e.splat(b, b.trunc(x, e.I32), PAGE)
    halves = lambda at: read_floats(b, page, b.add(b.mul(group, e.i64(PAGE * 2)), e.i64(at)), "f16", PAGE)
    low = lambda: halves(size * (kind.scales_at + 1))
    if kind.bits == 8:
        quants = b.sext(read(b, page, b.mul(d, e.i64(PAGE)), ir.VectorType(e.I8, PAGE)), lanes)
        return numbers(b, kind, quants, None, halves(size * kind.scales_at), low)
    word = b.zext(read(b, page, b.mul(b.lshr(d, e.i64(1)), e.i64(PAGE)), ir.VectorType(e.I8, PAGE)), lanes)
    quants = b.and_(b.lshr(word, every(b.shl(b.and_(d, e.i64(1)), e.i64(2)))), every(e.i64(15)))

    def fifth():
        bits = read(b, page, b.add(b.mul(group, e.i64(PAGE * 4)), e.i64(size * 8)), lanes)
        return b.and_(b.lshr(bits, every(b.and_(d, e.i64(31)))), every(e.i64(1)))

    return numbers(b, kind, quants, fifth, halves(size * kind.scales_at), low)


def values_at(b, page, dtype, size, cell, j, width):
    """Elements j…j+width−1 of a cell of a page of values, as f32. Blocks have whole sixteens."""
    kind = KV_TYPES[dtype]
    if not kind.bits:
        first = b.add(b.mul(cell, e.i64(size)), e.i64(j))
        return read_floats(b, page, b.mul(first, e.i64(DTYPES[dtype].nbytes)), dtype, width)
    lanes = ir.VectorType(e.I32, width)
    group, row = j // 32, b.mul(cell, e.i64(size // 32))  # of blocks

    def half(at):
        where = b.add(b.shl(row, e.i64(1)), e.i64(at + group * 2))
        return e.splat(b, b.fpext(read(b, page, where, F16), e.F32), width)

    low = lambda: half(size * (kind.scales_at + 1))
    if kind.bits == 8:
        at = b.add(b.shl(row, e.i64(5)), e.i64(j))
        quants = b.sext(read(b, page, at, ir.VectorType(e.I8, width)), lanes)
        return numbers(b, kind, quants, None, half(size * kind.scales_at), low)
    word = read(b, page, b.add(b.shl(row, e.i64(4)), e.i64(group * 16)), ir.VectorType(e.I8, width))
    each = lambda x: e.splat(b, ir.Constant(e.I8, x), width)
    quants = b.zext(b.lshr(word, each(4)) if j % 32 else b.and_(word, each(15)), lanes)

    def fifth():
        at = b.add(b.shl(row, e.i64(2)), e.i64(size * 8 + group * 4 + j % 32 // 8))
        return b.zext(b.bitcast(read(b, page, at, e.I16), ir.VectorType(ir.IntType(1), width)), lanes)

    return numbers(b, kind, quants, fifth, half(size * kind.scales_at), low)


def widest(size):
    return next(w for w in (16, 8, 4, 2, 1) if size % w == 0)


def page_converter(dtype, size, *, keys):
    """intrinsic f(page, out): a page of keys or values as f32, in the same order."""
    width = PAGE if keys else widest(size)

    @intrinsic
    def convert(typingctx, page, out):
        def codegen(ctx, b, sig, args):
            P, OUT = (b.inttoptr(v, e.I8P) for v in args)

            def of_keys(d, _):
                write(b, keys_at(b, P, dtype, size, d, b.sdiv(d, e.i64(32))), OUT, b.mul(d, e.i64(PAGE * 4)))
                return []

            def of_values(cell, _):
                for j in range(0, size, width):
                    at = b.add(b.mul(cell, e.i64(size * 4)), e.i64(4 * j))
                    write(b, values_at(b, P, dtype, size, cell, j, width), OUT, at)
                return []

            e.loop(b, e.i64(0), e.i64(size if keys else PAGE), [], of_keys if keys else of_values)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return convert


def row_converter(dtype, size):
    """intrinsic f(row, out): a row that is a page of one cell as f32."""
    width = widest(size)

    @intrinsic
    def convert(typingctx, row, out):
        def codegen(ctx, b, sig, args):
            ROW, OUT = (b.inttoptr(v, e.I8P) for v in args)
            for j in range(0, size, width):  # of a sixteenth of the size: its parts begin where those of a page would
                write(b, values_at(b, ROW, dtype, size // PAGE, e.i64(0), j, width), OUT, e.i64(4 * j))
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return convert


def page_transposer(dtype, size):
    """intrinsic f(page, out): a page of keys [D][16] as f32 in the order of values, [16][D]."""
    width = widest(size)  # of blocks (width, width) that are transposed

    @intrinsic
    def convert(typingctx, page, out):
        def codegen(ctx, b, sig, args):
            P, OUT = (b.inttoptr(v, e.I8P) for v in args)

            def block(i, _):
                first = b.mul(i, e.i64(width))
                rows = []
                for r in range(width):
                    d = b.add(first, e.i64(r))
                    rows.append(keys_at(b, P, dtype, size, d, b.sdiv(d, e.i64(32))))
                to = b.mul(first, e.i64(4))
                for cell in range(0, PAGE, width):
                    for j, row in enumerate(_transpose(b, rows, cell, width)):
                        write(b, row, OUT, b.add(to, e.i64((cell + j) * size * 4)))
                return []

            e.loop(b, e.i64(0), e.i64(size // width), [], block)
            return ctx.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return convert


def _transpose(b, rows, first, width):
    """Transpose lanes first…first+width−1 of `width` vectors: one vector of each lane."""
    part = list(range(first, first + width))
    pick = lambda x, y, lanes: b.shuffle_vector(x, y, ir.Constant(ir.VectorType(e.I32, len(lanes)), lanes))
    rows = [pick(row, row, part) for row in rows]
    half, lanes = width // 2, [n for i in range(width) for n in (i, width + i)]
    for _ in range(width.bit_length() - 1):  # each pass interleaves two vectors lane by lane
        pairs = [(rows[i], rows[i + half]) for i in range(half)]
        rows = [pick(x, y, lanes[s : s + width]) for x, y in pairs for s in (0, width)]
    return rows


def scores(size, rows, dtype, prefetch_nbytes):
    """intrinsic f(q, k0, k1, out, *next): out[r][32] = q[r]·k, for two pages of keys of this dtype.

    Rows of q are `size` floats apart. Meanwhile the four addresses of `next` are prefetched, as
    many bytes of each as `ahead` has.
    """
    lanes = 2 if size % 2 == 0 else 1
    room = F32_SUMS if dtype == "f32" else SUMS
    max_rows = min(rows, room // 2)  # rows side by side
    # partial sums side by side, or one after the other
    n_sums = lanes if max_rows * 2 * lanes <= room else 1
    step = lanes * (UNROLL if size % (UNROLL * lanes) == 0 else 1)
    # each prefetches its share: a core drops some of many prefetches at once
    n_turns = step // lanes
    # cache lines to prefetch with each step
    n_lines = [-(-nbytes * step // size // LINE) for nbytes in prefetch_nbytes]

    @intrinsic
    def tile(typingctx, q, k0, k1, out, a0, a1, a2, a3):
        def codegen(ctx, b, sig, args):
            Q, K0, K1, OUT, *pages = (b.inttoptr(v, e.I8P) for v in args)
            for first in range(0, rows, max_rows):
                of_rows(b, Q, K0, K1, OUT, pages, range(first, min(rows, first + max_rows)))
            return ctx.get_dummy_value()

        def of_rows(b, Q, K0, K1, OUT, pages, row_range):
            places = [(r, page) for r in row_range for page in range(2)]

            def fetch(d, turn):
                for page, lines in zip(pages, n_lines, strict=True):
                    done = b.mul(b.sdiv(d, e.i64(step)), e.i64(lines * LINE))
                    for line in range(lines * turn // n_turns, lines * (turn + 1) // n_turns):
                        e.prefetch(b, e.at(b, page, b.add(done, e.i64(line * LINE))), l1=dtype == "f32")

            def body(d, sums, fetches):
                group = b.sdiv(d, e.i64(32))
                for turn in range(n_turns):
                    if fetches:
                        fetch(d, turn)
                    result = []
                    for lane in range(n_sums):
                        at = b.add(d, e.i64(turn * lanes + lane))
                        keys = [keys_at(b, page, dtype, size, at, group) for page in (K0, K1)]
                        for r in row_range:
                            x = e.splat(b, read(b, Q, b.add(b.mul(at, e.i64(4)), e.i64(r * size * 4))), PAGE)
                            for page in range(2):
                                result.append(fma(b, x, keys[page], sums[len(result)]))
                    sums = result
                return sums

            total = []
            for lane in range(0, lanes, n_sums):
                turn = partial(body, fetches=lane == row_range.start == 0)
                sums = e.loop(b, e.i64(lane), e.i64(size), [fill(PAGE, 0.0)] * (len(places) * n_sums), turn, step)
                if lane:  # the first sums wait in memory: registers are few
                    total = [read(b, OUT, (r * BLOCK + page * PAGE) * 4, vector(PAGE)) for r, page in places]
                for part in range(0, len(sums), len(places)):
                    new = sums[part : part + len(places)]
                    total = [b.fadd(u, v, flags=STRICT) for u, v in zip(total, new, strict=True)] if total else new
                for (r, page), value in zip(places, total, strict=True):
                    write(b, value, OUT, (r * BLOCK + page * PAGE) * 4)

        return types.void(*[types.int64] * 8), codegen

    return tile


def weighted_sum(size, rows, *, whole=False):
    """intrinsic f(p, v, out, lo, hi): out[r] += Σ p[r][cell]·v[cell] for cells lo…hi−1, in order.

    v: 32 cells as f32. Rows of p are 32 floats apart, rows of out `size` floats. lo < hi. `whole`:
    all cells.
    """

    @intrinsic
    def tile(typingctx, p, v, out, lo, hi):
        def codegen(ctx, b, sig, args):
            P, V, OUT = (b.inttoptr(x, e.I8P) for x in args[:3])

            def of_cell(cell, j, width):
                return read(b, V, b.add(b.mul(cell, e.i64(size * 4)), e.i64(j * 4)), vector(width))

            begin, end, by = (e.i64(0), e.i64(BLOCK), UNROLL) if whole else (*args[3:5], 1)
            _sum_cells(b, size, rows, P, OUT, of_cell, begin, end, by, F32_SUMS)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return tile


def weighted_sum_of_pages(size, rows, dtype):
    """intrinsic f(p, v0, v1, out, lo, hi, next0, next1): the same for two pages of values of a
    dtype.

    For each cell, the same cell of two other pages is prefetched.
    """
    row_nbytes = size * (KV_TYPES[dtype].bits or 8 * DTYPES[dtype].nbytes) // 8

    @intrinsic
    def tile(typingctx, p, v0, v1, out, lo, hi, next0, next1):
        def codegen(ctx, b, sig, args):
            P, V0, V1, OUT, _, _, N0, N1 = (b.inttoptr(x, e.I8P) for x in args)

            def of_cell(cell, j, width):
                second = b.icmp_signed(">=", cell, e.i64(PAGE))
                inside = b.and_(cell, e.i64(PAGE - 1))
                if not j:
                    start = e.at(b, b.select(second, N1, N0), b.mul(inside, e.i64(row_nbytes)))
                    for line in range(-(-row_nbytes // LINE)):
                        e.prefetch(b, e.at(b, start, e.i64(line * LINE)), l1=False)
                return values_at(b, b.select(second, V1, V0), dtype, size, inside, j, width)

            _sum_cells(b, size, rows, P, OUT, of_cell, *args[4:6], 1, SUMS)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


def _sum_cells(b, size, rows, P, OUT, of_cell, begin, end, by, room):
    """Weighted sum of cells. `of_cell(cell, j, width)`: elements j…j+width−1 of a cell's values.

    `room`: vectors of sums at once.
    """
    width = widest(size)
    n_elements = max(1, room // rows) * width  # elements whose sums stay in registers
    for first in range(0, size, n_elements):
        chunks = range(first, min(size, first + n_elements), width)
        places = [(r, j) for r in range(rows) for j in chunks]
        at = {(r, j): (r * size + j) * 4 for r, j in places}
        start = [read(b, OUT, at[place], vector(width)) for place in places]

        def body(cell, sums, chunks=chunks, places=places):
            for step in range(by):
                index = b.add(cell, e.i64(step))
                values = {j: of_cell(index, j, width) for j in chunks}
                weights = [read(b, P, b.add(b.mul(index, e.i64(4)), e.i64(r * BLOCK * 4))) for r in range(rows)]
                splats = [e.splat(b, w, width) for w in weights]
                sums = [fma(b, splats[r], values[j], acc) for (r, j), acc in zip(places, sums, strict=True)]
            return sums

        for place, value in zip(places, e.loop(b, begin, end, start, body, by), strict=True):
            write(b, value, OUT, at[place])


def softmax_step(size, rows, *, masked):
    """intrinsic f(s, tops, l, out, seen, cap): softmax step of a block: scores → weights, in place.

    seen: i32 (first, last + 1) visible cell of each row in the block; others weigh 0. Not `masked`:
    all cells are visible. tops: a float per row. l: 16 floats per row, whose sum is the sum of
    weights. cap 0: none. When a row's top rises, its l and its `size` floats of out are rescaled.
    """
    width = widest(size)
    parts = range(BLOCK // PAGE)
    cells = [ir.Constant(ir.VectorType(e.I32, PAGE), list(range(i, i + PAGE))) for i in range(0, BLOCK, PAGE)]

    @intrinsic
    def step(typingctx, s, tops, l, out, seen, cap):
        def codegen(ctx, b, sig, args):
            S, TOPS, L, OUT, SEEN = (b.inttoptr(x, e.I8P) for x in args[:5])

            def of_row(r):  # scores of a row, and the masks of its visible cells
                x = [
                    read(b, S, b.add(b.mul(r, e.i64(BLOCK * 4)), e.i64(part * PAGE * 4)), vector(PAGE))
                    for part in parts
                ]
                if not masked:
                    return x, []
                ends = [b.add(b.mul(r, e.i64(8)), e.i64(4 * i)) for i in range(2)]
                lo, hi = (e.splat(b, read(b, SEEN, at, e.I32), PAGE) for at in ends)
                masks = [b.and_(b.icmp_signed(">=", i, lo), b.icmp_signed("<", i, hi)) for i in cells]
                minus_inf = fill(PAGE, float("-inf"))
                return [b.select(mask, score, minus_inf) for mask, score in zip(masks, x, strict=True)], masks

            def apply_cap(r, _):
                x, _ = of_row(r)
                limit = e.splat(b, args[5], PAGE)
                for part in parts:
                    at = b.add(b.mul(r, e.i64(BLOCK * 4)), e.i64(part * PAGE * 4))
                    write(b, b.fmul(limit, tanh(b, b.fdiv(x[part], limit))), S, at)
                return []

            def raise_top(r, _):
                x, _ = of_row(r)
                highest = tree(b, largest(x), maximum)
                at = b.mul(r, e.i64(4))
                old = read(b, TOPS, at)
                above = b.fcmp_ordered(">", b.fsub(highest, old, flags=STRICT), ir.Constant(e.F32, HEADROOM))
                with b.if_then(above):
                    write(b, highest, TOPS, at)
                    shrink = exp2(b, e.splat(b, b.fsub(old, highest, flags=STRICT), PAGE))
                    at = b.mul(r, e.i64(PAGE * 4))
                    write(b, b.fmul(read(b, L, at, vector(PAGE)), shrink), L, at)
                    factor = e.splat(b, b.extract_element(shrink, ir.Constant(e.I32, 0)), width)
                    for j in range(0, size, width):
                        at = b.add(b.mul(r, e.i64(size * 4)), e.i64(4 * j))
                        write(b, b.fmul(read(b, OUT, at, vector(width)), factor), OUT, at)
                return []

            def largest(x):
                while len(x) > 1:
                    x = [maximum(b, u, v) for u, v in zip(x[::2], x[1::2], strict=False)] + x[len(x) // 2 * 2 :]
                return x[0]

            def below_top(x):
                tops = [e.splat(b, read(b, TOPS, 4 * r), PAGE) for r in range(rows)]
                return [b.fsub(x[r][part], tops[r], flags=STRICT) for r in range(rows) for part in parts]

            with b.if_then(b.fcmp_ordered("!=", args[5], ir.Constant(e.F32, 0.0)), likely=False):
                e.loop(b, e.i64(0), e.i64(rows), [], apply_cap)
            x, masks = zip(*(of_row(e.i64(r)) for r in range(rows)), strict=True)
            # all rows side by side: one row's dependency chain is too long to hide
            z = below_top(x)
            # NaN of one row hides no other
            above = b.fcmp_unordered(">", largest(z), fill(PAGE, HEADROOM))
            before = b.block
            with b.if_then(b.icmp_signed("!=", b.bitcast(above, e.I16), ir.Constant(e.I16, 0)), likely=False):
                e.loop(b, e.i64(0), e.i64(rows), [], raise_top)
                e.keep_order(b)  # reload the scores instead of keeping them in registers
                rescored = below_top([of_row(e.i64(r))[0] for r in range(rows)])
                after = b.block
            weights = []
            for first, second in zip(z, rescored, strict=True):
                weights.append(b.phi(first.type))
                weights[-1].add_incoming(first, before)
                weights[-1].add_incoming(second, after)
            weights = [exp2(b, z) for z in weights]
            for r in range(rows):
                total = read(b, L, r * PAGE * 4, vector(PAGE))
                for part in parts:
                    weight = weights[r * len(parts) + part]
                    if masked:
                        weight = b.select(masks[r][part], weight, fill(PAGE, 0.0))
                    write(b, weight, S, (r * BLOCK + part * PAGE) * 4)
                    total = b.fadd(total, weight, flags=STRICT)
                write(b, total, L, r * PAGE * 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5, types.float32), codegen

    return step


def clear_rows(size):
    """intrinsic f(o, l, tops, rows): initial states: no weighted values, no weights, the lowest
    top.
    """
    width = widest(size)

    @intrinsic
    def clear(typingctx, o, l, tops, rows):
        def codegen(ctx, b, sig, args):
            O, L, TOPS = (b.inttoptr(v, e.I8P) for v in args[:3])

            def of_row(r, _):
                write(b, ir.Constant(e.F32, LOWEST), TOPS, b.mul(r, e.i64(4)))
                write(b, fill(PAGE, 0.0), L, b.mul(r, e.i64(PAGE * 4)))
                for j in range(0, size, width):
                    write(b, fill(width, 0.0), O, b.add(b.mul(r, e.i64(size * 4)), e.i64(4 * j)))
                return []

            e.loop(b, e.i64(0), args[3], [], of_row)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return clear


def join_rows(size):
    """intrinsic f(o, l, tops, to, tl, ttops, rows): join the states of a span to those before it.

    A row that saw nothing of either (its values are 0) leaves the other's bits unchanged. Tops are
    read 16 at a time, so there is memory behind the last; it is only read.
    """
    width = widest(size)

    @intrinsic
    def join(typingctx, o, l, tops, to, tl, ttops, rows):
        def codegen(ctx, b, sig, args):
            O, L, TOPS, TO, TL, TTOPS = (b.inttoptr(v, e.I8P) for v in args[:6])
            factors = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(e.F32, 2 * PAGE)), e.I8P)

            def of_rows(first, _):
                at = b.mul(first, e.i64(4))
                new, old = read(b, TOPS, at, vector(PAGE)), read(b, TTOPS, at, vector(PAGE))
                top = maximum(b, old, new)
                write(b, top, TTOPS, at)
                for i, x in enumerate((old, new)):
                    write(b, exp2(b, b.fsub(x, top, flags=STRICT)), factors, 4 * PAGE * i)

                def of_row(r, _):
                    where = b.mul(b.sub(r, first), e.i64(4))
                    before, now = (read(b, factors, b.add(where, e.i64(4 * PAGE * i))) for i in range(2))

                    def add(X, T, at, n):
                        previous = b.fmul(read(b, T, at, vector(n)), e.splat(b, before, n))
                        write(b, fma(b, read(b, X, at, vector(n)), e.splat(b, now, n), previous), T, at)

                    add(L, TL, b.mul(r, e.i64(PAGE * 4)), PAGE)
                    for j in range(0, size, width):
                        add(O, TO, b.add(b.mul(r, e.i64(size * 4)), e.i64(4 * j)), width)
                    return []

                e.loop(b, first, e.minimum(b, args[6], b.add(first, e.i64(PAGE))), [], of_row)
                return []

            e.loop(b, e.i64(0), args[6], [], of_rows, PAGE)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return join


def divide(size):
    """intrinsic f(x, l, out): `size` floats of x divided by the sum of the 16 floats of l, which is
    ≥ 1.
    """

    @intrinsic
    def row(typingctx, x, l, out):
        def codegen(ctx, b, sig, args):
            X, L, OUT = (b.inttoptr(v, e.I8P) for v in args)
            total = tree(b, read(b, L, 0, vector(PAGE)), lambda b, u, v: b.fadd(u, v))
            inverse = b.fdiv(ir.Constant(e.F32, 1.0), total)
            width = widest(size)
            for j in range(0, size, width):
                write(b, b.fmul(read(b, X, 4 * j, vector(width)), e.splat(b, inverse, width)), OUT, 4 * j)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return row

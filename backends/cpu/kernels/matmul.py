"""y = x · wᵀ of packed weights and packed activations (layout.py): `linear:<type>:<rows>x<groups>`, a tile each.

A tile is `mt` activation rows × `nt` groups of 16 outputs; its accumulators stay in registers over a stretch of K.
Each output is one chain of fused multiply-adds over k (over blocks of 32 for quantised types), whatever the tile, so
the bits of a row do not depend on the rows beside it. A unit of work is one strip of `nt` groups for as many rows as
stay in cache while weights stream; units of the same rows follow each other. Within a unit, a stretch of weights small
enough for the first-level cache, expanded once if it is quantised and the rows are many (blocks.py), meets all rows
before the next; partial sums wait in scratch. Tiles at an edge are moved back over their neighbour and compute it
twice: same numbers, no special case.
"""

from __future__ import annotations

import itertools

from numba import njit, types
from numba.extending import intrinsic

from backends.cpu.isa import isa
from backends.cpu.kernels import emit as e
from backends.cpu.kernels.blocks import Expanded, Expanding, Packed
from backends.cpu.kernels.layout import (
    ACT_BLOCK,
    ACT_HALF,
    ACT_OFFSET,
    ACT_SCALE,
    ACT_SUM,
    AT_ONCE,
    LAYOUTS,
    expanded_nbytes,
    expanded_tile,
)
from backends.cpu.kernels.registry import f32p, kernel


def quant_tile(dtype, mt, nt, form):
    """A tile of quantised weights, as one of the forms of blocks.py: a loop over blocks of 32.

    Between the dots of a block the memory is asked for what comes later: with few rows it is the limit, and it has to
    be asked all the time, for few lines can be under way at once. So a block of packed weights meets up to 16 rows,
    AT_ONCE by AT_ONCE, before the next.
    """
    layout = LAYOUTS[dtype]
    biased = not layout.mins
    halves = [range(first, min(mt, first + AT_ONCE)) for first in range(0, mt, AT_ONCE)]
    turns = [(rows, part) for rows in halves for part in range(layout.parts)]

    def block_of(b, i, acc, w, x, ahead, wide):
        sums = list(acc)
        asks = iter(spread(asks_of(b, blocks_of(b, i, w, wide), x, ahead), 8 * len(halves)))
        for rows, part in turns:
            if (rows, part) != turns[0]:
                e.keep_order(b)
            if part == 0:
                blocks = blocks_of(b, i, w, wide)
            xs = [e.at(b, x, ACT_BLOCK * j) for j in rows]
            offset = ACT_OFFSET if layout.parts == 1 else (ACT_HALF, ACT_HALF + 4)[part]
            starts = [e.dot_start(b, e.load(b, e.at(b, row, offset), e.I32, 4), biased) for row in xs]
            dots = [start for start in starts for _ in blocks]
            for step in range(8 // layout.parts * part, 8 // layout.parts * (part + 1)):
                for line, near in next(asks):
                    e.prefetch(b, line, near=near)
                u = [block.quants(step) for block in blocks]
                for j, row in enumerate(xs):
                    x4 = e.load(b, e.at(b, row, 4 * step), e.I32, 4)
                    for n in range(nt):
                        dots[j * nt + n] = e.dot(b, dots[j * nt + n], u[n], x4, biased)
            scales = [block.scale(part) for block in blocks]
            scales_x = [e.splat(b, e.load(b, e.at(b, row, ACT_SCALE), e.F32, 4)) for row in xs]
            terms = [e.dot_times(b, dot, scales[k % nt]) for k, dot in enumerate(dots)]
            first = rows[0] * nt
            for k, term in enumerate(terms):
                sums[first + k] = e.fma(b, term, scales_x[k // nt], sums[first + k])
            if layout.mins:
                mins = [block.min() for block in blocks]
                sums_x = [e.splat(b, e.load(b, e.at(b, row, ACT_SUM), e.F32, 4)) for row in xs]
                for k in range(len(dots)):
                    sums[first + k] = e.fma(b, mins[k % nt], sums_x[k // nt], sums[first + k])
        return sums

    def blocks_of(b, i, w, wide):
        if form is Expanding:
            return [form(b, layout, group, i, to) for group, to in zip(w, wide, strict=True)]
        return [form(b, layout, group, i) for group in w]

    def asks_of(b, blocks, x, ahead):
        weights = [ask for block in blocks for ask in block.asks(ahead)]
        if form is Packed:
            return weights
        return weights + [(e.at(b, e.at(b, x, ahead), 64 * line), True) for line in range(-(-mt * ACT_BLOCK // 64))]

    return tile_of(block_of, mt, nt, claiming=form is not Packed)


def spread(items, n):
    """n lists of them, in order and about as long."""
    ends = [-(-len(items) * i // n) for i in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def float_tile(dtype, mt, nt):
    """A tile of floats: a loop over k."""

    def element_of(b, i, acc, w, x, _ahead, _wide):
        ws = []
        for group in w:
            ws.append(e.floats(b, e.at(b, group, b.mul(i, e.i64(LAYOUTS[dtype].quants))), dtype))
        out = []
        for j in range(mt):
            xj = e.splat(b, e.load(b, e.at(b, x, 4 * j), e.F32, 4))
            out += [e.fma(b, ws[n], xj, acc[j * nt + n]) for n in range(nt)]
        return out

    return tile_of(element_of, mt, nt)


def tile_of(body, mt, nt, *, claiming=False):
    """An intrinsic that runs `body` for blocks begin…end; its sums [mt][nt][16] start from zero where begin is 0.

    They go to `out`, whose rows are `out_stride` bytes apart: back to where they were, or to their place in y, `adding`
    to what is there if that is not 0. So many bytes `ahead` lies what a later tile reads: in packed weights the next
    group, with expanded ones the next rows. `wide` is where groups are left expanded, `wide_nbytes` apart.
    A tile of many rows is `claiming` the lines of its sums early: some of them are in y.
    """

    @intrinsic
    def tile(
        typingctx,
        w,
        group_nbytes,
        last,
        x,
        x_stride,
        sums,
        out,
        out_stride,
        adding,
        begin,
        end,
        ahead,
        wide,
        wide_nbytes,
    ):
        def codegen(ctx, b, sig, a):
            w0, x0, sums0, out0 = (b.inttoptr(a[p], e.I8P) for p in (0, 3, 5, 6))
            w = [e.at(b, w0, b.mul(a[1], e.smaller(b, a[2], e.i64(n)))) for n in range(nt)]
            wide0 = b.inttoptr(a[12], e.I8P)
            wide = [e.at(b, wide0, b.mul(a[13], e.i64(n))) for n in range(nt)]
            places = [e.at(b, sums0, 64 * i) for i in range(mt * nt)]
            fresh = b.icmp_signed("==", a[9], e.i64(0))
            start = [b.select(fresh, e.each(0.0), e.load(b, p, e.V16F)) for p in places]

            ends = [e.at(b, out0, b.add(b.mul(a[7], e.i64(i // nt)), e.i64(64 * (i % nt)))) for i in range(mt * nt)]
            for place in ends if claiming else ():
                e.prefetch(b, place, write=True)

            def step(i, acc):
                return body(b, i, acc, w, e.at(b, x0, b.mul(i, a[4])), a[11], wide)

            values = e.loop(b, a[9], a[10], start, step)
            with b.if_else(b.icmp_signed("!=", a[8], e.i64(0))) as (added, put):
                with added:
                    for place, value in zip(ends, values, strict=True):
                        e.store(b, b.fadd(e.load(b, place, e.V16F), value), place)
                with put:
                    for place, value in zip(ends, values, strict=True):
                        e.store(b, value, place)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 14), codegen

    return tile


def put(mt, nt, *, adding=False):
    """Sums of a tile, from its row `first` on → y, `columns` of them."""

    @njit(forceinline=True)
    def copy(sums, y, ldy, columns, first):
        for j in range(first, mt):
            part, row = f32p(sums + j * nt * 64), f32p(y + j * ldy * 4)
            for c in range(columns):
                row[c] = row[c] + part[c] if adding else part[c]

    return copy


@njit(forceinline=True)
def ask(address, begin, end):
    """The bytes begin…end−1 from there on are wanted later."""
    for line in range(address + begin, address + end, 64):
        e.fetch(line)


@njit(forceinline=True)
def share(nbytes, rows, mt):
    """Of so many bytes, what each of the tiles of these rows asks for: whole cache lines."""
    return (nbytes * mt // rows + 64) // 64 * 64


@njit(forceinline=True)
def tile_at(first, row, m, panel_rows, n_panels, count):
    """Where x has the row of a tile whose rows begin at `first`, in numbers or blocks, and how many rows of each k.

    Panels begin where tiles do; but for the last, which takes what is left, a panel has the rows of one.
    So this is quantize.py's `panel_of` without its division, for it is asked for each tile.
    """
    last_panel = (n_panels - 1) * panel_rows
    panel = min(first, last_panel)
    return panel * count + row - panel, m - panel if panel == last_panel else panel_rows


@kernel("linear")
def linear(dtype, shape, then=""):
    """a: w, x, y, m, n, count (blocks or k), stretch of it, bytes of a group, rows at once, how many times, rows of a
    panel of x, panels. Scratch: the sums.

    `then` "add": y is added to, by whole tiles of a quantised weight, whose last rows may be moved back, too.
    """
    adding = then == "add"
    mt, nt = (int(s) for s in shape.split("x"))
    layout, copy = LAYOUTS[dtype], put(mt, nt, adding=adding)
    quantised = layout.block > 1
    expanded = (mt, nt) == expanded_tile(dtype, isa())
    x_nbytes = ACT_BLOCK if quantised else 4
    if quantised:
        first_tile = quant_tile(dtype, mt, nt, Expanding if expanded else Packed)
        tile = quant_tile(dtype, mt, nt, Expanded) if expanded else first_tile
    else:
        tile = first_tile = float_tile(dtype, mt, nt)
    block_nbytes = expanded_nbytes(layout) if expanded else 0

    def run(a, begin, end, scratch):
        m, n, count, stretch, group_nbytes, most, times, panel_rows = a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        n_panels = a[11]
        groups = (n + 15) // 16
        strips = (groups + nt - 1) // nt
        for unit in range(begin, end):
            turn, strip = unit // strips, unit % strips
            r0 = turn * most
            rows = m - r0 if turn == times - 1 else most
            g0 = max(0, min(strip * nt, groups - nt))
            w, y = a[0] + g0 * group_nbytes, a[2] + (r0 * n + g0 * 16) * 4
            columns = min(n - g0 * 16, nt * 16)
            for k0 in range(0, count, stretch):
                k1 = min(count, k0 + stretch)
                finished = k1 == count and columns == nt * 16
                last = groups - 1 - g0
                ahead = panel_rows * count * x_nbytes if expanded else group_nbytes
                wide, wide_nbytes = scratch + (rows + mt) * nt * 64 - k0 * block_nbytes, (k1 - k0) * block_nbytes
                asked, stop = nt * group_nbytes * (count + k0) // count, nt * group_nbytes * (count + k1) // count
                each = share(stop - asked, rows, mt)
                for r in range(0, rows, mt):
                    row = min(r, rows - mt)
                    sums = scratch + r * nt * 64
                    at, rows_beside = tile_at(r0 + r, r0 + row, m, panel_rows, n_panels, count)
                    xr, x_stride = a[1] + at * x_nbytes, rows_beside * x_nbytes
                    to_y = finished and (row == r or not adding)
                    out, stride = (y + row * n * 4, n * 4) if to_y else (sums, nt * 64)
                    added = adding and to_y
                    if expanded:  # the next groups, for the first tile alone reads memory, which rests while others run
                        ask(w, asked, min(stop, asked + each))
                        asked += each
                    rest = xr, x_stride, sums, out, stride, added, k0, k1, ahead, wide, wide_nbytes
                    if expanded and r > 0:
                        tile(wide, wide_nbytes, nt, *rest)
                    else:
                        first_tile(w, group_nbytes, last, *rest)
            if columns < nt * 16:
                for r in range(0, rows, mt):
                    copy(scratch + r * nt * 64, y + min(r, rows - mt) * n * 4, n, columns, 0)
            elif adding and rows % mt:
                r, row = rows // mt * mt, rows - mt
                copy(scratch + r * nt * 64, y + row * n * 4, n, columns, r - row)

    return run


@kernel("linear_rows")
def linear_rows(rows):
    """Plain f32 weights (n, k), each group packed into scratch first. a: w, x, y, m, n, k.

    A group is a unit. Scratch: the group and a tile's sums.
    """
    mt = int(rows)
    tile, copy = float_tile("f32", mt, 1), put(mt, 1)

    def run(a, begin, end, scratch):
        m, n, k = a[3], a[4], a[5]
        packed, sums = f32p(scratch), scratch + k * 64
        for g in range(begin, end):
            columns = min(16, n - g * 16)
            w = f32p(a[0] + g * 16 * k * 4)
            for i in range(k):
                for c in range(16):
                    packed[i * 16 + c] = w[min(c, columns - 1) * k + i]
            for r in range(0, m, mt):
                r = min(r, m - mt)
                tile(scratch, 0, 0, a[1] + r * 4, m * 4, sums, sums, 64, 0, 0, k, 0, 0, 0)
                copy(sums, a[2] + (r * n + g * 16) * 4, n, columns, 0)

    return run

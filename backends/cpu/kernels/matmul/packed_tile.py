"""GEMM register tile with packed weights (layout.py): `mt` rows × `nt` groups of 16 outputs.

Accumulators stay in registers over a K block. Each output is one chain of fused multiply-adds over
k; of quantised types over the groups that share an activation scale: blocks of 32, or chains of 8
blocks for types of 256. Batch invariance: the chain is the same for every tile, so a row's bits do
not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from functools import partial

from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.dot import (
    DotAccumulator,
    accumulate_exact,
    accumulate_scaled,
    add_pairs,
    bf16_dot,
    dot_value,
    late_shift,
    matrix_dots,
    pair_room,
    scaled_dot,
    start_of,
    subtract_zeros,
    uses_matrices,
    widen_pairs,
)
from logitless.backends.cpu.kernels.ir.math import STRICT
from logitless.backends.cpu.kernels.matmul.layout import (
    ACT_BLOCK,
    ACT_HALF,
    ACT_OFFSET,
    ACT_SCALE,
    ACT_SUM,
    LAYOUTS,
    ROWS_IN_REGISTERS,
    ROWS_WITH_CACHED_QUANTS,
    nibble_planes,
    uses_prefetch,
)
from logitless.backends.cpu.kernels.matmul.unpack_blocks import Bundle, ExpandedBlock, ExpandingBlock, PackedBlock
from logitless.backends.host import isa, target_host

PREFETCH_DISTANCE = 2048  # prefetch distance of floats, in each stream


def quant_tile(dtype, mt, nt, form, *, nontemporal=False):
    """Tile of quantised weights in one of the forms of unpack_blocks.py.

    It loops over blocks of 32, inside a loop over activation scales if blocks share them. A dot
    without a scale of its own saves an operation.

    Prefetches are spread between the dots of a block. With few rows memory is the limit, and a core
    has few misses in flight, so it has to be kept busy all the time. For this a block of packed
    weights meets up to 16 rows, ROWS_IN_REGISTERS at a time, before the next. `nontemporal`:
    prefetched lines bypass the outer caches.
    """
    layout = LAYOUTS[dtype]
    scale_blocks = layout.scale_blocks
    # LLVM sinks all prefetches to the end of a block; with few rows in wide registers it does not.
    in_order = form is PackedBlock and (
        mt >= ROWS_IN_REGISTERS or not uses_prefetch(dtype, mt) or not target_host().has_512_bits
    )
    # Quants with two scales per block cost most to unpack, so they stay in registers for all rows.
    keeps_quants = form is PackedBlock and mt > ROWS_IN_REGISTERS and layout.parts > 1 and target_host().has_512_bits
    at_once = ROWS_WITH_CACHED_QUANTS if keeps_quants else ROWS_IN_REGISTERS
    row_groups = [range(first, min(mt, first + at_once)) for first in range(0, mt, at_once)]
    parts = range(layout.parts)
    in_turn = form is ExpandedBlock and not target_host().has_512_bits
    matrices = form is ExpandedBlock and uses_matrices()
    # bytes and codes are unpacked once for each nibble, which pays from four rows on; nibbles pay from two on
    rolled = isa() == "avx2" and (in_turn or (form is PackedBlock and mt > layout.bits // 4 and layout.plain))
    turns, nt = (nt, 1) if in_turn else (1, nt)
    late_shift_of = partial(late_shift, layout, lone=mt == 1 and form is PackedBlock)
    order = (
        [(rows, part) for part in parts for rows in row_groups]
        if keeps_quants
        else list(itertools.product(row_groups, parts))
    )

    def rolled_dots(b, block, xs, steps):
        """AVX2: dots of rows and a block without their start values, by loops over steps.

        Of unrolled steps LLVM adds the products as a tree, which needs more registers than there are.
        """
        late, dots = late_shift_of(0), []
        planes, per_turn = nibble_planes(layout, isa()), 2 if form is PackedBlock and layout.low_bits == 4 else 1
        steps = range(steps.start // per_turn, steps.stop // per_turn)
        room = min(len(steps), pair_room(layout.bits // len(planes)) // per_turn)

        def add_step(place, step, pairs):
            """Sums of pairs, two halves a row, plus the products of a step."""
            for u, after in block.turn(step, late, place):
                x4s = [e.load(b, e.at(b, row, b.mul(b.add(step, e.i64(after)), e.i64(4))), e.I32, 4) for row in xs]
                sums = [add_pairs(b, pairs[2 * j : 2 * j + 2], u, e.splat(b, x4)) for j, x4 in enumerate(x4s)]
                pairs = [half for pair in sums for half in pair]
            return pairs

        def widen(place, pairs, dots):
            wide = [widen_pairs(b, pairs[j : j + 2], late + place) for j in range(0, len(pairs), 2)]
            return [b.add(dot, w) for dot, w in zip(dots, wide, strict=True)] if dots else wide

        def add_steps(place, step, dots):
            """Dots plus the products of `room` steps, one or two."""
            pairs = []
            for i in range(room):
                pairs = add_step(place, b.add(step, e.i64(i)), pairs)
            return widen(place, pairs, dots)

        for place in planes:
            if room <= 2:
                dots, add = add_steps(place, e.i64(steps.start), dots), partial(add_steps, place)
                dots = e.loop(b, e.i64(steps.start + room), e.i64(steps.stop), dots, add, room, rolled=True)
                continue
            for first in steps[::room]:
                pairs, add = add_step(place, e.i64(first), []), partial(add_step, place)
                pairs = e.loop(b, e.i64(first + 1), e.i64(first + room), pairs, add, rolled=True)
                dots = widen(place, pairs, dots)
        return dots

    def block_of(b, i, acc, groups, x, ahead, wide, prefetch_at):
        """One block of 32 k.

        `acc`: the sums; where blocks share an activation scale, sums without it, then the sums of
        the groups' scales.
        """
        sums, scale_sums = list(acc[: mt * nt]), list(acc[mt * nt :])
        prefetches = iter(
            split_evenly(prefetches_of(b, blocks_of(b, i, groups, wide), x, ahead, prefetch_at(i)), 8 * len(row_groups))
        )
        for rows, part in order:
            steps = range(8 // layout.parts * part, 8 // layout.parts * (part + 1))
            if (rows, part) != order[0]:
                e.keep_order(b)
            if part == 0 and (not keeps_quants or rows[0] == 0):
                blocks = blocks_of(b, i, groups, wide)
            if keeps_quants and rows[0] == 0:
                quants = {step: [block.quants(step, late_shift_of(step)) for block in blocks] for step in steps}
                scales = [block.scale(part) for block in blocks]
            xs = [e.at(b, x, ACT_BLOCK * j) for j in rows]
            offset = ACT_OFFSET if layout.parts == 1 else (ACT_HALF, ACT_HALF + 4)[part]
            products = []
            if rolled:
                products = rolled_dots(b, blocks[0], xs, steps)
            elif matrices:
                products = matrix_dots(b, blocks[0].at, xs, steps, late_shift_of(0))
            for line, l1 in itertools.chain.from_iterable(prefetches if products else ()):
                e.prefetch(b, line, l1=l1, nontemporal=nontemporal)
            starts = [e.load(b, e.at(b, row, offset), e.I32, 4) for row in xs]
            dots = [] if products else [DotAccumulator(b, layout, start) for start in starts for _ in blocks]
            for step in steps if dots else []:
                for line, l1 in next(prefetches):
                    e.prefetch(b, line, l1=l1, nontemporal=nontemporal)
                if in_order and not keeps_quants:
                    e.keep_order(b)
                u = quants[step] if keeps_quants else [block.quants(step, late_shift_of(step)) for block in blocks]
                for j, row in enumerate(xs):
                    x4 = e.load(b, e.at(b, row, 4 * step), e.I32, 4)
                    for n in range(nt):
                        dots[j * nt + n].add(u[n], x4, late_shift_of(step))
            totals = [dot.value() for dot in dots] or [
                b.add(start_of(b, layout, start, signed=matrices), whole)
                for start, whole in zip(starts, products, strict=True)
            ]
            if not keeps_quants:
                scales = [block.scale(part) for block in blocks]
            indices = range(rows[0] * nt, rows[0] * nt + len(totals))
            if layout.grid:
                terms = [
                    accumulate_exact(b, sums[k], dot, scales[k % nt]) for k, dot in zip(indices, totals, strict=True)
                ]
            elif scale_blocks > 1:
                terms = [
                    accumulate_scaled(b, sums[k], dot, scales[k % nt]) for k, dot in zip(indices, totals, strict=True)
                ]
                if rows[0] == 0:
                    scale_sums = [b.fadd(zero, s, flags=STRICT) for zero, s in zip(scale_sums, scales, strict=True)]
            else:
                terms = [scaled_dot(b, dot, scales[k % nt]) for k, dot in enumerate(totals)]
            if layout.mins:
                mins = [block.min(part) for block in blocks]
                if layout.parts == 1:
                    sums_x = [e.splat(b, e.load(b, e.at(b, row, ACT_SUM), e.F32, 4)) for row in xs]
                else:  # of halves: starts hold −128 times the sum, minima are divided by −128
                    sums_x = [dot_value(b, start) for start in starts]
                terms = [e.fma(b, mins[k % nt], sums_x[k // nt], term) for k, term in enumerate(terms)]
            if scale_blocks == 1:
                scales_x = [scale_of(b, row) for row in xs]
                terms = [
                    e.fma(b, term, scales_x[i // nt], sums[k])
                    for i, (k, term) in enumerate(zip(indices, terms, strict=True))
                ]
            sums[indices.start : indices.stop] = terms
        return [*sums, *scale_sums]

    def scale_group(b, i, acc, w, x_at, ahead, wide, prefetch_at):
        none = [e.constant(0.0)] * (mt * nt + nt)
        groups = groups_of(b, i, w)
        inner = lambda j, totals: block_of(b, j, totals, groups, x_at(j), ahead, wide, prefetch_at)
        totals = e.loop(b, i, b.add(i, e.i64(scale_blocks)), none, inner)
        sums, scale_sums = totals[: mt * nt], totals[mt * nt :]
        scales_x = [scale_of(b, e.at(b, x_at(i), ACT_BLOCK * j)) for j in range(mt)]
        terms = sums if layout.grid else [subtract_zeros(b, t, scale_sums[k % nt]) for k, t in enumerate(sums)]
        return [e.fma(b, term, scales_x[k // nt], acc[k]) for k, term in enumerate(terms)]

    def scale_of(b, row):
        return e.splat(b, e.load(b, e.at(b, row, ACT_SCALE), e.F32, 4))

    def groups_of(b, i, w):
        """Contents of a form's blocks: bundles of packed groups, or expanded groups."""
        return w if form is ExpandedBlock else [Bundle(b, layout, group, i) for group in w]

    def blocks_of(b, i, groups, wide):
        if form is ExpandingBlock:
            return [form(b, layout, group, i, to) for group, to in zip(groups, wide, strict=True)]
        return [form(b, layout, group, i) for group in groups]

    def prefetches_of(b, blocks, x, ahead, prefetch_at):
        if form is PackedBlock:
            return blocks[0].prefetch_lines(prefetch_at[0], mt) if uses_prefetch(dtype, mt) else []
        weights = [item for block in blocks for item in block.prefetch_lines()] + [
            (line, False) for line in prefetch_at
        ]
        return weights + [(e.at(b, e.at(b, x, ahead), 64 * line), True) for line in range(-(-mt * ACT_BLOCK // 64))]

    def single_block(b, i, acc, w, x_at, ahead, wide, prefetch_at):
        return block_of(b, i, acc, groups_of(b, i, w), x_at(i), ahead, wide, prefetch_at)

    return tile_of(
        scale_group if scale_blocks > 1 else single_block,
        mt,
        nt,
        scale_blocks,
        prefetch_output=form is not PackedBlock,
        turns=turns,
    )


def many_row_tiles(dtype, mt, nt):
    """(Tile of the first rows, which also expands a K block; tile of later rows), of `mt` rows and `nt` groups."""
    tile = quant_tile(dtype, mt, nt, ExpandedBlock)
    if target_host().has_512_bits:
        return quant_tile(dtype, mt, nt, ExpandingBlock), tile
    expand = expander(dtype, nt)

    @njit(forceinline=True)
    def first_tile(
        w, group_nbytes, last, x, x_stride, sums, out, out_stride, adding, begin, end, ahead, wide, wide_nbytes,
        prefetch_at, prefetch_step, prefetch_apart,
    ):  # fmt: skip
        expand(w, group_nbytes, last, begin, end, wide, wide_nbytes)
        tile(
            wide, wide_nbytes, nt, x, x_stride, sums, out, out_stride, adding, begin, end, ahead, 0, 0,
            prefetch_at, prefetch_step, prefetch_apart,
        )  # fmt: skip

    return first_tile, tile


def expander(dtype, nt):
    """intrinsic f(w, group_nbytes, last, begin, end, wide, wide_nbytes): expand blocks of nt groups."""
    layout = LAYOUTS[dtype]

    @intrinsic
    def expand(typingctx, w, group_nbytes, last, begin, end, wide, wide_nbytes):
        def codegen(ctx, b, sig, a):
            w0, wide0 = (b.inttoptr(a[p], e.I8P) for p in (0, 5))

            def group(n, _):
                packed = e.at(b, w0, b.mul(a[1], e.minimum(b, a[2], n)))
                e.loop(b, a[3], a[4], [], partial(block, packed, e.at(b, wide0, b.mul(a[6], n))), rolled=True)
                return []

            def block(packed, to, i, _):
                here = ExpandingBlock(b, layout, Bundle(b, layout, packed, i), i, to)
                for line, l1 in here.prefetch_lines():
                    e.prefetch(b, line, l1=l1)
                for step in range(8):
                    here.quants(step, late_shift(layout, step))
                for part in range(layout.parts):
                    here.scale(part)
                    if layout.mins:
                        here.min(part)
                return []

            e.loop(b, e.i64(0), e.i64(nt), [], group, rolled=True)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return expand


def split_evenly(items, n):
    """Split items into n consecutive lists of about equal length."""
    bounds = [-(-len(items) * i // n) for i in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def float_tile(dtype, mt, nt):
    """Tile of floats: a loop over k."""
    return _float_tile(dtype, mt, nt, 64 // LAYOUTS[dtype].quants, partial(e.load_floats, dtype=dtype), e.fma)


def bf16_tile(mt, nt):
    """Tile of bf16 weights and activations: a loop over pairs, which are moved like f32."""
    return _float_tile("bf16", mt, nt, 1, partial(e.load_floats, dtype="f32"), bf16_dot)


def _float_tile(dtype, mt, nt, per_line, load_line, multiply):
    quants = 64 // per_line

    def elements_of(n):
        def elements(b, i, acc, w, x_at, _ahead, _wide, _asked):
            lines = [e.at(b, group, b.mul(i, e.i64(quants))) for group in w]
            for line in lines if uses_prefetch(dtype, mt) else ():
                e.prefetch(b, e.at(b, line, PREFETCH_DISTANCE))
            for j, ws in enumerate(zip(*(load_line(b, line, n=n) for line in lines), strict=True)):
                x, sums, acc = x_at(b.add(i, e.i64(j))), acc, []
                for row in range(mt):
                    xj = e.splat(b, e.load(b, e.at(b, x, 4 * row), e.F32, 4))
                    acc += [multiply(b, w, xj, sums[row * nt + g]) for g, w in enumerate(ws)]
            return acc

        return elements

    return tile_of(elements_of(per_line), mt, nt, per_line, rest=elements_of(1))


def tile_of(body, mt, nt, by=1, *, rest=None, prefetch_output=False, turns=1):
    """intrinsic of a tile: `body` for blocks begin…end, `by` at a time, and `rest` for the
    remainder.

    Sums [mt][nt][16] start from zero where begin is 0. They go to `out`, with rows `out_stride`
    bytes apart: back to `sums`, or to y; `adding` accumulates into it. With expanded weights, the
    next rows are `ahead` bytes on. Expanded groups are written to `wide`, `wide_nbytes` apart. Each
    block prefetches two lines of later weights from `prefetch_at` on (packed weights: as many as a
    block has), `prefetch_apart` bytes apart, and `prefetch_step` bytes further per block.
    `prefetch_output`: a tile of many rows prefetches the lines of its results, some of which are in
    y. `turns`: the tile is of turns · nt groups, of which nt are computed at a time.
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
        prefetch_at,
        prefetch_step,
        prefetch_apart,
    ):
        def codegen(ctx, b, sig, a):
            def groups(turn, _):
                """Compute nt groups from nt · turn on."""
                first, columns = b.mul(turn, e.i64(nt)), b.mul(turn, e.i64(64 * nt))
                w0, x0, sums0, out0, wide0 = (b.inttoptr(a[p], e.I8P) for p in (0, 3, 5, 6, 12))
                places = [b.add(first, e.i64(n)) for n in range(nt)]
                w = [e.at(b, w0, b.mul(a[1], e.minimum(b, a[2], n))) for n in places]
                wide = [e.at(b, wide0, b.mul(a[13], n)) for n in places]
                sums0, out0 = e.at(b, sums0, columns), e.at(b, out0, columns)
                places = [e.at(b, sums0, 64 * (i // nt * nt * turns + i % nt)) for i in range(mt * nt)]
                is_first = b.icmp_signed("==", a[9], e.i64(0))
                start = [b.select(is_first, e.constant(0.0), e.load(b, p, e.V16F)) for p in places]

                rows = [e.at(b, out0, b.mul(a[7], e.i64(j))) for j in range(mt)]
                outputs = [e.at(b, row, 64 * n) for row in rows for n in range(nt)]
                for place in outputs if prefetch_output else ():
                    e.prefetch(b, place, write=True)

                def later_lines(i):
                    line = e.at(b, b.inttoptr(a[14], e.I8P), b.mul(b.sub(i, a[9]), a[15]))
                    return line, e.at(b, line, a[16])

                def step(i, acc, body=body):
                    return body(b, i, acc, w, lambda block: e.at(b, x0, b.mul(block, a[4])), a[11], wide, later_lines)

                if rest is None:
                    totals = e.loop(b, a[9], a[10], start, step, by)
                else:
                    totals = e.unrolled(
                        b, a[9], a[10], start, lambda n: partial(step, body=body if n == by else rest), by
                    )
                with b.if_else(b.icmp_signed("!=", a[8], e.i64(0))) as (accumulate, store):
                    with accumulate:
                        for place, value in zip(outputs, totals, strict=True):
                            e.store(b, b.fadd(e.load(b, place, e.V16F), value), place)
                    with store:
                        for place, value in zip(outputs, totals, strict=True):
                            e.store(b, value, place)
                return []

            if turns > 1:
                e.loop(b, e.i64(0), e.i64(turns), [], groups, rolled=True)
            else:
                groups(e.i64(0), [])
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 17), codegen

    return tile

"""The register tile of products with packed weights (layout.py): `mt` activation rows × `nt` groups of 16 outputs.

Its accumulators stay in registers over a stretch of K. Each output is one chain of fused multiply-adds over k (for
quantised types over what shares a scale of activations: blocks of 32, whose dots are a chain in turn where those are of
256), whatever the tile, so the bits of a row do not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from functools import partial

from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.bf16 import pairs_added
from logitless.backends.cpu.kernels.ir.int_dot import Dot, added, late_shift, less_zeros, times
from logitless.backends.cpu.kernels.ir.math import STRICT
from logitless.backends.cpu.kernels.matmul.layout import (
    ACT_BLOCK,
    ACT_HALF,
    ACT_OFFSET,
    ACT_SCALE,
    ACT_SUM,
    AT_ONCE,
    BESIDE_HELD,
    LAYOUTS,
    asks_ahead,
)
from logitless.backends.cpu.kernels.matmul.unpack_blocks import Bundle, Expanded, Expanding, Packed
from logitless.backends.host import compiled_for

EARLY_BYTES = 2048  # of floats, in each stream


def quant_tile(dtype, mt, nt, form, *, past=False):
    """A tile of quantised weights, as one of the forms of blocks.py: a loop over blocks of 32, within one over the
    scales of activations if blocks share them. A dot that does not need a scale of its own is an operation less.

    Between the dots of a block the memory is asked for what comes later: with few rows it is the limit, and it has to
    be asked all the time, for few lines can be under way at once. So a block of packed weights meets up to 16 rows,
    AT_ONCE by AT_ONCE, before the next. `past`: what is asked for keeps out of the outer caches.
    """
    layout = LAYOUTS[dtype]
    shared = layout.shared
    # LLVM moves what is asked for to a block's end, all at once; of few rows in wide registers it leaves more apart
    in_order = form is Packed and (mt >= AT_ONCE or not asks_ahead(dtype, mt) or not compiled_for().has_512_bits)
    # Quants of halves with scales of their own cost most to unpack: there they are kept for all rows instead
    holds = form is Packed and mt > AT_ONCE and layout.parts > 1 and compiled_for().has_512_bits
    at_once = BESIDE_HELD if holds else AT_ONCE
    some = [range(first, min(mt, first + at_once)) for first in range(0, mt, at_once)]
    parts = range(layout.parts)
    late = partial(late_shift, layout, lone=mt == 1 and form is Packed)
    turns = [(rows, part) for part in parts for rows in some] if holds else list(itertools.product(some, parts))

    def block_of(b, i, acc, groups, x, ahead, wide, asked):
        """`acc`: the sums, and where blocks share a scale of activations, so far without it, the groups' scales."""
        sums, zeros = list(acc[: mt * nt]), list(acc[mt * nt :])
        asks = iter(spread(asks_of(b, blocks_of(b, i, groups, wide), x, ahead, asked(i)), 8 * len(some)))
        for rows, part in turns:
            steps = range(8 // layout.parts * part, 8 // layout.parts * (part + 1))
            if (rows, part) != turns[0]:
                e.keep_order(b)
            if part == 0 and (not holds or rows[0] == 0):
                blocks = blocks_of(b, i, groups, wide)
            if holds and rows[0] == 0:
                held = {step: [block.quants(step, late(step)) for block in blocks] for step in steps}
                scales = [block.scale(part) for block in blocks]
            xs = [e.at(b, x, ACT_BLOCK * j) for j in rows]
            offset = ACT_OFFSET if layout.parts == 1 else (ACT_HALF, ACT_HALF + 4)[part]
            starts = [e.load(b, e.at(b, row, offset), e.I32, 4) for row in xs]
            dots = [Dot(b, layout, start) for start in starts for _ in blocks]
            for step in steps:
                for line, near in next(asks):
                    e.prefetch(b, line, near=near, past=past)
                if in_order and not holds:
                    e.keep_order(b)
                u = held[step] if holds else [block.quants(step, late(step)) for block in blocks]
                for j, row in enumerate(xs):
                    x4 = e.load(b, e.at(b, row, 4 * step), e.I32, 4)
                    for n in range(nt):
                        dots[j * nt + n].add(u[n], x4, late(step))
            values = [dot.value() for dot in dots]
            if not holds:
                scales = [block.scale(part) for block in blocks]
            places = range(rows[0] * nt, rows[0] * nt + len(dots))
            if shared > 1:
                terms = [added(b, sums[k], dot, scales[k % nt]) for k, dot in zip(places, values, strict=True)]
                if rows[0] == 0:
                    zeros = [b.fadd(zero, s, flags=STRICT) for zero, s in zip(zeros, scales, strict=True)]
            else:
                terms = [times(b, dot, scales[k % nt]) for k, dot in enumerate(values)]
            if layout.mins:
                mins = [block.min() for block in blocks]
                sums_x = [e.splat(b, e.load(b, e.at(b, row, ACT_SUM), e.F32, 4)) for row in xs]
                terms = [e.fma(b, mins[k % nt], sums_x[k // nt], term) for k, term in enumerate(terms)]
            if shared == 1:
                scales_x = [scale_of(b, row) for row in xs]
                terms = [
                    e.fma(b, term, scales_x[i // nt], sums[k])
                    for i, (k, term) in enumerate(zip(places, terms, strict=True))
                ]
            sums[places.start : places.stop] = terms
        return [*sums, *zeros]

    def shared_of(b, i, acc, w, x_at, ahead, wide, asked):
        none = [e.each(0.0)] * (mt * nt + nt)
        groups = groups_of(b, i, w)
        inner = lambda j, values: block_of(b, j, values, groups, x_at(j), ahead, wide, asked)
        values = e.loop(b, i, b.add(i, e.i64(shared)), none, inner)
        sums, zeros = values[: mt * nt], values[mt * nt :]
        scales_x = [scale_of(b, e.at(b, x_at(i), ACT_BLOCK * j)) for j in range(mt)]
        terms = [less_zeros(b, term, zeros[k % nt]) for k, term in enumerate(sums)]
        return [e.fma(b, term, scales_x[k // nt], acc[k]) for k, term in enumerate(terms)]

    def scale_of(b, row):
        return e.splat(b, e.load(b, e.at(b, row, ACT_SCALE), e.F32, 4))

    def groups_of(b, i, w):
        """What a form takes block i of: of a packed group the bundle."""
        return w if form is Expanded else [Bundle(b, layout, group, i) for group in w]

    def blocks_of(b, i, groups, wide):
        if form is Expanding:
            return [form(b, layout, group, i, to) for group, to in zip(groups, wide, strict=True)]
        return [form(b, layout, group, i) for group in groups]

    def asks_of(b, blocks, x, ahead, asked):
        if form is Packed:
            return blocks[0].asks(asked[0]) if asks_ahead(dtype, mt) else []
        weights = [ask for block in blocks for ask in block.asks()] + [(line, False) for line in asked]
        return weights + [(e.at(b, e.at(b, x, ahead), 64 * line), True) for line in range(-(-mt * ACT_BLOCK // 64))]

    def lone_of(b, i, acc, w, x_at, ahead, wide, asked):
        return block_of(b, i, acc, groups_of(b, i, w), x_at(i), ahead, wide, asked)

    return tile_of(shared_of if shared > 1 else lone_of, mt, nt, shared, claiming=form is not Packed)


def spread(items, n):
    """n lists of them, in order and about as long."""
    ends = [-(-len(items) * i // n) for i in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def float_tile(dtype, mt, nt):
    """A tile of floats: a loop over k."""
    return _tile_of_numbers(dtype, mt, nt, 64 // LAYOUTS[dtype].quants, partial(e.floats, dtype=dtype), e.fma)


def bf16_tile(mt, nt):
    """A tile of bf16 and rows that are rounded to it: a loop over pairs, which are moved as if they were f32."""
    return _tile_of_numbers("bf16", mt, nt, 1, partial(e.floats, dtype="f32"), pairs_added)


def _tile_of_numbers(dtype, mt, nt, in_line, numbers, multiply):
    quants = 64 // in_line

    def elements_of(n):
        def elements(b, i, acc, w, x_at, _ahead, _wide, _asked):
            lines = [e.at(b, group, b.mul(i, e.i64(quants))) for group in w]
            for line in lines if asks_ahead(dtype, mt) else ():
                e.prefetch(b, e.at(b, line, EARLY_BYTES))
            for j, ws in enumerate(zip(*(numbers(b, line, n=n) for line in lines), strict=True)):
                x, sums, acc = x_at(b.add(i, e.i64(j))), acc, []
                for row in range(mt):
                    xj = e.splat(b, e.load(b, e.at(b, x, 4 * row), e.F32, 4))
                    acc += [multiply(b, w, xj, sums[row * nt + g]) for g, w in enumerate(ws)]
            return acc

        return elements

    return tile_of(elements_of(in_line), mt, nt, in_line, rest=elements_of(1))


def tile_of(body, mt, nt, by=1, *, rest=None, claiming=False):
    """An intrinsic that runs `body` for blocks begin…end, `by` at once, and `rest` for each of those that are left; its
    sums [mt][nt][16] start from zero where begin is 0.

    They go to `out`, whose rows are `out_stride` bytes apart: back to where they were, or to their place in y, `adding`
    to what is there if that is not 0. With expanded weights the next rows lie so many bytes `ahead`. `wide` is where
    groups are left expanded, `wide_nbytes` apart. Of the weights that come later each block asks for two lines (packed
    weights: as many as a block has from `asked` on), `apart` bytes apart, and for those `asked_step` bytes further than
    the block before. A tile of many rows is `claiming` the lines of its sums early: some of them are in y.
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
        asked,
        asked_step,
        apart,
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

            def lines_asked(i):
                line = e.at(b, b.inttoptr(a[14], e.I8P), b.mul(b.sub(i, a[9]), a[15]))
                return line, e.at(b, line, a[16])

            def step(i, acc, body=body):
                return body(b, i, acc, w, lambda block: e.at(b, x0, b.mul(block, a[4])), a[11], wide, lines_asked)

            if rest is None:
                values = e.loop(b, a[9], a[10], start, step, by)
            else:
                values = e.unrolled(b, a[9], a[10], start, lambda n: partial(step, body=body if n == by else rest), by)
            with b.if_else(b.icmp_signed("!=", a[8], e.i64(0))) as (added, put):
                with added:
                    for place, value in zip(ends, values, strict=True):
                        e.store(b, b.fadd(e.load(b, place, e.V16F), value), place)
                with put:
                    for place, value in zip(ends, values, strict=True):
                        e.store(b, value, place)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 17), codegen

    return tile

"""The gated part of a feed-forward block, rounded for the product that follows: `glu_act:<activation>:<group>` of what
gate and up made, `linear_glu:<type>:<activation>` with both products for many rows, `…:1` for one.

A tile of many rows has 16 outputs of gate beside the same 16 of up, so both are in the first-level cache when they
meet, and what is written is a quarter of one of them; one row has a stage less. Every number has the bits that
`linear`, `glu` and `quantize_act` give it.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.elementwise import ACTIVATIONS, joined
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.registry import i64p, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, FOLLOWING, LAYOUTS, expanded_nbytes, expanded_tile
from logitless.backends.cpu.kernels.matmul.packed_matmul import ask, share, tile_at
from logitless.backends.cpu.kernels.matmul.packed_tile import quant_tile
from logitless.backends.cpu.kernels.matmul.quantize_activations import panel_of, round_each, row_rounder
from logitless.backends.cpu.kernels.matmul.unpack_blocks import Expanded, Expanding, Packed
from logitless.backends.host import isa


def gated(activation):
    """intrinsic f(sums, out, rows): sums [rows][2][16] of gate and up → out, 16 of each 32 floats."""

    @intrinsic
    def run(typingctx, sums, out, rows):
        def codegen(ctx, b, sig, a):
            source, target = (b.inttoptr(v, e.I8P) for v in a[:2])

            def body(i, _):
                at = b.mul(i, e.i64(128))
                gate, up = (e.load(b, e.at(b, source, b.add(at, e.i64(64 * j))), e.V16F, 4) for j in range(2))
                e.store(b, b.fmul(ACTIVATIONS[activation](b, gate), up), e.at(b, target, at), 4)
                return []

            e.loop(b, e.i64(0), a[2], [], body)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return run


@kernel("glu_act")
def glu_act(activation, group_size):
    """a: gate, up, y, m, blocks of a row, blocks of a unit, panel rows, panels. A unit is a part of a row.

    Scratch: a unit as floats.
    """
    join = joined(activation)
    round_row = row_rounder(int(group_size))

    def run(a, begin, end, scratch):
        m, count, most, panel_rows, n_panels = a[3], a[4], a[5], a[6], a[7]
        parts = (count + most - 1) // most
        for unit in range(begin, end):
            row, first = unit // parts, unit % parts * most
            n = min(most, count - first)
            at = (row * count + first) * 128
            join(a[0] + at, a[1] + at, scratch, n * 32)
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            round_row(scratch, a[2] + (r0 * count + first * rows + row - r0) * ACT_BLOCK, rows * ACT_BLOCK, n)

    return run


@kernel("linear_glu")
def linear_glu(dtype, activation, rows="", then=""):
    """a: gate, up, x, y, m, n, blocks of k, stretch of them, bytes of a group, rows at once, how many times, rows of a
    panel of x and of y, panels. `rows` "1": of one row, for which the last five are not looked at; `then` "past": its
    weights are read past the caches.

    A unit is 32 columns of y for the rows at once.
    """
    return _lone(dtype, activation, then == "past") if rows == "1" else _expanded(dtype, activation)


def _lone(dtype, activation, past):
    """One row. Scratch: gate and up in f32 [2][columns of all units].

    With more rows the time to join and round them, in which memory rests, is as long as a stage of its own takes.
    """
    tile = quant_tile(dtype, 1, 1, Packed, past=past)
    join, round_row = joined(activation), row_rounder(32)
    nbytes = LAYOUTS[dtype].block_nbytes

    def run(a, begin, end, scratch):
        gate, up, x, count, group_nbytes = a[0], a[1], a[2], a[6], a[8]
        n, following = (end - begin) * 32, i64p(scratch - FOLLOWING)[0]
        for part in range(4 * begin, 4 * end):  # of a unit two groups of gate, then two of up
            group = part // 4 * 2 + part % 2
            w, out = gate + group * group_nbytes, scratch + (group - 2 * begin) * 64
            ahead = group_nbytes if part % 2 == 0 else up - gate - group_nbytes
            if part % 4 > 1:
                w, out = w - gate + up, out + n * 4
                ahead = group_nbytes if part % 2 == 0 else gate - up + group_nbytes
            if part == 4 * end - 1 and following != 0:
                ahead = following - w
            tile(w, 0, 0, x, ACT_BLOCK, 0, out, 0, 0, 0, count, 0, 0, 0, w + ahead, nbytes, 0)
        join(scratch, scratch + n * 4, scratch, n)
        round_row(scratch, a[3] + begin * ACT_BLOCK, ACT_BLOCK, end - begin)

    return run


def _expanded(dtype, activation):
    """Scratch: sums [rows + tile][2][16], y in f32 [rows][32], and of both groups of weights a stretch, expanded."""
    mt, _ = expanded_tile(dtype, isa())
    first_tile, tile = (quant_tile(dtype, mt, 2, form) for form in (Expanding, Expanded))
    block_nbytes = expanded_nbytes(LAYOUTS[dtype])
    join = gated(activation)
    round4, round2, round1 = round_each(4), round_each(2), round_each(1)

    def run(a, begin, end, scratch):
        m, blocks, count, stretch, group_nbytes = a[4], a[5] // 32, a[6], a[7], a[8]
        most, times, panel_rows, n_panels = a[9], a[10], a[11], a[12]
        ahead = panel_rows * count * ACT_BLOCK
        for unit in range(begin, end):
            turn, column = unit // blocks, unit % blocks
            r0 = turn * most
            rows = m - r0 if turn == times - 1 else most
            values = scratch + (rows + mt) * 128
            for half in range(2):
                group = (2 * column + half) * group_nbytes
                for k0 in range(0, count, stretch):
                    k1 = min(count, k0 + stretch)
                    wide, nbytes = values + rows * 128 - k0 * block_nbytes, (k1 - k0) * block_nbytes
                    asked, stop = group_nbytes * (count + k0) // count, group_nbytes * (count + k1) // count
                    each = share(stop - asked, rows, mt)
                    for r in range(0, rows, mt):
                        row = min(r, rows - mt)
                        sums = scratch + r * 128
                        out = scratch + row * 128 if k1 == count else sums
                        at, rows_beside = tile_at(r0 + r, r0 + row, m, panel_rows, n_panels, count)
                        xr, x_stride = a[2] + at * ACT_BLOCK, rows_beside * ACT_BLOCK
                        spread = min(each, 64 * (k1 - k0))
                        ask(a[0] + group, asked + spread, min(stop, asked + each))
                        ask(a[1] + group, asked + spread, min(stop, asked + each))
                        later = a[0] + group + asked, spread // (k1 - k0), a[1] - a[0]
                        asked += each
                        rest = xr, x_stride, sums, out, 128, 0, k0, k1, ahead, wide, nbytes, *later
                        if r > 0:
                            tile(wide, nbytes, 1, *rest)
                        else:  # gate and up are two groups of one weight, as it were
                            first_tile(a[0] + group, a[1] - a[0], 1, *rest)
                join(scratch, values + half * 64, rows)
            row = 0
            while row < rows:
                y0, y_rows = panel_of(r0 + row, m, panel_rows, n_panels)
                y = a[3] + (y0 * blocks + column * y_rows + r0 + row - y0) * ACT_BLOCK
                stop = min(rows, y0 + y_rows - r0)
                while row < stop:
                    if stop - row >= 4:
                        round4(values + row * 128, y, ACT_BLOCK)
                        done = 4
                    elif stop - row >= 2:
                        round2(values + row * 128, y, ACT_BLOCK)
                        done = 2
                    else:
                        round1(values + row * 128, y, ACT_BLOCK)
                        done = 1
                    row, y = row + done, y + done * ACT_BLOCK

    return run

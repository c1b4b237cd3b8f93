"""GLU of a feed-forward block, fused with its GEMMs and with the quantisation of the result.

`glu_act:<activation>:<group>` takes the results of gate and up. `linear_glu:<dtype>:<activation>`
also computes both GEMMs of many rows, `…:1` of one row.

A tile of many rows has 16 outputs of gate next to the same 16 of up. Both are in the L1 cache when
they meet, and the result is a quarter of one of them. One row saves a phase. Every number has
the bits that `linear`, `glu` and `quantize_act` give it.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.elementwise import vectors
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import i64p, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, LAYOUTS, expanded_nbytes, expanded_tile
from logitless.backends.cpu.kernels.matmul.packed_matmul import prefetch_range, prefetch_share, row_offset
from logitless.backends.cpu.kernels.matmul.packed_tile import many_row_tiles, quant_tile
from logitless.backends.cpu.kernels.matmul.quantize_activations import block_quantizer, panel_of, row_quantizer
from logitless.backends.cpu.kernels.matmul.unpack_blocks import PackedBlock
from logitless.backends.cpu.kernels.runtime.control_block import NEXT_WEIGHTS
from logitless.backends.host import isa


def glu_function(activation):
    """intrinsic f(gate, up, y, n): y[i] = activation(gate[i]) · up[i]."""
    return m.elementwise(2, 0, vectors(f"glu:{activation}"))


def glu_tile(activation):
    """intrinsic f(sums, out, rows): sums [rows][2][16] of gate and up → out, 16 of each 32 floats."""
    formula = vectors(f"glu:{activation}")

    @intrinsic
    def run(typingctx, sums, out, rows):
        def codegen(ctx, b, sig, a):
            source, target = (b.inttoptr(v, e.I8P) for v in a[:2])

            def body(i, _):
                at = b.mul(i, e.i64(128))
                both = [e.load(b, e.at(b, source, b.add(at, e.i64(64 * j))), e.V16F, 4) for j in range(2)]
                e.store(b, formula(b, both, []), e.at(b, target, at), 4)
                return []

            e.loop(b, e.i64(0), a[2], [], body)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return run


@kernel("glu_act")
def glu_act(activation, group_size):
    """GLU and quantisation.

    A unit is `unit_blocks` of the `count` blocks of a row. Scratch: a unit as floats.
    """
    glu = glu_function(activation)
    quantize_row = row_quantizer(int(group_size))

    def run(gate_at, up_at, y_at, m, count, unit_blocks, panel_rows, n_panels, begin, end, scratch):
        parts = (count + unit_blocks - 1) // unit_blocks
        for unit in range(begin, end):
            row, first = unit // parts, unit % parts * unit_blocks
            n = min(unit_blocks, count - first)
            at = (row * count + first) * 128
            glu(gate_at + at, up_at + at, scratch, n * 32)
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            quantize_row(scratch, y_at + (r0 * count + first * rows + row - r0) * ACT_BLOCK, rows * ACT_BLOCK, n)

    return run


@kernel("linear_glu")
def linear_glu(dtype, activation, rows="", variant=""):
    """Gate and up GEMMs, GLU and quantisation. A unit is 32 columns of y, of one pass of rows.

    a: gate, up, x, y, m, n, blocks of k, blocks of a K block, bytes of a group, rows of a pass,
    passes, rows of a panel of x and of y, panels. `rows` "1": one row; the last five are unused.
    `variant` "nontemporal": weights are prefetched past the outer caches.
    """
    return _one_row(dtype, activation, variant == "nontemporal") if rows == "1" else _many_rows(dtype, activation)


def _one_row(dtype, activation, nontemporal):
    """One row. Scratch: gate and up in f32 [2][columns of all units].

    With more rows, the GLU and quantisation, during which memory idles, take as long as a phase of
    their own.
    """
    tile = quant_tile(dtype, 1, 1, PackedBlock, nontemporal=nontemporal)
    glu, quantize_row = glu_function(activation), row_quantizer(32)
    nbytes = LAYOUTS[dtype].block_nbytes

    def run(a, begin, end, scratch):
        gate, up, x, count, group_nbytes = a[0], a[1], a[2], a[6], a[8]
        n, next_weights = (end - begin) * 32, i64p(scratch - NEXT_WEIGHTS)[0]
        for part in range(4 * begin, 4 * end):  # two groups of gate, then two of up, per unit
            group = part // 4 * 2 + part % 2
            w, out = gate + group * group_nbytes, scratch + (group - 2 * begin) * 64
            ahead = group_nbytes if part % 2 == 0 else up - gate - group_nbytes
            if part % 4 > 1:
                w, out = w - gate + up, out + n * 4
                ahead = group_nbytes if part % 2 == 0 else gate - up + group_nbytes
            if part == 4 * end - 1 and next_weights != 0:
                ahead = next_weights - w
            tile(w, 0, 0, x, ACT_BLOCK, 0, out, 0, 0, 0, count, 0, 0, 0, w + ahead, nbytes, 0)
        glu(scratch, scratch + n * 4, scratch, n)
        quantize_row(scratch, a[3] + begin * ACT_BLOCK, ACT_BLOCK, end - begin)

    return run


def _many_rows(dtype, activation):
    """Many rows. Scratch: sums [rows + tile][2][16], y in f32 [rows][32], expanded K blocks of gate
    and up.
    """
    mt, _ = expanded_tile(dtype, isa())
    first_tile, tile = many_row_tiles(dtype, mt, 2)
    block_nbytes = expanded_nbytes(LAYOUTS[dtype], isa())
    glu = glu_tile(activation)
    quantize4, quantize2, quantize1 = block_quantizer(4), block_quantizer(2), block_quantizer(1)

    def run(a, begin, end, scratch):
        m, blocks, count, k_block, group_nbytes = a[4], a[5] // 32, a[6], a[7], a[8]
        pass_rows, n_passes, panel_rows, n_panels = a[9], a[10], a[11], a[12]
        ahead = panel_rows * count * ACT_BLOCK
        for unit in range(begin, end):
            pass_index, column = unit // blocks, unit % blocks
            r0 = pass_index * pass_rows
            rows = m - r0 if pass_index == n_passes - 1 else pass_rows
            values = scratch + (rows + mt) * 128
            for half in range(2):
                group = (2 * column + half) * group_nbytes
                for k0 in range(0, count, k_block):
                    k1 = min(count, k0 + k_block)
                    expanded, nbytes = values + rows * 128 - k0 * block_nbytes, (k1 - k0) * block_nbytes
                    prefetch_at, stop = group_nbytes * (count + k0) // count, group_nbytes * (count + k1) // count
                    tile_nbytes = prefetch_share(stop - prefetch_at, rows, mt)
                    for r in range(0, rows, mt):
                        row = min(r, rows - mt)
                        sums = scratch + r * 128
                        out = scratch + row * 128 if k1 == count else sums
                        at, panel_height = row_offset(r0 + r, r0 + row, m, panel_rows, n_panels, count)
                        xr, x_stride = a[2] + at * ACT_BLOCK, panel_height * ACT_BLOCK
                        spread = min(tile_nbytes, 64 * (k1 - k0))
                        prefetch_range(a[0] + group, prefetch_at + spread, min(stop, prefetch_at + tile_nbytes))
                        prefetch_range(a[1] + group, prefetch_at + spread, min(stop, prefetch_at + tile_nbytes))
                        prefetch_args = a[0] + group + prefetch_at, spread // (k1 - k0), a[1] - a[0]
                        prefetch_at += tile_nbytes
                        rest = xr, x_stride, sums, out, 128, 0, k0, k1, ahead, expanded, nbytes, *prefetch_args
                        if r > 0:
                            tile(expanded, nbytes, 1, *rest)
                        else:  # gate and up act as two groups of one weight
                            first_tile(a[0] + group, a[1] - a[0], 1, *rest)
                glu(scratch, values + half * 64, rows)
            row = 0
            while row < rows:
                y0, y_rows = panel_of(r0 + row, m, panel_rows, n_panels)
                y = a[3] + (y0 * blocks + column * y_rows + r0 + row - y0) * ACT_BLOCK
                stop = min(rows, y0 + y_rows - r0)
                while row < stop:
                    if stop - row >= 4:
                        quantize4(values + row * 128, y, ACT_BLOCK)
                        done = 4
                    elif stop - row >= 2:
                        quantize2(values + row * 128, y, ACT_BLOCK)
                        done = 2
                    else:
                        quantize1(values + row * 128, y, ACT_BLOCK)
                        done = 1
                    row, y = row + done, y + done * ACT_BLOCK

    return run

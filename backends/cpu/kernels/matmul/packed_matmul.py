"""GEMM and GEMV with packed weights, y = x · wᵀ: `linear:<dtype>:<rows>x<groups>`, one per tile.

A unit is a strip of `nt` groups of 16 outputs, for as many rows as stay in the cache while weights
stream (a pass); units of a pass are consecutive. Within a unit, a K block of weights that fits the
L1 cache meets all rows before the next one. With many rows, quantised weights are expanded once per
K block (unpack_blocks.py). Partial sums wait in scratch. A tile at the edge is moved back over its
neighbour and computes those results twice: same numbers, no special case.
"""

from __future__ import annotations

from numba import njit

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.math import copy_elements, copy_nontemporal
from logitless.backends.cpu.kernels.ir.registry import f32p, i64p, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, LAYOUTS, expanded_nbytes, expanded_tile
from logitless.backends.cpu.kernels.matmul.packed_tile import bf16_tile, float_tile, many_row_tiles, quant_tile
from logitless.backends.cpu.kernels.matmul.unpack_blocks import PackedBlock
from logitless.backends.cpu.kernels.runtime.control_block import NEXT_WEIGHTS
from logitless.backends.host import isa


def tile_writer(mt, nt, *, accumulate=False):
    """f(sums, y, ldy, columns, first): write rows `first`… of a tile's sums to y."""

    @njit(forceinline=True)
    def copy(sums, y, ldy, columns, first):
        for j in range(first, mt):
            part, row = f32p(sums + j * nt * 64), f32p(y + j * ldy * 4)
            for c in range(columns):
                row[c] = row[c] + part[c] if accumulate else part[c]

    return copy


@njit(forceinline=True)
def prefetch_range(address, begin, end):
    """Prefetch bytes begin…end−1 from an address on into the L2 cache."""
    for line in range(address + begin, address + end, 64):
        e.prefetch_l2(line)


@njit(forceinline=True)
def prefetch_share(nbytes, rows, mt):
    """Share of so many bytes that each tile of these rows prefetches, in whole cache lines."""
    return (nbytes * mt // rows + 64) // 64 * 64


@njit(forceinline=True)
def row_offset(first, row, m, panel_rows, n_panels, count):
    """Offset of a row in x, in elements or blocks, and the rows that each k of its panel has.

    The row belongs to a tile whose rows begin at `first`. Panels begin where tiles do, and all but
    the last have a tile's rows. So this is `panel_of` without the division, since each tile calls
    it.
    """
    last_panel = (n_panels - 1) * panel_rows
    panel = min(first, last_panel)
    return panel * count + row - panel, m - panel if panel == last_panel else panel_rows


@kernel("linear")
def linear(dtype, shape, variant=""):
    """GEMM with packed weights.

    a: w, x, y, m, n, count (blocks or k), K block, bytes of a group. With expanded weights: rows of
    a pass, passes, rows of a panel of x, panels. With packed ones: units whose results are buffered
    (0: none).

    `variant`: "add" (expanded weights): accumulate into y. "nontemporal" (packed weights): prefetch
    past the outer caches. "bf16": activations are bf16 like the weights, and a k is a pair.
    """
    mt, nt = (int(s) for s in shape.split("x"))
    if (mt, nt) == expanded_tile(dtype, isa()):
        return _expanded_kernel(dtype, mt, nt, variant == "add")
    return _packed_kernel(dtype, mt, nt, variant)


def _packed_kernel(dtype, mt, nt, variant):
    """Few rows. Scratch: sums of a tile for all rows, then buffered results.

    Rows of y are pages apart. A core that writes a line here and there between two groups of
    weights reads the weights so much slower that 8 rows take a sixth longer. So where weights come
    from memory, the results of `n_buffered` units are buffered and written together: a long piece
    of each row, with non-temporal stores, which need no read.
    """
    run_strips = packed_strips(dtype, mt, nt, variant)

    def run(a, begin, end, scratch):
        next_weights = i64p(scratch - NEXT_WEIGHTS)[0]
        run_strips(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], begin, end, scratch, next_weights)

    return run


def packed_strips(dtype, mt, nt, variant=""):
    """f(w, x, y, m, n, count, k_block, group_nbytes, n_buffered, begin, end, scratch,
    next_weights): strips of y.
    """
    quantised = LAYOUTS[dtype].block > 1
    if quantised:
        tile = quant_tile(dtype, mt, nt, PackedBlock, nontemporal=variant == "nontemporal")
    else:
        tile = bf16_tile(mt, nt) if variant == "bf16" else float_tile(dtype, mt, nt)
    x_nbytes, block_nbytes = ACT_BLOCK if quantised else 4, LAYOUTS[dtype].block_nbytes if quantised else 0
    # types of 256 k lose 2 to 3 % where the prefetch distance varies
    uses_next = LAYOUTS[dtype].scale_blocks == 1

    @njit(forceinline=True)
    def run_strips(weight, xs, ys, m, n, count, k_block, group_nbytes, n_buffered, begin, end, scratch, next_weights):
        groups = (n + 15) // 16
        # bytes that a tile prefetches per block: tiles share it
        tile_nbytes = block_nbytes // ((m + mt - 1) // mt)
        buffer, buffer_nbytes = scratch + (m + mt) * nt * 64, max(1, n_buffered) * nt * 64
        first = groups  # of the buffered ones
        for unit in range(begin, end):
            g0 = max(0, min(unit * nt, groups - nt))
            w, last = weight + g0 * group_nbytes, groups - 1 - g0
            ahead = group_nbytes  # the last group of a K block prefetches the thread's next one
            if uses_next and unit == end - 1 and next_weights != 0:
                ahead = next_weights - w
            to_y = n_buffered == 0 and (g0 + nt) * 16 <= n
            if not to_y:
                first = min(first, g0)
            for k0 in range(0, count, k_block):
                k1 = min(count, k0 + k_block)
                prefetch_at = w + ahead + k0 * block_nbytes
                for r in range(0, m, mt):
                    row = min(r, m - mt)
                    x, x_stride = xs + row * x_nbytes, m * x_nbytes
                    sums = scratch + r * nt * 64
                    out, out_stride = sums, nt * 64
                    if k1 == count and to_y:
                        out, out_stride = ys + (row * n + g0 * 16) * 4, n * 4
                    elif k1 == count:
                        out, out_stride = buffer + row * buffer_nbytes + (g0 - first) * 64, buffer_nbytes
                    prefetch_args = prefetch_at + r // mt * tile_nbytes * (k1 - k0), tile_nbytes, 0
                    tile(w, group_nbytes, last, x, x_stride, sums, out, out_stride, 0, k0, k1, 0, 0, 0, *prefetch_args)
            if not to_y and (unit == end - 1 or g0 + nt - first == n_buffered * nt):
                columns = min(n, (g0 + nt) * 16) - first * 16
                for row in range(m):
                    y = ys + (row * n + first * 16) * 4
                    if n_buffered > 0 and columns % 16 == 0 and y % 64 == 0:
                        copy_nontemporal(buffer + row * buffer_nbytes, y, columns)
                    else:
                        copy_elements(buffer + row * buffer_nbytes, y, columns)
                e.store_fence()
                first = groups

    return run_strips


def _expanded_kernel(dtype, mt, nt, accumulate):
    """Many rows. Scratch: the sums, then an expanded K block of weights."""
    copy = tile_writer(mt, nt, accumulate=accumulate)
    first_tile, tile = many_row_tiles(dtype, mt, nt)
    block_nbytes = expanded_nbytes(LAYOUTS[dtype], isa())

    def run(a, begin, end, scratch):
        m, n, count, k_block, group_nbytes, pass_m, n_passes, panel_m = a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        n_panels = a[11]
        groups = (n + 15) // 16
        strips = (groups + nt - 1) // nt
        ahead = panel_m * count * ACT_BLOCK
        for unit in range(begin, end):
            pass_index, strip = unit // strips, unit % strips
            r0 = pass_index * pass_m
            rows = m - r0 if pass_index == n_passes - 1 else pass_m
            g0 = max(0, min(strip * nt, groups - nt))
            w, y = a[0] + g0 * group_nbytes, a[2] + (r0 * n + g0 * 16) * 4
            columns = min(n - g0 * 16, nt * 16)
            last = groups - 1 - g0
            for k0 in range(0, count, k_block):
                k1 = min(count, k0 + k_block)
                finished = k1 == count and columns == nt * 16
                wide, wide_nbytes = scratch + (rows + mt) * nt * 64 - k0 * block_nbytes, (k1 - k0) * block_nbytes
                prefetch_at, stop = nt * group_nbytes * (count + k0) // count, nt * group_nbytes * (count + k1) // count
                tile_nbytes = prefetch_share(stop - prefetch_at, rows, mt)
                for r in range(0, rows, mt):
                    row = min(r, rows - mt)
                    sums = scratch + r * nt * 64
                    at, panel_height = row_offset(r0 + r, r0 + row, m, panel_m, n_panels, count)
                    x, x_stride = a[1] + at * ACT_BLOCK, panel_height * ACT_BLOCK
                    to_y = finished and (row == r or not accumulate)
                    out, stride = (y + row * n * 4, n * 4) if to_y else (sums, nt * 64)
                    # prefetch the next groups: only the first tile reads memory, which idles while
                    # others run
                    spread = min(tile_nbytes, 128 * (k1 - k0))
                    prefetch_range(w, prefetch_at + spread, min(stop, prefetch_at + tile_nbytes))
                    prefetch_args = w + prefetch_at, spread // (k1 - k0), 64
                    prefetch_at += tile_nbytes
                    rows_here = x, x_stride, sums, out, stride, accumulate and to_y
                    rest = *rows_here, k0, k1, ahead, wide, wide_nbytes, *prefetch_args
                    if r > 0:
                        tile(wide, wide_nbytes, nt, *rest)
                    else:
                        first_tile(w, group_nbytes, last, *rest)
            if columns < nt * 16:
                for r in range(0, rows, mt):
                    copy(scratch + r * nt * 64, y + min(r, rows - mt) * n * 4, n, columns, 0)
            elif accumulate and rows % mt:
                r, row = rows // mt * mt, rows - mt
                copy(scratch + r * nt * 64, y + row * n * 4, n, columns, r - row)

    return run


@kernel("linear_rows")
def linear_rows(rows):
    """GEMM with plain f32 weights (n, k). A unit is a group of 16 columns.

    Each group is packed into scratch first. Scratch: the group and a tile's sums.
    """
    mt = int(rows)
    tile, copy = float_tile("f32", mt, 1), tile_writer(mt, 1)

    def run(w_at, x_at, y_at, m, n, k, begin, end, scratch):
        panel, sums = f32p(scratch), scratch + k * 64
        for g in range(begin, end):
            columns = min(16, n - g * 16)
            w = f32p(w_at + g * 16 * k * 4)
            for i in range(k):
                for c in range(16):
                    panel[i * 16 + c] = w[min(c, columns - 1) * k + i]
            for r in range(0, m, mt):
                r = min(r, m - mt)
                tile(scratch, 0, 0, x_at + r * 4, m * 4, sums, sums, 64, 0, 0, k, 0, 0, 0, 0, 0, 0)
                copy(sums, y_at + (r * n + g * 16) * 4, n, columns, 0)

    return run

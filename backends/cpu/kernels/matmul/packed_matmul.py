"""y = x · wᵀ of packed weights and packed activations (layout.py): `linear:<type>:<rows>x<groups>`, a tile each.

A unit of work is one strip of `nt` groups of 16 outputs for as many rows as stay in cache while weights stream; units
of the same rows follow each other. Within a unit, a stretch of weights small enough for the first-level cache, expanded
once if it is quantised and the rows are many (blocks.py), meets all rows before the next; partial sums wait in scratch.
Tiles at an edge are moved back over their neighbour and compute it twice: same numbers, no special case.
"""

from __future__ import annotations

from numba import njit

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.math import copied, past_caches
from logitless.backends.cpu.kernels.ir.registry import f32p, i64p, kernel
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, FOLLOWING, LAYOUTS, expanded_nbytes, expanded_tile
from logitless.backends.cpu.kernels.matmul.packed_tile import bf16_tile, float_tile, quant_tile
from logitless.backends.cpu.kernels.matmul.unpack_blocks import Expanded, Expanding, Packed
from logitless.backends.host import isa


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
    """a: w, x, y, m, n, count (blocks or k), stretch of it, bytes of a group; with expanded weights rows at once, how
    many times, rows of a panel of x, panels; with packed ones units whose results are held back (0: none are).

    `then` "add", with expanded weights: y is added to, by whole tiles, whose last rows may be moved back, too. "past",
    with packed ones: they are read past the caches. "rounded", with bf16: so are rows, and a k is two of them.
    """
    mt, nt = (int(s) for s in shape.split("x"))
    if (mt, nt) == expanded_tile(dtype, isa()):
        return _expanded(dtype, mt, nt, then == "add")
    return _packed(dtype, mt, nt, then)


def _packed(dtype, mt, nt, then):
    """Few rows. Scratch: sums of a tile for all rows, then what is held back of y.

    Rows of y lie in pages of their own. A core that gets a line here and a line there between two groups of weights
    reads these so much slower that 8 rows take a sixth longer. So where weights come from memory, results of some units
    are `held` and go to y together, a long piece of each row, and past the caches: nothing has to be read for it.
    """
    walk = packed_strips(dtype, mt, nt, then)

    def run(a, begin, end, scratch):
        following = i64p(scratch - FOLLOWING)[0]
        walk(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], begin, end, scratch, following)

    return run


def packed_strips(dtype, mt, nt, then=""):
    """f(w, x, y, m, n, count, stretch, bytes of a group, held, begin, end, scratch, following): those strips of y."""
    quantised = LAYOUTS[dtype].block > 1
    if quantised:
        tile = quant_tile(dtype, mt, nt, Packed, past=then == "past")
    else:
        tile = bf16_tile(mt, nt) if then == "rounded" else float_tile(dtype, mt, nt)
    x_nbytes, block_nbytes = ACT_BLOCK if quantised else 4, LAYOUTS[dtype].block_nbytes if quantised else 0
    follows = LAYOUTS[dtype].block == 32  # those of 256 lose 2 to 3 % where a distance is not always the same

    @njit(forceinline=True)
    def walk(weight, xs, ys, m, n, count, stretch, group_nbytes, held, begin, end, scratch, following):
        groups = (n + 15) // 16
        each = block_nbytes // ((m + mt - 1) // mt)  # of what a block asks for: the tiles of all rows share it
        back, back_nbytes = scratch + (m + mt) * nt * 64, max(1, held) * nt * 64
        first = groups  # of those that are held back
        for unit in range(begin, end):
            g0 = max(0, min(unit * nt, groups - nt))
            w, last = weight + g0 * group_nbytes, groups - 1 - g0
            ahead = group_nbytes  # the last group of a stretch asks for the first of the thread's next one
            if follows and unit == end - 1 and following != 0:
                ahead = following - w
            to_y = held == 0 and (g0 + nt) * 16 <= n
            if not to_y:
                first = min(first, g0)
            for k0 in range(0, count, stretch):
                k1 = min(count, k0 + stretch)
                asked = w + ahead + k0 * block_nbytes
                for r in range(0, m, mt):
                    row = min(r, m - mt)
                    x, x_stride = xs + row * x_nbytes, m * x_nbytes
                    sums = scratch + r * nt * 64
                    out, out_stride = sums, nt * 64
                    if k1 == count and to_y:
                        out, out_stride = ys + (row * n + g0 * 16) * 4, n * 4
                    elif k1 == count:
                        out, out_stride = back + row * back_nbytes + (g0 - first) * 64, back_nbytes
                    later = asked + r // mt * each * (k1 - k0), each, 0
                    tile(w, group_nbytes, last, x, x_stride, sums, out, out_stride, 0, k0, k1, 0, 0, 0, *later)
            if not to_y and (unit == end - 1 or g0 + nt - first == held * nt):
                columns = min(n, (g0 + nt) * 16) - first * 16
                for row in range(m):
                    y = ys + (row * n + first * 16) * 4
                    if held > 0 and columns % 16 == 0 and y % 64 == 0:
                        past_caches(back + row * back_nbytes, y, columns)
                    else:
                        copied(back + row * back_nbytes, y, columns)
                e.written()
                first = groups

    return walk


def _expanded(dtype, mt, nt, adding):
    """Many rows. Scratch: the sums, then a stretch of weights, expanded."""
    copy = put(mt, nt, adding=adding)
    first_tile, tile = (quant_tile(dtype, mt, nt, form) for form in (Expanding, Expanded))
    block_nbytes = expanded_nbytes(LAYOUTS[dtype])

    def run(a, begin, end, scratch):
        m, n, count, stretch, group_nbytes, most, times, panel_rows = a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        n_panels = a[11]
        groups = (n + 15) // 16
        strips = (groups + nt - 1) // nt
        ahead = panel_rows * count * ACT_BLOCK
        for unit in range(begin, end):
            turn, strip = unit // strips, unit % strips
            r0 = turn * most
            rows = m - r0 if turn == times - 1 else most
            g0 = max(0, min(strip * nt, groups - nt))
            w, y = a[0] + g0 * group_nbytes, a[2] + (r0 * n + g0 * 16) * 4
            columns = min(n - g0 * 16, nt * 16)
            last = groups - 1 - g0
            for k0 in range(0, count, stretch):
                k1 = min(count, k0 + stretch)
                finished = k1 == count and columns == nt * 16
                wide, wide_nbytes = scratch + (rows + mt) * nt * 64 - k0 * block_nbytes, (k1 - k0) * block_nbytes
                asked, stop = nt * group_nbytes * (count + k0) // count, nt * group_nbytes * (count + k1) // count
                each = share(stop - asked, rows, mt)
                for r in range(0, rows, mt):
                    row = min(r, rows - mt)
                    sums = scratch + r * nt * 64
                    at, rows_beside = tile_at(r0 + r, r0 + row, m, panel_rows, n_panels, count)
                    x, x_stride = a[1] + at * ACT_BLOCK, rows_beside * ACT_BLOCK
                    to_y = finished and (row == r or not adding)
                    out, stride = (y + row * n * 4, n * 4) if to_y else (sums, nt * 64)
                    # the next groups, for the first tile alone reads memory, which rests while others run
                    spread = min(each, 128 * (k1 - k0))
                    ask(w, asked + spread, min(stop, asked + each))
                    later = w + asked, spread // (k1 - k0), 64
                    asked += each
                    rows_here = x, x_stride, sums, out, stride, adding and to_y
                    rest = *rows_here, k0, k1, ahead, wide, wide_nbytes, *later
                    if r > 0:
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
                tile(scratch, 0, 0, a[1] + r * 4, m * 4, sums, sums, 64, 0, 0, k, 0, 0, 0, 0, 0, 0)
                copy(sums, a[2] + (r * n + g * 16) * 4, n, columns, 0)

    return run

"""C = A · B in f32: `gemm:<A>:<B>`, any of its operands as it lies in memory.

Both operands are packed into streams of what one step over k needs: MT numbers of A, NR of B (BLIS: Van Zee and van de
Geijn, 2015). A tile of MT × NR results stays in registers for KC steps, then waits in C. Every result is one chain of
fused multiply-adds over k, in order, whatever the tile and the division into units: no bit depends on either.

    A   tiles   (⌈M/MT⌉, K, MT), packed beforehand (`pack_tiles:m` and `pack_tiles:k`)
        m       (M, K)
        k       (K, M)
    B   n       (N, K)
        k       (K, N)
        n:type  a packed weight of floats (layout.py), N rows of K numbers; `n:bf16:rounded`: of K pairs, as A is then
        k:type  a packed weight of K rows and N columns: back through it
A unit is a block of C.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.gather import strip
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.mask import lanes_below, masked_load, masked_store
from logitless.backends.cpu.kernels.ir.registry import f32p, kernel
from logitless.backends.cpu.kernels.matmul.gemm_tile import KC, MT, NR, put_pairs, put_tile
from logitless.backends.cpu.kernels.matmul.layout import LAYOUTS, STRIPS

PACK_STEPS = 16
AHEAD = 12  # rows of k that are asked for while one is copied


def transpose_16(b, rows):
    """16 vectors as the columns of the 16 given ones."""
    for s in (1, 2, 4, 8):
        low = ir.Constant(e.V16I, [j if not j & s else 16 + j - s for j in range(16)])
        high = ir.Constant(e.V16I, [j + s if not j & s else 16 + j for j in range(16)])
        rows = list(rows)
        for i in range(16):
            if not i & s:
                x, y = rows[i], rows[i + s]
                rows[i], rows[i + s] = b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)
    return rows


def turned(n_rows, step_nbytes):
    """intrinsic f(source, row_nbytes, last, target, blocks): 16·blocks numbers of each of n_rows ≤ 16 rows → columns.

    Column k is at target + k · step_nbytes. Row `last` stands for those that follow it. Where n_rows < 16 each column's
    store reaches 16 − n_rows numbers too far, over the next column's place, so columns are stored in order and the
    target needs that much room at its end.
    """

    @intrinsic
    def turn(typingctx, source, row_nbytes, last, target, blocks):
        def codegen(ctx, b, sig, args):
            src, dst = b.inttoptr(args[0], e.I8P), b.inttoptr(args[3], e.I8P)
            starts = [e.at(b, src, b.mul(args[1], e.smaller(b, e.i64(r), args[2]))) for r in range(n_rows)]

            def block(i, _):
                rows = [e.load(b, e.at(b, p, b.mul(i, e.i64(64))), e.V16F, 4) for p in starts]
                rows += [ir.Constant(e.V16F, ir.Undefined)] * (16 - n_rows)
                out = e.at(b, dst, b.mul(i, e.i64(16 * step_nbytes)))
                for k, column in enumerate(transpose_16(b, rows)):
                    e.store(b, column, e.at(b, out, k * step_nbytes), 4)
                return []

            e.loop(b, e.i64(0), args[4], [], block)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return turn


turn_rows, turn_columns = turned(MT, 4 * MT), turned(16, 4 * NR)


@njit(forceinline=True)
def pack_rows(source, row_nbytes, rows, steps, target):
    """`rows` ≤ MT rows of k numbers → target[k][MT], zeros where there is no row."""
    done = 0
    if rows == MT and steps >= 16:
        done = steps // 16 * 16
        turn_rows(source, row_nbytes, MT - 1, target, steps // 16)
    out = f32p(target)
    for r in range(MT):
        if r < rows:
            x = f32p(source + r * row_nbytes)
            for k in range(done, steps):
                out[k * MT + r] = x[k]
        else:
            for k in range(steps):
                out[k * MT + r] = np.float32(0)


@njit(forceinline=True)
def pack_whole_rows(source, row_nbytes, rows, steps, target):
    """The same where the target has no room at its end."""
    pack_rows(source, row_nbytes, rows, steps - 1, target)  # its last store reaches into the column that is left
    last = f32p(target + (steps - 1) * MT * 4)
    for r in range(MT):
        last[r] = f32p(source + r * row_nbytes)[steps - 1] if r < rows else np.float32(0)


@njit(forceinline=True)
def pack_columns(source, row_nbytes, columns, steps, target):
    """`columns` ≤ NR rows of k numbers → target[k][NR], in whole vectors of 16 columns."""
    out, done = f32p(target), steps // 16 * 16
    for c0 in range(0, columns, 16):
        if done > 0:
            turn_columns(source + c0 * row_nbytes, row_nbytes, columns - 1 - c0, target + c0 * 4, steps // 16)
        for c in range(c0, c0 + 16):
            x = f32p(source + min(c, columns - 1) * row_nbytes)
            for k in range(done, steps):
                out[k * NR + c] = x[k]


def moved(width):
    """intrinsics f(source, target, ahead): `width` numbers, those `ahead` bytes further on are asked for; and
    f(source, target, n): n of them, zeros for the rest."""
    places = [(64 * i, min(16, width - 16 * i)) for i in range((width + 15) // 16)]

    @intrinsic
    def move(typingctx, source, target, ahead):
        def codegen(ctx, b, sig, args):
            x, y = b.inttoptr(args[0], e.I8P), b.inttoptr(args[1], e.I8P)
            for place, n in places:
                e.prefetch(b, e.at(b, e.at(b, x, args[2]), place))
                e.store(b, e.load(b, e.at(b, x, place), ir.VectorType(e.F32, n), 4), e.at(b, y, place), 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def move_part(typingctx, source, target, n):
        def codegen(ctx, b, sig, args):
            x, y = b.inttoptr(args[0], e.I8P), b.inttoptr(args[1], e.I8P)
            for place, most in places:
                value = masked_load(b, e.at(b, x, place), lanes_below(b, b.sub(args[2], e.i64(place // 4))))
                masked_store(b, value, e.at(b, y, place), lanes_below(b, e.i64(most)))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return move, move_part


def copied(width):
    """f(source, row_nbytes, columns, steps, target, panel_nbytes): panels of `width` numbers of each row →
    target[panel][k][width].

    Zeros where the last panel has no column. Rows are read from end to end, because they lie pages apart.
    """
    move, move_part = moved(width)

    @njit(forceinline=True)
    def copy(source, row_nbytes, columns, steps, target, panel_nbytes):
        whole, rest = columns // width, columns % width
        for k in range(steps):
            x, y = source + k * row_nbytes, target + k * width * 4
            for p in range(whole):
                move(x + p * width * 4, y + p * panel_nbytes, AHEAD * row_nbytes)
            if rest > 0:
                move_part(x + whole * width * 4, y + whole * panel_nbytes, rest)

    return copy


copy_rows, copy_columns = copied(MT), copied(NR)


@njit
def product(a, a_nbytes, a_of_k, b, b_nbytes, b_of_k, c, c_nbytes, m, n, k, adding, work):
    """c (m, n) = or (adding) += A · B, rows `…_nbytes` apart; `…_of_k`: rows of k numbers, else k rows.

    For a kernel's own small products. work: NR·KC numbers, and MT·(KC+2) for each tile of m.
    """
    tiles_at = work + NR * KC * 4
    for k0 in range(0, k, KC):
        steps = min(KC, k - k0)
        fresh = 1 if k0 == 0 and adding == 0 else 0
        if a_of_k != 0:
            for r in range(0, m, MT):
                pack_rows(a + r * a_nbytes + k0 * 4, a_nbytes, min(MT, m - r), steps, tiles_at + r * steps * 4)
        else:
            copy_rows(a + k0 * a_nbytes, a_nbytes, m, steps, tiles_at, steps * MT * 4)
        for q in range(0, n, NR):
            columns = min(NR, n - q)
            if b_of_k != 0:
                pack_columns(b + q * b_nbytes + k0 * 4, b_nbytes, columns, steps, work)
            else:
                copy_columns(b + k0 * b_nbytes + q * 4, b_nbytes, columns, steps, work, 0)
            for r in range(0, m, MT):
                x, y = tiles_at + r * steps * 4, c + r * c_nbytes + q * 4
                put_tile(x, work, y, c_nbytes, steps, fresh, min(MT, m - r), columns)


@kernel("pack_tiles")
def pack_tiles(layout):
    """a: x (M, K) or with `k` (K, M), y (tiles, K, MT), M, K. A unit is a tile, or PACK_STEPS rows of x."""

    def columns(a, begin, end, scratch):
        m, k = a[2], a[3]
        k0, k1 = begin * PACK_STEPS, min(k, end * PACK_STEPS)
        copy_rows(a[0] + k0 * m * 4, m * 4, m, k1 - k0, a[1] + k0 * MT * 4, k * MT * 4)

    def rows(a, begin, end, scratch):
        m, k = a[2], a[3]
        for t in range(begin, end):
            rows = min(MT, m - t * MT)
            pack_whole_rows(a[0] + t * MT * k * 4, k * 4, rows, k, a[1] + t * MT * k * 4)

    return columns if layout == "k" else rows


def widened(dtype):
    """intrinsic f(group, last, group_nbytes, k, steps, target): NR/16 packed groups of floats → target[step][NR], from
    k on, a multiple of those in a line; `last` groups follow the first one, and stand for any beyond them."""
    nbytes = LAYOUTS[dtype].quants

    @intrinsic
    def widen(typingctx, group, last, group_nbytes, k, steps, target):
        def codegen(ctx, b, sig, args):
            start, out = b.inttoptr(b.add(args[0], b.mul(args[3], e.i64(nbytes))), e.I8P), b.inttoptr(args[5], e.I8P)
            groups = [e.at(b, start, b.mul(args[2], e.smaller(b, args[1], e.i64(v)))) for v in range(NR // 16)]

            def steps_of(n):
                def some(i, _):
                    for v, source in enumerate(groups):
                        line = e.at(b, source, b.mul(i, e.i64(nbytes)))
                        for k, values in enumerate(e.floats(b, line, dtype, n)):
                            row = b.mul(b.add(i, e.i64(k)), e.i64(4 * NR))
                            e.store(b, values, e.at(b, out, b.add(row, e.i64(64 * v))))
                    return []

                return some

            e.unrolled(b, e.i64(0), args[4], [], steps_of, 64 // nbytes)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return widen


@kernel("gemm")
def gemm(a_layout, b_layout, dtype="", how=""):
    """a: A, B, C, M, N, K, rows and columns of a block, bytes of a packed weight's group, whether C is added to; begin
    and end of the part of K to be summed now, multiples of KC but for the last: the parts come one after the other.

    Scratch: NR·KC numbers for each of STRIPS of B, MT·(KC+2) for each tile of a block's rows (A unpacked).
    """
    tiled, rows_of_k, columns_of_k, packed = a_layout == "tiles", a_layout == "m", b_layout == "n", dtype != ""
    widen = widened("f32" if how == "rounded" else dtype) if packed and columns_of_k else None
    put = put_pairs if how == "rounded" else put_tile
    decode = strip(dtype, NR) if packed and not columns_of_k else None

    def run(a, begin, end, scratch):
        m, n, k, m_block, n_block, group_nbytes = a[3], a[4], a[5], a[6], a[7], a[8]
        m_blocks = (m + m_block - 1) // m_block
        strip_at = scratch
        tiles_at = scratch + STRIPS * NR * KC * 4
        for unit in range(begin, end):
            m0, n0 = unit % m_blocks * m_block, unit // m_blocks * n_block
            m1, n1 = min(m, m0 + m_block), min(n, n0 + n_block)
            for k0 in range(a[10], a[11], KC):
                steps = min(KC, k - k0)
                tile_nbytes = k * MT * 4 if tiled else steps * MT * 4
                tiles = a[0] + (m0 // MT * k + k0) * MT * 4 if tiled else tiles_at
                if rows_of_k:
                    for r in range(m0, m1, MT):
                        at = tiles_at + (r - m0) // MT * tile_nbytes
                        pack_rows(a[0] + (r * k + k0) * 4, k * 4, min(MT, m1 - r), steps, at)
                elif not tiled:
                    copy_rows(a[0] + (k0 * m + m0) * 4, m * 4, m1 - m0, steps, tiles_at, tile_nbytes)
                for c in range(n0, n1, NR):
                    columns = min(NR, n1 - c)
                    if packed and columns_of_k:
                        widen(a[1] + c // 16 * group_nbytes, (n - c - 1) // 16, group_nbytes, k0, steps, strip_at)
                    elif packed:
                        decode(a[1], group_nbytes, n, k0, steps, c, columns, strip_at)
                    elif columns_of_k:
                        pack_columns(a[1] + (c * k + k0) * 4, k * 4, columns, steps, strip_at)
                    else:
                        place = (c - n0) // NR % STRIPS
                        if place == 0:
                            at = a[1] + (k0 * n + c) * 4
                            copy_columns(at, n * 4, min(STRIPS * NR, n1 - c), steps, scratch, steps * NR * 4)
                        strip_at = scratch + place * steps * NR * 4
                    for r in range(m0, m1, MT):
                        x, y = tiles + (r - m0) // MT * tile_nbytes, a[2] + (r * n + c) * 4
                        fresh = 1 if k0 == 0 and a[9] == 0 else 0
                        put(x, strip_at, y, n * 4, steps, fresh, min(MT, m1 - r), columns)

    return run

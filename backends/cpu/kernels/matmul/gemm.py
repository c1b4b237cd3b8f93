"""f32 GEMM, C = A · B: `gemm:<A>:<B>`, with operands in any of these memory layouts.

    A   tiles   (⌈M/MT⌉, K, MT), packed beforehand (`pack_tiles:m` and `pack_tiles:k`)
        m       (M, K)
        k       (K, M)
    B   n       (N, K)
        k       (K, N)
        n:type  a packed float weight (layout.py), N rows of K elements; `n:bf16:bf16`:
                of K pairs, as A is then
        k:type  a packed weight of K rows and N columns: the gradient of its input

Both operands are packed into streams of what a step over k needs: MT elements of A, NR of B (BLIS:
Van Zee and van de Geijn, 2015). A tile of MT × NR results stays in registers for KC steps, then
waits in C. Every result is one chain of fused multiply-adds over k, in order, for any tile and any
division into units. A unit is a block of C.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.gather import strip_decoder
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.builder import lanes_below, masked_load, masked_store
from logitless.backends.cpu.kernels.ir.registry import f32p, kernel
from logitless.backends.cpu.kernels.matmul.gemm_tile import KC, MT, NR, compute_bf16_tile, compute_tile
from logitless.backends.cpu.kernels.matmul.layout import LAYOUTS, STRIPS

PACK_STEPS = 16
PREFETCH_ROWS = 12  # rows of k that are prefetched while one is copied


def transpose_16(b, rows):
    """Transpose of 16 vectors of 16 lanes."""
    for s in (1, 2, 4, 8):
        low = ir.Constant(e.V16I, [j if not j & s else 16 + j - s for j in range(16)])
        high = ir.Constant(e.V16I, [j + s if not j & s else 16 + j for j in range(16)])
        rows = list(rows)
        for i in range(16):
            if not i & s:
                x, y = rows[i], rows[i + s]
                rows[i], rows[i + s] = b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)
    return rows


def transposer(n_rows, step_nbytes):
    """intrinsic f(source, row_nbytes, last, target, blocks): n_rows ≤ 16 rows → columns.

    A row has 16·blocks elements. Column k goes to target + k · step_nbytes. Row `last` stands in
    for those behind it. Where n_rows < 16, a column's store reaches 16 − n_rows elements into the
    next column. So columns are stored in order, and the target needs that much room at its end.
    """

    @intrinsic
    def transpose(typingctx, source, row_nbytes, last, target, blocks):
        def codegen(ctx, b, sig, args):
            src, dst = b.inttoptr(args[0], e.I8P), b.inttoptr(args[3], e.I8P)
            starts = [e.at(b, src, b.mul(args[1], e.minimum(b, e.i64(r), args[2]))) for r in range(n_rows)]

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

    return transpose


transpose_rows, transpose_columns = transposer(MT, 4 * MT), transposer(16, 4 * NR)


@njit(forceinline=True)
def pack_a(source, row_nbytes, rows, steps, target):
    """Pack `rows` ≤ MT rows → target[k][MT], zero where there is no row."""
    done = 0
    if rows == MT and steps >= 16:
        done = steps // 16 * 16
        transpose_rows(source, row_nbytes, MT - 1, target, steps // 16)
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
def pack_a_exact(source, row_nbytes, rows, steps, target):
    """The same for a target without room at its end."""
    # its last store reaches into the remaining column
    pack_a(source, row_nbytes, rows, steps - 1, target)
    last = f32p(target + (steps - 1) * MT * 4)
    for r in range(MT):
        last[r] = f32p(source + r * row_nbytes)[steps - 1] if r < rows else np.float32(0)


@njit(forceinline=True)
def pack_b(source, row_nbytes, columns, steps, target):
    """Pack `columns` ≤ NR rows of B → target[k][NR], in whole vectors of 16 columns."""
    out, done = f32p(target), steps // 16 * 16
    for c0 in range(0, columns, 16):
        if done > 0:
            transpose_columns(source + c0 * row_nbytes, row_nbytes, columns - 1 - c0, target + c0 * 4, steps // 16)
        for c in range(c0, c0 + 16):
            x = f32p(source + min(c, columns - 1) * row_nbytes)
            for k in range(done, steps):
                out[k * NR + c] = x[k]


def row_copier(width):
    """intrinsics f(source, target, ahead): copy `width` elements, prefetch those `ahead` bytes
    further;

    and f(source, target, n): copy n elements, zero the rest.
    """
    offsets = [(64 * i, min(16, width - 16 * i)) for i in range((width + 15) // 16)]

    @intrinsic
    def copy_row(typingctx, source, target, ahead):
        def codegen(ctx, b, sig, args):
            x, y = b.inttoptr(args[0], e.I8P), b.inttoptr(args[1], e.I8P)
            for offset, n in offsets:
                e.prefetch(b, e.at(b, e.at(b, x, args[2]), offset))
                e.store(b, e.load(b, e.at(b, x, offset), ir.VectorType(e.F32, n), 4), e.at(b, y, offset), 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @intrinsic
    def copy_part(typingctx, source, target, n):
        def codegen(ctx, b, sig, args):
            x, y = b.inttoptr(args[0], e.I8P), b.inttoptr(args[1], e.I8P)
            for offset, most in offsets:
                value = masked_load(b, e.at(b, x, offset), lanes_below(b, b.sub(args[2], e.i64(offset // 4))))
                masked_store(b, value, e.at(b, y, offset), lanes_below(b, e.i64(most)))
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return copy_row, copy_part


def panel_copier(width):
    """f(source, row_nbytes, columns, steps, target, panel_nbytes): rows → target[panel][k][width].

    Zero where the last panel has no column. Rows are read from end to end, because they are pages
    apart.
    """
    copy_row, copy_part = row_copier(width)

    @njit(forceinline=True)
    def copy(source, row_nbytes, columns, steps, target, panel_nbytes):
        whole, rest = columns // width, columns % width
        for k in range(steps):
            x, y = source + k * row_nbytes, target + k * width * 4
            for p in range(whole):
                copy_row(x + p * width * 4, y + p * panel_nbytes, PREFETCH_ROWS * row_nbytes)
            if rest > 0:
                copy_part(x + whole * width * 4, y + whole * panel_nbytes, rest)

    return copy


copy_a_panels, copy_b_panels = panel_copier(MT), panel_copier(NR)


@njit
def small_gemm(a, a_nbytes, a_of_k, b, b_nbytes, b_of_k, c, c_nbytes, m, n, k, accumulate, work):
    """Small GEMM inside another kernel: c (m, n) = or, `accumulate`, += A · B.

    Rows are `…_nbytes` apart; `…_of_k`: rows of k elements, otherwise k rows. work: NR·KC floats,
    and MT·(KC+2) for each tile of m.
    """
    tiles_at = work + NR * KC * 4
    for k0 in range(0, k, KC):
        steps = min(KC, k - k0)
        fresh = 1 if k0 == 0 and accumulate == 0 else 0
        if a_of_k != 0:
            for r in range(0, m, MT):
                pack_a(a + r * a_nbytes + k0 * 4, a_nbytes, min(MT, m - r), steps, tiles_at + r * steps * 4)
        else:
            copy_a_panels(a + k0 * a_nbytes, a_nbytes, m, steps, tiles_at, steps * MT * 4)
        for q in range(0, n, NR):
            columns = min(NR, n - q)
            if b_of_k != 0:
                pack_b(b + q * b_nbytes + k0 * 4, b_nbytes, columns, steps, work)
            else:
                copy_b_panels(b + k0 * b_nbytes + q * 4, b_nbytes, columns, steps, work, 0)
            for r in range(0, m, MT):
                x, y = tiles_at + r * steps * 4, c + r * c_nbytes + q * 4
                compute_tile(x, work, y, c_nbytes, steps, fresh, min(MT, m - r), columns)


@kernel("pack_tiles")
def pack_tiles(layout):
    """Pack A (M, K), or (K, M) with layout `k`, into tiles (tiles, K, MT).

    A unit is a tile, or PACK_STEPS rows of x.
    """

    def columns(x_at, y_at, m, k, begin, end, scratch):
        k0, k1 = begin * PACK_STEPS, min(k, end * PACK_STEPS)
        copy_a_panels(x_at + k0 * m * 4, m * 4, m, k1 - k0, y_at + k0 * MT * 4, k * MT * 4)

    def rows(x_at, y_at, m, k, begin, end, scratch):
        for t in range(begin, end):
            rows = min(MT, m - t * MT)
            pack_a_exact(x_at + t * MT * k * 4, k * 4, rows, k, y_at + t * MT * k * 4)

    return columns if layout == "k" else rows


def group_unpacker(dtype):
    """intrinsic f(group, last, group_nbytes, k, steps, target): packed float groups →
    target[step][NR].

    It reads NR/16 groups from k on, a multiple of a line's elements. `last` groups follow the first
    one, and the last stands in for any beyond.
    """
    nbytes = LAYOUTS[dtype].quants

    @intrinsic
    def unpack(typingctx, group, last, group_nbytes, k, steps, target):
        def codegen(ctx, b, sig, args):
            start, out = b.inttoptr(b.add(args[0], b.mul(args[3], e.i64(nbytes))), e.I8P), b.inttoptr(args[5], e.I8P)
            groups = [e.at(b, start, b.mul(args[2], e.minimum(b, args[1], e.i64(v)))) for v in range(NR // 16)]

            def steps_of(n):
                def body(i, _):
                    for v, source in enumerate(groups):
                        line = e.at(b, source, b.mul(i, e.i64(nbytes)))
                        for k, values in enumerate(e.load_floats(b, line, dtype, n)):
                            row = b.mul(b.add(i, e.i64(k)), e.i64(4 * NR))
                            e.store(b, values, e.at(b, out, b.add(row, e.i64(64 * v))))
                    return []

                return body

            e.unrolled(b, e.i64(0), args[4], [], steps_of, 64 // nbytes)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return unpack


@kernel("gemm")
def gemm(a_layout, b_layout, dtype="", variant=""):
    """GEMM. m_block, n_block: rows and columns of a block; group_nbytes: of a packed weight's group.

    The part of K to sum begins and ends at multiples of KC but for the last; parts of one product
    come one after the other.

    Scratch: NR·KC floats for each of STRIPS of B, and MT·(KC+2) for each tile of a block's rows (if
    A is not packed).
    """
    tiled, rows_of_k, columns_of_k, packed = a_layout == "tiles", a_layout == "m", b_layout == "n", dtype != ""
    unpack = group_unpacker("f32" if variant == "bf16" else dtype) if packed and columns_of_k else None
    compute = compute_bf16_tile if variant == "bf16" else compute_tile
    decode = strip_decoder(dtype, NR) if packed and not columns_of_k else None

    def run(
        a_at, b_at, c_at, m, n, k, m_block, n_block, group_nbytes, accumulated, k_first, k_last,
        begin, end, scratch,
    ):  # fmt: skip
        m_blocks = (m + m_block - 1) // m_block
        strip_at = scratch
        tiles_at = scratch + STRIPS * NR * KC * 4
        for unit in range(begin, end):
            m0, n0 = unit % m_blocks * m_block, unit // m_blocks * n_block
            m1, n1 = min(m, m0 + m_block), min(n, n0 + n_block)
            for k0 in range(k_first, k_last, KC):
                steps = min(KC, k - k0)
                tile_nbytes = k * MT * 4 if tiled else steps * MT * 4
                tiles = a_at + (m0 // MT * k + k0) * MT * 4 if tiled else tiles_at
                if rows_of_k:
                    for r in range(m0, m1, MT):
                        at = tiles_at + (r - m0) // MT * tile_nbytes
                        pack_a(a_at + (r * k + k0) * 4, k * 4, min(MT, m1 - r), steps, at)
                elif not tiled:
                    copy_a_panels(a_at + (k0 * m + m0) * 4, m * 4, m1 - m0, steps, tiles_at, tile_nbytes)
                for c in range(n0, n1, NR):
                    columns = min(NR, n1 - c)
                    if packed and columns_of_k:
                        unpack(b_at + c // 16 * group_nbytes, (n - c - 1) // 16, group_nbytes, k0, steps, strip_at)
                    elif packed:
                        decode(b_at, group_nbytes, n, k0, steps, c, columns, strip_at)
                    elif columns_of_k:
                        pack_b(b_at + (c * k + k0) * 4, k * 4, columns, steps, strip_at)
                    else:
                        slot = (c - n0) // NR % STRIPS
                        if slot == 0:
                            at = b_at + (k0 * n + c) * 4
                            copy_b_panels(at, n * 4, min(STRIPS * NR, n1 - c), steps, scratch, steps * NR * 4)
                        strip_at = scratch + slot * steps * NR * 4
                    for r in range(m0, m1, MT):
                        x, y = tiles + (r - m0) // MT * tile_nbytes, c_at + (r * n + c) * 4
                        fresh = 1 if k0 == 0 and accumulated == 0 else 0
                        compute(x, strip_at, y, n * 4, steps, fresh, min(MT, m1 - r), columns)

    return run

"""Products of f32 matrices of which one is thin, read where they lie: packing them would cost more than the product.

`thin_rows:n`, `thin_rows:k`: A (M, K) times B (N, K) or (K, N), with few columns or a short K. `thin_sums`: A (K, M)
transposed times B (K, N), with few rows or columns and a long K, which is cut into parts with a result each. Every
result is one chain of fused multiply-adds over (its part of) k, as in gemm.py.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.emit_mask import MASK, lanes_below, masked_load, masked_store
from backends.cpu.kernels.gemm import KC, MT, NR, pack_columns
from backends.cpu.kernels.registry import kernel

ROWS, COLUMNS = 4 * MT, 4 * NR  # of a block of `thin_sums`


def reaching(vectors):
    """intrinsic of MT × 16·vectors of C, of which only `rows` × `columns` are there; k is `…_step` bytes apart."""

    @intrinsic
    def tile(typingctx, a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns):
        def codegen(ctx, builder, sig, args):
            bl = builder
            pa, pb, pc = (bl.inttoptr(args[i], e.I8P) for i in (0, 3, 5))
            a_row, a_step, b_step, c_row, steps, fresh, rows, columns = (args[i] for i in (1, 2, 4, 6, 7, 8, 9, 10))
            inside = [lanes_below(bl, bl.sub(columns, e.i64(16 * v))) for v in range(vectors)]
            last = bl.sub(rows, e.i64(1))
            sources = [e.at(bl, pa, bl.mul(a_row, e.smaller(bl, e.i64(r), last))) for r in range(MT)]
            places, masks = [], []
            for r in range(MT):
                there = bl.icmp_signed("<", e.i64(r), rows)
                row = e.at(bl, pc, bl.mul(c_row, e.i64(r)))
                for v in range(vectors):
                    places.append(e.at(bl, row, 64 * v))
                    masks.append(bl.select(there, inside[v], ir.Constant(MASK, [0] * 16)))
            entry, load, begin = bl.block, bl.append_basic_block("old"), bl.append_basic_block("begin")
            bl.cbranch(bl.icmp_signed("==", fresh, e.i64(0)), load, begin)
            bl.position_at_end(load)
            old = [masked_load(bl, p, m) for p, m in zip(places, masks, strict=True)]
            bl.branch(begin)
            bl.position_at_end(begin)
            sums = []
            for value in old:
                phi = bl.phi(e.V16F)
                phi.add_incoming(e.each(0.0), entry)
                phi.add_incoming(value, load)
                sums.append(phi)

            def step(i, sums):
                at_a, at_b = bl.mul(i, a_step), e.at(bl, pb, bl.mul(i, b_step))
                row = [masked_load(bl, e.at(bl, at_b, 64 * v), inside[v]) for v in range(vectors)]
                out = []
                for r in range(MT):
                    x = e.splat(bl, e.load(bl, e.at(bl, sources[r], at_a), e.F32, 4))
                    out += [e.fma(bl, row[v], x, sums[r * vectors + v]) for v in range(vectors)]
                return out

            for value, place, mask in zip(e.loop(bl, e.i64(0), steps, sums, step), places, masks, strict=True):
                masked_store(bl, value, place, mask)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return tile


narrow, wide = reaching(1), reaching(NR // 16)


@kernel("thin_rows")
def thin_rows(b_layout):
    """a: A (M, K), B, C (M, N), M, N, K, rows of a unit. Scratch: a strip of B, NR·KC."""
    by_columns = b_layout == "n"

    def run(a, begin, end, scratch):
        m, n, k, block = a[3], a[4], a[5], a[6]
        for k0 in range(0, k, KC):
            steps = min(KC, k - k0)
            fresh = 1 if k0 == 0 else 0
            for c in range(0, n, NR):
                columns = min(NR, n - c)
                if by_columns:
                    pack_columns(a[1] + (c * k + k0) * 4, k * 4, columns, steps, scratch)
                    strip, strip_step = scratch, NR * 4
                else:
                    strip, strip_step = a[1] + (k0 * n + c) * 4, n * 4
                for r in range(begin * block, min(m, end * block), MT):
                    x, y, rows = a[0] + (r * k + k0) * 4, a[2] + (r * n + c) * 4, min(MT, m - r)
                    if columns <= 16:
                        narrow(x, k * 4, 4, strip, strip_step, y, n * 4, steps, fresh, rows, columns)
                    else:
                        wide(x, k * 4, 4, strip, strip_step, y, n * 4, steps, fresh, rows, columns)

    return run


@kernel("thin_sums")
def thin_sums():
    """a: A (K, M), B (K, N), C (parts, M, N), K, M, N, steps of a part. A unit is a block of C."""

    def run(a, begin, end, scratch):
        k, m, n, part_steps = a[3], a[4], a[5], a[6]
        across, down = (n + COLUMNS - 1) // COLUMNS, (m + ROWS - 1) // ROWS
        for unit in range(begin, end):
            part, r0, c0 = unit // (across * down), unit // across % down * ROWS, unit % across * COLUMNS
            k0 = part * part_steps
            steps = min(part_steps, k - k0)
            for c in range(c0, min(n, c0 + COLUMNS), NR):
                columns = min(NR, n - c)
                for r in range(r0, min(m, r0 + ROWS), MT):
                    x, z = a[0] + (k0 * m + r) * 4, a[1] + (k0 * n + c) * 4
                    y, rows = a[2] + ((part * m + r) * n + c) * 4, min(MT, m - r)
                    if columns <= 16:
                        narrow(x, 4, m * 4, z, n * 4, y, n * 4, steps, 1, rows, columns)
                    else:
                        wide(x, 4, m * 4, z, n * 4, y, n * 4, steps, 1, rows, columns)

    return run

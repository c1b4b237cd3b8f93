"""GEMM register tile: MT × NR results, each one chain of fused multiply-adds over k, in order.

Two hyperthreads of a core have less room for instructions than for multiply-adds, so a step over k
should have few of them. 8 × 3 vectors need 3 loads of B and 8 splats of A for 24 multiply-adds; 12
× 2 would need 2 and 12.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.builder import MASK, lanes_below, masked_load, masked_store
from logitless.backends.cpu.kernels.ir.dot import bf16_dot
from logitless.backends.cpu.kernels.matmul.layout import gemm_tile
from logitless.backends.host import isa

MT, NR, KC = gemm_tile(isa())
VECTORS = NR // 16
UNROLL = 4  # steps


def tile_masks(b, rows, columns, vectors):
    """A mask for each vector of a partial tile of `rows` × `columns`."""
    inside = [lanes_below(b, b.sub(columns, e.i64(16 * v))) for v in range(vectors)]
    none = ir.Constant(MASK, [0] * 16)
    return [b.select(b.icmp_signed("<", e.i64(r), rows), x, none) for r in range(MT) for x in inside]


def load_sums(b, places, masks, fresh):
    """Initial sums of a tile: zeros, or the values at their places."""
    entry, old, begin = b.block, b.append_basic_block("old"), b.append_basic_block("begin")
    b.cbranch(b.icmp_signed("==", fresh, e.i64(0)), old, begin)
    b.position_at_end(old)
    values = [masked_load(b, p, masks[i]) if masks else e.load(b, p, e.V16F, 4) for i, p in enumerate(places)]
    b.branch(begin)
    b.position_at_end(begin)
    sums = []
    for value in values:
        phi = b.phi(e.V16F)
        phi.add_incoming(e.constant(0.0), entry)
        phi.add_incoming(value, old)
        sums.append(phi)
    return sums


def store_sums(b, sums, places, masks):
    for i, (value, place) in enumerate(zip(sums, places, strict=True)):
        if masks:
            masked_store(b, value, place, masks[i])
        else:
            e.store(b, value, place, 4)


def tile_of(vectors, whole, multiply=e.fma):
    """intrinsic of a tile of MT × 16·vectors of C: + Σ over `steps` of a[k][MT] · b[k][NR].

    Sums start at zero where fresh. Rows of C are `row_nbytes` apart. Not `whole`: the tile has
    `rows` × `columns`.
    """

    @intrinsic
    def tile(typingctx, a, b, c, row_nbytes, steps, fresh, rows, columns):
        def codegen(ctx, bl, sig, args):
            pa, pb, pc = (bl.inttoptr(x, e.I8P) for x in args[:3])
            c_rows = [e.at(bl, pc, bl.mul(args[3], e.i64(r))) for r in range(MT)]
            places = [e.at(bl, row, 64 * v) for row in c_rows for v in range(vectors)]
            masks = None if whole else tile_masks(bl, args[6], args[7], vectors)
            for place in places:
                e.prefetch(bl, place)  # C is far away, and needed only after all steps
            sums = load_sums(bl, places, masks, args[5])

            def steps_of(n):
                def body(i, values):
                    at_a, at_b, *sums = values
                    for k in range(n):
                        columns = [e.load(bl, e.at(bl, at_b, 4 * (NR * k + 16 * v)), e.V16F, 4) for v in range(vectors)]
                        out = []
                        for r in range(MT):
                            x = e.splat(bl, e.load(bl, e.at(bl, at_a, 4 * (MT * k + r)), e.F32, 4))
                            out += [multiply(bl, columns[v], x, sums[r * vectors + v]) for v in range(vectors)]
                        sums = out
                    return [e.at(bl, at_a, 4 * MT * n), e.at(bl, at_b, 4 * NR * n), *sums]

                return body

            values = e.unrolled(bl, e.i64(0), args[4], [pa, pb, *sums], steps_of, UNROLL)
            store_sums(bl, values[2:], places, masks)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


def strided_tile_of(vectors):
    """intrinsic of a partial tile of `rows` × `columns` of C, with A and B in place.

    Steps of k are `…_step` bytes apart.
    """

    @intrinsic
    def part(typingctx, a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns):
        def codegen(ctx, bl, sig, args):
            pa, pb, pc = (bl.inttoptr(args[i], e.I8P) for i in (0, 3, 5))
            a_row, a_step, b_step, c_row, steps, fresh, rows, columns = (args[i] for i in (1, 2, 4, 6, 7, 8, 9, 10))
            inside = [lanes_below(bl, bl.sub(columns, e.i64(16 * v))) for v in range(vectors)]
            last = bl.sub(rows, e.i64(1))
            sources = [e.at(bl, pa, bl.mul(a_row, e.minimum(bl, e.i64(r), last))) for r in range(MT)]
            c_rows = [e.at(bl, pc, bl.mul(c_row, e.i64(r))) for r in range(MT)]
            places = [e.at(bl, row, 64 * v) for row in c_rows for v in range(vectors)]
            masks = tile_masks(bl, rows, columns, vectors)

            def step(i, sums):
                at_a, at_b = bl.mul(i, a_step), e.at(bl, pb, bl.mul(i, b_step))
                row = [masked_load(bl, e.at(bl, at_b, 64 * v), inside[v]) for v in range(vectors)]
                out = []
                for r in range(MT):
                    x = e.splat(bl, e.load(bl, e.at(bl, sources[r], at_a), e.F32, 4))
                    out += [e.fma(bl, row[v], x, sums[r * vectors + v]) for v in range(vectors)]
                return out

            sums = e.loop(bl, e.i64(0), steps, load_sums(bl, places, masks, fresh), step)
            store_sums(bl, sums, places, masks)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return part


_widths = [min(n, VECTORS) for n in (1, 2, 3)]
strided_1, strided_2, strided_3 = (strided_tile_of(n) for n in _widths)


def tile_function(multiply):
    """Function for whole and partial tiles of packed A and B."""
    whole_tile = tile_of(VECTORS, True, multiply)
    tile_1, tile_2, tile_3 = (tile_of(n, False, multiply) for n in _widths)

    @njit(forceinline=True)
    def compute(a, b, c, row_nbytes, steps, fresh, rows, columns):
        if rows == MT and columns == NR:
            whole_tile(a, b, c, row_nbytes, steps, fresh, rows, columns)
        elif columns > 32:
            tile_3(a, b, c, row_nbytes, steps, fresh, rows, columns)
        elif columns > 16:
            tile_2(a, b, c, row_nbytes, steps, fresh, rows, columns)
        else:
            tile_1(a, b, c, row_nbytes, steps, fresh, rows, columns)

    return compute


compute_tile = tile_function(e.fma)
compute_bf16_tile = tile_function(bf16_dot)  # two bf16 are moved like one f32


@njit(forceinline=True)
def compute_strided_tile(a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns):
    """Partial tile with A and B read in place."""
    if columns > 32:
        strided_3(a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns)
    elif columns > 16:
        strided_2(a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns)
    else:
        strided_1(a, a_row, a_step, b, b_step, c, c_row, steps, fresh, rows, columns)

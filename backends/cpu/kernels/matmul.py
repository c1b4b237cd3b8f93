"""y = x · wᵀ over packed weights (layout.py): `linear:<type>:<rows>x<groups>`, one tile shape a kernel.

A tile is `mt` activation rows × `nt` groups of 16 outputs; its accumulators stay in registers over the whole of K.
Each output is one chain of fused multiply-adds over k (over blocks of 32 for quantised types), whatever the tile, so
the bits of a row do not depend on the rows beside it. A unit of work is one strip of `nt` groups for one block of
activation rows; units of the same row block follow each other, so the rows stay in cache while weights stream.
Tiles at an edge are moved back over their neighbour and compute it twice: same numbers, no special case.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.layout import ACT_BLOCK, ACT_HALF, ACT_OFFSET, ACT_SCALE, ACT_SUM, LAYOUTS
from backends.cpu.kernels.registry import f32p, kernel


class Block:
    """32 k of one group, in registers: `quants(step)` and, once the dots are there, `scales` and `min`."""

    def __init__(self, b, layout, group, i, n_blocks):
        self.b, self.layout, self.biased = b, layout, not layout.mins
        section, self.at = e.i64(0), []
        for width in (layout.quants, layout.high, layout.fine):
            self.at.append(e.at(b, group, b.add(section, b.mul(i, e.i64(width)))))
            section = b.add(section, b.mul(n_blocks, e.i64(width)))
        super_block = b.lshr(i, e.i64((layout.block // 32).bit_length() - 1))
        self.coarse = e.at(b, group, b.add(section, b.mul(super_block, e.i64(layout.coarse))))
        self.loaded = {}

    def vector(self, section, index):
        key = section, index
        if key not in self.loaded:
            self.loaded[key] = e.load(self.b, e.at(self.b, self.at[section], 64 * index), e.V16I)
        return self.loaded[key]

    def quants(self, step):
        """Unsigned bytes: q, or with an offset (q << shift) + 128."""
        b, layout = self.b, self.layout
        if layout.quants == 512:
            return self.vector(0, step)
        shift, mask = layout.shift, 15 << layout.shift
        u = e.bits_to(b, self.vector(0, step % 4), shift - 4 * (step // 4), mask)
        if layout.high == 64:
            u = b.or_(u, e.bits_to(b, self.vector(1, 0), 4 + shift - step, 16 << shift))
        elif layout.high == 128:
            u = b.or_(u, e.bits_to(b, self.vector(1, step // 4), 4 + shift - 2 * (step % 4), 48 << shift))
        return u

    def scales(self):
        """f32 vectors: one for the block, or one for each half."""
        b, layout = self.b, self.layout
        d = e.half(b, self.coarse)
        if layout.shift:
            d = b.fmul(d, e.each(2.0**-layout.shift))
        if not layout.fine:
            return [d]
        fine = [e.load(b, e.at(b, self.at[2], 16 * h), e.V16I8) for h in range(1 if layout.mins else 2)]
        return [b.fmul(d, b.sitofp((b.zext if layout.mins else b.sext)(s, e.V16I), e.V16F)) for s in fine]

    def min(self):
        b, layout = self.b, self.layout
        m = e.half(b, e.at(b, self.coarse, 32))
        if layout.fine:
            fine = b.zext(e.load(b, e.at(b, self.at[2], 16), e.V16I8), e.V16I)
            m = b.fneg(b.fmul(m, b.sitofp(fine, e.V16F)))
        return m


def quant_tile(dtype, mt, nt):
    """void(w, bytes of a group, last group, x, bytes of a row, y, y row stride, blocks of 32): quantised weights."""
    layout = LAYOUTS[dtype]

    def block_of(b, i, acc, w, x, n_blocks):
        blocks = [Block(b, layout, group, i, n_blocks) for group in w]
        xs = [e.at(b, row, b.mul(i, e.i64(ACT_BLOCK))) for row in x]
        parts = 2 if layout.high == 128 else 1  # q6_k has a scale for each half of a block
        biased = not layout.mins
        pairs = [(n, j) for n in range(nt) for j in range(mt)]
        sums = {}
        for part in range(parts):
            for j in range(mt):
                offset = e.load(b, e.at(b, xs[j], ACT_OFFSET), e.I32, 4)
                if parts == 2:
                    first = e.load(b, e.at(b, xs[j], ACT_HALF), e.I32, 4)
                    offset = b.sub(offset, first) if part else first
                for n in range(nt):
                    sums[n, j, part] = e.dot_start(b, offset, biased)
        for step in range(8):
            part = step * parts // 8
            u = [block.quants(step) for block in blocks]
            for j in range(mt):
                x4 = e.load(b, e.at(b, xs[j], 4 * step), e.I32, 4)
                for n in range(nt):
                    sums[n, j, part] = e.dot(b, sums[n, j, part], u[n], x4, biased)
        scales = [block.scales() for block in blocks]
        mins = [block.min() if layout.mins else None for block in blocks]
        out = []
        for (n, j), a in zip(pairs, acc, strict=True):
            if layout.mins:
                a = e.fma(b, mins[n], e.splat(b, e.load(b, e.at(b, xs[j], ACT_SUM), e.F32, 4)), a)
            t = b.fmul(b.sitofp(sums[n, j, 0], e.V16F), scales[n][0])
            if parts == 2:
                t = e.fma(b, b.sitofp(sums[n, j, 1], e.V16F), scales[n][1], t)
            out.append(e.fma(b, t, e.splat(b, e.load(b, e.at(b, xs[j], ACT_SCALE), e.F32, 4)), a))
        return out

    return tile_of(block_of, mt, nt)


def float_tile(dtype, mt, nt):
    """The same for floats; the loop counts k."""

    def element_of(b, i, acc, w, x, _k):
        width = LAYOUTS[dtype].quants
        ws = []
        for group in w:
            p = e.at(b, group, b.mul(i, e.i64(width)))
            if dtype == "f32":
                ws.append(e.load(b, p, e.V16F, 4))
            elif dtype == "f16":
                ws.append(e.half(b, p))
            else:
                ws.append(b.bitcast(b.shl(b.zext(e.load(b, p, e.V16I16, 2), e.V16I), e.each(16)), e.V16F))
        xs = [e.splat(b, e.load(b, e.at(b, row, b.mul(i, e.i64(4))), e.F32, 4)) for row in x]
        return [e.fma(b, ws[n], xs[j], acc[n * mt + j]) for n in range(nt) for j in range(mt)]

    return tile_of(element_of, mt, nt)


def tile_of(body, mt, nt):
    """An intrinsic that runs `body` over k from zero accumulators and stores them."""

    @intrinsic
    def tile(typingctx, w, group_nbytes, last, x, row_nbytes, y, ldy, count):
        def codegen(ctx, b, sig, a):
            w0, x0, y0 = (b.inttoptr(a[p], e.I8P) for p in (0, 3, 5))
            w = [e.at(b, w0, b.mul(a[1], e.smaller(b, a[2], e.i64(n)))) for n in range(nt)]
            x = [e.at(b, x0, b.mul(a[4], e.i64(j))) for j in range(mt)]
            zeros = [e.each(0.0)] * (mt * nt)
            acc = e.loop(b, a[7], zeros, lambda i, acc: body(b, i, acc, w, x, a[7]))
            for n in range(nt):
                for j in range(mt):
                    offset = b.mul(b.add(b.mul(a[6], e.i64(j)), e.i64(16 * n)), e.i64(4))
                    e.store(b, acc[n * mt + j], e.at(b, y0, offset), 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


@kernel("linear")
def linear(dtype, shape):
    """a: w, x, y, m, n, count (blocks or k), bytes of a group, of an x row, rows of a row block. Scratch: a tile."""
    mt, nt = (int(s) for s in shape.split("x"))
    tile = (float_tile if LAYOUTS[dtype].block == 1 else quant_tile)(dtype, mt, nt)

    def run(a, begin, end, scratch):
        w, x, y, m, n, count, group_nbytes, row_nbytes, row_block = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
        groups = (n + 15) // 16
        strips = (groups + nt - 1) // nt
        for unit in range(begin, end):
            r0 = unit // strips * row_block
            r1 = min(m, r0 + row_block)
            g0 = max(0, min(unit % strips * nt, groups - nt))
            last = groups - 1 - g0  # a weight of fewer groups than the tile repeats its last one
            columns = min(n - g0 * 16, nt * 16)
            whole = columns == nt * 16
            for r in range(r0, r1, mt):
                r = min(r, m - mt) if r + mt > m else r
                if whole:
                    out, ldy = y + (r * n + g0 * 16) * 4, n
                else:
                    out, ldy = scratch, nt * 16
                tile(w + g0 * group_nbytes, group_nbytes, last, x + r * row_nbytes, row_nbytes, out, ldy, count)
                if not whole:
                    for j in range(mt):
                        part, row = f32p(scratch + j * nt * 64), f32p(y + ((r + j) * n + g0 * 16) * 4)
                        for c in range(columns):
                            row[c] = part[c]

    return run


@kernel("linear_rows")
def linear_rows(rows):
    """Plain f32 weights (n, k), each group packed into scratch first. a: w, x, y, m, n, k. A group is a unit."""
    mt = int(rows)
    tile = float_tile("f32", mt, 1)

    def run(a, begin, end, scratch):
        x, y, m, n, k = a[1], a[2], a[3], a[4], a[5]
        packed, out = f32p(scratch), scratch + k * 64
        for g in range(begin, end):
            columns = min(16, n - g * 16)
            w = f32p(a[0] + g * 16 * k * 4)
            for i in range(k):
                for c in range(16):
                    packed[i * 16 + c] = w[min(c, columns - 1) * k + i]
            for r in range(0, m, mt):
                r = min(r, m - mt)
                tile(scratch, 0, 0, x + r * k * 4, k * 4, out, 16, k)
                for j in range(mt):
                    part, row = f32p(out + j * 64), f32p(y + ((r + j) * n + g * 16) * 4)
                    for c in range(columns):
                        row[c] = part[c]

    return run

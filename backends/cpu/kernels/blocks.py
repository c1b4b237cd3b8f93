"""32 k of a weight's group of 16 rows, in registers: out of its packed form, or expanded once for many rows.

Expanded: per 32 k [8][16][4] u8 quants, then [16] f32 scales (two for q6_k, each of 16 k), then [16] f32 minima for
types that have them. Both forms give the same numbers.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.layout import LAYOUTS, expanded_nbytes


class Packed:
    """32 k of one group as packed (layout.py), in registers: `quants(step)`, `scale` and `min`."""

    def __init__(self, b, layout, group, i, n_blocks):
        self.b, self.layout = b, layout
        section, self.at = e.i64(0), []
        for width in (layout.quants, layout.high, layout.fine):
            self.at.append(e.at(b, group, b.add(section, b.mul(i, e.i64(width)))))
            section = b.add(section, b.mul(n_blocks, e.i64(width)))
        super_block = b.lshr(i, e.i64((layout.block // 32).bit_length() - 1))
        self.coarse = e.at(b, group, b.add(section, b.mul(super_block, e.i64(layout.coarse))))
        self.loaded = {}

    def lines(self):
        """The addresses of all cache lines that it reaches into."""
        widths = self.layout.quants, self.layout.high, self.layout.fine
        parts = [(at, line) for at, width in zip(self.at, widths, strict=True) for line in range(0, width, 64)]
        return [e.at(self.b, at, line) for at, line in parts] + [self.coarse]

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

    def scale(self, part):
        """f32: of the block, or (q6_k) of one of its halves."""
        b, layout = self.b, self.layout
        d = e.half(b, self.coarse)
        if layout.shift:
            d = b.fmul(d, e.each(2.0**-layout.shift))
        if not layout.fine:
            return d
        fine = e.load(b, e.at(b, self.at[2], 16 * part), e.V16I8)
        return b.fmul(d, b.sitofp((b.zext if layout.mins else b.sext)(fine, e.V16I), e.V16F))

    def min(self):
        b, layout = self.b, self.layout
        m = e.half(b, e.at(b, self.coarse, 32))
        if layout.fine:
            fine = b.zext(e.load(b, e.at(b, self.at[2], 16), e.V16I8), e.V16I)
            m = b.fneg(b.fmul(m, b.sitofp(fine, e.V16F)))
        return m


class Expanded:
    """32 k of one group as `expand` leaves them."""

    def __init__(self, b, layout, group, i, n_blocks):
        self.b, self.layout, nbytes = b, layout, expanded_nbytes(layout)
        self.at = e.at(b, group, b.mul(i, e.i64(nbytes)))

    def quants(self, step):
        return e.load(self.b, e.at(self.b, self.at, 64 * step), e.V16I)

    def scale(self, part):
        return e.load(self.b, e.at(self.b, self.at, 512 + 64 * part), e.V16F)

    def min(self):
        return e.load(self.b, e.at(self.b, self.at, 512 + 64 * self.layout.parts), e.V16F)


def expand(dtype):
    """intrinsic f(group, out, begin, end, count): blocks begin…end−1 of a packed group of `count` blocks."""
    layout = LAYOUTS[dtype]

    @intrinsic
    def unpack(typingctx, group, out, begin, end, count):
        def codegen(ctx, b, sig, a):
            source, target = (b.inttoptr(v, e.I8P) for v in a[:2])

            def body(i, _):
                block = Packed(b, layout, source, i, a[4])
                to = e.at(b, target, b.mul(b.sub(i, a[2]), e.i64(expanded_nbytes(layout))))
                vectors = [block.quants(step) for step in range(8)]
                vectors += [block.scale(part) for part in range(layout.parts)] + [block.min()] * layout.mins
                for place, vector in enumerate(vectors):
                    e.store(b, vector, e.at(b, to, 64 * place))
                return []

            e.loop(b, a[2], a[3], [], body)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return unpack

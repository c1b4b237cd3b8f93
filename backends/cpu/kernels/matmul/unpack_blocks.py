"""32 k of a weight's group of 16 rows, in registers: out of its packed form, or expanded once for many rows.

Expanded: per 32 k [8][16][4] u8 quants, then [16] f32 scales (two for q6_k, each of 16 k), then [16] f32 minima for
types that have them. All forms give the same numbers.
"""

from __future__ import annotations

from numba import njit

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.codebook import coded
from logitless.backends.cpu.kernels.ir.int_dot import of_signed
from logitless.backends.cpu.kernels.matmul.layout import expanded_nbytes
from logitless.backends.host import compiled_for

NEAR = 4  # blocks
EARLY = 24  # blocks: as far ahead as a Zen core reads while it waits for memory


def places(layout):
    """f(group, i): where the coarse, fine, high and quants of block i of a packed group of 16 rows begin."""
    bundle, nbytes, step = layout.bundle, layout.bundle_nbytes, layout.coarse_step
    fine_at, high_at, quants_at = layout.fine_at, layout.high_at, layout.quants_at
    fine, high, quants = layout.fine, layout.high, layout.quants

    @njit(forceinline=True)
    def find(group, i):
        at, j = group + i // bundle * nbytes, i % bundle
        return at + j * step, at + fine_at + j * fine, at + high_at + j * high, at + quants_at + j * quants

    return find


@njit(forceinline=True)
def float_place(together, k, r):
    """Which number of a packed group of floats is that of row r and k."""
    return (k // together * 16 + r) * together + k % together


class Bundle:
    """The bundle of a packed group that holds block i: where it begins, its first block, and of types of 256 k their
    numbers as f32."""

    def __init__(self, b, layout, group, i):
        self.b, self.layout, self.group = b, layout, group
        number = b.lshr(i, e.i64(layout.bundle.bit_length() - 1))
        self.start = e.at(b, group, b.mul(number, e.i64(layout.bundle_nbytes)))
        self.first = b.and_(i, e.i64(-layout.bundle))
        if layout.block == 256:
            self.scale = self.scale_at(self.start)
            self.min = b.fneg(e.half(b, e.at(b, self.start, 32))) if layout.mins else None

    def scale_at(self, coarse):
        """Of quants as they are shifted."""
        d, shift = e.half(self.b, coarse), self.layout.shift
        return self.b.fmul(d, e.each(2.0**-shift)) if shift else d


class Packed:
    """32 k of one group as packed (layout.py), in registers: `quants(step, late)`, `scale` and `min`."""

    def __init__(self, b, layout, bundle, i):
        self.b, self.layout, self.bundle, self.i = b, layout, bundle, i
        start, j = bundle.start, b.sub(i, bundle.first)

        def place(section, width):
            return e.at(b, e.at(b, start, section), b.mul(j, e.i64(width)))

        self.coarse, self.fine = place(0, layout.coarse_step), place(layout.fine_at, layout.fine)
        self.at = place(layout.quants_at, layout.quants), place(layout.high_at, layout.high)
        self.loaded = {}

    def asks(self, later):
        """Cache lines to ask for, and whether for the first-level cache: as many bytes as this block has, of what comes
        later; and those of a few blocks on, for a processor with too many lines under way forgets what it was asked.
        Zen remembers, and reads fastest what it is asked for once.
        """
        if compiled_for().is_zen:
            return self._near_asks(EARLY)
        far = [(e.at(self.b, later, line), False) for line in range(0, self.layout.block_nbytes, 64)]
        return [ask for both in zip(far, self._near_asks(), strict=True) for ask in both]

    def _near_asks(self, blocks=NEAR):
        b, nbytes = self.b, self.layout.block_nbytes
        start = e.at(b, e.at(b, self.bundle.group, b.mul(self.i, e.i64(nbytes))), blocks * nbytes)
        return [(e.at(b, start, line), True) for line in range(0, nbytes, 64)]

    def vector(self, section, index):
        key = section, index
        if key not in self.loaded:
            self.loaded[key] = e.load(self.b, e.at(self.b, self.at[section], 64 * index), e.V16I)
        return self.loaded[key]

    def quants(self, step, late):
        """Unsigned bytes: q << shift, of signed types + 128; less what waits for their dots (emit_dot.late_shift).

        Codes of 8 bits are signed bytes where dots take these.
        """
        b, layout = self.b, self.layout
        if layout.quants == 512:
            return self.vector(0, step)
        shift = layout.shift - late
        if layout.codes:
            zero = 0 if of_signed() and layout.bits == 8 else 128 >> late
            places = e.bits_to(b, self.vector(0, step % 4), -4 * (step // 4), 15)
            return coded(b, places, [(code << shift) + zero & 255 for code in layout.codes])
        mask = 15 << shift
        u = e.bits_to(b, self.vector(0, step % 4), shift - 4 * (step // 4), mask)
        if layout.high == 64:
            u = b.or_(u, e.bits_to(b, self.vector(1, 0), 4 + shift - step, 16 << shift))
        elif layout.high == 128:
            u = b.or_(u, e.bits_to(b, self.vector(1, step // 4), 4 + shift - 2 * (step % 4), 48 << shift))
        return u

    def scale(self, part):
        """f32: of the block, or (q6_k) of one of its halves."""
        b, layout = self.b, self.layout
        if layout.coarse == 16:
            exponent = b.zext(e.load(b, self.coarse, e.V16I8), e.V16I)
            return b.fmul(b.bitcast(b.shl(exponent, e.each(23)), e.V16F), e.each(2.0 ** -(layout.shift + 1)))
        if not layout.fine:
            return self.bundle.scale_at(self.coarse)
        fine = e.load(b, e.at(b, self.fine, 16 * part), e.V16I8)
        return b.fmul(self.bundle.scale, b.sitofp((b.zext if layout.mins else b.sext)(fine, e.V16I), e.V16F))

    def min(self):
        b = self.b
        if not self.layout.fine:
            return e.half(b, e.at(b, self.coarse, 32))
        fine = b.zext(e.load(b, e.at(b, self.fine, 16), e.V16I8), e.V16I)
        return b.fmul(self.bundle.min, b.sitofp(fine, e.V16F))


class Expanded:
    """32 k of one group as `Expanding` leaves them."""

    def __init__(self, b, layout, group, i):
        self.b, self.layout, nbytes = b, layout, expanded_nbytes(layout)
        self.at = e.at(b, group, b.mul(i, e.i64(nbytes)))

    def asks(self):
        return []  # they stay in the first-level cache

    def quants(self, step, late):
        return e.load(self.b, e.at(self.b, self.at, 64 * step), e.V16I)

    def scale(self, part):
        return e.load(self.b, e.at(self.b, self.at, 512 + 64 * part), e.V16F)

    def min(self):
        return e.load(self.b, e.at(self.b, self.at, 512 + 64 * self.layout.parts), e.V16F)


class Expanding(Packed):
    """The same for the first rows that meet it: as packed, and left `to` the others expanded."""

    def __init__(self, b, layout, bundle, i, to):
        super().__init__(b, layout, bundle, i)
        self.to = e.at(b, to, b.mul(i, e.i64(expanded_nbytes(layout))))

    def asks(self):
        return self._near_asks()  # the kernel asked for the others while earlier tiles ran

    def _left(self, vector, at):
        e.store(self.b, vector, e.at(self.b, self.to, at))
        return vector

    def quants(self, step, late):
        return self._left(super().quants(step, late), 64 * step)

    def scale(self, part):
        return self._left(super().scale(part), 512 + 64 * part)

    def min(self):
        return self._left(super().min(), 512 + 64 * self.layout.parts)

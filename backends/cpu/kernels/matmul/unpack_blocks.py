"""Unpacking of weights in registers: 32 k of a group of 16 rows, packed or expanded.

With many rows a block is expanded once. Expanded: per 32 k [8][16][4] u8 quants (for NEON's products
of matrices [4][16][8], signed), then [16] f32 scales (two for types with scales of 16 k), then as many
[16] f32 minima for types that have them. All forms give the same numbers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.dot import dots_take_signed, pair_steps, uses_matrices
from logitless.backends.cpu.kernels.ir.grid import (
    V64B,
    GridEntries,
    has_register_tables,
    look_up_octets,
    split_f16,
    trit_place,
)
from logitless.backends.cpu.kernels.matmul.layout import expanded_nbytes, nibble_planes
from logitless.backends.host import NEON, isa, target_host

NEAR_BLOCKS = 4  # prefetch distance in blocks
ZEN_BLOCKS = 24  # the same on Zen: as far as a core reads while it waits for memory
ZEN_NBYTES, ZEN_ROWS = 4096, 4  # from so many rows on, which take longer to multiply, so many bytes


def section_finder(layout):
    """f(group, i): addresses of the coarse, fine, high and quants sections of block i of a packed
    group.
    """
    bundle, nbytes, coarse, of_gguf = layout.bundle, layout.bundle_nbytes, layout.coarse, layout.gguf_blocks
    fine_at, high_at, quants_at = layout.fine_at, layout.high_at, layout.quants_at
    fine, high, quants = layout.fine, layout.high, layout.quants

    @njit(forceinline=True)
    def sections(group, i):
        at, j = group + i // bundle * nbytes, i % bundle
        coarse_at = at + j // of_gguf * coarse
        return coarse_at, at + fine_at + j * fine, at + high_at + j * high, at + quants_at + j * quants

    return sections


@njit(forceinline=True)
def places_of_trits(quants, r):
    """Addresses of row r's bytes of five and of three trits of a block, and of those with the fifth bits."""
    return quants + r * 4, quants + 64 + r % 8 * 4, quants + 96 + r // 2


@njit(forceinline=True)
def float_index(k_interleave, k, r):
    """Index of element (row r, k) in a packed group of floats."""
    return (k // k_interleave * 16 + r) * k_interleave + k % k_interleave


class Bundle:
    """Bundle of a packed group that holds block i: its address and first block.

    Of types of 256 k also the coarse scale and min, as f32.
    """

    def __init__(self, b, layout, group, i):
        self.b, self.layout, self.group = b, layout, group
        number = b.lshr(i, e.i64(layout.bundle.bit_length() - 1))
        self.start = e.at(b, group, b.mul(number, e.i64(layout.bundle_nbytes)))
        self.first = b.and_(i, e.i64(-layout.bundle))
        if layout.block == 256:
            self.coarse = self.coarse_at(b.sub(i, self.first))
            self.scale = self.scale_at(self.coarse)
            self.min = b.fneg(e.load_f16(b, e.at(b, self.coarse, 32))) if layout.mins else None

    def coarse_at(self, j):
        """Address of the coarse numbers of the bundle's block j of 32 k."""
        b, layout = self.b, self.layout
        number = b.lshr(j, e.i64(layout.gguf_blocks.bit_length() - 1))
        return e.at(b, self.start, b.mul(number, e.i64(layout.coarse)))

    def scale_at(self, coarse):
        """Scale of quants that are read shifted."""
        b, layout = self.b, self.layout
        d = split_f16(b, coarse) if layout.coarse == 128 else e.load_f16(b, coarse)
        unit = 2.0**-layout.shift * (layout.grid.unit if layout.grid else 1)
        return b.fmul(d, e.constant(unit)) if unit != 1 else d


class PackedBlock:
    """32 k of a packed group (layout.py), in registers: `quants(step, late)`, `scale` and `min`."""

    def __init__(self, b, layout, bundle, i):
        self.b, self.layout, self.bundle, self.i = b, layout, bundle, i
        start, self.j = bundle.start, b.sub(i, bundle.first)

        def address(offset, width):
            return e.at(b, e.at(b, start, offset), b.mul(self.j, e.i64(width)))

        self.coarse, self.fine = bundle.coarse_at(self.j), address(layout.fine_at, layout.fine)
        self.at = address(layout.quants_at, layout.quants), address(layout.high_at, layout.high)
        self.signed_codes = dots_take_signed() and layout.bits == 8
        self._loaded = {}
        if layout.grid:
            self.entries = GridEntries(b, layout, *self.at)

    def prefetch_lines(self, later, rows):
        """(cache line, into L1) to prefetch for a tile of so many rows: a block's bytes from `later` on, and of a few
        blocks ahead.

        The near ones repeat, because a processor with too many misses in flight drops prefetches.
        Zen does not, and reads fastest what is prefetched once.
        """
        if target_host().prefetches_rows(rows):
            return self._near_lines(ZEN_BLOCKS if rows < ZEN_ROWS else -(-ZEN_NBYTES // self.layout.block_nbytes))
        far = [(e.at(self.b, later, line), False) for line in range(0, self.layout.block_nbytes, 64)]
        return [line for pair in zip(far, self._near_lines(), strict=True) for line in pair]

    def _near_lines(self, blocks=NEAR_BLOCKS):
        b, nbytes = self.b, self.layout.block_nbytes
        start = e.at(b, e.at(b, self.bundle.group, b.mul(self.i, e.i64(nbytes))), blocks * nbytes)
        return [(e.at(b, start, line), True) for line in range(0, nbytes, 64)]

    def vector(self, section, index):
        key = section, index
        if key not in self._loaded:
            self._loaded[key] = e.load(self.b, e.at(self.b, self.at[section], 64 * index), e.V16I)
        return self._loaded[key]

    def quants(self, step, late):
        """Unsigned bytes: q << shift, + 128 for signed types, less the bits shifted later
        (late_shift).

        8-bit codes are signed bytes where dots take those.
        """
        b, layout = self.b, self.layout
        if layout.quants == 512:
            return self.vector(0, step)
        if layout.grid:
            return self.entries.quants(step, late)
        shift = layout.shift - late
        if layout.trits:
            return self._trits(step, shift)
        if layout.codes:
            zero = 0 if self.signed_codes else 128 >> late
            indices = e.shift_mask(b, self.vector(0, step % 4), -4 * (step // 4), 15)
            return look_up(b, indices, [(code << shift) + zero & 255 for code in layout.codes])
        low = layout.low_bits
        if low == 3:
            return self._three_bits(step, late)
        mask = (1 << low) - 1 << shift + layout.step - 1
        u = e.shift_mask(b, self.vector(0, step % low), layout.shift_left(step, late), mask)
        if layout.high == 64:
            u = b.or_(u, e.shift_mask(b, self.vector(1, 0), low + shift - step, 1 << low + shift))
        elif layout.high == 128:
            u = b.or_(u, e.shift_mask(b, self.vector(1, step // 4), 4 + shift - 2 * (step % 4), 48 << shift))
        return u

    def turn(self, v, late, place):
        """[(quants, their step − v)] of vector v, an i64 value: both nibbles of each byte, or of packed bytes and codes
        the one at bit `place`."""
        b, layout = self.b, self.layout
        word = e.load(b, e.at(b, self.at[0], b.mul(v, e.i64(64))), e.V16I)
        if layout.low_bits == 8:
            return [(e.shift_mask(b, word, -place, 15), 0)]
        if layout.codes:
            codes = [code + 128 >> place & 15 for code in layout.codes]
            return [(look_up(b, e.shift_mask(b, word, -step, 15), codes), step) for step in (0, 4)]
        mask = 15 << layout.shift - late
        return [(e.shift_mask(b, word, layout.shift_left(step, late), mask), step) for step in (0, 4)]

    def _three_bits(self, step, late):
        """Quants of q3_k."""
        b, layout = self.b, self.layout
        left, place = layout.shift_left(step, late), layout.shift - late
        if step < 6:
            return e.shift_mask(b, self.vector(0, step // 2), left, 7 << place)
        upper = e.shift_mask(b, self.vector(0, step - 6), left, 6 << place)
        return b.or_(upper, e.shift_mask(b, self.vector(0, 2), place - step, 1 << place))

    def _trits(self, step, shift):
        """Bytes with a digit of base 3, shifted left."""
        b = self.b
        if step >= 5 or (step and has_register_tables()):
            fields = self._once("three", self._three_trits) if step >= 5 else self._once("four", self._four_trits)
            return e.shift_mask(b, fields, shift - trit_place(step), 3 << shift)
        octets = ir.VectorType(e.I8, 64)
        constant = lambda value: ir.Constant(octets, [value] * 64)
        fraction = b.bitcast(self._fraction(step), octets)
        ones = [
            b.select(b.icmp_signed(">", fraction, constant(last - 128)), constant(1 << shift), constant(0))
            for last in (85, 170)  # of the first and of the second third of 256
        ]
        return b.bitcast(b.add(*ones), e.V16I)

    def _once(self, key, make):
        if key not in self._loaded:
            self._loaded[key] = make()
        return self._loaded[key]

    def _fraction(self, step):
        """Bytes whose first digit is that of step 0 to 4: times 3 for each digit before it."""
        if step == 0:
            return self.vector(0, 0)
        return self._once(("fraction", step), lambda: e.triple_octets(self.b, self._fraction(step - 1)))

    def _four_trits(self):
        """Bytes with the digits of steps 1 to 4."""
        table = [0] * 256
        for number in range(243):
            digits = (number // 3 ** (4 - step) % 3 << trit_place(step) for step in range(1, 5))
            table[-(-number * 256 // 243) ^ 128] = sum(digits)
        indices = self.b.bitcast(self.vector(0, 0), V64B)
        return self.b.bitcast(look_up_octets(self.b, table, indices), e.V16I)

    def _three_trits(self):
        """Bytes with the digits of steps 5 to 7."""
        b, at = self.b, e.at(self.b, self.at[0], 64)
        table = [sum(i // 3 ** (7 - step) % 3 << trit_place(step) for step in (5, 6, 7)) for i in range(27)] + [0] * 5
        octets = ir.VectorType(e.I8, 32)
        pairs = e.load(b, at, octets)
        halves = pairs, b.lshr(pairs, ir.Constant(octets, [4] * 32))
        words = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(e.I32, 64), list(range(64))))
        indices = e.shift_mask(b, b.bitcast(words, e.V16I), 0, 15)
        low, high = (b.bitcast(look_up(b, indices, table[n : n + 16]), V64B) for n in (0, 16))
        bits = b.bitcast(e.load(b, e.at(b, at, 32), e.I64), ir.VectorType(ir.IntType(1), 64))
        return b.bitcast(b.select(bits, high, low), e.V16I)

    def scale(self, part):
        """f32 scale of the block, or of one of its halves."""
        b, layout = self.b, self.layout
        if layout.coarse == 16:
            exponent = b.zext(e.load(b, self.coarse, e.V16I8), e.V16I)
            return b.fmul(b.bitcast(b.shl(exponent, e.constant(23)), e.V16F), e.constant(2.0 ** -(layout.shift + 1)))
        if layout.grid:
            return b.fmul(self.bundle.scale, self._odd_scale(part))
        if not layout.fine:
            return self.bundle.scale if layout.block == 256 else self.bundle.scale_at(self.coarse)
        if not layout.coarse:  # E4M3 in units of a half: the bits of an f16 at the same places
            return b.fmul(e.half_bits(b, self._fine(part), 7), e.constant(2.0 ** (7 - layout.shift)))
        if layout.fine == 24:
            return self._six_bit_scale(part)
        fine = self._fine(part)
        if layout.mins and layout.parts == 2:
            fine = b.and_(fine, ir.Constant(e.V16I8, [15] * 16))
        return b.fmul(self.bundle.scale, b.sitofp((b.zext if layout.mins else b.sext)(fine, e.V16I), e.V16F))

    def _odd_scale(self, part):
        """2s + 1 of a type with a grid."""
        b, kind = self.b, self.layout.grid.scales
        j = b.trunc(b.sub(self.i, self.bundle.first), e.I32)
        odd = b.and_(j, ir.Constant(e.I32, 1))
        if kind in ("signs", "high"):
            s = self.entries.word_scales()
        elif kind == "coarse":
            pair = b.zext(b.and_(b.lshr(j, ir.Constant(e.I32, 1)), ir.Constant(e.I32, 3)), e.I64)
            words = b.zext(e.load(b, e.at(b, self.bundle.coarse, b.mul(pair, e.i64(32))), e.V16I16), e.V16I)
            shift = b.add(b.mul(odd, ir.Constant(e.I32, 6)), ir.Constant(e.I32, 3 * part))
            s = b.and_(b.lshr(words, e.splat(b, shift)), e.constant(7))
        else:
            at, shift = self.fine, ir.Constant(e.I32, 4 * part)
            if kind == "pairs":
                at, shift = e.at(b, at, b.mul(b.zext(odd, e.I64), e.i64(-8))), b.mul(odd, ir.Constant(e.I32, 4))
            s = b.and_(b.lshr(b.zext(e.load(b, at, e.V16I8), e.V16I), e.splat(b, shift)), e.constant(15))
        return b.sitofp(b.or_(b.shl(s, e.constant(1)), e.constant(1)), e.V16F)

    def min(self, part):
        """f32 minimum; of types with halves that of one, divided by −128, for the start values of dots."""
        b, layout = self.b, self.layout
        if not layout.fine:
            return e.load_f16(b, e.at(b, self.coarse, 32))
        if layout.parts == 1:
            return b.fmul(self.bundle.min, b.sitofp(b.zext(self._fine(1), e.V16I), e.V16F))
        fine = b.lshr(self._fine(part), ir.Constant(e.V16I8, [4] * 16))
        return b.fmul(b.fmul(self.bundle.min, e.constant(-1 / 128)), b.sitofp(b.zext(fine, e.V16I), e.V16F))

    def _fine(self, index):
        return e.load(self.b, e.at(self.b, self.fine, 16 * index), e.V16I8)

    def _six_bit_scale(self, part):
        """Scale of q3_k: d · (s − 32), as 64 d · (1 + s / 64) − 96 d, in which s is a float's upper bits."""
        b = self.b
        octets = [e.load(b, e.at(b, self.fine, 12 * half), ir.VectorType(e.I8, 16)) for half in range(2)]
        pairs = [place for r in range(8) for place in (r // 2 * 3 + r % 2, r // 2 * 3 + r % 2 + 1, 0, 0)]
        lanes = ir.Constant(ir.VectorType(e.I32, 32), pairs)
        words = e.concat(b, [b.bitcast(b.shuffle_vector(o, o, lanes), ir.VectorType(e.I32, 8)) for o in octets])
        left = ir.Constant(e.V16I, [17 - 6 * part - r % 2 * 4 for r in range(16)])
        bits = b.or_(b.and_(b.shl(words, left), e.constant(63 << 17)), e.constant(127 << 23))
        scale, zero = (b.fmul(self.bundle.scale, e.constant(factor)) for factor in (64.0, -96.0))
        return e.fma(b, b.bitcast(bits, e.V16F), scale, zero)


class ExpandedBlock:
    """32 k of an expanded group."""

    def __init__(self, b, layout, group, i):
        self.b, self.layout, nbytes = b, layout, expanded_nbytes(layout, isa())
        self.at = e.at(b, group, b.mul(i, e.i64(nbytes)))
        self.scales = e.at(b, self.at, 512 * len(nibble_planes(layout, isa())))

    def prefetch_lines(self):
        return []  # they stay in the L1 cache

    def quants(self, step, late):
        return e.load(self.b, e.at(self.b, self.at, 64 * step), e.V16I)

    def turn(self, step, _late, place):
        """[(quants, 0)] of a step, an i64 value; see PackedBlock.turn."""
        at = e.at(self.b, self.at, 512 * nibble_planes(self.layout, isa()).index(place))
        return [(e.load(self.b, e.at(self.b, at, self.b.mul(step, e.i64(64))), e.V16I), 0)]

    def scale(self, part):
        return e.load(self.b, e.at(self.b, self.scales, 64 * part), e.V16F)

    def min(self, part):
        return e.load(self.b, e.at(self.b, self.scales, 64 * (self.layout.parts + part)), e.V16F)


class ExpandingBlock(PackedBlock):
    """32 k of a packed group that are also stored expanded, at `to`, for later tiles."""

    def __init__(self, b, layout, bundle, i, expanded):
        super().__init__(b, layout, bundle, i)
        self.planes = nibble_planes(layout, isa())
        self.signed_codes = self.signed_codes and len(self.planes) == 1
        self.at_expanded = e.at(b, expanded, b.mul(i, e.i64(expanded_nbytes(layout, isa()))))

    def prefetch_lines(self):
        return self._near_lines()  # the rest was prefetched by earlier tiles

    def _store(self, vector, at):
        e.store(self.b, vector, e.at(self.b, self.at_expanded, at))
        return vector

    def quants(self, step, late):
        u = super().quants(step, late)
        if uses_matrices():
            if step % 2 == 0:
                self.before = u
            else:
                for half, pair in enumerate(pair_steps(self.b, self.layout, self.before, u)):
                    self._store(pair, 64 * (step - 1 + half))
            return u
        for plane, place in enumerate(self.planes):
            part = u if len(self.planes) == 1 else e.shift_mask(self.b, u, -place, 15)
            self._store(part, 512 * plane + 64 * step)
        return u

    def scale(self, part):
        return self._store(super().scale(part), 512 * len(self.planes) + 64 * part)

    def min(self, part):
        return self._store(super().min(part), 512 * len(self.planes) + 64 * (self.layout.parts + part))


def look_up(b, indices, codes):
    """Codebook values of 16 i32 of four indices each (0 to 15); bytes as they are."""
    if isa() == "plain":
        return _select(b, indices, codes)
    name, n = {
        "avx512_vnni": ("llvm.x86.avx512.pshuf.b.512", 64),
        "avx_vnni": ("llvm.x86.avx2.pshuf.b", 32),
        "avx2": ("llvm.x86.avx2.pshuf.b", 32),
        **dict.fromkeys(NEON, ("llvm.aarch64.neon.tbl1.v16i8", 16)),
    }[isa()]
    t = ir.VectorType(e.I8, n)
    table, words = ir.Constant(t, [*codes] * (n // 16)), ir.VectorType(e.I32, n // 4)
    parts = [b.bitcast(e.extract_lanes(b, indices, i, n // 4), t) for i in range(64 // n)]
    return e.concat(b, [b.bitcast(e.call(b, name, t, [table, p]), words) for p in parts])


def look_up_bytes(b, indices, codes):
    """Codebook values, i8, of 16 indices, i8 each."""
    if isa() == "plain":
        value = ir.Constant(indices.type, [codes[0]] * 16)
        for i in range(1, 16):
            here = b.icmp_signed("==", indices, ir.Constant(indices.type, [i] * 16))
            value = b.select(here, ir.Constant(indices.type, [codes[i]] * 16), value)
        return value
    name = "llvm.aarch64.neon.tbl1.v16i8" if isa() in NEON else "llvm.x86.ssse3.pshuf.b.128"
    return e.call(b, name, indices.type, [ir.Constant(indices.type, [*codes]), indices])


def _select(b, indices, codes):
    """Lookup without a shuffle instruction: select by each bit of the index."""
    values = [e.constant(_word(code)) for code in codes]
    for bit in range(4):
        ones = b.and_(b.lshr(indices, e.constant(bit)), e.constant(0x01010101))
        mask = b.mul(ones, e.constant(255))
        values = [b.xor(no, b.and_(mask, b.xor(no, yes))) for no, yes in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _word(byte):
    """A byte repeated four times, as an i32."""
    word = byte * 0x01010101
    return word - (1 << 32) if word >> 31 else word

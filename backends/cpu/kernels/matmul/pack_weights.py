"""Packing of weights: GGUF blocks → groups (layout.py), `pack:<dtype>`. A unit is a group.

Sources may be unaligned. A GGUF block of 32 (q4_0 … q5_1, iq4_nl, mxfp4) has elements j and j+16 in
the halves of byte j, as our layout has. The K types hold 64 (q4_k, q5_k) or 128 (q6_k) elements
side by side, and are split into blocks of 32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.registry import kernel, u8p, u16p, u32p
from logitless.backends.cpu.kernels.matmul.layout import LAYOUTS
from logitless.backends.cpu.kernels.matmul.unpack_blocks import float_index, places_of_trits, section_finder


@kernel("pack")
def pack(dtype):
    """Pack a weight."""
    layout = LAYOUTS[dtype]
    if layout.block == 1:
        return float_packer(layout)
    block, block_nbytes = layout.block, layout.gguf_nbytes
    pack_block = BLOCK_PACKERS[dtype](layout)

    def run(source_at, y_at, n, k, group_nbytes, begin, end, scratch):
        row_nbytes = k // block * block_nbytes
        for group in range(begin, end):
            out = y_at + group * group_nbytes
            rows = min(16, n - group * 16)
            if rows < 16:
                zeros = u32p(out)
                for i in range(group_nbytes // 4):
                    zeros[i] = 0
            source = source_at + group * 16 * row_nbytes
            for i in range(k // block):
                for r in range(rows):
                    pack_block(source + r * row_nbytes + i * block_nbytes, out, i, r)

    return run


def float_packer(layout):
    width, k_interleave = layout.gguf_nbytes, layout.k_interleave

    def run(source_at, y_at, n, k, group_nbytes, begin, end, scratch):
        for group in range(begin, end):
            out = y_at + group * group_nbytes
            source = source_at + group * 16 * k * width
            rows = min(16, n - group * 16)
            for i in range((k + k_interleave - 1) // k_interleave * k_interleave):
                for r in range(16):
                    index, exists = float_index(k_interleave, i, r), r < rows and i < k
                    if width == 4:
                        u32p(out)[index] = u32p(source)[r * k + i] if exists else 0
                    else:
                        u16p(out)[index] = u16p(source)[r * k + i] if exists else 0

    return run


def q8_0_packer(layout):
    """Block: f16 d, 32 i8."""

    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        coarse, _, _, quants = sections(out, i)
        target = u32p(quants + r * 4)
        q = u32p(block + 2)
        for step in range(8):
            target[step * 16] = q[step] ^ 0x80808080
        u16p(coarse)[r] = u16p(block)[0]

    return pack_block


def block32_packer(layout):
    """q4_0 … q5_1, iq4_nl, mxfp4.

    Block: f16 d (mxfp4: u8 e), [f16 m], [u32: bit j belongs to element j], 16 bytes of nibbles.
    """
    sections, high, coarse = section_finder(layout), layout.high, layout.coarse

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        coarse_at, _, high_at, quants_at = sections(out, i)
        if coarse == 16:
            u8p(coarse_at)[r] = u8p(block)[0]
        else:
            u16p(coarse_at)[r] = u16p(block)[0]
        nibbles = block + coarse // 16
        if coarse == 64:
            u16p(coarse_at)[16 + r] = u16p(block)[1]
        if high:
            bits = u32p(nibbles)[0]
            nibbles += 4
            target = u8p(high_at + r * 4)
            for t in range(4):  # element 4·step + t is bit `step` of byte t
                byte = 0
                for step in range(8):
                    byte |= ((bits >> (4 * step + t)) & 1) << step
                target[t] = byte
        for v in range(4):
            u32p(quants_at + r * 4)[16 * v] = u32p(nibbles)[v]

    return pack_block


@njit(forceinline=True)
def nibbles_of(low, high, shift):
    """Four bytes of our layout: the nibbles of `low` at `shift` (0 or 4) below those of `high`."""
    return ((low >> shift) & 0x0F0F0F0F) | (((high >> shift) & 0x0F0F0F0F) << 4)


def q45_k_packer(layout):
    """q4_k, q5_k.

    Block: f16 d, dmin, 12 bytes of 6-bit scales and mins, [32 bytes: bit s is sub-block s], 128
    bytes of nibbles. Of each 32 bytes of nibbles, the low ones are one sub-block of 32 and the high
    ones the next.
    """
    sections, high = section_finder(layout), layout.high

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        halves = u16p(sections(out, i * 8)[0])
        halves[r], halves[16 + r] = u16p(block)[0], u16p(block)[1]
        s, h, q = u8p(block + 4), u8p(block + 16), u32p(block + 16 + high // 2)
        for sub in range(8):
            _, fine_at, high_at, quants_at = sections(out, i * 8 + sub)
            fine = u8p(fine_at)
            if sub < 4:
                fine[r], fine[16 + r] = s[sub] & 63, s[sub + 4] & 63
            else:
                fine[r] = (s[sub + 4] & 15) | ((s[sub - 4] >> 6) << 4)
                fine[16 + r] = (s[sub + 4] >> 4) | ((s[sub] >> 6) << 4)
            target = u32p(quants_at + r * 4)
            shift = sub % 2 * 4
            for v in range(4):
                target[16 * v] = nibbles_of(q[sub // 2 * 8 + v], q[sub // 2 * 8 + v + 4], shift)
            if high:
                put_one_bit(h, u8p(high_at + r * 4), sub)

    return pack_block


@njit(forceinline=True)
def two_bits_of(words, shift, v):
    """Four bytes of our layout: 2 bits, at `shift` of eight words of bytes, of steps v, v+2, v+4, v+6."""
    word = np.uint32(0)
    for field in range(4):
        word |= (words[2 * field + v] >> np.uint32(shift) & np.uint32(0x03030303)) << np.uint32(2 * field)
    return word


def q23_k_packer(layout):
    """q2_k, q3_k, tq2_0.

    Block: two halves of 128 elements, each of 32 bytes of four times 2 bits: element 32·s + l has
    bits 2s of byte l. q2_k: 16 bytes of scales and mins before, then f16 d, dmin. q3_k: 32 bytes
    before, of which bit s is sub-block s; then 12 bytes of 6-bit scales, f16 d. tq2_0: f16 d.
    """
    sections, parts, three = section_finder(layout), layout.parts, layout.low_bits == 3
    quants_in, d_in = (32, 108) if three else (16, 80) if parts == 2 else (0, 64)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        coarse = sections(out, i * 8)[0]
        u16p(coarse)[r] = u16p(block + d_in)[0]
        if parts == 2 and not three:
            u16p(coarse)[16 + r] = u16p(block + d_in)[1]
        for sub in range(8):
            _, fine_at, _, quants_at = sections(out, i * 8 + sub)
            words = u32p(block + quants_in + sub // 4 * 32)
            if three:
                put_six_bits(u8p(block + 96), u8p(fine_at), r, sub)
                put_three_bits(words, u32p(block), u32p(quants_at + r * 4), sub)
                continue
            for v in range(2):
                u32p(quants_at + r * 4)[16 * v] = two_bits_of(words, sub % 4 * 2, v)
            if parts == 2:
                for part in range(2):
                    u8p(fine_at)[16 * part + r] = u8p(block)[2 * sub + part]

    return pack_block


@njit(forceinline=True)
def put_six_bits(packed, target, r, sub):
    """Two of the sixteen scales of q3_k in 12 bytes → 12 bits of 24 bytes, whose even rows come first."""
    both = 0
    for part in range(2):
        i = 2 * sub + part
        scale = packed[i % 8] >> (i // 8 * 4) & 15 | (packed[8 + i % 4] >> (i // 4 * 2) & 3) << 4
        both |= np.int32(scale) << 6 * part
    at = r // 2 * 3
    if r % 2 == 0:
        target[at], target[at + 1] = both & 255, both >> 8
    else:
        target[at + 1] |= both << 4 & 240
        target[at + 2] = both >> 4


@njit(forceinline=True)
def put_three_bits(words, high, target, sub):
    """Three words of our layout, of q3_k: eight words of bytes with four times 2 bits, and of 32 highest bits."""
    for v in range(3):
        target[16 * v] = np.uint32(0)
    for step in range(8):
        low = words[step] >> np.uint32(sub % 4 * 2) & np.uint32(0x03030303)
        quant = low | (high[step] >> np.uint32(sub) & np.uint32(0x01010101)) << np.uint32(2)
        if step < 6:
            target[step // 2 * 16] |= quant << np.uint32(3 * (step % 2))
        else:
            target[(step - 6) * 16] |= (quant >> np.uint32(1) & np.uint32(0x03030303)) << np.uint32(6)
            target[32] |= (quant & np.uint32(0x01010101)) << np.uint32(step)


@njit(forceinline=True)
def put_one_bit(octets, target, sub):
    """Bit `sub` of 32 bytes → four bytes, whose bit is the step."""
    for t in range(4):
        byte = 0
        for step in range(8):
            byte |= ((octets[4 * step + t] >> sub) & 1) << step
        target[t] = byte


@njit(forceinline=True)
def trit_of(octets, element):
    """A digit of a block of tq1_0: 32, then 16 bytes of five each, then four bytes of four."""
    if element < 160:
        byte, digit = octets[element % 32], element // 32
    elif element < 240:
        byte, digit = octets[32 + element % 16], (element - 160) // 16
    else:
        byte, digit = octets[48 + element % 4], (element - 240) // 4
    return ((np.int64(byte) * 3**digit & 255) * 3) >> 8


def tq1_0_packer(layout):
    """Block: 52 bytes of digits of base 3, f16 d."""
    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        coarse, _, _, quants_at = sections(out, i * 8)
        u16p(coarse)[r] = u16p(block + 52)[0]
        for sub in range(8):
            five_at, three_at, bits_at = places_of_trits(quants_at + 104 * sub, r)
            bits = 0
            for t in range(4):
                five = three = 0
                for step in range(8):
                    trit = trit_of(u8p(block), 32 * sub + 4 * step + t)
                    if step < 5:
                        five = five * 3 + trit
                    else:
                        three = three * 3 + trit
                u8p(five_at)[t] = (five * 256 + 242) // 243 ^ 128  # a fraction of 3^5, rounded up, less a half
                if r < 8:
                    u8p(three_at)[t] = three & 15
                else:
                    u8p(three_at)[t] |= three << 4 & 240
                bits |= three >> 4 << t
            if r % 2 == 0:
                u8p(bits_at)[0] = bits
            else:
                u8p(bits_at)[0] |= bits << 4

    return pack_block


def q2_0_packer(layout):
    """Block: f16 d, 16 bytes of four elements side by side."""
    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        u16p(sections(out, i * 2)[0])[r] = u16p(block)[0]
        for sub in range(2):
            octets, target = u8p(block + 2 + 8 * sub), u32p(sections(out, i * 2 + sub)[3] + r * 4)
            for v in range(2):
                word = np.uint32(0)
                for field in range(4):
                    for t in range(4):
                        quant = np.uint32(octets[2 * field + v] >> (2 * t) & 3)
                        word |= quant << np.uint32(8 * t + 2 * field)
                target[16 * v] = word

    return pack_block


def q1_0_packer(layout):
    """Block: f16 d, 16 bytes of eight elements side by side."""
    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        u16p(sections(out, i * 4)[0])[r] = u16p(block)[0]
        for sub in range(4):
            octets, target = u8p(block + 2 + 4 * sub), u8p(sections(out, i * 4 + sub)[3] + r * 4)
            for t in range(4):
                byte = 0
                for step in range(8):
                    byte |= (octets[step // 2] >> (step % 2 * 4 + t) & 1) << step
                target[t] = byte

    return pack_block


def iq4_xs_packer(layout):
    """Block: f16 d, u16 of eight times 2 high bits of scales, 4 bytes of low nibbles, 128 of indices."""
    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        u16p(sections(out, i * 8)[0])[r] = u16p(block)[0]
        for sub in range(8):
            _, fine_at, _, quants_at = sections(out, i * 8 + sub)
            low = u8p(block + 4)[sub // 2] >> (sub % 2 * 4) & 15
            u8p(fine_at)[r] = (low | (u16p(block)[1] >> (2 * sub) & 3) << 4) - 32
            for v in range(4):
                u32p(quants_at + r * 4)[16 * v] = u32p(block + 8 + 16 * sub)[v]

    return pack_block


def nvfp4_packer(layout):
    """Block: 4 bytes of E4M3 scales, four times 8 bytes whose nibbles are elements j and j + 8.

    A scale of NaN (127) counts as 0, and sign bits of scales do not count, as in llama.cpp.
    """
    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        for sub in range(2):
            _, fine_at, _, quants_at = sections(out, i * 2 + sub)
            q, target = u32p(block + 4 + 16 * sub), u32p(quants_at + r * 4)
            for part in range(2):
                scale = u8p(block)[2 * sub + part]
                u8p(fine_at)[16 * part + r] = 0 if scale == 127 else scale & 127
                # steps v of the first 16 elements are below those of the last
                target[16 * part] = nibbles_of(q[part], q[2 + part], 0)
                target[16 * (2 + part)] = nibbles_of(q[part], q[2 + part], 4)

    return pack_block


def q6_k_packer(layout):
    """Block: 128 bytes of nibbles, 64 bytes of high bit pairs, 16 i8 scales, f16 d.

    Each half (128 elements) has 64 + 32 bytes. Element 32·s + l takes the low (s < 2) or high
    nibble of byte 32·(s mod 2) + l, and bits 2s of byte l.
    """

    sections = section_finder(layout)

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        u16p(sections(out, i * 8)[0])[r] = u16p(block)[104]
        scales = u8p(block + 192)
        for sub in range(8):
            _, fine_at, high_at, quants_at = sections(out, i * 8 + sub)
            part, s = sub // 4, sub % 4
            fine = u8p(fine_at)
            fine[r], fine[16 + r] = scales[2 * sub], scales[2 * sub + 1]
            q = u32p(block + part * 64 + s % 2 * 32)
            h = u32p(block + 128 + part * 32)
            target = u32p(quants_at + r * 4)
            pairs = u32p(high_at + r * 4)
            shift = s // 2 * 4
            for v in range(4):
                target[16 * v] = nibbles_of(q[v], q[v + 4], shift)
            for v in range(2):
                word = 0
                for step in range(4):
                    word |= ((h[4 * v + step] >> (2 * s)) & 0x03030303) << (2 * step)
                pairs[16 * v] = word

    return pack_block


@njit(forceinline=True)
def sign_nibbles(signs, bits):
    """Sign words (layout.py) of 4 · `bits` signs: bit j of part g becomes bit g of nibble j."""
    word = np.int64(0)
    for g in range(4):
        for j in range(bits):
            word |= (signs >> (bits * g + j) & 1) << (4 * j + g)
    return word


@njit(forceinline=True)
def plane_nibbles(fields, bits, width):
    """High bits of four indices: bit p of the field of `width` bits g becomes bit g of nibble p."""
    word = np.int64(0)
    for g in range(4):
        for p in range(bits):
            word |= (fields >> (width * g + p) & 1) << (4 * p + g)
    return word


# -- grids: f(block, sub): the words of indices, signs and high bits, and a byte of scales


@njit(forceinline=True)
def iq2_xxs_fields(block, sub):
    """Block: f16 d, 8 × (4 u8 indices, u32: 4 × 7 signs, 4 bits of scale)."""
    q = u32p(block + 2 + 8 * sub)
    return q[0], 0, sign_nibbles(q[1], 7) | (q[1] >> 28) << 28, 0, 0


@njit(forceinline=True)
def iq3_xxs_fields(block, sub):
    """Block: f16 d, 64 u8 indices, 8 × (u32: 4 × 7 signs, 4 bits of scale)."""
    q, rest = u32p(block + 2 + 8 * sub), u32p(block + 66)[sub]
    return q[0], q[1], sign_nibbles(rest, 7) | (rest >> 28) << 28, 0, 0


@njit(forceinline=True)
def iq2_xs_fields(block, sub):
    """Block: f16 d, 32 × u16 (index of 9 bits, 7 signs), 8 × (2 × 4 bits of scale)."""
    q = u16p(block + 2 + 8 * sub)
    index, signs, high = np.int64(0), np.int64(0), np.int64(0)
    for g in range(4):
        both = np.int64(q[g])
        index |= (both & 255) << (8 * g)
        signs |= (both >> 9) << (7 * g)
        high |= (both >> 8 & 1) << g
    return index, 0, sign_nibbles(signs, 7) | high << 28, 0, u8p(block + 66)[sub]


@njit(forceinline=True)
def iq2_s_fields(block, sub):
    """Block: f16 d, 32 u8 indices, 32 × 8 signs, 8 × (4 × 2 high bits), 8 × (2 × 4 bits of scale)."""
    q, b = u32p(block + 2 + 4 * sub), u8p(block + 66 + sub)
    return q[0], 0, sign_nibbles(q[8], 8), plane_nibbles(b[0], 2, 2), b[8]


@njit(forceinline=True)
def iq3_s_fields(block, sub):
    """Block: f16 d, 64 u8 indices, 8 × 8 high bits, 32 × 8 signs, 8 × 4 bits of scale."""
    q, signs = u32p(block + 2 + 8 * sub), u32p(block + 74)[sub]
    return q[0], q[1], sign_nibbles(signs, 8), u8p(block + 66)[sub], u8p(block + 106)[sub // 2]


@njit(forceinline=True)
def iq1_s_fields(block, sub):
    """Block: f16 d, 32 u8 indices, 8 × u16 (4 × 3 high bits, 3 bits of scale, delta)."""
    rest = np.int64(u16p(block + 34)[sub])
    return u32p(block + 2)[sub], 0, 0, plane_nibbles(rest, 3, 3) | (rest >> 12) << 12, 0


@njit(forceinline=True)
def iq1_m_fields(block, sub):
    """Block: 32 u8 indices, 32 × (3 high bits, delta), 4 × u16 (4 × 3 bits of scale, a nibble of d)."""
    return u32p(block)[sub], 0, 0, plane_nibbles(np.int64(u16p(block + 32)[sub]), 4, 4), 0


GRID_FIELDS = {
    "iq2_xxs": iq2_xxs_fields,
    "iq2_xs": iq2_xs_fields,
    "iq2_s": iq2_s_fields,
    "iq3_xxs": iq3_xxs_fields,
    "iq3_s": iq3_s_fields,
    "iq1_s": iq1_s_fields,
    "iq1_m": iq1_m_fields,
}


def grid_packer(layout):
    """Types with a grid."""
    grid, sections, high_nbytes, fine = layout.grid, section_finder(layout), layout.high, layout.fine
    words, signs, split_d, fields = grid.index_words, grid.signs, layout.coarse == 128, GRID_FIELDS[grid.dtype]

    @njit(forceinline=True)
    def pack_block(block, out, i, r):
        coarse = u16p(sections(out, i * 8)[0])
        if split_d:
            for n in range(4):
                coarse[16 * n + r] = u16p(block + 48)[n]
        else:
            coarse[r] = u16p(block)[0]
        for sub in range(8):
            _, fine_at, high_at, quants_at = sections(out, i * 8 + sub)
            index, second, sign, high, scale = fields(block, sub)
            target = u32p(quants_at + r * 4)
            target[0] = index
            if words == 2:
                target[16] = second
            if signs:
                target[16 * words] = sign
            if high_nbytes == 32:
                u16p(high_at)[r] = high
            elif high_nbytes:
                u8p(high_at)[r] = high
            if fine == 16 or (fine == 8 and sub % 2 == 0):
                u8p(fine_at)[r] = scale

    return pack_block


BLOCK_PACKERS = {
    "q8_0": q8_0_packer,
    "q4_0": block32_packer,
    "q4_1": block32_packer,
    "q5_0": block32_packer,
    "q5_1": block32_packer,
    "iq4_nl": block32_packer,
    "mxfp4": block32_packer,
    "q1_0": q1_0_packer,
    "q2_0": q2_0_packer,
    "nvfp4": nvfp4_packer,
    "q2_k": q23_k_packer,
    "q3_k": q23_k_packer,
    "tq1_0": tq1_0_packer,
    "tq2_0": q23_k_packer,
    "iq4_xs": iq4_xs_packer,
    "q4_k": q45_k_packer,
    "q5_k": q45_k_packer,
    "q6_k": q6_k_packer,
    **dict.fromkeys(GRID_FIELDS, grid_packer),
}

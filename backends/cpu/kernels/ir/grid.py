"""Lookup of the entries of a grid: codebooks of groups of 4 or 8 numbers (IQ1, IQ2, IQ3).

A block of 32 k of 16 rows (matmul/layout.py) becomes eight vectors of bytes, as dots take them. With
AVX512-VBMI tables are in registers: `vpermi2b` looks up 64 indices in 128 bytes. Numbers of a grid
have two to eight magnitudes, so a number is a code of two bits (grids of 4 numbers: of four), and an
entry is two bytes of codes. `vpmultishiftqb` moves the codes of four k, and their signs, into bytes,
and `vpermb` makes numbers of them. Elsewhere entries are loaded one by one from a table in memory.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.host import isa, target_host
from logitless.graph.dtype import grid_of

V64B, V32I = ir.VectorType(e.I8, 64), ir.VectorType(e.I32, 32)
CHOOSE = 0xCA  # vpternlog: bits of the second where the first is set, of the third elsewhere
NIBBLES = 0x0FFFFFFF  # mask of the seven nibbles of signs


def has_register_tables():
    """True when bytes can be looked up in registers (AVX512-VBMI)."""
    return isa() == "avx512_vnni" and target_host().has("avx512vbmi")


def trit_place(step):
    """Lowest of a digit's two bits in the bytes where a step of tq1_0 has it (matmul/unpack_blocks.py)."""
    if step >= 5:
        return 16 - 2 * step
    return 8 - 2 * step if step and has_register_tables() else 6


@cache
def magnitudes(dtype):
    """(entries, numbers) of a grid that are multiplied by a sign; of IQ1, eight times the numbers."""
    entries = grid_of(dtype).astype(np.int64)
    return entries * 8 if entries.min() < 0 else entries


@cache
def codes_of(dtype):
    """The levels of a grid, and (2, entries) bytes of their codes: the first and the second half of an entry."""
    levels, codes = np.unique(magnitudes(dtype), return_inverse=True)
    codes = codes.reshape(len(magnitudes(dtype)), 2, -1)
    shifts = np.arange(codes.shape[2]) * (8 // codes.shape[2])
    return levels, (codes << shifts).sum(-1).astype(np.uint8).T


def table_at(b, name, data):
    """Pointer to constant bytes of the module."""
    table = b.module.globals.get(name)
    if table is None:
        kind = ir.ArrayType(e.I8, len(data))
        table = ir.GlobalVariable(b.module, kind, name)
        table.global_constant, table.linkage, table.align = True, "internal", 64
        table.initializer = ir.Constant(kind, bytearray(data))
    return b.bitcast(table, e.I8P)


def grid_address(dtype):
    """intrinsic f(): address of a grid's `magnitudes`, one byte each."""

    @intrinsic
    def address(typingctx):
        return types.int64(), lambda ctx, b, sig, args: b.ptrtoint(_table(b, dtype, 0), e.I64)

    return address


def _table(b, dtype, shift):
    return table_at(b, f"grid.{dtype}.{shift}", (magnitudes(dtype) << shift).astype(np.int8).tobytes())


def split_f16(b, at):
    """f32 of 16 f16 whose nibbles are at the top of four vectors of u16 (iq1_m)."""
    parts = [b.lshr(e.load(b, e.at(b, at, 32 * i), e.V16I16), _words(12)) for i in range(4)]
    value = parts[0]
    for i in range(1, 4):
        value = b.or_(value, b.shl(parts[i], _words(4 * i)))
    return b.fpext(b.bitcast(value, e.V16H), e.V16F)


def _words(value):
    return ir.Constant(e.V16I16, [value] * 16)


def _bytes(values):
    """64 bytes out of four of each lane, or out of 64."""
    values = [*values]
    return ir.Constant(V64B, [int(v) & 255 for v in (values * 16 if len(values) == 4 else values)])


def spread(b, words, places):
    """Bytes `places` of each of 16 lanes, as bytes."""
    octets = b.bitcast(words, V64B)
    indices = [4 * lane + place for lane in range(16) for place in places]
    return b.shuffle_vector(octets, octets, ir.Constant(ir.VectorType(e.I32, 64), indices))


def look_up_octets(b, table, indices, masks=()):
    """Bytes of a table of 256, or of more; then masks choose by bit 8 of an index and on (AVX512-VBMI)."""
    parts = [_bytes(table[at : at + 64]) for at in range(0, len(table), 64)]
    values = [
        e.call(b, "llvm.x86.avx512.vpermi2var.qi.512", V64B, [low, indices, high])
        for low, high in zip(parts[::2], parts[1::2], strict=True)
    ]
    for mask in (b.icmp_signed("<", indices, _bytes([0] * 64)), *masks):
        values = [b.select(mask, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class GridEntries:
    """Entries of 32 k of 16 rows: `quants(step, late)` as of PackedBlock."""

    def __init__(self, b, layout, at, high_at):
        self.b, self.layout, self.grid = b, layout, layout.grid
        words = [e.load(b, e.at(b, at, 64 * i), e.V16I) for i in range(layout.quants // 64)]
        self.indices, signs = words[: self.grid.index_words], words[self.grid.index_words :]
        self.signs = self.last_nibble = None
        if signs:
            self.signs = signs[0]
            if self.grid.signs == 7:
                self.last_nibble = b.lshr(self.signs, e.constant(28))
                self.signs = self._with_parity(self.signs)
        self.high = self.last_nibble
        if layout.high:
            self.high = b.zext(e.load(b, high_at, e.V16I8 if layout.high == 16 else e.V16I16), e.V16I)
        self._codes, self._pair = None, (-1, ())

    def _with_parity(self, words):
        """Sign words whose last nibble makes the number of signs even."""
        b = self.b
        odd = signs = b.and_(words, e.constant(NIBBLES))
        for shift in (16, 8, 4):
            odd = b.xor(odd, b.lshr(odd, e.constant(shift)))
        return b.or_(signs, b.shl(odd, e.constant(28)))

    def word_scales(self):
        """s of types that have it beside signs or high bits."""
        if self.grid.scales == "signs":
            return self.last_nibble
        return self.b.and_(self.b.lshr(self.high, e.constant(12)), e.constant(7))

    def _sign_nibbles(self, step):
        """Word with the signs of a step, or with its deltas, their nibbles, and the bit in these."""
        group, half = step // 2, step % 2
        if self.grid.signs:
            return self.signs, [4 * half + t for t in range(4)], group
        return self.high, [3] * 4, 3 if self.grid.scales == "high" else group

    def high_bit(self, index, plane):
        """Bit of the high bits for an index's bit 8 + plane."""
        return 4 * (plane + index // 4) + index % 4

    def quants(self, step, late):
        shift = self.layout.shift - late
        if has_register_tables():
            return self._of_codes(step, shift, 128 >> late)
        return self._of_memory(step, shift, 128 >> late)

    # -- tables in registers

    def _of_codes(self, step, shift, zero):
        b, grid = self.b, self.grid
        if self._codes is None:
            self._codes = self._look_up_codes()
        if grid.size == 8:
            codes, start, n = self._codes[step % 2], 8 * (step // 2), 2
        else:
            codes, start, n = self._codes[step // 2], 16 * (step % 2), 3
        codes = self._windows(codes, [start + 8 // (grid.size // 2) * t for t in range(4)])
        # an index of six bits: a code of n, then as many signs of a nibble as fit, of which one counts
        word, nibbles, bit = self._sign_nibbles(step)
        first = bit // (6 - n) * (6 - n)
        signs = self._windows(word, [4 * nibble + first - n for nibble in nibbles])
        mask = e.constant((64 - (1 << n)) * 0x01010101)
        words = [mask, *(b.bitcast(v, e.V16I) for v in (signs, codes)), ir.Constant(e.I32, CHOOSE)]
        both = e.call(b, "llvm.x86.avx512.pternlog.d.512", e.V16I, words)
        numbers = [(number << shift) + zero for number in self._numbers_of_codes(n, n + bit - first)]
        return b.bitcast(self._permute("permvar.qi", _bytes(numbers), b.bitcast(both, V64B)), e.V16I)

    def _numbers_of_codes(self, n, sign_at):
        """Number of each index of six bits: a code of n bits, and a sign or a delta at its bit."""
        levels, _ = codes_of(self.grid.dtype)
        levels = [*map(int, levels), *[0] * ((1 << n) - len(levels))]
        plain, signed = ((lambda v: v), (lambda v: -v)) if self.grid.signs else ((lambda v: v + 1), (lambda v: v - 1))
        return [(signed if i >> sign_at & 1 else plain)(levels[i & (1 << n) - 1]) for i in range(64)]

    def _look_up_codes(self):
        """Codes of the two halves of entries of 8 numbers, one byte for each index; or of pairs of
        entries of 4 numbers, two bytes each."""
        b, grid = self.b, self.grid
        _, planes = codes_of(grid.dtype)
        results = []
        for i, words in enumerate(self.indices):
            indices = b.bitcast(words, V64B)
            masks = []
            for plane in range(grid.index_bits - 8):
                bits = [self.high_bit(4 * i + g, plane) for g in range(4)]
                tested = b.and_(
                    spread(b, self.high, [bit // 8 for bit in bits]), _bytes([1 << bit % 8 for bit in bits])
                )
                masks.append(b.icmp_signed("!=", tested, _bytes([0] * 64)))
            halves = [look_up_octets(b, plane, indices, masks) for plane in planes]
            if grid.size == 8:
                results += halves
            else:
                for first in (0, 2):
                    pattern = [4 * r + first + g + 64 * h for r in range(16) for g in range(2) for h in range(2)]
                    results.append(b.shuffle_vector(*halves, ir.Constant(ir.VectorType(e.I32, 64), pattern)))
        return results

    def _windows(self, words, bits):
        """Bytes that begin at four bits of each of 16 lanes; some of their high bits are a neighbour's."""
        offsets = [(bit + 32 * (lane % 2)) % 64 for lane in range(16) for bit in bits]
        octets = self.b.bitcast(words, V64B)
        return e.call(self.b, "llvm.x86.avx512.pmultishift.qb.512", V64B, [_bytes(offsets), octets])

    def _permute(self, name, table, indices):
        return e.call(self.b, f"llvm.x86.avx512.{name}.512", V64B, [table, indices])

    # -- tables in memory

    def _of_memory(self, step, shift, zero):
        b, grid = self.b, self.grid
        numbers = b.bitcast(self._loaded_entries(step, shift), V64B)
        word, nibbles, bit = self._sign_nibbles(step)
        octets = spread(b, word, [nibble // 2 for nibble in nibbles])
        tested = b.and_(octets, _bytes([1 << nibble % 2 * 4 + bit for nibble in nibbles]))
        mask = b.sext(b.icmp_signed("!=", tested, _bytes([0] * 64)), V64B)
        if grid.signs:
            signed = b.sub(b.xor(numbers, mask), mask)
        else:
            signed = b.sub(b.add(numbers, _bytes([1 << shift] * 64)), b.and_(mask, _bytes([2 << shift] * 64)))
        return b.bitcast(b.add(signed, _bytes([zero] * 64)), e.V16I)

    def _loaded_entries(self, step, shift):
        """Four numbers of 16 rows. Entries of 8 numbers are loaded once for two steps."""
        b, grid = self.b, self.grid
        if grid.size == 4:
            return self._load_entries(step, shift, e.I32)
        if self._pair[0] != step // 2:
            both = b.bitcast(self._load_entries(step // 2, shift, e.I64), V32I)
            halves = [ir.Constant(e.V16I, list(range(half, 32, 2))) for half in range(2)]
            self._pair = step // 2, [b.shuffle_vector(both, both, lanes) for lanes in halves]
        return self._pair[1][step % 2]

    def _load_entries(self, number, shift, kind):
        b, grid = self.b, self.grid
        indices = b.and_(b.lshr(self.indices[number // 4], e.constant(number % 4 * 8)), e.constant(255))
        for plane in range(grid.index_bits - 8):
            bit = self.high_bit(number, plane)
            high = b.and_(b.lshr(self.high, e.constant(bit)), e.constant(1))
            indices = b.or_(indices, b.shl(high, e.constant(8 + plane)))
        table = _table(b, grid.dtype, shift)
        if isa() in ("avx2", "avx_vnni"):
            return self._gather(table, indices, kind)
        t = ir.VectorType(kind, 16)
        entries = ir.Constant(t, ir.Undefined)
        for lane in range(16):
            place = ir.Constant(e.I32, lane)
            offset = b.mul(b.zext(b.extract_element(indices, place), e.I64), e.i64(grid.size))
            entries = b.insert_element(entries, e.load(b, e.at(b, table, offset), kind, grid.size), place)
        return entries

    def _gather(self, table, indices, kind):
        """Entries by gathers of 32 bytes."""
        b, size = self.b, self.grid.size
        n = 32 // size
        t, name = ir.VectorType(kind, n), f"llvm.x86.avx2.gather.d.{'d' if size == 4 else 'q'}.256"
        zeros, ones, scale = ir.Constant(t, [0] * n), ir.Constant(t, [-1] * n), ir.Constant(e.I8, size)
        some = (e.extract_lanes(b, indices, i, n) for i in range(16 // n))
        return e.concat(b, [e.call(b, name, t, [zeros, table, each, ones, scale]) for each in some])

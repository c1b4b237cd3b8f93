"""Memory layouts of packed weights and activations, and the tile shapes of the GEMM kernels.

A weight (N rows out, K in) is packed into groups of 16 output rows. The 16 rows are the 16 lanes of
a vector, so a dot product needs no horizontal sum, and the order of additions over k is the same
for 1 activation row and for 512. N is padded to whole groups with zeros. A group is contiguous and
`group_nbytes` long. Floats are [K][16] f32 or f16. bf16 are k-interleaved, [K/2][16][2]: two
neighbours become f32 without being moved apart, and an odd last one is paired with zero.

A group of a quantised dtype is a sequence of bundles of 64 to 512 k. So it is read from one end to
the other. Four sections far apart would be four streams, which a hardware prefetcher does not
follow reliably. A bundle has these sections, each at a multiple of 64:

           coarse, per GGUF block      fine, per 32 k          high, per 32 k     quants, per 32 k
    q8_0   [16] f16 d                                                             [8][16][4] u8: q+128
    q4_0   [16] f16 d                                                             [4][16][4] nibbles
    q4_1   [16] f16 d, [16] f16 m                                                 [4][16][4] nibbles
    q5_0   [16] f16 d                                          [16][4] 1 bit      [4][16][4] nibbles
    q5_1   [16] f16 d, [16] f16 m                              [16][4] 1 bit      [4][16][4] nibbles
    iq4_nl [16] f16 d                                                             [4][16][4] indices
    mxfp4  [16] u8 e: 2^(e − 128)                                                 [4][16][4] indices
    q4_k   [16] f16 d, [16] f16 dmin   [16] u8 sc, [16] u8 m                      [4][16][4] nibbles
    q5_k   [16] f16 d, [16] f16 dmin   [16] u8 sc, [16] u8 m   [16][4] 1 bit      [4][16][4] nibbles
    q6_k   [16] f16 d                  [2][16] i8 sc, 16 k     [2][16][4] 2 bits  [4][16][4] nibbles
    q2_k   [16] f16 d, [16] f16 dmin   [2][16] u8 sc, m, 16 k                     [2][16][4] 2 bits
    q3_k   [16] f16 d                  [16][2] 6 bits, 16 k                       [3][16][4] 3 bits
    iq4_xs [16] f16 d                  [16] i8 sc                                 [4][16][4] indices
    tq2_0  [16] f16 d                                                             [2][16][4] 2 bits
    tq1_0  [16] f16 d                                                             [104] u8 of trits
    q2_0   [16] f16 d                                                             [2][16][4] 2 bits
    q1_0   [16] f16 d                                                             [16][4] 1 bit
    nvfp4                              [2][16] u8 E4M3, 16 k                      [4][16][4] indices

A scale and a minimum of q2_k are the halves of a byte. Scales of q3_k are 24 bytes. Trits are digits of base 3.
Those of steps 0 to 4 are [16][4] u8: a fraction of 256, which times 3 has the first one above it,
less 128. Those of steps 5 to 7 are [16][4] numbers of 5 bits: [32] u8 of the nibbles of two numbers,
32 apart, then 64 highest bits.

Types with a grid (IQ1, IQ2, IQ3) have bundles of 512 k (iq1_m: 256), so that no section is padded:

    iq2_xxs  [16] f16 d                                        indices, signs with s
    iq2_xs   [16] f16 d            [16] 2 nibbles s, 16 k      indices, signs with high bits
    iq2_s    [16] f16 d            [16] 2 nibbles s, 16 k      indices, signs        [16] u8 high bits
    iq3_xxs  [16] f16 d                                        indices, signs with s
    iq3_s    [16] f16 d            [16] 2 nibbles s, 64 k      indices, signs        [16] u8 high bits
    iq1_s    [16] f16 d                                        indices               [16] u16 high bits, s, delta
    iq1_m    [4][16] u16 d and s                               indices               [16] u16 high bits, deltas

Indices: [16][4] u8 of entries of 8 numbers, or [2][16][4] of 4; entry e has the numbers from 8e (4e)
on. Signs: [16] u32; bit g of nibble j is set where number 8g + j is negative. With seven signs of
eight numbers, which are even in number, the last nibble is s or the index's high bits. High bits:
bit g of nibble p is bit 8 + p of index g (iq3_s: bit 8 of index 4p + g). The deltas (IQ1: an eighth
is added, or taken away) are the fourth nibble, in iq1_s a last bit after three of s. A scale is d ·
(2s + 1) · `Grid.unit`.

A last bundle of fewer blocks of 32 k ends after the quants that it has.

A block of 32 k is 8 steps of 4. Element k = 4·step + t of row r is byte [step][r][t], so a 32-bit
lane holds four consecutive k, as an integer dot product takes them. Nibbles: byte [v][r][t] holds
step v in its low half and step v+4 in its high half; so do indices into a dtype's codebook
(graph/dtype.py). 2 bits: byte [v][r][t] holds steps v, v+2, v+4 and v+6, the lowest first. 3 bits:
byte [v][r][t] holds steps 2v and 2v+1, the lower first; above them the bytes of v = 0 and 1 have the
upper two bits of steps 6 and 7, that of v = 2 their lowest bits. One high
bit: bit `step` of byte [r][t]. Two high bits: bits 2(step mod 4) of byte [step div 4][r][t].

Kernels read every signed type as unsigned with offset 128. A quant of b bits is shifted to the top
of its byte (q4_0 · 16, q5_0 and the codes of mxfp4 · 8, q6_k · 4), and the scale is divided by the
same power of two (the offset of types of fewer than 3 bits is 64). −128 · sum(x) starts the integer
dot, as the bits of the float 1.5 · 2^23 − 128 · sum(x). Near 1.5 · 2^23 the bits of floats count in
ones, so the finished dot is read as a float without a conversion (ir/dot.py). Types of 256 k, whose
activations share a scale, add up eight such floats and subtract all eight 1.5 · 2^23 at once. That
rounds to ones of a dot, so their quants are at the top of a byte, too (q4_k · 16, q5_k · 8), where
ones are least.

Activations (M rows) are packed, too:

    q8_act     panels of as many rows as the tile for many rows (one panel if there are
               fewer); the last panel takes the remainder, so a tile reads from one end to
               the other. A panel is [K/32][rows] of 52 bytes: 32 i8 quants, f32 scale,
               f32 sum, and the start values of integer dots with all, with the first 16
               and with the last 16 elements
    f32_act    [K][M] f32
    bf16_act   [K/2][M][2] bf16; of many rows [M/rows][K/2][rows][2], for gemm.py's tiles
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from logitless.backends.host import target_host
from logitless.graph.dtype import DTYPES

LANES = 16
# bytes of a block, offsets in it
ACT_BLOCK, ACT_SCALE, ACT_SUM, ACT_OFFSET, ACT_HALF = 52, 32, 36, 40, 44
ATTENTION_SPAN = 256  # KV cells with a softmax of their own; several are joined
LIST_TOKENS = 8  # tokens of a sequence, at most, that share the keys of an indexer of blocks
ENCODER_ROWS = 384  # query rows of a unit of an encoder's attention
ENCODER_KEYS = 240  # keys and values of it that are packed at a time, a multiple of each tile's rows


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@dataclass(frozen=True, slots=True)
class Grid:
    """Codebook of entries of several numbers, and what a type stores beside their indices."""

    dtype: str  # its name in graph/dtype.py, whose `grid_of` has the entries
    size: int  # numbers of an entry: 8 or 4
    index_bits: int
    unit: float  # of scales
    signs: int = 0  # sign bits of eight numbers: 8, 7 (and their parity), or 0 where entries have signs
    # where s is: the sign words, bytes for the halves of 32 k or for two blocks of 32 k, beside the
    # high bits, or beside d
    scales: Literal["signs", "halves", "pairs", "high", "coarse"] = "signs"

    @property
    def index_words(self) -> int:
        """32-bit words of indices of a row of 32 k."""
        return 8 // self.size


@dataclass(frozen=True, slots=True)
class Layout:
    """Sections of one dtype, in bytes per group of 16 rows."""

    block: int  # k of a GGUF block; 1 for floats
    gguf_nbytes: int  # bytes of a GGUF block
    quants: int  # per 32 k (per k for floats)
    high: int = 0  # per 32 k
    fine: int = 0  # per 32 k
    coarse: int = 0  # per GGUF block
    shift: int = 0  # quants are read as q << shift; signed types with an offset
    zero: int = 128  # the offset
    step: int = 1  # from a quant to the next
    mins: bool = False  # value = scale · q + min instead of scale · (q − offset)
    codes: tuple[int, ...] = ()  # codebook: value = scale · codes[quant]
    grid: Grid | None = None
    parts: int = 1  # scales of a block of 32 k
    bundle: int = 2  # blocks of 32 k in a bundle: a power of two
    k_interleave: int = 1  # neighbouring k of a row, of floats

    @property
    def low_bits(self) -> int:
        """Bits of a quant that are in the quants section."""
        return 2 if self.trits else self.quants // 64

    @property
    def trits(self) -> bool:
        """True if quants are digits of base 3."""
        return self.quants == 104

    @property
    def plain(self) -> bool:
        """True if quants are nibbles or bytes, or indices of codes of 8 bits, without high bits or grid."""
        return self.low_bits in (4, 8) and not (self.high or self.grid) and self.bits in (4, 8)

    @property
    def bits(self) -> int:
        """Bits of a quant, or of its codebook value."""
        if self.codes or self.grid:
            return 8 - self.shift
        return self.low_bits + self.high // 64 + self.step - 1

    def shift_left(self, step: int, late: int = 0) -> int:
        """Left shift of a vector of quants after which those of a step are at their place."""
        place = self.low_bits * (step // self.low_bits)
        if self.low_bits == 3:
            place = 3 * (step % 2) if step < 6 else 5
        return self.shift + self.step - 1 - late - place

    @property
    def scale_blocks(self) -> int:
        """Blocks of 32 k whose activations share a scale."""
        return 8 if self.block == 256 else 1

    @property
    def k_multiple(self) -> int:
        """Multiple that a part of K must be: blocks summed together, or interleaved k of floats."""
        return max(self.scale_blocks, self.k_interleave)

    @property
    def gguf_blocks(self) -> int:
        """Blocks of 32 k in a GGUF block."""
        return self.block // 32

    @property
    def fine_at(self) -> int:
        """Offset of a bundle's fine numbers."""
        return _whole_lines(self.coarse * self.bundle // self.gguf_blocks)

    @property
    def high_at(self) -> int:
        return _whole_lines(self.fine_at + self.bundle * self.fine)

    @property
    def quants_at(self) -> int:
        return self.high_at + self.bundle * self.high

    @property
    def bundle_nbytes(self) -> int:
        return self.quants_at + self.bundle * self.quants

    @property
    def block_nbytes(self) -> int:
        """Bytes of 32 k, with their part of the bundle's common bytes."""
        return self.bundle_nbytes // self.bundle

    def group_nbytes(self, k: int) -> int:
        if self.block == 1:
            return -(-k // self.k_interleave) * self.k_interleave * self.quants
        bundles, rest = divmod(k // 32, self.bundle)
        return bundles * self.bundle_nbytes + bool(rest) * (self.quants_at + rest * self.quants)


def _grid(
    nbytes: int,
    quants: int,
    *grid: Any,
    high: int = 0,
    fine: int = 0,
    coarse: int = 32,
    shift: int,
    parts: int = 1,
    bundle: int = 16,
) -> Layout:
    return Layout(256, nbytes, quants, high, fine, coarse, shift, grid=Grid(*grid), parts=parts, bundle=bundle)


LAYOUTS: dict[str, Layout] = {
    "f32": Layout(1, 4, 64),
    "f16": Layout(1, 2, 32),
    "bf16": Layout(1, 2, 32, k_interleave=2),
    "q8_0": Layout(32, 34, 512, coarse=32),
    "q4_0": Layout(32, 18, 256, coarse=32, shift=4),
    "q4_1": Layout(32, 20, 256, coarse=64, mins=True),
    "q5_0": Layout(32, 22, 256, high=64, coarse=32, shift=3),
    "q5_1": Layout(32, 24, 256, high=64, coarse=64, mins=True),
    "q1_0": Layout(128, 18, 64, coarse=32, shift=6, zero=64, step=2, bundle=8),
    "q2_0": Layout(64, 18, 128, coarse=32, shift=6, zero=64, bundle=4),
    "iq4_nl": Layout(32, 18, 256, coarse=32, codes=DTYPES["iq4_nl"].codes),
    "mxfp4": Layout(32, 17, 256, coarse=16, shift=3, codes=DTYPES["mxfp4"].codes, bundle=4),
    "nvfp4": Layout(64, 36, 256, fine=32, shift=3, codes=DTYPES["nvfp4"].codes, parts=2),
    "q2_k": Layout(256, 84, 128, fine=32, coarse=64, shift=6, mins=True, parts=2, bundle=8),
    "q3_k": Layout(256, 110, 192, fine=24, coarse=32, shift=5, parts=2, bundle=8),
    "q4_k": Layout(256, 144, 256, fine=32, coarse=64, shift=4, mins=True, bundle=8),
    "q5_k": Layout(256, 176, 256, high=64, fine=32, coarse=64, shift=3, mins=True, bundle=8),
    "q6_k": Layout(256, 210, 256, high=128, fine=32, coarse=32, shift=2, parts=2, bundle=8),
    "iq4_xs": Layout(256, 136, 256, fine=16, coarse=32, codes=DTYPES["iq4_xs"].codes, bundle=8),
    "tq1_0": Layout(256, 54, 104, coarse=32, shift=6, zero=64, bundle=16),
    "tq2_0": Layout(256, 66, 128, coarse=32, shift=6, zero=64, bundle=16),
    "iq2_xxs": _grid(66, 128, "iq2_xxs", 8, 8, 1 / 8, 7, shift=1),
    "iq2_xs": _grid(74, 128, "iq2_xs", 8, 9, 1 / 8, 7, "halves", fine=16, shift=1, parts=2),
    "iq2_s": _grid(82, 128, "iq2_s", 8, 10, 1 / 8, 8, "halves", high=16, fine=16, shift=1, parts=2),
    "iq3_xxs": _grid(98, 192, "iq3_xxs", 4, 8, 1 / 4, 7, shift=1),
    "iq3_s": _grid(110, 192, "iq3_s", 4, 9, 1, 8, "pairs", high=16, fine=8, shift=3),
    "iq1_s": _grid(50, 64, "iq1_s", 8, 11, 1 / 8, 0, "high", high=32, shift=3),
    "iq1_m": _grid(56, 64, "iq1_m", 8, 11, 1 / 8, 0, "coarse", high=32, coarse=128, shift=3, parts=2, bundle=8),
}

# Tiles (activation rows, groups). The last one is for many rows; its quantised weights are expanded
# first (unpack_blocks.py).
WIDE_TILES = {
    "float": ((1, 4), (2, 4), (4, 4)),  # more than 63 rows: gemm.py
    "int": ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (6, 2)),
}
NARROW_TILES = {  # 16 registers of half the width
    "float": ((1, 2), (2, 2), (6, 1)),
    "int": ((1, 1), (2, 1), (4, 1), (4, 2)),
}
MAX_TILE = 16  # rows, and outputs
FEW_NARROW_ROWS = 7  # most rows that meet packed weights in narrow registers
ROWS_IN_REGISTERS = 8  # rows whose integer dots are in registers; more meet a block in turns
ROWS_WITH_CACHED_QUANTS = 2  # the same where a block's quants stay in registers
ROW_MULTIPLE = 12  # rows that are whole tiles of every tile for many rows
MAX_ACT_NBYTES = 8 << 20  # bytes of activations that stay in the L3 cache while weights stream past
MAX_PASS_ROWS = 516  # most rows of a pass
STRIPS = 4  # strips of B (K, N) that gemm.py copies at once: its rows are pages apart


def nibble_planes(layout: Layout, isa: str) -> tuple[int, ...]:
    """Lowest bits of the parts of a quant that an expanded group has as bytes of their own.

    AVX2 adds products in 16 bits. Two products of 8-bit quants do not fit, so it has their nibbles.
    """
    return (4, 0) if isa == "avx2" and layout.bits == 8 else (0,)


def expanded_nbytes(layout: Layout, isa: str) -> int:
    """Bytes of 32 k of an expanded group (unpack_blocks.py)."""
    return 512 * len(nibble_planes(layout, isa)) + 64 * layout.parts * (1 + layout.mins)


def rows_per_pass(m: int, row_nbytes: int) -> tuple[int, int]:
    """Rows of a pass over all weights, and the number of passes; the last one takes the remainder.

    No pass has fewer rows than the tallest tile, unless it is the only one.
    """
    rows = min(MAX_PASS_ROWS, max(2, MAX_ACT_NBYTES // row_nbytes // ROW_MULTIPLE) * ROW_MULTIPLE)
    return rows, max(1, -(-(m - MAX_TILE + 1) // rows))


def tiles(dtype: str, isa: str) -> tuple[tuple[int, int], ...]:
    """Tile shapes of a dtype, fewest rows first."""
    table = WIDE_TILES if isa == "avx512_vnni" else NARROW_TILES
    return table["float" if LAYOUTS[dtype].block == 1 else "int"]


def peak_chains(isa: str) -> int:
    """Independent sums of kernels/runtime/peaks.py: enough to hide an instruction's latency."""
    return 12 if isa == "avx512_vnni" else 6


def gemm_tile(isa: str) -> tuple[int, int, int]:
    """Rows, columns and k of gemm.py's tiles."""
    return (8, 48, 288) if isa == "avx512_vnni" else (6, 16, 288)


def expanded_tile(dtype: str, isa: str) -> tuple[int, int] | None:
    """Tile for which a dtype's weights are expanded first; None for floats."""
    return tiles(dtype, isa)[-1] if LAYOUTS[dtype].block > 1 else None


def uses_prefetch(dtype: str, mt: int) -> bool:
    """True when tiles of `mt` rows prefetch packed weights.

    Zen's hardware prefetcher is best where one or two rows do little but load, in one stream. It
    cannot keep up with floats, whose groups are as many streams.
    """
    if LAYOUTS[dtype].block == 1:
        return target_host().prefetches_rows(mt) and (mt > 1 or dtype != "f32")
    return not (target_host().prefetches_rows(mt) and LAYOUTS[dtype].quants == 512 and mt <= 2)


@cache
def tile_for(dtype: str, isa: str, m: int) -> tuple[int, int]:
    """Tile for m rows: no taller than m, and the least work; the last tile may overlap another."""
    expanded = expanded_tile(dtype, isa)
    wide = expanded is not None and expanded[1] > 1
    to_unpack = LAYOUTS[dtype].quants < 512

    # of a group, in products of a row; the taller on a tie
    def cost(tile: tuple[int, int]) -> tuple[float, int]:
        rows, groups = tile
        # with loads of rows, and unpacking
        row_cost = rows * (1 + 0.5 / groups) + 2 * -(-rows // ROWS_IN_REGISTERS)
        # of the expanded weights
        expansion = 0 if tile != expanded or wide else 3 if to_unpack else 6
        return -(-m // rows) * row_cost + expansion, -rows

    # With few rows memory is the limit, and reading packed weights loads it most evenly.
    most = MAX_TILE if isa == "avx512_vnni" else FEW_NARROW_ROWS
    few = m <= (most if to_unpack else 2 * most)
    candidates = (t for t in tiles(dtype, isa) if t[0] <= m and not (wide and few and t == expanded))
    return min(candidates, key=cost)


def act_panels(m: int, isa: str, group: int) -> tuple[int, int]:
    """Rows of a panel of q8_act, and the number of panels. `group`: elements that share a scale.

    A panel has a tile's rows only where all dtypes of this group have that tile.
    """
    dtype = "q8_0" if group == 32 else "q6_k"
    tile = tile_for(dtype, isa, m)
    return (tile[0], m // tile[0]) if tile == expanded_tile(dtype, isa) else (m, 1)

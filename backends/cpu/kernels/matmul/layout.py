"""Where every number lies: packed weights, quantised activations, and the tile shapes of the matmul kernels.

A weight (N rows out, K in) is packed into groups of 16 output rows: the 16 rows are the 16 lanes of a vector, so a dot
product needs no horizontal sum, and the order of additions over k is the same for 1 activation row and for 512. N is
padded to whole groups with zeros. A group is self-contained and `group_nbytes` long. Floats are [K][16] f32 or f16;
bf16 are [K/2][16][2], for two that lie beside each other become f32 without being moved apart, a last one alone with a
zero. A group of a quantised type is a sequence of bundles, of 256 k (types of GGUF blocks of 256), 128 k (mxfp4) or
64 k, so that it is read from one end to the other: what belongs to k in four places is four streams, and a processor's
own prefetching follows those now well and now badly. A bundle has these sections, each at a multiple of 64:

    type  coarse, per GGUF block (32 or 256 k)  fine, per 32 k             high bits, per 32 k  quants, per 32 k
    q8_0  [16] f16 d                                                                            [8][16][4] u8: q+128
    q4_0  [16] f16 d                                                                            [4][16][4] nibbles
    q4_1  [16] f16 d, [16] f16 m                                                                [4][16][4] nibbles
    q5_0  [16] f16 d                                                       [16][4] 1 bit        [4][16][4] nibbles
    q5_1  [16] f16 d, [16] f16 m                                           [16][4] 1 bit        [4][16][4] nibbles
    iq4_nl [16] f16 d                                                                           [4][16][4] places
    mxfp4 [16] u8 e, of scales 2^(e − 128)                                                      [4][16][4] places
    q4_k  [16] f16 d, [16] f16 dmin             [16] u8 sc, [16] u8 m                           [4][16][4] nibbles
    q5_k  [16] f16 d, [16] f16 dmin             [16] u8 sc, [16] u8 m      [16][4] 1 bit        [4][16][4] nibbles
    q6_k  [16] f16 d                            [2][16] i8 sc (16 k each)  [2][16][4] 2 bits    [4][16][4] nibbles

A last bundle of fewer blocks of 32 k ends after the quants that there are.

A block of 32 k is 8 steps of 4: element k = 4·step + t of row r is byte [step][r][t], so that a 32-bit lane holds four
consecutive k, which is what an integer dot product takes. Nibbles: byte [v][r][t] holds step v in its low half and
step v+4 in its high half; so do places in a type's table of codes (graph/dtype.py). One high bit: bit `step` of byte
[r][t]. Two high bits: bits 2(step mod 4) of byte [step div 4][r][t].

The kernels read every signed type as unsigned with offset 128: a quant of b bits is shifted to the top of its byte
(q4_0 · 16, q5_0 and the codes of mxfp4 · 8, q6_k · 4) and the scale divided by the same power of two; −128 · sum(x)
starts the integer dot. It does so as the bits of the float 1.5 · 2^23 − 128 · sum(x): near 1.5 · 2^23 the bits of
floats count in ones, so the finished dot is read as a float without a conversion (emit_dot.py). Types of 256 k, whose
activations share a scale, add up eight such floats and take away what was 1.5 · 2^23 in all of them at once; that
rounds ones of a dot, so their quants are at the top of a byte, too (q4_k · 16, q5_k · 8), where ones are least.

Activations (M rows) are rearranged, too.
    q8_act     panels of as many rows as the tile for many rows has (with fewer, one panel), the last panel taking what
               is left, so that a tile reads from one end to the other. A panel is [K/32][rows] of 52 bytes: 32 i8
               quants, f32 scale, f32 sum, and the starts of an integer dot with all, with the first 16 and with
               the second
    f32_act    [K][M] f32
    bf16_act   [K/2][M][2] bf16, of many rows [M/rows][K/2][rows][2], for the tiles of gemm.py

In front of a thread's scratch lie what the step (step.py) and the pool tell kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from logitless.backends.host import compiled_for
from logitless.graph.dtype import DTYPES

LANES = 16
ACT_BLOCK, ACT_SCALE, ACT_SUM, ACT_OFFSET, ACT_HALF = 52, 32, 36, 40, 44  # bytes of a block, offsets in it
ATTENTION_SPAN = 256  # cells that have a softmax of their own, of which several are joined
FOLLOWING = 8  # bytes before a thread's scratch: where it streams after this chunk, if not what lies behind it (0)
SHARED = 16  # bytes before it: the address of the memory that all threads share


@dataclass(frozen=True, slots=True)
class Layout:
    """One type's sections, in bytes for a whole group of 16 rows."""

    block: int  # k per GGUF block; 1 for floats
    source: int  # bytes of a GGUF block
    quants: int  # per 32 k (per k for floats)
    high: int = 0  # per 32 k
    fine: int = 0  # per 32 k
    coarse: int = 0  # per GGUF block
    shift: int = 0  # quants are read as q << shift; signed types with offset 128
    mins: bool = False  # value = scale · q + min instead of scale · (q − offset)
    codes: tuple[int, ...] = ()  # what quants are places of: value = scale · code
    together: int = 1  # k of a row that lie beside each other, of floats

    @property
    def bits(self) -> int:
        """Of a quant, or of what it stands for."""
        if self.codes:
            return 8 - self.shift
        return 8 if self.quants == 512 else 4 + self.high // 64

    @property
    def nibbles(self) -> bool:
        """Whether quants are, or have as their lower bits, halves of bytes that are numbers themselves."""
        return self.quants == 256 and not self.codes

    @property
    def parts(self) -> int:
        """Scales of 32 k."""
        return 2 if self.high == 128 else 1

    @property
    def shared(self) -> int:
        """Blocks of 32 k whose activations share a scale."""
        return max(1, self.block // 32)

    @property
    def whole(self) -> int:
        """What a part of K is a multiple of: blocks that are summed up together, or k of floats."""
        return max(self.shared, self.together)

    @property
    def bundle(self) -> int:
        """Blocks of 32 k in a bundle: a power of two; as many as have 64 bytes of scales of 8 bits."""
        return 8 if self.block == 256 else 4 if self.coarse == 16 else 2

    @property
    def coarse_step(self) -> int:
        """Bytes from the coarse numbers of 32 k to those of the next, within a bundle."""
        return self.coarse if self.block == 32 else 0

    @property
    def fine_at(self) -> int:
        """Where a bundle's fine numbers begin."""
        return -(-max(self.coarse, self.coarse_step * self.bundle) // 64) * 64

    @property
    def high_at(self) -> int:
        return self.fine_at + self.bundle * self.fine

    @property
    def quants_at(self) -> int:
        return self.high_at + self.bundle * self.high

    @property
    def bundle_nbytes(self) -> int:
        return self.quants_at + self.bundle * self.quants

    @property
    def block_nbytes(self) -> int:
        """Of 32 k, with their part of what a bundle has once."""
        return self.bundle_nbytes // self.bundle

    def group_nbytes(self, k: int) -> int:
        if self.block == 1:
            return -(-k // self.together) * self.together * self.quants
        bundles, rest = divmod(k // 32, self.bundle)
        return bundles * self.bundle_nbytes + bool(rest) * (self.quants_at + rest * self.quants)


LAYOUTS: dict[str, Layout] = {
    "f32": Layout(1, 4, 64),
    "f16": Layout(1, 2, 32),
    "bf16": Layout(1, 2, 32, together=2),
    "q8_0": Layout(32, 34, 512, coarse=32),
    "q4_0": Layout(32, 18, 256, coarse=32, shift=4),
    "q4_1": Layout(32, 20, 256, coarse=64, mins=True),
    "q5_0": Layout(32, 22, 256, high=64, coarse=32, shift=3),
    "q5_1": Layout(32, 24, 256, high=64, coarse=64, mins=True),
    "iq4_nl": Layout(32, 18, 256, coarse=32, codes=DTYPES["iq4_nl"].codes),
    "mxfp4": Layout(32, 17, 256, coarse=16, shift=3, codes=DTYPES["mxfp4"].codes),
    "q4_k": Layout(256, 144, 256, fine=32, coarse=64, shift=4, mins=True),
    "q5_k": Layout(256, 176, 256, high=64, fine=32, coarse=64, shift=3, mins=True),
    "q6_k": Layout(256, 210, 256, high=128, fine=32, coarse=32, shift=2),
}

# Tiles (activation rows, groups), and last the one for many rows, for which quantised weights are expanded (blocks.py)
WIDE_TILES = {
    "float": ((1, 4), (2, 4), (4, 4)),  # for more than 63 rows: gemm.py
    "int": ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (6, 2)),
}
NARROW_TILES = {  # 16 registers of half the width
    "float": ((1, 2), (2, 2), (6, 1)),
    "int": ((1, 1), (2, 1), (4, 1)),
}
MAX_TILE = 16  # rows, and outputs
AT_ONCE = 8  # rows whose integer dots are in registers at once; more meet a block of weights in turns
BESIDE_HELD = 2  # where a block's quants stay in registers for all of them
WHOLE_TILES = 12  # rows that are whole tiles of those for many rows
ACT_BYTES = 8 << 20  # rounded activations that stay in the third-level cache while weights stream past them
MOST_ROWS = 516  # of these
STRIPS = 4  # of B (K, N) that gemm.py copies at once: its rows lie pages apart


def expanded_nbytes(layout: Layout) -> int:
    """Of 32 k of a group (blocks.py)."""
    return 512 + 64 * (layout.parts + layout.mins)


def rows_at_once(m: int, row_nbytes: int) -> tuple[int, int]:
    """Rows of rounded activations that all weights meet before the next, and how many times: the last are those left.

    None but a lone one has fewer than the tallest tile.
    """
    rows = min(MOST_ROWS, max(2, ACT_BYTES // row_nbytes // WHOLE_TILES) * WHOLE_TILES)
    return rows, max(1, -(-(m - MAX_TILE + 1) // rows))


def tiles(dtype: str, isa: str) -> tuple[tuple[int, int], ...]:
    """The tile shapes that exist for a type, fewest rows first."""
    table = WIDE_TILES if isa == "avx512_vnni" else NARROW_TILES
    return table["float" if LAYOUTS[dtype].block == 1 else "int"]


def peak_chains(isa: str) -> int:
    """Independent sums of kernels/peaks.py, in registers: enough to hide an instruction's latency."""
    return 12 if isa == "avx512_vnni" else 6


def gemm_tile(isa: str) -> tuple[int, int, int]:
    """Rows, columns and k of gemm.py's tiles."""
    return (8, 48, 288) if isa == "avx512_vnni" else (6, 16, 288)


def expanded_tile(dtype: str, isa: str) -> tuple[int, int] | None:
    """The tile for which a type's weights are expanded first (blocks.py); None for floats."""
    return tiles(dtype, isa)[-1] if LAYOUTS[dtype].block > 1 else None


def asks_ahead(dtype: str, mt: int) -> bool:
    """Whether tiles of so many rows ask for packed weights before they load them.

    Zen's own prefetching is best where a row or two do little but load them, of one place after the other, and is not
    up to floats, whose groups are so many streams.
    """
    if LAYOUTS[dtype].block == 1:
        return compiled_for().is_zen and (mt > 1 or dtype != "f32")
    return not (compiled_for().is_zen and LAYOUTS[dtype].quants == 512 and mt <= 2)


@cache
def tile_for(dtype: str, isa: str, m: int) -> tuple[int, int]:
    """The tile for m rows: no taller than m, and the least work, as the last tile may overlap the one before."""
    expanded = expanded_tile(dtype, isa)
    wide = expanded is not None and expanded[1] > 1
    to_unpack = LAYOUTS[dtype].quants < 512

    def cost(tile: tuple[int, int]) -> tuple[float, int]:  # of a group, in products of a row; of equals the tallest
        rows, groups = tile
        once = rows * (1 + 0.5 / groups) + 2 * -(-rows // AT_ONCE)  # with loads of rows, and unpacking
        leaving = 0 if tile != expanded or wide else 3 if to_unpack else 6  # the weights expanded
        return -(-m // rows) * once + leaving, -rows

    # With few rows memory is the limit, which is asked most evenly for packed weights
    few = m <= (MAX_TILE if to_unpack else 2 * MAX_TILE)
    able = (t for t in tiles(dtype, isa) if t[0] <= m and not (wide and few and t == expanded))
    return min(able, key=cost)


def act_panels(m: int, isa: str, group: int) -> tuple[int, int]:
    """Rows of a panel of q8_act, and how many panels: of a tile's rows only where all types of this group, the numbers
    that share a scale, have that tile."""
    wanted = "q8_0" if group == 32 else "q6_k"
    tile = tile_for(wanted, isa, m)
    return (tile[0], m // tile[0]) if tile == expanded_tile(wanted, isa) else (m, 1)

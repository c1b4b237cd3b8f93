"""Layout of packed weights on GPUs: GGUF blocks in groups of 16 output rows, so that lanes are rows.

A weight (N rows out, K in) becomes sections, one after the other, each for all groups g, each
starting at a multiple of 256 bytes. N is padded to whole groups with zeros; b counts blocks of 32 k
(two are 16 k each in a q6_k block).

    type         quants                              high bits            fine scales              coarse scales
    f32          [g][K][16] f32
    f16, bf16    [g][K][16] u16
    q8_0         [g][b][8][16][4] i8                                                               [g][b][16] f16 d
    q4_0 q4_1    [g][b][4][16][4] nibbles                                                          [g][b][1|2][16] f16
    iq4_nl       [g][b][4][16][4] places                                                           [g][b][16] f16
    mxfp4        [g][b][4][16][4] places                                                           [g][b][16] u8 e
    q5_0 q5_1    [g][b][4][16][4] nibbles            [g][b][16] u32                                [g][b][1|2][16] f16
    q4_k         [g][b][4][16][4] nibbles                                 [g][b][2][16] u8 sc, m   [g][b/8][2][16] f16
    q5_k         [g][b][4][16][4] nibbles            [g][b][16] u32       [g][b][2][16] u8 sc, m   [g][b/8][2][16] f16
    q6_k         [g][b][4][16][4] nibbles            [g][b][2][16] u32    [g][b][2][16] i8 sc      [g][b/8][16] f16
    q2_k         [g][b][2][16] u32 of 2 bits                              [g][b][2][16] u8 sc, m   [g][b/8][2][16] f16
    q3_k         [g][b][2][16] u32 of 2 bits         [g][b][16] u32       [g][b][16] u8 low sc     [g][b/8][3][16] d, sc
    iq4_xs       [g][b][4][16][4] places                                  [g][b][16] i8 sc         [g][b/8][16] f16
    nvfp4        [g][b][4][16][4] places                                  [g][b][2][16] u8
    tq2_0, q2_0  [g][b][2][16] u32 of 2 bits                                                       [g][b/8|2][16] f16
    q1_0         [g][b][16] u32 of bits                                                            [g][b/4][16] f16
    tq1_0        [g][b/8][13][16] u32 of 5 trits a byte                                            [g][b/8][16] f16
    iq2_xxs      [g][b][2][16] u32: places, signs                                                  [g][b/8][16] f16
    iq2_xs       [g][b][2][16] u32: places, signs                         [g][b][16] u8 sc         [g][b/8][16] f16
    iq2_s        [g][b][2][16] u32: places, signs                         [g][b][2][16] u8         [g][b/8][16] f16
    iq3_xxs      [g][b][2][16] u32 places            [g][b][16] u32 signs                          [g][b/8][16] f16
    iq3_s        [g][b][2][16] u32 places            [g][b][16] u32 signs                          [g][b/8][7][16] d …
    iq1_s        [g][b][16] u32 places                                    [g][b][2][16] u8         [g][b/8][16] f16
    iq1_m        [g][b][16] u32 places                                    [g][b][2][16] u8         [g][b/8][4][16] d, sc

Behind these sections a type of groups (IQ1, IQ2, IQ3) has its codebook, whose places they hold.

Devices with integer dot products (`wide`) have four of a row's words of quants side by side, for loads
of 16 bytes: [g][b][8][16][4] is [g][b][2][16][4][4] there, [g][b][4][16][4] is [g][b][16][4][4]; a type
of two words a block has these two.

A block of 32 k is 8 steps of 4: element k = 4·step + t. Nibbles: byte t of word v holds step v in
its low half and step v + 4 in its high half. One high bit: bit 8t + step of the word. Two high
bits: bits 8t + 2·(step mod 4) of word step div 4. Values are scale · (q − offset) + minimum, with
the types' usual meaning. Places, which lie as nibbles do, are those of a type's codes
(graph/dtype.py): values are scale · code. A scale of mxfp4 is 2^(e − 128)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.backends.cores import cores
from logitless.backends.gpu.language.dialect import LANES
from logitless.graph.backend import Bytes
from logitless.graph.dtype import DTYPES, grid_of
from logitless.graph.tensor import Tensor

SECTION = 256  # bytes: where sections begin
PIECE = 1 << 20  # bytes of a weight that are packed at a time
MOST_THREADS = 16  # that pack
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Packing:
    """Bytes of 16 rows: quants, high bits and fine scales per 32 k (per k for floats), coarse
    per GGUF block.
    """

    quants: int
    high: int = 0
    fine: int = 0
    coarse: int = 0


PACKINGS = {
    "f32": Packing(64),
    "f16": Packing(32),
    "bf16": Packing(32),
    "q8_0": Packing(512, coarse=32),
    "q4_0": Packing(256, coarse=32),
    "q4_1": Packing(256, coarse=64),
    "iq4_nl": Packing(256, coarse=32),
    "mxfp4": Packing(256, coarse=16),
    "q5_0": Packing(256, high=64, coarse=32),
    "q5_1": Packing(256, high=64, coarse=64),
    "q4_k": Packing(256, fine=32, coarse=64),
    "q5_k": Packing(256, high=64, fine=32, coarse=64),
    "q6_k": Packing(256, high=128, fine=32, coarse=32),
    "q2_k": Packing(128, fine=32, coarse=64),
    "q3_k": Packing(128, high=64, fine=16, coarse=96),
    "iq4_xs": Packing(256, fine=16, coarse=32),
    "nvfp4": Packing(256, fine=32),
    "tq2_0": Packing(128, coarse=32),
    "q2_0": Packing(128, coarse=32),
    "q1_0": Packing(64, coarse=32),
    "tq1_0": Packing(104, coarse=32),
    "iq2_xxs": Packing(128, coarse=32),
    "iq2_xs": Packing(128, fine=16, coarse=32),
    "iq2_s": Packing(128, fine=32, coarse=32),
    "iq3_xxs": Packing(128, high=64, coarse=32),
    "iq3_s": Packing(128, high=64, coarse=224),
    "iq1_s": Packing(64, fine=32, coarse=32),
    "iq1_m": Packing(64, fine=32, coarse=128),
}


def _group_nbytes(dtype: str, k: int) -> tuple[int, int, int, int]:
    """Bytes of 16 rows of k in each section."""
    p, d = PACKINGS[dtype], DTYPES[dtype]
    per_32 = k if d.block == 1 else k // 32
    return per_32 * p.quants, per_32 * p.high, per_32 * p.fine, k // d.block * p.coarse


def sections(dtype: str, n: int, k: int) -> tuple[int, int, int, int, int, int]:
    """Offsets of quants, high bits, fine and coarse scales and the codebook in a packed weight,
    and its size in bytes.
    """
    groups = -(-n // LANES)
    ends = list(accumulate(-(-groups * nbytes // SECTION) * SECTION for nbytes in _group_nbytes(dtype, k)))
    return 0, ends[0], ends[1], ends[2], ends[3], ends[3] + codebook(dtype).nbytes


def row_copies(dtype: str, k: int, n: int, to: tuple[int, int], of: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Copies that bring n rows, whole groups, from one packed weight to another: offsets there and here, bytes.

    `to`, `of`: the rows of each weight, and the first to write or read. A codebook is copied, too."""
    starts, sizes = (sections(dtype, rows, k) for rows, _ in (to, of)), _group_nbytes(dtype, k)
    ends, own = starts
    for at, start, size in zip(ends, own, sizes, strict=False):
        if size:
            yield at + to[1] // LANES * size, start + of[1] // LANES * size, n // LANES * size
    if own[-1] > own[-2]:
        yield ends[-2], own[-2], own[-1] - own[-2]


@functools.cache
def codebook(dtype: str) -> Array:
    """Words of four bytes of a group's places; of IQ1, eight numbers plus 1 as the halves of four bytes."""
    if not DTYPES[dtype].grid:
        return np.zeros(0, np.uint32)
    grid = grid_of(dtype)
    if DTYPES[dtype].grid == "IQ1_S":
        plus_1 = (grid + 1).astype(np.uint8)
        grid = plus_1[:, :4] | plus_1[:, 4:] << 4
    return np.ascontiguousarray(grid).view(np.uint32).reshape(-1)


def n_words(dtype: str) -> int:
    """Words of the quants of a row's 32 k, or of a tq1_0 block."""
    return 13 if dtype == "tq1_0" else PACKINGS[dtype].quants // (4 * LANES)


def packs(t: Tensor) -> bool:
    """True if there is a packing for a constant matrix' type."""
    return t.dtype in PACKINGS


def packed_nbytes(dtype: str, n: int, k: int) -> int:
    return sections(dtype, n, k)[-1]


def pack(dtype: str, shape: tuple[int, ...], raw: Bytes, *, wide: bool) -> Bytes:
    """Pack a weight (n, k) of GGUF bytes; large ones with several threads. `wide`: for loads of 16 bytes."""
    n, k = shape
    row_nbytes, of_group = len(raw) // n, _group_nbytes(dtype, k)
    *starts, grid_at, nbytes = sections(dtype, n, k)
    out = np.zeros(nbytes, np.uint8)
    out[grid_at:] = codebook(dtype).view(np.uint8)
    step = max(LANES, PIECE // row_nbytes // LANES * LANES)  # rows at a time

    def piece(first: int) -> None:
        part = raw[first * row_nbytes : min(first + step, n) * row_nbytes].reshape(-1, row_nbytes)
        rows = np.zeros((-(-len(part) // LANES) * LANES, row_nbytes), np.uint8)
        rows[: len(part)] = part
        quants, *others = _sections_of(dtype, rows, k)
        if wide and DTYPES[dtype].block > 1:
            words = n_words(dtype)
            side = math.gcd(words, 4)
            quants = np.ascontiguousarray(quants).reshape(-1).view(np.uint32)
            quants = quants.reshape(-1, words // side, side, LANES).swapaxes(2, 3)
        for start, size, section in zip(starts, of_group, (quants, *others), strict=True):
            data = np.ascontiguousarray(section).reshape(-1).view(np.uint8)
            at = start + first // LANES * size
            out[at : at + len(data)] = data

    if n <= step:
        piece(0)
        return out
    with ThreadPoolExecutor(min(-(-n // step), cores(), MOST_THREADS)) as pool:
        # numpy copies and shifts without Python's lock
        for _ in pool.map(piece, range(0, n, step)):
            pass
    return out


def _sections_of(dtype: str, rows: Array, k: int) -> list[Array]:
    """The four sections of whole groups; empty where a type has none."""
    none = np.zeros(0, np.uint8)
    groups = len(rows) // LANES
    if DTYPES[dtype].block == 1:
        kind = np.uint32 if dtype == "f32" else np.uint16
        return [rows.view(kind).reshape(groups, LANES, k).transpose(0, 2, 1), none, none, none]
    block, size = DTYPES[dtype].block, DTYPES[dtype].nbytes
    blocks = rows.reshape(groups, LANES, k // block, size)
    if dtype == "q8_0":
        quants = blocks[..., 2:].reshape(groups, LANES, k // 32, 8, 4).transpose(0, 2, 3, 1, 4)
        return [quants, none, none, _scales(blocks[..., :2])]
    if block == 32:
        n_scales, nibbles = 2 if dtype.endswith("_1") else 1, blocks[..., -16:]
        low, high = nibbles & 15, nibbles >> 4  # k 0…15 and 16…31
        quants = _nibbles(np.concatenate([low, high], -1).reshape(groups, LANES, k // 32, 32))
        bits = none
        if dtype.startswith("q5"):
            word = np.ascontiguousarray(blocks[..., 2 * n_scales : 2 * n_scales + 4]).view(np.uint32)
            bits = _one_bit((word >> np.arange(32, dtype=np.uint32)) & 1)
        if dtype == "mxfp4":
            return [quants, bits, none, blocks[..., 0].transpose(0, 2, 1)]
        return [quants, bits, none, _scales(blocks[..., : 2 * n_scales])]
    if dtype in ("q4_k", "q5_k", "q6_k"):
        return _k_sections(dtype, blocks, groups, k)
    return _low_sections(dtype, blocks, (groups, LANES, k // 32, 32))


def _k_sections(dtype: str, blocks: Array, groups: int, k: int) -> list[Array]:
    none, shape = np.zeros(0, np.uint8), (groups, LANES, k // 32, 32)
    if dtype == "q6_k":
        # halves of 128 k: 64 low nibbles, 64 high
        low = blocks[..., :128].reshape(groups, LANES, -1, 2, 1, 64)
        low = (low >> np.array([0, 4], np.uint8)[:, None]) & 15
        two = blocks[..., 128:192].reshape(groups, LANES, -1, 2, 1, 32)
        two = (two >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
        fine = blocks[..., 192:208].reshape(groups, LANES, k // 32, 2).transpose(0, 2, 3, 1)
        return [_nibbles(low.reshape(shape)), _two_bits(two.reshape(shape)), fine, _scales(blocks[..., 208:])]
    packed = blocks[..., 4:16]
    sc, m = np.empty((*packed.shape[:-1], 8), np.uint8), np.empty((*packed.shape[:-1], 8), np.uint8)
    sc[..., :4], m[..., :4] = packed[..., :4] & 63, packed[..., 4:8] & 63
    sc[..., 4:] = (packed[..., 8:] & 15) | (packed[..., :4] >> 6 << 4)
    m[..., 4:] = (packed[..., 8:] >> 4) | (packed[..., 4:8] >> 6 << 4)
    fine = np.stack([sc, m], -1).reshape(groups, LANES, k // 32, 2).transpose(0, 2, 3, 1)
    # 64 k: 32 low nibbles, 32 high
    quants = blocks[..., -128:].reshape(groups, LANES, -1, 4, 1, 32)
    quants = (quants >> np.array([0, 4], np.uint8)[:, None]) & 15
    bits = none
    if dtype == "q5_k":
        high = blocks[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        bits = _one_bit(high.reshape(shape))
    return [_nibbles(quants.reshape(shape)), bits, fine, _scales(blocks[..., :4])]


def _low_sections(dtype: str, blocks: Array, shape: tuple[int, ...]) -> list[Array]:
    """Types of few bits."""
    none = np.zeros(0, np.uint8)
    if dtype == "q2_k":
        return [
            _two_bits(_planes(blocks[..., 16:80], 2, shape)),
            none,
            _fine(blocks[..., :16], shape),
            _scales(blocks[..., 80:]),
        ]
    if dtype == "q3_k":
        high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        places = np.arange(16)
        low = blocks[..., 96 + places % 8] >> (places // 8 * 4).astype(np.uint8) & 15
        two = blocks[..., 104 + places % 4] >> (places // 4 * 2).astype(np.uint8) & 3
        pairs = two[..., ::2] | two[..., 1::2] << 2
        coarse = np.concatenate([blocks[..., 108:], _pairs(pairs)], -1)
        return [
            _two_bits(_planes(blocks[..., 32:96], 2, shape)),
            _one_bit(high.reshape(shape)),
            _fine(_pairs(low), shape),
            _scales(coarse),
        ]
    if dtype == "iq4_xs":
        low = blocks[..., 4:8].repeat(2, -1) >> np.array([0, 4] * 4, np.uint8) & 15
        high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        fine = (low | high.astype(np.uint8) << 4) - np.uint8(32)
        return [_halves(blocks[..., 8:], 16, shape), none, _fine(fine, shape), _scales(blocks[..., :2])]
    if dtype == "nvfp4":
        fine = np.where(blocks[..., :4] == 0x7F, 0, blocks[..., :4]).astype(np.uint8)  # NaN there is 0 here
        return [_halves(blocks[..., 4:], 8, shape), none, _fine(fine, shape), none]
    if dtype in ("tq2_0", "q2_0", "q1_0"):
        if dtype == "tq2_0":
            return [_two_bits(_planes(blocks[..., :64], 2, shape)), none, none, _scales(blocks[..., 64:])]
        bits = 2 if dtype == "q2_0" else 1
        quants = (blocks[..., 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1).reshape(shape)
        return [_two_bits(quants) if bits == 2 else _one_bit(quants), none, none, _scales(blocks[..., :2])]
    if dtype == "tq1_0":
        return [_words(blocks[..., :52], blocks.shape), none, none, _scales(blocks[..., 52:])]
    if dtype == "iq1_m":
        words = np.ascontiguousarray(blocks[..., 48:]).view(np.uint16)
        d = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(-1, keepdims=True, dtype=np.uint16)
        three = words.repeat(4, -1) >> np.array([0, 3, 6, 9] * 4, np.uint16) & 7
        planes = [
            ((three >> bit & 1) << np.arange(16, dtype=np.uint16)).sum(-1, keepdims=True, dtype=np.uint16)
            for bit in range(3)
        ]
        coarse = np.concatenate([d, *planes], -1).view(np.uint8)
        return [_words(blocks[..., :32], shape), none, _fine(blocks[..., 32:48], shape), _scales(coarse)]
    d, rest = blocks[..., :2], blocks[..., 2:]
    if dtype == "iq1_s":
        return [_words(rest[..., :32], shape), none, _fine(rest[..., 32:], shape), _scales(d)]
    if dtype == "iq2_s":  # words of places and of signs; bytes of scales and of the places' high bits
        quants = np.concatenate([part.reshape(*shape[:3], 4) for part in (rest[..., :32], rest[..., 32:64])], -1)
        fine = np.stack([rest[..., 72:], rest[..., 64:72]], -1)
        return [_words(quants, shape), none, _fine(fine, shape), _scales(d)]
    quants = _words(rest[..., :64], shape)
    if dtype == "iq3_xxs":
        return [quants, _words(rest[..., 64:], shape), none, _scales(d)]
    if dtype == "iq3_s":
        coarse = np.concatenate([d, rest[..., 104:], rest[..., 64:72]], -1)
        return [quants, _words(rest[..., 72:104], shape), none, _scales(coarse)]
    return [quants, none, _fine(rest[..., 64:], shape) if dtype == "iq2_xs" else none, _scales(d)]


def _planes(raw: Array, bits: int, shape: tuple[int, ...]) -> Array:
    """Quants of runs of 32 bytes, whose low bits are 32 quants, the next the next 32."""
    runs = raw.reshape(*raw.shape[:-1], -1, 1, 32) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs & ((1 << bits) - 1)).reshape(shape)


def _halves(raw: Array, run: int, shape: tuple[int, ...]) -> Array:
    """Nibbles of runs of bytes, whose low halves come before the high ones."""
    runs = raw.reshape(*raw.shape[:-1], -1, run)
    return _nibbles(np.concatenate([runs & 15, runs >> 4], -1).reshape(shape))


def _words(raw: Array, shape: tuple[int, ...]) -> Array:
    """Bytes of rows → words (g, b, of a block, 16)."""
    return np.ascontiguousarray(raw).reshape(*shape[:3], -1).view(np.uint32).transpose(0, 2, 3, 1)


def _pairs(values: Array) -> Array:
    """Bytes of two values of 4 bits each, the first in the low half."""
    both: Array = values[..., ::2] | values[..., 1::2] << 4
    return both


def _fine(raw: Array, shape: tuple[int, ...]) -> Array:
    """Bytes of rows → (g, b, of a block, 16)."""
    return raw.reshape(*shape[:3], -1).transpose(0, 2, 3, 1)


def _nibbles(values: Array) -> Array:
    """(g, 16, b, 32) of 4 bits → (g, b, 4, 16, 4)."""
    steps = values.reshape(*values.shape[:3], 2, 4, 4)
    both: Array = (steps[..., 0, :, :] | steps[..., 1, :, :] << 4).transpose(0, 2, 3, 1, 4)
    return both


def _one_bit(values: Array) -> Array:
    """(g, 16, b, 32) of 1 bit → (g, b, 16) u32."""
    steps = values.reshape(*values.shape[:3], 8, 4).astype(np.uint32)
    places = 8 * np.arange(4, dtype=np.uint32) + np.arange(8, dtype=np.uint32)[:, None]
    words: Array = (steps << places).sum((-1, -2), dtype=np.uint32).transpose(0, 2, 1)
    return words


def _two_bits(values: Array) -> Array:
    """(g, 16, b, 32) of 2 bits → (g, b, 2, 16) u32."""
    steps = values.reshape(*values.shape[:3], 2, 4, 4).astype(np.uint32)
    places = 8 * np.arange(4, dtype=np.uint32) + 2 * np.arange(4, dtype=np.uint32)[:, None]
    words: Array = (steps << places).sum((-1, -2), dtype=np.uint32).transpose(0, 2, 3, 1)
    return words


def _scales(raw: Array) -> Array:
    """(g, 16, blocks, 2·n) bytes of n f16 → (g, blocks, n, 16)."""
    return np.ascontiguousarray(raw).view(np.uint16).transpose(0, 2, 3, 1)

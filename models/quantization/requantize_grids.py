"""Requantization of block types with codebook grids (IQ1, IQ2, IQ3) to types that kernels read."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.dtype import grid_of
from logitless.models.quantization.requantize_blocks import Bytes, Floats, floats, nearest_q8_0, q5_0, q6_k, q8_0

Words = npt.NDArray[np.uint64]
ONES = np.uint64(0x0101010101010101)
SEVENS = np.arange(0, 28, 7, dtype=np.uint32)  # where each eight numbers' signs begin


@cache
def _places(name: str, factor: int = 1, more: int = 0) -> npt.NDArray[Any]:
    """A grid's places as words of 8 or 4 bytes: of its numbers times a factor, and something
    more."""
    places = grid_of(name) * np.int8(factor) + np.int8(more)
    return places.view(f"u{places.shape[1]}")[:, 0]


def _words(name: str, places: npt.NDArray[Any]) -> Words:
    """Grid entries, eight numbers each, as words."""
    words: Words = np.take(_places(name), places).view(np.uint64)
    return words


@cache
def _negative() -> Words:
    """Sign mask of eight sign bits: 255 where a number is negative, else 0."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(255)).view(np.uint64)[:, 0]


@cache
def _negative_of_seven() -> Words:
    """Sign mask of seven sign bits; the eighth makes the number of signs even."""
    signs = np.arange(128)
    odd = np.array([int(s).bit_count() & 1 for s in signs])
    return np.take(_negative(), signs | odd << 7)


def _signed(numbers: Words, negative: Words) -> Words:
    """None of the numbers is 0, so nothing is carried from one byte to the next."""
    return (numbers ^ negative) + (negative & ONES)


def _of_sixteen(d: Floats, words: Words) -> Bytes:
    """(n, 16), (n, 32) → (n, 8 · 34): scales of 16 numbers each."""
    values = words.view(np.int8).reshape(len(d), 16, 16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        values *= d[..., None]
    return nearest_q8_0(values.reshape(len(d), 8, 32))


def _of_32(d: Floats, words: Words) -> Bytes:
    """(n, 8), (n, 8, 4) → (n, 8 · 34)."""
    return q8_0(d, np.ascontiguousarray(words).view(np.uint8))


def _halves(part: Bytes) -> Bytes:
    """(n, k) → (n, 2·k): numbers of 4 bits, the low ones first."""
    halves: Bytes = part[..., None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return halves.reshape(len(part), -1)


def _scaled(blocks: Bytes, scales: npt.NDArray[Any], parts: int) -> Floats:
    """(n, …), (n, k) → (n, k): small scales times that of the block, which it begins with."""
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return floats(blocks[:, :2]) * (scales.astype(np.float32) / np.float32(parts))


def of_iq2_xxs(blocks: Bytes) -> Bytes:
    """(n, 66) → (n, 8 · 34). Of each 32: four places, then four times seven signs and a scale."""
    n = len(blocks)
    places = blocks[:, 2:].reshape(n, 8, 8)
    rest = np.ascontiguousarray(places[..., 4:]).view(np.uint32)  # (n, 8, 1)
    words = _signed(_words("iq2_xxs", places[..., :4]), _negative_of_seven()[rest >> SEVENS & 127])
    return _of_32(_scaled(blocks, (rest[..., 0] >> 28) * 2 + 1, 8), words)


def of_iq2_xs(blocks: Bytes) -> Bytes:
    """(n, 74) → (n, 8 · 34). Of each eight: a place of 9 bits, seven signs."""
    both = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
    words = _signed(_words("iq2_xs", both & 511), _negative_of_seven()[both >> 9])
    return _of_sixteen(_scaled(blocks, _halves(blocks[:, 66:]) * 2 + 1, 8), words)


def of_iq2_s(blocks: Bytes) -> Bytes:
    """(n, 82) → (n, 8 · 34). Of each eight: a place of 10 bits, of which two are apart; eight
    signs."""
    high = (blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 32)
    words = _signed(_words("iq2_s", blocks[:, 2:34] | high.astype(np.uint16) << 8), _negative()[blocks[:, 34:66]])
    return _of_sixteen(_scaled(blocks, _halves(blocks[:, 74:]) * 2 + 1, 8), words)


def of_iq3_xxs(blocks: Bytes) -> Bytes:
    """(n, 98) → (n, 8 · 34). Of each 32: eight places of four numbers, four times seven signs and a
    scale."""
    n = len(blocks)
    rest = np.ascontiguousarray(blocks[:, 66:]).view(np.uint32)[..., None]
    numbers = _words("iq3_xxs", blocks[:, 2:66]).reshape(n, 8, 4)
    words = _signed(numbers, _negative_of_seven()[rest >> SEVENS & 127])
    return _of_32(_scaled(blocks, (rest[..., 0] >> 28) * 2 + 1, 4), words)


def of_iq3_s(blocks: Bytes) -> Bytes:
    """(n, 110) → (n, 8 · 34). Of each four: a place of 9 bits, of which one is apart; eight signs
    of each eight."""
    n = len(blocks)
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    numbers = _words("iq3_s", blocks[:, 2:66] | high << 8).reshape(n, 8, 4)
    words = _signed(numbers, _negative()[blocks[:, 74:106]].reshape(n, 8, 4))
    return _of_32(_scaled(blocks, _halves(blocks[:, 106:]) * 2 + 1, 1), words)


def of_iq1_s(blocks: Bytes) -> Bytes:
    """(n, 50) → (n, 8 · 22). Of each eight: a place of 11 bits, of which three are apart; of each
    32: a scale, and whether an eighth is added to its numbers or taken away."""
    n = len(blocks)
    rest = np.ascontiguousarray(blocks[:, 34:]).view(np.uint16)[..., None]  # (n, 8, 1)
    places = blocks[:, 2:34].reshape(n, 8, 4) | (rest >> np.arange(0, 12, 3, dtype=np.uint16) & 7) << 8
    less = rest >> 15 > 0
    words = np.where(less, _places("iq1_s", 8, 15)[places], _places("iq1_s", 8, 17)[places])
    return q5_0(_scaled(blocks, (rest[..., 0] >> 12 & 7) * 2 + 1, 8), words.view(np.uint8))


def of_iq1_m(blocks: Bytes) -> Bytes:
    """(n, 56) → (n, 210). The same, with scales of 16 numbers and eighths of eight; the scale of
    all is in four parts."""
    n = len(blocks)
    rest = _halves(blocks[:, 32:48])  # (n, 32): three bits of a place, and the eighth
    places = blocks[:, :32] | (rest & 7).astype(np.uint16) << 8
    words = np.where(rest >> 3 > 0, _places("iq1_s", 8, 31)[places], _places("iq1_s", 8, 33)[places])
    packed = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)  # (n, 4)
    scales = (packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).astype(np.uint8).reshape(n, 16) * 2 + 1
    d = np.bitwise_or.reduce(packed >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=1).astype(np.uint16)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        eighths = floats(d[:, None].view(np.uint8)) / np.float32(8)
    return q6_k(eighths, scales, words.view(np.uint8))

"""Block types of files that no kernel reads, held as another that has the same numbers.

    q3_k    as q6_k   the same: scales of 16 numbers, and quants that are fewer
    iq4_nl  as q8_0   the same: its sixteen values are bytes
    iq4_xs  as q8_0   a block's scale, a product of two, rounded to f16: at most 1 in 2,048 away
    mxfp4   as q5_0   the same: powers of two, and quants from -12 to 12; scales from 2^-24 to 2^15, as f16 has them

Layouts: ggml's `block_q3_K`, `block_iq4_nl`, `block_iq4_xs`, `block_mxfp4` (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8).view(np.uint8)
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # in halves of what the type calls 1
BLOCKS = 1 << 14  # at once, by each thread: a few megabytes of temporaries
F16_MOST = 65504


def _each(value: int) -> np.uint64:
    """A byte eight times."""
    return np.uint64(value * 0x0101010101010101)


def _words(part: Bytes) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(part).view(np.uint64)


def _q3_k(blocks: Bytes) -> Bytes:
    """(n, 110) → (n, 210). Eight quants at a time; a half of a block is four quarters of 32."""
    n = len(blocks)
    low, high = _words(blocks[:, 32:96]), _words(blocks[:, :32])  # (n, 8), (n, 4)
    high = np.concatenate([high, high >> np.uint64(4)], axis=1)  # each half's bits from the lowest on
    top = np.zeros_like(low)
    nibbles = []
    for quarter in range(4):
        quants = low >> np.uint64(2 * quarter) & _each(3)
        quants |= (high >> np.uint64(quarter) & _each(1)) << np.uint64(2)
        quants += _each(32 - 4)  # 6 bits, 32 of them for 0
        nibbles.append(quants & _each(15))
        top |= (quants >> np.uint64(4) & _each(3)) << np.uint64(2 * quarter)
    both = np.stack([nibbles[i] | nibbles[i + 2] << np.uint64(4) for i in range(2)], axis=1)  # (n, quarter, 8)
    both = both.reshape(n, 2, 2, 4).swapaxes(1, 2).reshape(n, 16)
    packed = blocks[:, 96:108]
    scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    scales |= (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(n, 16) << 4
    return np.concatenate([both.view(np.uint8), top.view(np.uint8), scales - np.uint8(32), blocks[:, 108:]], axis=1)


@cache
def _pairs(values: bytes) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """By two bytes of two numbers each: the values of their low halves, and those of their high halves."""
    table = np.frombuffer(values, np.uint8)
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return table[pairs & 15].view(np.uint16).reshape(-1), table[pairs >> 4].view(np.uint16).reshape(-1)


def _nibbles(packed: Bytes, values: Bytes) -> Bytes:
    """(…, 16) of two numbers each → (…, 32) of their values: the low halves first."""
    words = np.ascontiguousarray(packed).view(np.uint16)
    low, high = _pairs(values.tobytes())
    return np.concatenate([low.take(words), high.take(words)], axis=-1).view(np.uint8)


def _iq4_nl(blocks: Bytes) -> Bytes:
    """(n, 18) → (n, 34)."""
    return np.concatenate([blocks[:, :2], _nibbles(blocks[:, 2:], IQ4)], axis=1)


def _iq4_xs(blocks: Bytes) -> Bytes:
    """(n, 136) → (n, 8 · 34). OverflowError for a scale that f16 does not have."""
    n = len(blocks)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(n, 8)
    scales = low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8) << 4
    with np.errstate(invalid="ignore"):  # what is no number stays none
        d = d * (scales.astype(np.float32) - 32)
    if (np.abs(d[np.isfinite(d)]) > F16_MOST).any():
        raise OverflowError(f"a scale of {np.abs(d[np.isfinite(d)]).max():g}")
    d = d.astype(np.float16)
    quants = _nibbles(blocks[:, 8:].reshape(n, 8, 16), IQ4)
    return np.concatenate([d[:, :, None].view(np.uint8), quants], axis=2).reshape(n, 272)


def _mxfp4(blocks: Bytes) -> Bytes:
    """(n, 17) → (n, 22). OverflowError for a scale that f16 does not have."""
    exponent = blocks[:, :1].astype(np.int32) - 128
    if (exponent > 15).any():
        raise OverflowError(f"a scale of 2^{exponent.max()}")
    d = np.ldexp(np.float32(1), exponent).astype(np.float16)
    quants = _nibbles(blocks[:, 1:], (MXFP4 + 16).astype(np.uint8))
    high = np.packbits(quants >> 4, axis=1, bitorder="little")
    low = quants & 15
    return np.concatenate([d.view(np.uint8), high, low[:, :16] | low[:, 16:] << 4], axis=1)


# type of the file → that of the graph, bytes of a block's numbers in either, and how they change
HELD: dict[str, tuple[str, int, int, Callable[[Bytes], Bytes]]] = {
    "q3_k": ("q6_k", 110, 210, _q3_k),
    "iq4_nl": ("q8_0", 18, 34, _iq4_nl),
    "iq4_xs": ("q8_0", 136, 272, _iq4_xs),
    "mxfp4": ("q5_0", 17, 22, _mxfp4),
}


def held_as(dtype: str) -> str:
    """The type that weights of this one have in the graph."""
    return HELD[dtype][0] if dtype in HELD else dtype


def held_nbytes(dtype: str, nbytes: int) -> int:
    """Of so many bytes of a file."""
    return nbytes // HELD[dtype][1] * HELD[dtype][2] if dtype in HELD else nbytes


def held(raw: Bytes, dtype: str) -> Bytes:
    """A matrix's bytes as the graph holds them. OverflowError for numbers that it cannot hold."""
    if dtype not in HELD:
        return raw
    _, before, after, change = HELD[dtype]
    blocks = raw.reshape(-1, before)
    out = np.empty((len(blocks), after), np.uint8)

    def some(i: int) -> None:
        out[i : i + BLOCKS] = change(blocks[i : i + BLOCKS])

    with ThreadPoolExecutor() as pool:
        list(pool.map(some, range(0, len(blocks), BLOCKS)))
    return out.reshape(-1)

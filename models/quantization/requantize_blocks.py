"""Requantization of block types with linear quants to types that kernels read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
TRITS = np.array([1, 3, 9, 27, 81], np.uint8)  # of a byte of TQ1_0, the most significant first
F16_MOST = 65504


def floats(part: Bytes) -> Floats:
    """(n, 2·k) → (n, k): numbers in f16."""
    return np.ascontiguousarray(part).view(np.float16).astype(np.float32)


def scales_of(d: Floats) -> Bytes:
    """(…, k) → (…, k, 2): scales as f16. OverflowError for one that f16 does not have; what is no
    number stays none."""
    finite = np.abs(d[np.isfinite(d)])
    if (finite > F16_MOST).any():
        raise OverflowError(f"a scale of {finite.max():g}")
    with np.errstate(over="ignore", invalid="ignore"):
        return d.astype(np.float16)[..., None].view(np.uint8)


def q4_0(d: Floats, quants: Bytes) -> Bytes:
    """(n, k), (n, k, 32) of 0 to 15, 8 for 0 → (n, k · 18)."""
    return np.concatenate([scales_of(d), quants[..., :16] | quants[..., 16:] << 4], axis=-1).reshape(len(d), -1)


def q5_0(d: Floats, quants: Bytes) -> Bytes:
    """(n, k), (n, k, 32) of 0 to 31, 16 for 0 → (n, k · 22)."""
    high, low = np.packbits(quants >> 4, axis=-1, bitorder="little"), quants & 15
    return np.concatenate([scales_of(d), high, low[..., :16] | low[..., 16:] << 4], axis=-1).reshape(len(d), -1)


def q6_k(d: Floats, scales: Bytes, quants: Bytes) -> Bytes:
    """(n, 1), (n, 16), (n, 256) of 0 to 63, 32 for 0 → (n, 210)."""
    n, quarters = len(d), quants.reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | quarters[:, :, 2:] << 4
    high = (quarters >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return np.concatenate([low.reshape(n, 128), high.reshape(n, 64), scales, scales_of(d)[:, 0]], axis=1)


def q8_0(d: Floats, quants: Bytes) -> Bytes:
    """(n, k), (n, k, 32) → (n, k · 34)."""
    return np.concatenate([scales_of(d), quants], axis=-1).reshape(len(d), -1)


def nearest_q8_0(values: Floats) -> Bytes:
    """(n, k, 32) → (n, k · 34): the greatest of each 32 numbers is 127 or −127, or less where f16
    has no scale that is near. They come out changed. A block may also have fewer than 32."""
    d = np.abs(values).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scales = scales_of(d).view(np.float16)[..., 0]
        # the greatest is not cut
        scales = np.where(scales < d, np.nextafter(scales, np.float16(np.inf)), scales)
        d = scales.astype(np.float32)
        factor = 1 / d
        factor[~np.isfinite(factor)] = 0  # a block of zeros, or with NaN
        values *= factor[..., None]
        np.rint(values, out=values)
        return q8_0(d, values.astype(np.int8).view(np.uint8))


def _each(value: int) -> np.uint64:
    """A byte eight times."""
    return np.uint64(value * 0x0101010101010101)


def _words(part: Bytes) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(part).view(np.uint64)


def of_q3_k(blocks: Bytes) -> Bytes:
    """(n, 110) → (n, 210). Eight quants at a time; a half of a block is four quarters of 32."""
    n = len(blocks)
    low, high = _words(blocks[:, 32:96]), _words(blocks[:, :32])  # (n, 8), (n, 4)
    # each half's bits from the lowest on
    high = np.concatenate([high, high >> np.uint64(4)], axis=1)
    top = np.zeros_like(low)
    nibbles = []
    for quarter in range(4):
        quants = low >> np.uint64(2 * quarter) & _each(3)
        quants |= (high >> np.uint64(quarter) & _each(1)) << np.uint64(2)
        quants += _each(32 - 4)  # 6 bits, 32 of them for 0
        nibbles.append(quants & _each(15))
        top |= (quants >> np.uint64(4) & _each(3)) << np.uint64(2 * quarter)
    # (n, quarter, 8)
    both = np.stack([nibbles[i] | nibbles[i + 2] << np.uint64(4) for i in range(2)], axis=1)
    both = both.reshape(n, 2, 2, 4).swapaxes(1, 2).reshape(n, 16)
    packed = blocks[:, 96:108]
    scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    scales |= (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(n, 16) << 4
    return np.concatenate([both.view(np.uint8), top.view(np.uint8), scales - np.uint8(32), blocks[:, 108:]], axis=1)


def of_iq4_xs(blocks: Bytes) -> Bytes:
    """(n, 136) → (n, 8 · 18). OverflowError for a scale that f16 does not have."""
    n = len(blocks)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(n, 8)
    scales = low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8) << 4
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        d = floats(blocks[:, :2]) * (scales.astype(np.float32) - 32)
    return np.concatenate([scales_of(d), blocks[:, 8:].reshape(n, 8, 16)], axis=-1).reshape(n, 144)


def of_q2_k(blocks: Bytes) -> Bytes:
    """(n, 84) → (n, 8 · 34). A scale and a least number of each 16, whose quants are 0 to 3: they
    have four values, the nearest of which are looked up as a byte of a word."""
    n, scales = len(blocks), blocks[:, :16]
    with np.errstate(invalid="ignore"):
        d, least = floats(blocks[:, 80:82]) * (scales & 15), floats(blocks[:, 82:84]) * (scales >> 4)
        values = d[..., None] * np.arange(4, dtype=np.float32) - least[..., None]
    # a scale, then two groups' values
    whole = nearest_q8_0(values.reshape(n, 8, 8)).reshape(n, 8, 10)
    words = np.ascontiguousarray(whole[..., 2:]).view(np.uint32).reshape(n, 16, 1)
    quants = blocks[:, 16:80].reshape(n, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    numbers = (words >> (quants << 3).reshape(n, 16, 16)).astype(np.uint8)
    return np.concatenate([whole[..., :2], numbers.reshape(n, 8, 32)], axis=-1).reshape(n, 272)


def of_tq1_0(blocks: Bytes) -> Bytes:
    """(n, 54) → (n, 8 · 18). Five trits in each of 48 bytes, four in each of 4 more."""
    n = len(blocks)
    parts = [(blocks[:, :32], TRITS), (blocks[:, 32:48], TRITS), (blocks[:, 48:52], TRITS[:4])]
    trits = [(part[:, None] * powers[:, None]).reshape(n, -1) for part, powers in parts]
    quants = (np.concatenate(trits, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8) + 7
    return q4_0(np.repeat(floats(blocks[:, 52:]), 8, axis=1), quants.reshape(n, 8, 32))


def of_tq2_0(blocks: Bytes) -> Bytes:
    """(n, 66) → (n, 8 · 18)."""
    n = len(blocks)
    quants = blocks[:, :64].reshape(n, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return q4_0(np.repeat(floats(blocks[:, 64:]), 8, axis=1), quants.reshape(n, 8, 32) + np.uint8(7))

"""Finite check: finds NaN and infinity in the bytes of a weight, at the speed of memory.

Without their sign, the bits of such a number are at least those of infinity: the greatest bit
patterns, taken as signed and as unsigned integers, tell. In quantised blocks only scales are
floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.dtype import DTYPES

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 18  # bytes, which stay in a cache for both looks
# type of floats → its bits as unsigned and as signed integers, and those of infinity
_BITS: dict[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "f32": (np.uint32, np.int32, 0x7F800000),
    "f16": (np.uint16, np.int16, 0x7C00),
    "bf16": (np.uint16, np.int16, 0x7F80),
}
FLOAT_TYPES = frozenset(_BITS)


def is_finite(raw: Bytes, dtype: str) -> bool:
    """True if no number of these contiguous bytes is NaN or infinite."""
    unsigned, signed, infinity = _BITS[dtype if dtype in _BITS else "f16"]
    sign = 1 << (8 * unsigned().itemsize - 1)
    return not any(
        bits.max() >= infinity or bits.view(unsigned).max() >= sign | infinity for bits in _floats(raw, dtype, signed)
    )


def _floats(raw: Bytes, dtype: str, kind: type[np.signedinteger[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Bit patterns of the floats, piece by piece."""
    width = DTYPES[dtype].nbytes
    step = _PIECE // width * width
    for start in range(0, len(raw), step):
        piece = raw[start : start + step]
        if dtype == "iq1_m":  # its f16 is four nibbles, at the top of the last four words
            words = (
                piece.reshape(-1, width)[:, 48:].copy().view(np.uint16) >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
            )
            yield np.bitwise_or.reduce(words, axis=1).astype(np.uint16).view(kind)
        for offset in DTYPES[dtype].scales:
            yield np.ndarray(len(piece) // width, kind, piece, offset, width)

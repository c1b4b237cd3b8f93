"""Quantization of float rows to GGUF blocks, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from logitless.graph.dtype import DTYPES as BLOCK_TYPES
from logitless.models.gguf.file import TensorInfo

F32 = NDArray[np.float32]
DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k")
_CHUNK = 1 << 20  # numbers at once: a few megabytes of temporaries
_FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def block_of(dtype: str) -> tuple[int, int]:
    """Elements and bytes of one block of a GGUF type (lower-case name)."""
    n, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]
    return n, nbytes


def storable_dtype(dtype: str, row: int) -> str:
    """The type itself if rows of `row` elements are whole blocks of it, else the type that llama.cpp falls
    back to."""
    if row % block_of(dtype)[0] == 0:
        return dtype
    return storable_dtype(_FALLBACK.get(dtype, "f16"), row)


def quantize(array: NDArray[np.floating], dtype: str) -> NDArray[np.uint8]:
    """The rows' bytes, shape (..., bytes of a row). The last dimension must be a multiple of the
    type's block.

    Raises ValueError for an unknown type, a row that is not whole blocks, and values that are not
    finite.
    """
    dtype = dtype.lower()
    if dtype not in DTYPES:
        raise ValueError(f"cannot quantize to {dtype!r}; the types are {', '.join(DTYPES)}")
    block, block_bytes = block_of(dtype)
    if array.shape[-1] % block:
        raise ValueError(f"rows of {array.shape[-1]} elements are not a multiple of {dtype}'s block of {block}")
    x = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"cannot quantize values that are not finite to {dtype}")
    encode = _ENCODERS.get(dtype)
    if encode is None:
        kind = GGMLQuantizationType[dtype.upper()]
        return np.ascontiguousarray(quants.quantize(x, kind)).view(np.uint8)
    blocks = x.reshape(-1, block)
    out = np.empty((len(blocks), block_bytes), np.uint8)
    at_once = _CHUNK // block
    for i in range(0, len(blocks), at_once):
        out[i : i + at_once] = encode(blocks[i : i + at_once])
    return out.reshape(*x.shape[:-1], -1)


def _q45_k(x: NDArray[np.float32], *, high_bit: bool) -> NDArray[np.uint8]:
    """x ≈ d·scale·q - dmin·min: 8 sub-blocks of 32 with 6-bit scales and mins, q of 4 bits or 5."""
    q_max = 31 if high_bit else 15
    n = len(x)
    x = x.reshape(n, 8, 32)
    low = np.minimum(x.min(axis=2), 0)
    scale = np.maximum(x.max(axis=2) - low, 0) / np.float32(q_max)
    d, scales = _to_6_bits(scale)
    dmin, mins = _to_6_bits(-low)
    step = d * scales
    shifted = x + (dmin * mins)[:, :, None]
    q = np.rint(shifted * _inverse(step)[:, :, None]).clip(0, q_max).astype(np.uint8)

    # four scales, four mins, then the low bits of the other four of each
    packed = np.empty((n, 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    packed[:, 4:8] = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    packed[:, 8:12] = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    pairs = q.reshape(n, 4, 2, 32)
    nibbles = ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).reshape(n, 128)
    parts = [_half(d), _half(dmin), packed, nibbles]
    if high_bit:  # byte i: bit j is the fifth bit of element i of sub-block j
        parts.insert(3, np.packbits(q >> 4, axis=1, bitorder="little").reshape(n, 32))
    return np.concatenate(parts, axis=1)


def _q6_k(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """x ≈ d·scale·(q - 32): 16 sub-blocks of 16 with signed 8-bit scales, q of 6 bits."""
    n = len(x)
    x = x.reshape(n, 16, 16)
    # the largest element becomes q = 0, the longer side's end
    scale = _largest(x)[:, :, 0] / np.float32(-32)
    d = _rounded(_largest(scale) / np.float32(-128))  # (n, 1)
    scales = np.rint(scale * _inverse(d)).clip(-128, 127).astype(np.int8)
    step = (d * scales)[:, :, None]
    q = (np.rint(x * _inverse(step)).clip(-32, 31) + 32).astype(np.uint8)
    nibbles = q.reshape(n, 2, 2, 64)
    low = ((nibbles[:, :, 0] & 15) | (nibbles[:, :, 1] & 15) << 4).reshape(n, 128)
    quarters = q.reshape(n, 2, 4, 32) >> 4
    high = (quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(n, 64)
    return np.concatenate([low, high, scales.view(np.uint8), _half(d)], axis=1)


def _iq4_nl(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """x ≈ d · one of 16 codes: the largest becomes the longer side's end, and d what fits what they
    all became best."""
    codes = np.array(BLOCK_TYPES["iq4_nl"].codes, np.float32)
    d = _rounded(_largest(x) / codes[0])
    chosen = codes[_nearest(x * _inverse(d), codes)]
    squares = (chosen * chosen).sum(axis=1, keepdims=True)
    d = _rounded((x * chosen).sum(axis=1, keepdims=True) / squares)  # no code is 0
    return np.concatenate([_half(d), _pairs(_nearest(x * _inverse(d), codes))], axis=1)


def _mxfp4(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """x ≈ 2^(e − 128) · one of 16 codes; e as OCP says: of the codes' power of two the largest has
    none above it."""
    codes = np.array(BLOCK_TYPES["mxfp4"].codes, np.float32)
    most = np.abs(x).max(axis=1, keepdims=True)
    e = np.where(most >= 2.0**-124, np.frexp(most)[1] + 124, 0)
    ascending, places = np.unique(codes, return_index=True)
    return np.concatenate([e.astype(np.uint8), _pairs(places[_nearest(np.ldexp(x, 128 - e), ascending)])], axis=1)


def _nearest(x: NDArray[np.float32], codes: NDArray[np.float32]) -> NDArray[np.intp]:
    """The place of the code that is nearest to each number; codes ascend."""
    return np.searchsorted((codes[1:] + codes[:-1]) / 2, x)


def _pairs(places: NDArray[Any]) -> NDArray[np.uint8]:
    """(n, 32) of 4 bits → (n, 16)."""
    places = places.astype(np.uint8)
    return np.asarray(places[:, :16] | places[:, 16:] << 4)


def _to_6_bits(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Non-negative (n, 8) as d (n, 1), representable in 16 bits, times integers up to 63."""
    d = _rounded(values.max(axis=1, keepdims=True) / np.float32(63))
    return d, np.rint(values * _inverse(d)).clip(0, 63).astype(np.uint8)


def _largest(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The element of largest magnitude along the last axis, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _rounded(d: NDArray[np.float32]) -> NDArray[np.float32]:
    return d.astype(np.float16).astype(np.float32)


def _half(d: NDArray[np.float32]) -> NDArray[np.uint8]:
    return d.astype(np.float16).view(np.uint8)


def _inverse(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """1/d, and 0 where d is 0: such a sub-block is all zeros, or too small for its super-block."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


_ENCODERS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.uint8]]] = {
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
    "q4_k": partial(_q45_k, high_bit=False),
    "q5_k": partial(_q45_k, high_bit=True),
    "q6_k": _q6_k,
}


def dequantized(info: TensorInfo, raw: NDArray[np.uint8]) -> F32:
    """A tensor's numbers as f32."""
    if info.dtype == "f32":
        return raw.view(np.float32).reshape(info.shape)
    rows = raw.reshape(*info.shape[:-1], -1)
    return np.array(quants.dequantize(rows, GGMLQuantizationType[info.dtype.upper()]), np.float32).reshape(info.shape)

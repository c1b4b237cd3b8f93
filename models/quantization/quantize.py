"""Quantization of float rows to GGUF blocks, and back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from logitless.graph.dtype import dequantize
from logitless.models.gguf.file import TensorInfo
from logitless.models.quantization.block_encoders import ENCODERS, WEIGHTED_ENCODERS

F32 = NDArray[np.float32]
DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *ENCODERS)
_CHUNK = 1 << 16  # numbers at once, by each thread: temporaries that fit a core's cache
_THREADS = min(16, os.cpu_count() or 1)
_FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


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


def quantize(array: NDArray[np.floating], dtype: str, importance: F32 | None = None) -> NDArray[np.uint8]:
    """The rows' bytes, shape (..., bytes of a row). The last dimension must be a multiple of the
    type's block.

    `importance`: how much the error of each element of a row counts, as an importance matrix says. Bytes are
    llama.cpp's. Raises ValueError for an unknown type, a row that is not whole blocks, and values that are not
    finite.
    """
    dtype = dtype.lower()
    if dtype not in DTYPES:
        raise ValueError(f"cannot quantize to {dtype!r}; the types are {', '.join(DTYPES)}")
    block, block_bytes = block_of(dtype)
    row = array.shape[-1]
    if row % block:
        raise ValueError(f"rows of {row} elements are not a multiple of {dtype}'s block of {block}")
    x = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"cannot quantize values that are not finite to {dtype}")
    rows = x.reshape(-1, row)
    out = np.empty((len(rows), row // block * block_bytes), np.uint8)
    at_once = max(1, _CHUNK // row)

    def some(i: int) -> None:
        out[i : i + at_once] = _encoded(rows[i : i + at_once], dtype, block, importance)

    if len(rows) <= at_once:
        some(0)
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(some, range(0, len(rows), at_once)))
    return out.reshape(*x.shape[:-1], -1)


def _encoded(rows: F32, dtype: str, block: int, importance: F32 | None) -> NDArray[np.uint8]:
    """Some rows' bytes (n, bytes of a row)."""
    encode = ENCODERS.get(dtype) or (WEIGHTED_ENCODERS.get(dtype) if importance is not None else None)
    n_blocks, weights = rows.shape[1] // block, None
    with np.errstate(all="ignore"):  # groups of zeros divide by 0, and are set apart; huge numbers become infinite
        if encode is None:
            kind = GGMLQuantizationType[dtype.upper()]
            return np.ascontiguousarray(quants.quantize(rows, kind)).view(np.uint8)
        if importance is not None:
            weights = np.tile(np.asarray(importance, np.float32).reshape(-1, block), (len(rows), 1))
        mean_square = np.cumsum(rows * rows, axis=1, dtype=np.float32)[:, -1] / np.float32(rows.shape[1])
        blocks = encode(rows.reshape(-1, block), weights, np.repeat(mean_square, n_blocks))
    return blocks.reshape(len(rows), -1)


def dequantized(info: TensorInfo, raw: NDArray[np.uint8]) -> F32:
    """A tensor's numbers as f32."""
    if info.dtype == "f32":
        return raw.view(np.float32).reshape(info.shape)
    rows = raw.reshape(*info.shape[:-1], -1)
    return dequantize(rows, info.dtype).reshape(info.shape)

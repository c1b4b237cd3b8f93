"""Pages of KV caches of block types, made of GGUF's blocks: the layout of graph/dtype.py (`KVType`) in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.dtype import DTYPES, KV_TYPES, dequantize
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

Array = npt.NDArray[Any]


def is_paged(t: Tensor) -> bool:
    """True for a KV cache of a block type."""
    return t.dtype in KV_TYPES and KV_TYPES[t.dtype].bits > 0 and len(t.shape) == 4


def _has_keys(shape: tuple[int, ...]) -> bool:
    return shape[3] == PAGE


def _cells(shape: tuple[int, ...]) -> int:
    """Cells of a page; 1 where each row is a page by itself."""
    return PAGE if _has_keys(shape) else shape[2]


def quantize_rows(rows: Array, dtype: str) -> Array:
    """GGUF blocks of rows (n, D), as llama.cpp quantises activations: (n, D / 32, bytes of a block)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    rows = np.ascontiguousarray(rows, np.float32)
    if codes := KV_TYPES[dtype].codes:  # gguf writes none
        x = rows.reshape(-1, 32).astype(np.float64)
        scale = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / codes[0]
        ratio = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
        indices = np.abs(ratio[..., None] - np.array(codes)).argmin(-1)
        q = np.array(codes, np.float64)[indices]
        square = (x * x * q * q).sum(1)
        best = np.divide((x**3 * q).sum(1), square, out=np.zeros_like(square), where=square != 0)
        quants = (indices[:, :16] | indices[:, 16:] << 4).astype(np.uint8)
        raw: Array = np.concatenate([best.astype(np.float16)[:, None].view(np.uint8), quants], 1)
    else:
        raw = quantize(rows, GGMLQuantizationType[dtype.upper()])
    return raw.reshape(len(rows), -1, DTYPES[dtype].nbytes)


def encode_pages(values: Array, dtype: str) -> Array:
    """Bytes of a cache, its values (pages, H, D, 16) of keys or (pages, H, 16 or 1, D) of values."""
    kind, keys, shape = KV_TYPES[dtype], _has_keys(values.shape), values.shape
    rows = values.swapaxes(2, 3) if keys else values
    n, size = shape[0] * shape[1], rows.shape[3]
    blocks = quantize_rows(rows.reshape(-1, size), dtype).reshape(n, _cells(shape), size // 32, -1)
    scales, blocks = np.split(blocks, [2 + 2 * kind.mins], 3)
    fifth, blocks = np.split(blocks, [4 * (kind.bits == 5)], 3)
    if kind.bits < 8 and keys:  # neighbours share a byte instead of halves
        quants = np.concatenate([blocks & 15, blocks >> 4], 3)
        blocks = quants[..., 0::2] | quants[..., 1::2] << 4
    numbers = blocks.reshape(n, _cells(shape), -1)
    parts = [numbers.swapaxes(1, 2) if keys else numbers]
    for words in (fifth.reshape(*fifth.shape[:3], -1, 4), scales.reshape(*scales.shape[:3], -1, 2)):
        for i in range(words.shape[3]):
            part = words[:, :, :, i]
            parts.append(part.swapaxes(1, 2) if keys else part)
    return np.concatenate([np.ascontiguousarray(p).reshape(n, -1) for p in parts], 1).reshape(-1)


def decode_pages(raw: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Values of a cache's bytes in its shape, float64."""
    kind, keys, n, cells = KV_TYPES[dtype], _has_keys(shape), shape[0] * shape[1], _cells(shape)
    size = shape[2] if keys else shape[3]
    pages = np.asarray(raw).reshape(-1).view(np.uint8).reshape(n, -1)
    at = 0

    def part(width: int, each: int) -> Array:
        """The next `width` numbers of a cell, of `each` bytes: (n, cells, width, each)."""
        nonlocal at
        at, begin = at + cells * width * each, at
        numbers = pages[:, begin:at]
        if keys:
            return numbers.reshape(n, width, cells, each).swapaxes(1, 2)
        return numbers.reshape(n, cells, width, each)

    blocks = part(size * kind.bits // 8 if kind.bits != 5 else size // 2, 1).reshape(n, cells, size // 32, -1)
    if kind.bits < 8 and keys:
        quants = np.stack([blocks & 15, blocks >> 4], -1).reshape(n, cells, size // 32, 32)
        blocks = quants[..., :16] | quants[..., 16:] << 4
    fifth = [part(size // 32, 4)] if kind.bits == 5 else []
    scales = [part(size // 32, 2) for _ in range(1 + kind.mins)]
    rows = np.ascontiguousarray(np.concatenate([*scales, *fifth, blocks], 3)).reshape(n * cells, -1)
    values = dequantize(rows, dtype).astype(np.float64).reshape(*shape[:2], cells, size)
    return values.swapaxes(2, 3) if keys else values

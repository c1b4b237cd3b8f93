"""Random GGUF blocks of quantised types that have no quantiser here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# offsets of f16 scales, if not first
SCALES = {"q2_k": (80, 82), "q3_k": (108,), "tq1_0": (52,), "tq2_0": (64,)}


def put_scales(blocks: Bytes, dtype: str, d: np.ndarray[Any, Any]) -> None:
    """Write f16 scales (n, 1) into blocks (n, bytes of a block)."""
    d = np.ascontiguousarray(d.astype(np.float16)).view(np.uint8)
    if dtype == "iq1_m":  # in the upper halves of four words
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (d[:, [0, 0, 1, 1]] >> np.array([0, 4, 0, 4], np.uint8)) << 4
        return
    for at in SCALES.get(dtype, (0,)):
        blocks[:, at : at + 2] = d


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, std: float) -> Bytes:
    """Random blocks of about this deviation, (…, bytes of a row)."""
    kind = GGMLQuantizationType[dtype.upper()]
    size, nbytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (math.prod(shape) // size, nbytes), np.uint8)
    if dtype == "mxfp4":
        raw[:, 0] = 127 + round(math.log2(std / 2.5))
    else:
        put_scales(raw, dtype, np.ones((len(raw), 1)))
        put_scales(raw, dtype, np.full((len(raw), 1), std / quants.dequantize(raw, kind).std()))
    return raw.reshape(*shape[:-1], -1)

"""Random GGUF blocks of quantised types that have no quantiser here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from logitless.graph.dtype import DTYPES, dequantize
from logitless.graph.testing.conformance import put_scale

# Types that the package gguf cannot write
RANDOM_TYPES = ("q2_k", "q3_k", "iq4_xs", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
RANDOM_TYPES += ("iq3_s",)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, std: float) -> Bytes:
    """Random blocks of about this deviation, (…, bytes of a row)."""
    size, nbytes = DTYPES[dtype].block, DTYPES[dtype].nbytes
    raw = rng.integers(0, 256, (math.prod(shape) // size, nbytes), np.uint8)
    if dtype == "nvfp4":
        raw[:, :4] = rng.integers(1, 12, (len(raw), 4))  # scales of 1 / 1024 and more, some of them subnormal
    elif dtype == "mxfp4":
        raw[:, 0] = 127 + round(math.log2(std / 2.5))
    else:
        put_scale(raw, dtype, 1)
        put_scale(raw, dtype, std / dequantize(raw, dtype).std())
    return raw.reshape(*shape[:-1], -1)

"""NaN and infinity in the bytes of weights, of every type."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.graph.dtype import BLOCK_TYPES, DTYPES, dequantize
from logitless.graph.testing.conformance import put_scale
from logitless.models.weights.finite import is_finite

BLOCKS = [name for name in BLOCK_TYPES if DTYPES[name].scales]


@pytest.mark.parametrize("dtype", BLOCKS)
def test_every_scale_of_a_block_is_looked_at(dtype: str) -> None:
    """Two bytes of a block at a time become infinity: where that shows in its numbers (the
    package gguf's), it is found."""
    size, width = DTYPES[dtype].block, DTYPES[dtype].nbytes
    raw = np.zeros((3, 256 // size * width), np.uint8)
    assert is_finite(raw.reshape(-1), dtype)
    seen = 0
    for at in range(0, raw.shape[1] - 1, 2):
        wrong = raw.copy()
        wrong[2, at : at + 2] = 0x00, 0x7C
        finite = bool(np.isfinite(dequantize(wrong, dtype)).all())
        assert is_finite(wrong.reshape(-1), dtype) == finite, at
        seen += not finite
    assert seen


@pytest.mark.parametrize("scale", [65504, np.nan, -np.inf])
def test_iq1_m_scale_in_four_parts_is_looked_at(scale: float) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (5, 56), np.uint8)
    put_scale(raw, "iq1_m", 1)
    put_scale(raw[3:4], "iq1_m", scale)
    assert is_finite(raw.reshape(-1), "iq1_m") == np.isfinite(dequantize(raw, "iq1_m")).all() == np.isfinite(scale)


@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_floats(dtype: str, wrong: float) -> None:
    """Also at the end of what is more than one piece; the greatest finite numbers are no such."""
    values = np.linspace(-3e4, 3e4, 150_001).astype(np.float16 if dtype == "f16" else np.float32)
    most = np.finfo(values.dtype).max
    for value, finite in ((most, True), (-most, True), (wrong, False)):
        values[-1] = value
        bits = values.view(np.uint32) & 0xFFFF0000 if dtype == "bf16" else values
        raw = bits.view(np.uint16)[1::2].copy() if dtype == "bf16" else bits
        assert is_finite(raw.view(np.uint8), dtype) == finite

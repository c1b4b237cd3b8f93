"""Types that are held as others have the numbers that gguf's own dequantiser finds in the file's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.held import BLOCKS, HELD, held, held_as


def random_blocks(dtype: str, n: int) -> np.ndarray:
    """Any bytes, but for scales in f16, which are ordinary numbers."""
    rng = np.random.default_rng(n)
    blocks = rng.integers(0, 256, (n, HELD[dtype][1]), np.uint8)
    d = rng.normal(size=(n, 1)).astype(np.float16).view(np.uint8)
    if dtype == "mxfp4":
        blocks[:, 0] = rng.integers(128 - 14, 128 + 16, n)
    elif dtype == "q3_k":
        blocks[:, -2:] = d
    else:
        blocks[:, :2] = d
    return blocks


@pytest.mark.parametrize("dtype", HELD)
@pytest.mark.parametrize("n", [1, 7, BLOCKS + 3])
def test_the_same_numbers(dtype: str, n: int) -> None:
    source, target = GGMLQuantizationType[dtype.upper()], GGMLQuantizationType[held_as(dtype).upper()]
    blocks = random_blocks(dtype, n)
    size, nbytes = GGML_QUANT_SIZES[source]
    assert nbytes == HELD[dtype][1]
    want = dequantize(blocks, source).reshape(-1)
    raw = held(blocks.reshape(-1), dtype)
    got = dequantize(raw.reshape(-1, GGML_QUANT_SIZES[target][1]), target).reshape(-1)
    assert len(want) == n * size
    assert want.std() > 0
    np.testing.assert_allclose(got, want, rtol=2**-11 if dtype == "iq4_xs" else 0)


def test_scales_that_are_too_large_and_too_small() -> None:
    blocks = random_blocks("mxfp4", 3)
    blocks[1, 0] = 128 + 16
    with pytest.raises(OverflowError, match=r"2\^16"):
        held(blocks.reshape(-1), "mxfp4")
    blocks[1, 0] = 0  # of a block of zeros, mostly
    assert not dequantize(held(blocks.reshape(-1), "mxfp4").reshape(-1, 22), GGMLQuantizationType.Q5_0)[1].any()


def test_iq4_xs_scales_beyond_f16() -> None:
    blocks = random_blocks("iq4_xs", 2)
    blocks[:, :2] = np.array([3000], np.float16).view(np.uint8)
    with pytest.raises(OverflowError, match="a scale of"):
        held(blocks.reshape(-1), "iq4_xs")


def test_other_types_are_held_as_they_are() -> None:
    raw = np.arange(34, dtype=np.uint8)
    assert held(raw, "q8_0") is raw
    assert held_as("q4_k") == "q4_k"

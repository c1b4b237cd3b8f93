"""Quantizers: llama.cpp's bytes for every type, with and without importances; errors beside those of plain rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from logitless.models.quantization.quantize import DTYPES, block_of, quantize
from tests.helpers.llama_cpp_library import Case, needs_llama_cpp, quantized

BLOCKS = [name for name in DTYPES if block_of(name)[0] > 1]
BITS = {"q2_k": 2, "q3_k": 3, "q4_0": 4, "q4_1": 4, "q4_k": 4, "iq4_nl": 4, "iq4_xs": 4, "q5_0": 5, "q5_1": 5}
BITS |= {"q5_k": 5, "q6_k": 6}


def odd_rows() -> np.ndarray:
    """Ordinary rows, then ones at the edges of every search."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((16, 1024)) * 0.02).astype(np.float32)
    x[3, :300], x[3, 512:530] = 0, 0
    x[4], x[5] = np.abs(x[4]), -np.abs(x[5])
    x[6], x[7] = 0, 0.5
    x[8] = rng.standard_t(2, 1024) * 0.01
    x[9] *= np.float32(1e-12)
    x[10] *= np.float32(1e-30)
    x[11, ::7] *= 40
    x[12] = rng.integers(-3, 4, 1024)
    x[13, 256:512] = x[13, 256]
    return x


def importances() -> list[np.ndarray | None]:
    weights = (np.random.default_rng(2).random(1024) ** 4).astype(np.float32)
    without_some = weights.copy()
    without_some[:256] = 0
    return [None, weights, without_some]


@needs_llama_cpp
def test_bytes_are_those_of_llama_cpp(tmp_path: Path) -> None:
    x = odd_rows()
    cases: dict[str, Case] = {
        f"{dtype}.{i}.{n}": (rows, dtype, None if weights is None else weights[: rows.shape[1]])
        for dtype in BLOCKS
        for i, weights in enumerate(importances())
        for n, rows in enumerate((x, x[:1, : block_of(dtype)[0]]))  # also a single block
    }
    for name, theirs in quantized(cases, tmp_path).items():
        rows, dtype, weights = cases[name]
        np.testing.assert_array_equal(quantize(rows, dtype, weights), theirs, name)


@pytest.mark.parametrize("dtype", BITS)
def test_error_is_below_that_of_plain_rounding(dtype: str) -> None:
    """Plain rounding: groups of 32 with an exact minimum and scale; importances lower their own error further."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 512)).astype(np.float32)
    groups = x.reshape(-1, 32)
    low = groups.min(axis=1, keepdims=True)
    step = (groups.max(axis=1, keepdims=True) - low) / (2 ** BITS[dtype] - 1)
    plain = np.square(np.rint((groups - low) / step) * step + low - groups).mean()
    weights = (rng.random(512) ** 4).astype(np.float32)

    def squares(importance: np.ndarray | None) -> np.ndarray:
        return np.square(dequantize(quantize(x, dtype, importance), GGMLQuantizationType[dtype.upper()]) - x)

    # symmetric types have one end of the range more than they need
    assert squares(None).mean() < plain * (1.3 if dtype in ("q4_0", "q5_0") else 1.001)
    assert (squares(weights) * weights).mean() < (squares(None) * weights).mean()


def test_rows_do_not_depend_on_other_rows() -> None:
    x, weights = odd_rows(), importances()[1]
    for dtype in BLOCKS:
        alone = np.concatenate([quantize(row[None], dtype, weights) for row in x[:4]])
        np.testing.assert_array_equal(alone, quantize(np.tile(x, (8, 1)), dtype, weights)[:4], dtype)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 100 elements are not a multiple of q2_k's block of 256"):
        quantize(np.zeros((2, 100)), "q2_k")
    with pytest.raises(ValueError, match="not finite"):
        quantize(np.full((2, 256), np.nan), "q2_k")
    with pytest.raises(ValueError, match="cannot quantize to 'iq1_s'"):
        quantize(np.zeros((2, 256)), "iq1_s")

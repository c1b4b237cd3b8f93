"""Requantized types have the numbers of gguf's own dequantizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from logitless.graph.testing.conformance import put_scale
from logitless.models.adapters.lora import Adapter, Pair
from logitless.models.adapters.merge import merge
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.model import hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.models.quantization.requantize import NUMBERS, REQUANTIZED, requantize, requantized_type
from tests.helpers.reference_model import Spec, write

ROUNDED = ("iq1_s", "iq2_xxs", "iq3_xxs", "iq3_s", "iq4_xs")  # scales
NEAREST = ("q2_k", "iq2_xs", "iq2_s")


GREATEST = dict.fromkeys(ROUNDED, 127) | {"iq1_s": 16, "iq1_m": 15 * 9}  # of what a scale that is made multiplies
ORDINARY, SMALL = (0.01, 4), (1e-5, 1e-3)  # scales: those of f16 below 2^-14 have fewer bits


def blocks_of(dtype: str, n: int, scales: tuple[float, float] = ORDINARY) -> np.ndarray:
    """Any bytes, but for scales in f16."""
    rng = np.random.default_rng(n)
    blocks = rng.integers(0, 256, (n, REQUANTIZED[dtype][2]), np.uint8)
    put_scale(blocks, dtype, rng.uniform(*scales, (n, 1)) * rng.choice([-1, 1], (n, 1)))
    return blocks


def greatest_of_q2_k(blocks: np.ndarray) -> np.ndarray:
    """Largest possible numbers: the same scales, with all quants 0 and all 3."""
    found = []
    for quants in (0, 255):
        same = blocks.copy()
        same[:, 16:80] = quants
        found.append(np.abs(dequantize(same, GGMLQuantizationType.Q2_K)))
    return np.maximum(*found)


@pytest.mark.parametrize("dtype", REQUANTIZED)
@pytest.mark.parametrize("scales", [ORDINARY, SMALL])
@pytest.mark.parametrize("n", [1, 7, "more than a part"])
def test_the_same_numbers(dtype: str, n: int | str, scales: tuple[float, float]) -> None:
    source, target = GGMLQuantizationType[dtype.upper()], GGMLQuantizationType[requantized_type(dtype).upper()]
    size, nbytes = GGML_QUANT_SIZES[source]
    count = n if isinstance(n, int) else NUMBERS // size + 3
    blocks = blocks_of(dtype, count, scales)
    assert (size, nbytes) == REQUANTIZED[dtype][1:3]
    want = dequantize(blocks, source).reshape(-1)
    raw = requantize(blocks.reshape(-1), dtype)
    assert len(raw) == count * REQUANTIZED[dtype][3]
    got = dequantize(raw.reshape(-1, GGML_QUANT_SIZES[target][1]), target).reshape(-1)
    assert len(want) == count * size
    assert want.std() > 0
    away = 2.0**-25 if scales == SMALL else 0
    if dtype in NEAREST:
        greatest = (np.abs(want) if dtype != "q2_k" else greatest_of_q2_k(blocks)).reshape(-1, 32).max(axis=1)
        assert (np.abs(got - want).reshape(-1, 32).max(axis=1) <= greatest / 250 + away).all()
    else:
        np.testing.assert_allclose(
            got, want, rtol=2**-11 if dtype in ROUNDED else 0, atol=away * GREATEST.get(dtype, 0)
        )


@pytest.mark.parametrize("dtype", NEAREST)
def test_blocks_of_zeros_and_of_no_numbers(dtype: str) -> None:
    blocks = blocks_of(dtype, 4)
    put_scale(blocks[1:], dtype, np.array([[0], [np.nan], [np.inf]]))
    raw = requantize(blocks.reshape(-1), dtype).reshape(-1, 34)
    with np.errstate(invalid="ignore"):
        numbers = dequantize(raw, GGMLQuantizationType.Q8_0).reshape(4, 256)
    assert np.isfinite(numbers[0]).all()
    assert not numbers[1].any()
    assert not np.isfinite(numbers[2:]).any()


def test_iq4_xs_scales_beyond_f16() -> None:
    blocks = blocks_of("iq4_xs", 2)
    blocks[:, :2] = np.array([3000], np.float16).view(np.uint8)
    with pytest.raises(OverflowError, match="a scale of"):
        requantize(blocks.reshape(-1), "iq4_xs")


@pytest.mark.parametrize(
    ("dtype", "merged_as"),
    [(t, t) for t in ("q2_k", "iq4_xs", "iq4_nl", "mxfp4")] + [("iq1_m", "q6_k"), ("tq2_0", "q4_0")],
)
def test_merged_matrices_keep_their_type_or_get_that_of_the_graph(dtype: str, merged_as: str, tmp_path: Path) -> None:
    spec = Spec(n_embd=256, n_ff=256, dtype=dtype)
    write(base_path := tmp_path / "base.gguf", spec)
    with GGUFFile.open(base_path) as base:
        rng, name, other = np.random.default_rng(1), "blk.0.attn_q.weight", "blk.0.ffn_up.weight"
        n_out, n_in = base.tensors[name].shape
        pair = Pair(*(rng.normal(size=shape).astype(np.float32) for shape in ((2, n_in), (n_out, 2))))
        h = hparams_of(base)
        assert merge(tmp_path / "merged.gguf", base, h, [(Adapter({name: pair}, 0.0), 0.25)]) == [name]
        expected = dequantized(base.tensors[name], base.bytes_of(name)) + 0.25 * pair.b @ pair.a
        untouched = base.bytes_of(other).tobytes()
    with GGUFFile.open(tmp_path / "merged.gguf") as merged:
        assert (merged.tensors[name].dtype, merged.tensors[other].dtype) == (merged_as, dtype)
        assert merged.bytes_of(other).tobytes() == untouched
        found = dequantized(merged.tensors[name], merged.bytes_of(name))
    greatest = np.abs(expected).max()
    levels = {"q2_k": 1.5, "q6_k": 31, "q4_0": 7, "iq4_nl": 7, "iq4_xs": 7, "mxfp4": 4}[merged_as]
    assert np.abs(found - expected).max() < greatest / levels


def test_other_types_are_held_as_they_are() -> None:
    raw = np.arange(34, dtype=np.uint8)
    assert requantize(raw, "q8_0") is raw
    assert [requantized_type(t) for t in ("q4_k", "iq4_nl", "mxfp4")] == ["q4_k", "iq4_nl", "mxfp4"]


@pytest.mark.parametrize("dtype", REQUANTIZED)
def test_any_bytes_become_numbers_without_a_warning(dtype: str) -> None:
    """Scales that are NaN or infinite, too; warnings are errors here."""
    blocks = np.random.default_rng(5).integers(0, 256, (2000, REQUANTIZED[dtype][2]), np.uint8)
    blocks[-1] = 255
    with suppress(OverflowError):  # a scale beyond f16
        requantize(blocks.reshape(-1), dtype)
    info = TensorInfo("m", (2000, REQUANTIZED[dtype][1]), dtype, 0, blocks.nbytes)
    assert dequantized(info, blocks.reshape(-1)).shape == info.shape

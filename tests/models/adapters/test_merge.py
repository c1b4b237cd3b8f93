"""Merged matrices of types that are only read, and the numbers of any bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logitless.graph.dtype import BLOCK_TYPES, DTYPES
from logitless.models.adapters.lora import Adapter, Pair
from logitless.models.adapters.merge import WRITTEN_AS, merge
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.model import hparams_of
from logitless.models.quantization.quantize import DTYPES as WRITTEN
from logitless.models.quantization.quantize import dequantized
from tests.helpers.random_blocks import RANDOM_TYPES
from tests.helpers.reference_model import Spec, write


@pytest.mark.parametrize(
    ("dtype", "merged_as"),
    [(t, t) for t in ("q2_k", "iq4_xs", "iq4_nl", "mxfp4")]
    + [("iq1_m", "q6_k"), ("tq2_0", "q4_0"), ("q1_0", "q4_0"), ("nvfp4", "q8_0")],
)
def test_merged_matrices_keep_their_type_or_get_a_written_one(dtype: str, merged_as: str, tmp_path: Path) -> None:
    spec = Spec(n_embd=256, n_ff=256, dtype=dtype, traits=("scales",))
    write(base_path := tmp_path / "base.gguf", spec)
    with GGUFFile.open(base_path) as base:
        rng, name, other = np.random.default_rng(1), "blk.0.attn_q.weight", "blk.0.ffn_up.weight"
        n_out, n_in = base.tensors[name].shape
        pair = Pair(*(rng.normal(size=shape).astype(np.float32) for shape in ((2, n_in), (n_out, 2))))
        h = hparams_of(base)
        assert merge(tmp_path / "merged.gguf", base, h, [(Adapter({name: pair}, 0.0), 0.25)]) == [name]
        scale = base.bytes_of("blk.0.attn_q.scale").view(np.float32)
        expected = dequantized(base.tensors[name], base.bytes_of(name)) * scale + 0.25 * pair.b @ pair.a
        untouched = base.bytes_of(other).tobytes()
        of_other = base.bytes_of("blk.0.ffn_up.scale").tobytes()
    with GGUFFile.open(tmp_path / "merged.gguf") as merged:
        assert (merged.tensors[name].dtype, merged.tensors[other].dtype) == (merged_as, dtype)
        assert merged.bytes_of(other).tobytes() == untouched
        assert merged.bytes_of("blk.0.attn_q.scale").view(np.float32) == 1.0
        assert merged.bytes_of("blk.0.ffn_up.scale").tobytes() == of_other
        result = dequantized(merged.tensors[name], merged.bytes_of(name))
    greatest = np.abs(expected).max()
    levels = {"q2_k": 1.5, "q6_k": 31, "q8_0": 127, "q4_0": 7, "iq4_nl": 7, "iq4_xs": 7, "mxfp4": 4}[merged_as]
    assert np.abs(result - expected).max() < greatest / levels


def test_every_type_of_blocks_has_one_that_is_written() -> None:
    assert {WRITTEN_AS.get(dtype, dtype) for dtype in BLOCK_TYPES} <= {*WRITTEN}


@pytest.mark.parametrize("dtype", RANDOM_TYPES)
def test_any_bytes_become_numbers_without_a_warning(dtype: str) -> None:
    """Scales that are NaN or infinite, too; warnings are errors here."""
    kind = DTYPES[dtype]
    blocks = np.random.default_rng(5).integers(0, 256, (2000, kind.nbytes), np.uint8)
    blocks[-1] = 255
    info = TensorInfo("m", (2000, kind.block), dtype, 0, blocks.nbytes)
    assert dequantized(info, blocks.reshape(-1)).shape == info.shape

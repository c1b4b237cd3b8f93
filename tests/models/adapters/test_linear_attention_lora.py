"""LoRA adapters of linear attention layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from logitless.engine.batch import UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.adapters.lora import Adapter, Pair, matrix_shape, read_adapter, write_adapter
from logitless.models.adapters.merge import merge
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.reference_model import Array, write

CONVS = ("ssm_conv1d.weight", "shortconv.conv.weight")
NO_PRODUCTS = ("ssm_norm", "time_mix_first", "blk.0.time_mix_v1", "blk.0.time_mix_v2")


def adapter_of(path: Path, *, convs: bool) -> Adapter:
    rng, pairs = np.random.default_rng(3), {}
    with GGUFFile.open(path) as base:
        for name, info in base.tensors.items():
            matrix = len(info.shape) == 2 and name.startswith("blk.") and name.endswith(".weight")
            if matrix and not any(part in name for part in NO_PRODUCTS) and name.endswith(CONVS) == convs:
                n_out, n_in = matrix_shape(info.shape)
                a, b = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((2, n_in), (n_out, 2)))
                pairs[name] = Pair(a, b)
    return Adapter(pairs, alpha=2.0)


def logits(path: Path, adapter: Adapter | None = None) -> Array:
    """Log-probabilities of 20 tokens' followers."""
    engine = ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=32, threads=1, type_k="f32", type_v="f32"))
    n, n_vocab = 20, engine.hparams.n_vocab
    rows, tokens = list(range(n)), [(7 * i) % n_vocab for i in range(n)]
    batch = UBatch(tokens, rows, [0] * n, rows, rows, [None] * n, [0] * n, n_top=1 + n_vocab)
    batch.tables[0], batch.begin, batch.end = [0, 1], [0] + [-1] * (n - 1), [-1] * n
    if adapter is not None:
        batch.mixes[0] = ((engine.adapters.put(adapter), 1.0),)
    result = engine.step(batch)
    assert result.logprobs is not None
    assert result.top_ids is not None
    results = np.zeros((n, n_vocab))
    for row, ids, values in zip(results, result.top_ids, result.logprobs[:, 1:], strict=True):
        row[ids] = values
    engine.close()
    return results


@pytest.mark.parametrize("arch", ["qwen35", "lfm2", "nemotron_h_moe", "falcon-h1", "mamba2", "rwkv6", "arwkv7"])
def test_an_adapter_beside_its_model_is_one_within(arch: str, tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", replace((PLAIN | MAPPED)[arch], vocabulary=True, n_vocab=512))
    with GGUFFile.open(path) as base:
        h = hparams_of(base)
        write_adapter(tmp_path / "a.gguf", adapter_of(path, convs=False), base, h)
        adapter = read_adapter(tmp_path / "a.gguf", base, h)
        merge(tmp_path / "merged.gguf", base, h, [(adapter, 1.0)])
    beside, plain = logits(path, adapter), logits(path)
    np.testing.assert_allclose(beside, logits(tmp_path / "merged.gguf"), atol=4e-4)
    assert np.abs(beside - plain).max() > 0.1


@pytest.mark.parametrize("arch", ["qwen35", "lfm2", "nemotron_h_moe", "falcon-h1", "mamba2"])
def test_convolutions_take_none(arch: str, tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", PLAIN[arch])
    with GGUFFile.open(path) as base:
        h = hparams_of(base)
        write_adapter(tmp_path / "a.gguf", adapter_of(path, convs=True), base, h)
        with pytest.raises(ModelFileError, match=r"the model has no matrix '.*conv"):
            read_adapter(tmp_path / "a.gguf", base, h)

"""Training of Gemma 4: KV sharing, and experts with gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import read_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import StridedSamples
from logitless.training.data.sampler import Sampler
from logitless.training.save import save_result
from logitless.training.trainable import Trainable, full
from logitless.training.trainer import Step, Trainer
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import EXPERTS, GEMMA3N, SMALL
from tests.models.architectures.test_registry import compute

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 12, np.uint8).astype(np.int32) - 31


def trained(trainable: Trainable) -> list[float]:
    """The losses of some steps, with checkpoints of gradients after every second layer."""
    data = StridedSamples(TEXT, 16)
    settings = TrainingConfig(ctx_size=16, batch_size=4, iterations=6, learning_rate=1e-2, weight_decay=0.1)
    result: list[float] = []
    trainer = Trainer(trainable, settings, Sampler(data, np.arange(len(data), dtype=np.int32), "text", 5), np.arange(0))
    trainer.fit(lambda e: result.append(e.loss) if isinstance(e, Step) else None)
    return result


@pytest.mark.parametrize(
    "spec", [SMALL, EXPERTS, GEMMA3N["gemma3n, all keep keys"]], ids=["small", "experts", "gemma3n"]
)
def test_an_adapter_learns_and_is_read_again(spec: Spec, session: Session, tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", spec)
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        trainable = lora(session, define_model(session, gguf, h, 64), LoraOptions(rank=3))
        result = trained(trainable)
        assert result[-1] < result[0] - 0.3
        save_result(tmp_path / "a.gguf", trainable, gguf, h)
        pairs = read_adapter(tmp_path / "a.gguf", gguf, h).pairs
    assert {"blk.0.attn_k.weight", "blk.1.ffn_up.weight"} <= pairs.keys()
    assert ("blk.7.attn_k.weight" in pairs) is False  # of SMALL it sees another layer's; the others have none


def test_trained_fused_tensor_is_saved_expert_by_expert(session: Session, tmp_path: Path) -> None:
    spec = replace(EXPERTS, n_layer=3, keys=EXPERTS.keys | {"attention.sliding_window_pattern": [True, True, False]})
    spec.keys["attention.head_count_kv"] = [2, 2, 1]
    write(path := tmp_path / "m.gguf", spec)
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        patterns = ("blk.1.ffn_up_exps.weight", "blk.2.ffn_down_exps.scale", "blk.2.attn_k.weight")
        trainable = full(session, define_model(session, gguf, h, 64), gguf, h, patterns)
        result = trained(trainable)
        assert result[-1] < result[0]
        save_result(tmp_path / "out.gguf", trainable, gguf, h)
        name, n_ff = "blk.1.ffn_gate_up_exps.weight", spec.keys["expert_feed_forward_length"]
        before = dequantized(gguf.tensors[name], gguf.bytes_of(name))
        values = trainable.read()
        with GGUFFile.open(tmp_path / "out.gguf") as saved:
            after = dequantized(saved.tensors[name], saved.bytes_of(name))
            others = {n for n in gguf.tensors if not np.array_equal(gguf.bytes_of(n), saved.bytes_of(n))}
    np.testing.assert_array_equal(after[:, :n_ff], before[:, :n_ff])
    np.testing.assert_array_equal(after[:, n_ff:].reshape(-1, spec.n_embd), values[patterns[0]])
    assert np.abs(after[:, n_ff:] - before[:, n_ff:]).max() > 1e-3
    assert others == {name, *patterns[1:]}
    ids = TEXT[:40].astype(np.int64)
    assert np.abs(compute(tmp_path / "out.gguf", spec, ids) - compute(path, spec, ids)).max() > 1e-2

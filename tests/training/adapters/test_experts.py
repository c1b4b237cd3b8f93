"""Adapters of experts' weights: gradients in float64, published bits, llama.cpp's shapes, resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import mul, sum_to
from logitless.graph.tensor import feed
from logitless.graph.testing.evaluate import evaluate
from logitless.models.adapters.lora import read_adapter
from logitless.models.adapters.low_rank import LowRank
from logitless.models.adapters.merge import merge
from logitless.models.adapters.stacked_lora import StackedLora
from logitless.models.batch import Sequences
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.weights.weights import check_weights
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import StridedSamples
from logitless.training.data.sampler import Sampler
from logitless.training.errors import TrainingError
from logitless.training.save import save_result
from logitless.training.trainer import Trainer
from tests.helpers.reference_model import Spec, write
from tests.models.adapters.test_lora import refusals

OPTIONS = LoraOptions(3, 5.0, targets=("experts", "q_proj"))
LENGTH = 12
SPEC = Spec("qwen3moe", n_embd=32, n_head=2, n_head_kv=1, n_ff=16, n_expert=4, n_expert_used=2)


class Opened:
    """A mixture of four experts, of which a row has two."""

    def __init__(self, path: Path) -> None:
        self.gguf = GGUFFile.open(path)
        self.h = hparams_of(self.gguf)
        self.session = Session([CPUBackend(1)])
        self.base = define_model(self.session, self.gguf, self.h, 64)

    def trainer(self, options: LoraOptions = OPTIONS, n: int = 3) -> Trainer:
        trainable = lora(self.session, self.base, options, gguf=self.gguf)
        tokens = np.random.default_rng(0).integers(0, self.h.n_vocab, 200).astype(np.int32)
        data = StridedSamples(tokens, LENGTH)
        limits = {"ctx_size": LENGTH, "batch_size": 3, "iterations": n}
        settings = TrainingConfig(**limits, learning_rate=3e-2, weight_decay=0.1)  # type: ignore[arg-type]
        order = Sampler(data, np.arange(len(data), dtype=np.int32), "tokens", 5)
        return Trainer(trainable, settings, order, np.zeros(0, np.int32))

    def close(self) -> None:
        self.session.close()
        self.gguf.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "m.gguf"
    write(path, SPEC)
    return path


@pytest.fixture
def one(model: Path) -> Iterator[Opened]:
    result = Opened(model)
    yield result
    result.close()


def inputs_of(one: Opened) -> dict[str, Any]:
    tokens = np.random.default_rng(3).integers(0, one.h.n_vocab, LENGTH).astype(np.int32)
    return {"tokens": tokens, "pos": np.arange(LENGTH, dtype=np.int32), "start": np.zeros(LENGTH, np.int32)}


def test_gradients_are_slopes_in_float64(one: Opened) -> None:
    trainable = one.trainer().trainable
    rng = np.random.default_rng(1)
    own = {f"train.{n}": v + 0.3 * rng.normal(size=v.shape) for n, v in trainable.read().items()}
    logits = trainable.model.training_logits(Sequences.feeds(1, LENGTH))
    loss = sum_to(mul(logits, feed("slope", logits.shape)), shape=())
    result = backward(loss, trainable.params)
    inputs = {**inputs_of(one), "slope": rng.normal(size=logits.shape)}
    fixed = {t.name: one.session.read(t.name) for t in one.base.weights.tensors.values()}
    if one.base.rotary.frequency is not None:
        name = one.base.rotary.frequency.name
        fixed[name] = one.session.read(name)
    gradients = evaluate(result.values(), inputs, {**fixed, **own})
    ways = {p.name: rng.normal(size=p.shape) for p in result}

    def at(step: float) -> float:
        moved = {name: value + step * ways.get(name, 0) for name, value in own.items()}
        return float(evaluate([loss], inputs, {**fixed, **moved})[0])

    slope = sum(float((g * ways[p.name]).sum()) for p, g in zip(result, gradients, strict=True))
    assert {p.name for p in trainable.params} == {p.name for p in result}
    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-5)


def test_requests_get_the_bits_of_the_trainers_forward_pass(one: Opened, model: Path, tmp_path: Path) -> None:
    """And a merged model has them within rounding; the file has llama.cpp's shapes."""
    trainer = one.trainer()
    trainer.fit()
    save_result(tmp_path / "a.gguf", trainer.trainable, one.gguf, one.h)
    shapes = {t.name: tuple(t.shape.tolist()) for t in GGUFReader(tmp_path / "a.gguf").tensors}
    assert shapes["blk.0.ffn_up_exps.weight.lora_a"] == (32, 3, 4)  # as ggml has it, the last axis first
    assert shapes["blk.0.ffn_up_exps.weight.lora_b"] == (3, 16, 4)
    assert refusals(tmp_path / "a.gguf", model) == []
    stack = StackedLora(one.session, check_weights(one.gguf, one.h))
    other = lora(one.session, one.base, LoraOptions(4, seed=9), "other")
    stack.put(other.adapter())
    handle = stack.put(read_adapter(tmp_path / "a.gguf", one.gguf, one.h))
    served = one.base.adapted(LowRank(stack.pairs, feed("lora_scales", (LENGTH, stack.n_columns)), deltas=stack.deltas))
    rows, inputs = Sequences.feeds(1, LENGTH), inputs_of(one)
    expected, base = (
        one.session.compute([m.training_logits(rows)], inputs)[0] for m in (trainer.trainable.model, one.base)
    )
    for mix, target in (((handle, 1.0),), expected), ((), base):
        scales = stack.row_scales([mix] * LENGTH, LENGTH)
        (result,) = one.session.compute([served.training_logits(rows)], inputs | {"lora_scales": scales})
        assert np.array_equal(result, target)
    assert np.abs(expected - base).max() > 1e-2
    merge(tmp_path / "m.gguf", one.gguf, one.h, [(trainer.trainable.adapter(), 1.0)])
    merged = Opened(tmp_path / "m.gguf")
    (result,) = merged.session.compute([merged.base.training_logits(rows)], inputs)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)
    merged.close()


def test_a_run_resumes_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    whole, half, resumed = Opened(model), Opened(model), Opened(model)
    runs = [whole.trainer(n=4), half.trainer(n=2), resumed.trainer(n=4)]
    runs[0].fit()
    runs[1].fit()
    save_checkpoint(tmp_path / "c.gguf", runs[1], whole.h.arch)
    read_checkpoint(tmp_path / "c.gguf").restore(runs[2])
    runs[2].fit()
    for name, values in runs[0].trainable.read().items():
        assert np.array_equal(values, runs[2].trainable.read()[name])
    for opened in (whole, half, resumed):
        opened.close()


def test_experts_have_adapters_only_by_name(one: Opened, tmp_path: Path) -> None:
    plain = lora(one.session, one.base, LoraOptions(2), "plain")
    assert not any("exps" in name for name in plain.names)
    for options, field in (({"dora": True}, "lora_dora"), ({"start": "pissa"}, "lora_init")):
        with pytest.raises(TrainingError, match=f"{field}: is of matrices"):
            lora(one.session, one.base, LoraOptions(2, targets=("experts",), **options), field, one.gguf)  # type: ignore[arg-type]
    narrow = Opened.trainer(one, LoraOptions(2, targets=("ffn_down_exps",)))
    save_result(tmp_path / "a.gguf", narrow.trainable, one.gguf, one.h)
    write(
        path := tmp_path / "m.gguf",
        Spec("qwen3moe", n_embd=32, n_head=2, n_head_kv=1, n_ff=16, n_expert=8, n_expert_used=2),
    )
    with (
        GGUFFile.open(path) as other,
        pytest.raises(ModelFileError, match=r"has shape \(4, 2, 16\), expected 8 matrices"),
    ):
        read_adapter(tmp_path / "a.gguf", other, hparams_of(other))

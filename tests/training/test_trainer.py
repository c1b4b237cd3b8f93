"""Trainer on a tiny model: trained parameters, accumulation, checkpoints, resuming to the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

import logitless
from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.host_memory import HostBuffer
from logitless.graph.backend import Bytes
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.adapters.lora import read_adapter
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import copied_keys, tensor, u32, write_gguf
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import ModelShape
from logitless.training import head
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import PackedExamples, StridedSamples
from logitless.training.data.sampler import Sampler
from logitless.training.data.tokenize_rows import Example
from logitless.training.errors import TrainingDiverged, TrainingError
from logitless.training.run import trainable_of
from logitless.training.save import save_result
from logitless.training.scratch import new_model
from logitless.training.step import GradientHook, Steps, outcome
from logitless.training.trainable import LORA, full
from logitless.training.trainer import Control, Save, Step, Trainer, Validated

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 12, np.uint8).astype(np.int32) + 3
RATE = "logitless.training.trainer.rate_at"


Open = Callable[..., Trainer]


@pytest.fixture
def start(model: Path) -> Iterator[Open]:
    """A trainer with a session of its own."""
    backend = CPUBackend(1)
    sessions: list[Session] = []
    files = []

    def make(
        kind: str = LORA,
        *,
        sgd: bool = False,
        patterns: tuple[str, ...] = ("*",),
        ranks: dict[str, int] | None = None,
        on_gradients: GradientHook | None = None,
        **changes: object,
    ) -> Trainer:
        gguf = GGUFFile.open(model)
        files.append(gguf)
        h = hparams_of(gguf)
        sessions.append(Session([backend]))
        base = define_model(sessions[-1], gguf, h, 64)
        if kind == LORA:
            trainable = lora(sessions[-1], base, LoraOptions(rank=3, alpha=6.0, ranks=ranks or {}))
        else:
            trainable = full(sessions[-1], base, gguf, h, patterns)
        data = StridedSamples(TEXT, 16)
        limits = {"ctx_size": 16, "batch_size": 4, "iterations": 6}
        default = {**limits, "learning_rate": 1e-2, "optimizer": "sgd" if sgd else "adamw", "weight_decay": 0.1}
        settings = TrainingConfig(**(default | changes))  # type: ignore[arg-type]
        indices = np.arange(len(data), dtype=np.int32)
        order = Sampler(data, indices[:-4], "text", 5)
        return Trainer(trainable, settings, order, indices[-4:], on_gradients=on_gradients)

    yield make
    for session in sessions:
        session.close()
    for gguf in files:
        gguf.close()
    backend.close()


def parameters(trainer: Trainer) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in trainer.trainable.read().items()}


def losses(trainer: Trainer) -> list[float]:
    result: list[float] = []
    trainer.fit(lambda e: result.append(e.loss) if isinstance(e, Step) else None)
    return result


def test_a_lora_run_begins_at_the_models_loss_and_leaves_the_model_alone(start: Open, model: Path) -> None:
    raw = model.read_bytes()
    trainer, base = start(), start("full")
    first = trainer.order.take(4)
    expected = base.steps.evaluate(first).losses
    assert np.array_equal(trainer.steps.evaluate(first).losses, expected)
    assert trainer.steps.optimizer_nbytes == 2 * 4 * trainer.trainable.n_params
    before = {n: trainer.trainable.session.read(n) for n in ("blk.0.attn_norm.weight",)}
    result = losses(trainer)
    assert result[-1] < result[0] - 0.1
    assert all(np.array_equal(trainer.trainable.session.read(n), v) for n, v in before.items())
    assert model.read_bytes() == raw
    shapes = {name: p.shape for name, p in zip(trainer.trainable.names, trainer.trainable.params, strict=True)}
    assert shapes["blk.1.attn_k.weight.lora_a"] == (3, 32)
    assert shapes["blk.1.attn_k.weight.lora_b"] == (16, 3)
    assert not any("token_embd" in name or "norm" in name for name in shapes)


class Counting(CPUBackend):
    """Counts the bytes that a session asks for, and those of constants."""

    taken = 0

    def alloc(self, nbytes: int, *, feeds: bool = False) -> HostBuffer:
        self.taken += nbytes
        return super().alloc(nbytes, feeds=feeds)

    def load(self, t: Tensor, raw: Bytes) -> HostBuffer:
        memory = super().load(t, raw)
        self.taken += memory.nbytes
        return memory


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LORA, {}),
        ("full", {"grad_acc": 2}),
        ("full", {"use_checkpointing": False, "optimizer": "sgd", "max_grad_norm": 0}),
    ],
)
def test_the_footprint_is_what_a_run_allocates(model: Path, kind: str, changes: dict[str, object]) -> None:
    backend = Counting(1)
    session = Session([backend])
    with GGUFFile.open(model) as gguf:
        h = hparams_of(gguf)
        base = define_model(session, gguf, h, 64)
        trainable = lora(session, base, LoraOptions(3)) if kind == LORA else full(session, base, gguf, h)
        default = {"ctx_size": 16, "batch_size": 4, "iterations": 2, "learning_rate": 1e-3}
        settings = TrainingConfig(**(default | changes))  # type: ignore[arg-type]
        data = StridedSamples(TEXT, 16)
        order = Sampler(data, np.arange(len(data) - 4, dtype=np.int32), "text", 5)
        trainer = Trainer(trainable, settings, order, np.arange(4, dtype=np.int32) + len(order))
        (planned,) = trainer.steps.footprint(settings.grad_acc)
        assert backend.taken < 16  # where programs that cannot run look
        backend.taken = 0
        losses(trainer)
    assert planned.total == backend.taken
    assert planned.parameters == 4 * trainable.n_params
    assert planned.optimizer == trainer.steps.optimizer_nbytes
    assert planned.gradients == (planned.parameters if settings.grad_acc > 1 else 0)
    session.close()


def test_ranks_are_set_by_kind(start: Open, model: Path) -> None:
    session = Session([CPUBackend(1)])
    with GGUFFile.open(model) as gguf:
        base = define_model(session, gguf, hparams_of(gguf), 64)
        ranks = {"wq": 2, "w1": 0, "w2": 0, "w3": 0, "wo": 0, "tok_embd": 5, "att_norm": 2, "out_norm": 1}
        options = LoraOptions(rank=4, ranks=ranks)
        trainable = lora(session, base, options)
        with pytest.raises(TrainingError, match="all ranks are 0"):
            lora(session, base, LoraOptions(rank=0), "none")
    shapes = {name: p.shape for name, p in zip(trainable.names, trainable.params, strict=True)}
    assert shapes["blk.0.attn_q.weight.lora_a"] == (2, 32)
    assert shapes["blk.0.attn_v.weight.lora_b"] == (16, 4)
    assert shapes["token_embd.weight.lora_a"] == (260, 5)
    assert shapes["token_embd.weight.lora_b"] == (32, 5)
    assert shapes["blk.1.attn_norm.weight.lora_a"] == (2, 32)
    assert shapes["blk.1.attn_norm.weight.lora_b"] == (1, 2)
    assert shapes["output_norm.weight.lora_a"] == (1, 32)
    assert not any("ffn" in name or "attn_output" in name for name in shapes)
    session.close()
    for backend in session.backends:
        backend.close()


@pytest.mark.parametrize("kind", ["full", LORA])
def test_logits_of_a_few_rows_at_a_time_give_the_same_run(
    start: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, weights = [], []
    for nbytes in (head.LOGITS_NBYTES, 260 * 4 * 17):  # 17 of the 64 rows
        monkeypatch.setattr(head, "LOGITS_NBYTES", nbytes)
        trainer = start(kind, iterations=3)
        assert len(head.logit_chunks(trainer.trainable.model, 64)) == (4 if result else 1)
        windows = trainer.order.take(4)
        result.append([trainer.steps.evaluate(windows).losses, *losses(trainer)])
        weights.append(trainer.trainable.read())
    assert np.array_equal(result[0][0], result[1][0])
    np.testing.assert_allclose(result[0][1:], result[1][1:], rtol=1e-5)
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name], values, atol=2e-4)


def test_a_step_without_clipping_is_one_with_a_limit_that_nothing_reaches(start: Open) -> None:
    runs = []
    for gclip in (0.0, 1e9):
        trainer = start("full", iterations=3, max_grad_norm=gclip)
        norms: list[float] = []
        trainer.fit(lambda e, norms=norms: norms.append(e.norm) if isinstance(e, Step) else None)  # type: ignore[misc]
        runs.append((norms, trainer.trainable.read()))
    assert runs[0][0] == runs[1][0]
    assert min(runs[0][0]) > 0
    assert all(np.array_equal(runs[0][1][name], values) for name, values in runs[1][1].items())


def test_accumulation_is_one_big_batch(start: Open) -> None:
    big, small = start("full", batch_size=4), start("full", batch_size=1, grad_acc=4)
    assert losses(big) == pytest.approx(losses(small), rel=2e-4)
    assert big.counters == small.counters
    assert big.counters.iterations == 6
    assert big.counters.samples == 24
    assert big.counters.tokens == 24 * 16
    assert big.counters.epochs == 24 // len(big.order)


def test_epochs_end_with_a_whole_iteration(start: Open) -> None:
    """In one go and event by event."""
    whole, stepwise = (start(iterations=0, epochs=2, batch_size=3, grad_acc=2) for _ in range(2))
    result, n_windows = losses(whole), len(whole.order)
    assert [event.loss for event in stepwise.work() if isinstance(event, Step)] == result
    assert stepwise.counters == whole.counters
    assert whole.counters.samples == 6 * len(result)
    assert 6 * (len(result) - 1) < 2 * n_windows <= 6 * len(result)


def test_sgd_has_no_state_and_what_is_not_chosen_stays(start: Open, model: Path, tmp_path: Path) -> None:
    trainer = start("full", sgd=True, patterns=("blk.0.ffn_down.weight", "output_norm.weight"), iterations=1)
    assert trainer.steps.optimizer_nbytes == 0
    before = trainer.trainable.read()
    losses(trainer)
    after = trainer.trainable.read()
    assert list(before) == ["output_norm.weight", "blk.0.ffn_down.weight"]
    with GGUFFile.open(model) as gguf:
        save_result(tmp_path / "m.gguf", trainer.trainable, gguf, hparams_of(gguf))
        with GGUFFile.open(tmp_path / "m.gguf") as saved:
            changed = {n for n in gguf.tensors if not np.array_equal(gguf.bytes_of(n), saved.bytes_of(n))}
    assert changed == set(before) == {n for n in before if not np.array_equal(before[n], after[n])}


def test_sgd_is_the_plain_formula(start: Open) -> None:
    """w · (1 − α·wd) − α·g of every tensor, and the gradient as it is, however
    large."""
    g = {}
    for decay in (0.0, 0.5):
        trainer = start("full", sgd=True, weight_decay=decay, iterations=1)
        before = {name: w * np.float32(1.5) for name, w in trainer.trainable.read().items()}  # for a large gradient
        trainer.trainable.write(before)
        losses(trainer)
        after = trainer.trainable.read()
        if decay == 0:
            g = {name: (before[name].astype(np.float64) - after[name]) / 1e-2 for name in before}
            assert sum(float((x**2).sum()) for x in g.values()) > 2**2
        else:
            for name, w in before.items():
                np.testing.assert_allclose(after[name], w * (1 - 1e-2 * decay) - 1e-2 * g[name], rtol=1e-5, atol=1e-5)


def test_only_matrices_decay(start: Open) -> None:
    """With full decay and steps of nothing, matrices shrink by rate · decay, and vectors stay."""
    trainer = start("full", weight_decay=1.0, adam_eps=1e12, iterations=1)
    before = trainer.trainable.read()
    losses(trainer)
    for name, value in trainer.trainable.read().items():
        keep = 0.99 if value.ndim == 2 else 1.0
        np.testing.assert_allclose(value, before[name] * keep, rtol=1e-5, atol=1e-9)


def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bytes(start: Open, model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as gguf:
        h = hparams_of(gguf)
        for kind in (LORA, "full"):
            changes = {"iterations": 0, "epochs": 1.4, "batch_size": 3, "grad_acc": 2}
            whole = start(kind, **changes)
            whole.stopping.past = 3
            result = losses(whole)
            n = len(result) // 2
            first = start(kind, **changes)
            first.stopping.past = 3
            work = first.work()
            while first.counters.iterations < n:
                next(work)
            work.close()
            save_checkpoint(tmp_path / "half.gguf", first, h.arch)
            second = start(kind, **changes)
            second.stopping.past = 3
            assert read_checkpoint(tmp_path / "half.gguf").restore(second)
            assert losses(second) == result[n:]
            for name, trainer in (("a", whole), ("b", second)):
                save_checkpoint(tmp_path / f"{name}.ck", trainer, h.arch)
                (tmp_path / name).mkdir(exist_ok=True)
                save_result(tmp_path / name / "out.gguf", trainer.trainable, gguf, h)
            (past,) = [t for t in GGUFReader(tmp_path / "a.ck").tensors if t.name == "optimizer.adam.past_loss_values"]
            assert past.data.tolist() == np.float32(result[-3:]).tolist()
            assert (tmp_path / "a.ck").read_bytes() == (tmp_path / "b.ck").read_bytes()
            assert (tmp_path / "a/out.gguf").read_bytes() == (tmp_path / "b/out.gguf").read_bytes()


def test_result_of_a_step_sums_up_its_epoch(start: Open) -> None:
    trainer, seen = start(iterations=0, epochs=2, batch_size=1, grad_acc=1), list[tuple[int, int]]()
    trainer.fit(lambda e: seen.append((e.epoch, len(e.result.losses))) if isinstance(e, Step) else None)
    second = seen.index((1, 1))
    assert len(seen) == pytest.approx(2 * second, abs=1)
    assert seen == [*((0, n + 1) for n in range(second)), *((1, n + 1) for n in range(len(seen) - second))]


@pytest.mark.parametrize("moments", [None, np.zeros(3, np.float32)])
def test_checkpoint_with_bad_moments_is_refused(start: Open, tmp_path: Path, moments: Any) -> None:
    trainer, path = start(iterations=1), tmp_path / "c.gguf"
    losses(trainer)
    save_checkpoint(path, trainer, "llama")
    result = read_checkpoint(path)
    result.tensors["optimizer.adam.second_moments"] = moments
    with pytest.raises(TrainingError, match=r"'optimizer\.adam\.second_moments' is missing, or not of \d+ numbers"):
        result.restore(start())


def test_checkpoints_have_llama_cpps_keys(start: Open, model: Path, tmp_path: Path) -> None:
    trainer = start()
    losses(trainer)
    path = tmp_path / "c.gguf"
    save_checkpoint(path, trainer, "llama")
    with GGUFFile.open(path) as gguf:
        keys = copied_keys(gguf.metadata)
    assert keys["training.type"].value == "finetune_lora"
    assert keys["training.iteration_count"].value == 6
    assert keys["training.token_count"].value == 6 * 4 * 16
    assert keys["training.lora.rank.attn_q"].value == 3
    assert keys["training.lora.rank.token_embd"].value == 0
    assert keys["optimizer.type"].value == "adam"
    assert keys["optimizer.parameter_count"].value == trainer.trainable.n_params
    with GGUFFile.open(path) as gguf:
        assert gguf.tensors["optimizer.adam.first_moments"].shape == (trainer.trainable.n_params,)
        newer = ("training.epoch_count", "training.shuffle.epoch", "training.epoch_result")
        older = {name: key for name, key in keys.items() if name not in newer}
        tensors = [(n, np.array(gguf.bytes_of(n).view(np.float32)).reshape(t.shape)) for n, t in gguf.tensors.items()]
    write_gguf(
        tmp_path / "v0.gguf", "llama", older | {"training.file_version": u32(0)}, [(n, tensor(a)) for n, a in tensors]
    )
    again = start()
    assert read_checkpoint(tmp_path / "v0.gguf").restore(again)
    assert again.counters.iterations == 6
    write_gguf(tmp_path / "v9.gguf", "llama", older | {"training.file_version": u32(9)}, [])
    with pytest.raises(ModelFileError, match=r"key 'training\.file_version' is 9; this version reads 1"):
        read_checkpoint(tmp_path / "v9.gguf")
    write_gguf(tmp_path / "o9.gguf", "llama", older | {"optimizer.file_version": u32(9)}, [])
    with pytest.raises(ModelFileError, match=r"key 'optimizer\.file_version' is 9; this version reads 0"):
        read_checkpoint(tmp_path / "o9.gguf")
    with pytest.raises(ModelFileError, match=r"key 'training\.file_version' is missing"):
        read_checkpoint(model)
    with pytest.raises(TrainingError, match="is a checkpoint of finetune_lora, not of train_model"):
        read_checkpoint(path).restore(start("full"))
    with pytest.raises(TrainingError, match="the optimizer was adam, not sgd"):
        read_checkpoint(path).restore(start(sgd=True))


def test_a_packed_example_has_the_loss_that_it_has_alone(start: Open) -> None:
    trainer = start(batch_size=2)
    pieces = [Example(TEXT[a : a + n], np.arange(n) > 0) for a, n in ((0, 7), (20, 9), (40, 12))]
    alone, packed = PackedExamples(pieces, 16, pack=False), PackedExamples(pieces, 16)
    assert (len(alone), len(packed)) == (3, 2)
    rng = np.random.default_rng(0)
    one = [trainer.steps.evaluate([alone.sample(i, rng)]).losses[: len(p.tokens) - 1] for i, p in enumerate(pieces)]
    together = trainer.steps.evaluate([packed.sample(i, rng) for i in range(2)]).losses
    np.testing.assert_array_equal(np.concatenate([together[:14], together[16:27]]), np.concatenate(one))


def test_callbacks_change_the_rate_and_cancel(start: Open) -> None:
    seen: list[float] = []

    def before(control: Control) -> None:
        seen.append(control.rate)
        control.rate = 0.0
        control.cancel = control.iteration == 2

    trainer = start()
    trainer.before_step = before
    first = trainer.trainable.read()
    done = trainer.fit()
    assert done.cancelled
    assert seen == [1e-2] * 3
    assert trainer.counters.iterations == 2
    assert all(np.array_equal(first[n], v) for n, v in trainer.trainable.read().items())


def test_validation_does_not_disturb_training(start: Open) -> None:
    result: list[int] = []
    often = start(validate_every=1)
    trained: list[float] = []
    for event in often.work():
        if isinstance(event, Validated):
            result.append(event.iteration)
            assert event.result.n_data == 4 * 16
        if isinstance(event, Step):
            trained.append(event.loss)
    assert result == [1, 2, 3, 4, 5, 6]
    assert (
        often.trainable.session.n_plans_built == 3
    )  # of steps, validations and a gradient: one of each for the whole run
    assert trained == losses(start())


def test_the_adapter_is_the_trained_one(start: Open, model: Path, tmp_path: Path) -> None:
    base = start("full")
    trainer = start(ranks={"att_norm": 1, "ffn_norm": 2, "out_norm": 1})
    first = trainer.order.take(4)
    assert np.array_equal(trainer.steps.evaluate(first).losses, base.steps.evaluate(first).losses)
    losses(trainer)
    with GGUFFile.open(model) as gguf:
        h = hparams_of(gguf)
        save_result(tmp_path / "a.gguf", trainer.trainable, gguf, h)
        adapter = read_adapter(tmp_path / "a.gguf", gguf, h)
    assert adapter.alpha == 6.0
    values = trainer.trainable.read()
    assert all(np.array_equal(p.b, values[f"{n}.lora_b"]) for n, p in adapter.pairs.items())
    assert all(np.abs(p.b).max() > 0 for p in adapter.pairs.values())


def test_wrong_settings_are_told(start: Open) -> None:
    with pytest.raises(TrainingError, match="a batch of 0 samples of 16 tokens cannot be trained on"):
        start(batch_size=0)
    with pytest.raises(TrainingError, match="no tensor is named like nothing"):
        start("full", patterns=("nothing",))


def test_checkpointing_changes_memory_and_nothing_else(start: Open) -> None:
    sizes, result = [], []
    for on in (False, True):
        trainer = start("full", use_checkpointing=on, batch_size=8)
        result.append(losses(trainer))
        arena = trainer.trainable.session.arena(0, 0)
        assert arena is not None
        sizes.append(arena.nbytes)
    assert result[0] == result[1]
    assert sizes[1] < sizes[0]


Gradients = dict[str, np.ndarray]


@pytest.mark.parametrize("kind", [LORA, "full"])
@pytest.mark.parametrize("changes", [{}, {"grad_acc": 2}, {"sgd": True}], ids=["one run", "micro-batches", "sgd"])
def test_a_hook_that_changes_nothing_leaves_the_runs_bits(start: Open, kind: str, changes: dict[str, object]) -> None:
    seen: list[Gradients] = []
    returning = iter([True, False] * 3)

    def identity(gradients: Gradients) -> Gradients | None:
        seen.append(gradients)
        return gradients if next(returning) else None

    plain, hooked = start(kind, **changes), start(kind, on_gradients=identity, **changes)
    assert losses(hooked) == losses(plain)
    assert parameters(hooked) == parameters(plain)
    assert len(seen) == plain.counters.iterations == 6
    shapes = dict(zip(plain.trainable.names, (p.shape for p in plain.trainable.params), strict=True))
    assert all({name: g.shape for name, g in gradients.items()} == shapes for gradients in seen)
    assert len({g.tobytes() for g in (gradients[plain.trainable.names[-1]] for gradients in seen)}) == 6


def test_a_hook_gets_the_gradient_whose_norm_the_step_reports(start: Open) -> None:
    norms: list[float] = []

    def measure(gradients: Gradients) -> None:
        norms.append(float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))))

    reported: list[float] = []
    start("full", on_gradients=measure).fit(lambda e: reported.append(e.norm) if isinstance(e, Step) else None)
    np.testing.assert_allclose(reported, norms, rtol=1e-5)


def test_the_optimizer_uses_what_a_hook_returns(start: Open) -> None:
    """Gradients of zero leave plain SGD where it is; those of one tensor move that tensor alone."""
    sgd: dict[str, Any] = {"sgd": True, "weight_decay": 0.0}
    still = start("full", **sgd, on_gradients=lambda g: {name: 0 * x for name, x in g.items()})
    first = parameters(still)
    losses(still)
    assert parameters(still) == first
    alone = "blk.1.ffn_up.weight"
    moved = start("full", **sgd, on_gradients=lambda g: {name: 0 * x for name, x in g.items() if name != alone})
    losses(moved)
    assert [name for name, value in parameters(moved).items() if value != first[name]] == [alone]


def test_two_processes_that_average_their_gradients_train_as_one(start: Open) -> None:
    """Data parallel: each has half of the batch; the mean of their gradients is the gradient of the
    whole batch."""
    whole = start("full", batch_size=4, iterations=1)
    batch = whole.order.take(4)
    gradients: list[Gradients] = []
    for half in (batch[:2], batch[2:]):
        part = start("full", batch_size=2, on_gradients=gradients.append)
        outcome(part.steps.step([half], 1, 1e-2))
    mean = {name: (gradients[0][name] + gradients[1][name]) / 2 for name in gradients[0]}
    together: list[Gradients] = []
    outcome(start("full", batch_size=4, on_gradients=together.append).steps.step([batch], 1, 1e-2))
    for name, g in together[0].items():
        np.testing.assert_allclose(mean[name], g, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"nothing": np.zeros(3)}, "the gradient hook returned 'nothing', which is no parameter of this run"),
        ({"output_norm.weight": np.zeros(3)}, r"'output_norm.weight' of shape \(3,\), expected \(32,\)"),
    ],
)
def test_bad_return_value_of_hook_is_named(start: Open, returned: Gradients, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        start("full", on_gradients=lambda _: returned).fit()


def test_the_footprint_of_a_run_with_a_hook_counts_its_gradients(start: Open) -> None:
    (planned,) = start("full", on_gradients=lambda _: None).steps.footprint()
    assert planned.gradients == planned.parameters


@pytest.mark.parametrize(("kind", "checkpointing"), [("lora", True), ("full", False)])
def test_a_deep_models_step_is_planned(tmp_path: Path, session: Session, kind: str, checkpointing: bool) -> None:
    """96 layers leave more holes in the arena than a list of 256."""
    path = tmp_path / "deep.gguf"
    new_model(path, None, ModelShape(32, 96, 4, 2, 48, 0, n_ctx=64), seed=3)
    with GGUFFile.open(path) as gguf:
        adapter = LoraOptions(rank=3) if kind == "lora" else None
        trainable = trainable_of(session, gguf, hparams_of(gguf), n_ctx=16, adapter=adapter)
        steps = Steps(trainable, TrainingConfig(ctx_size=16, batch_size=2, use_checkpointing=checkpointing))
        ((placement, layout),) = session.measure_all([steps.everything])
    assert len(placement.order) > 96 * 100
    assert 0 < layout.sizes[0] < 1 << 27


# -- divergence


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(
    ("rates", "changes", "message"),
    [
        ({0: math.inf}, {"iterations": 3}, r"at step 2: loss (nan|inf|[\d.]+, gradient norm (nan|inf))"),
        ({2: math.inf}, {"iterations": 3}, r"at step 3: loss after it (nan|inf), gradient norm \d"),
        ({1: math.inf}, {"iterations": 9, "save_every": 2}, r"at step 2: loss after it (nan|inf), gradient norm \d"),
        ({1: math.inf}, {"iterations": 9, "validate_every": 2}, r"at step 2: loss after it (nan|inf), gradient"),
    ],
)
@pytest.mark.parametrize("sgd", [False, True])
def test_a_diverged_run_ends_and_writes_nothing(
    start: Open,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rates: dict[int, float],
    changes: dict[str, int],
    message: str,
    sgd: bool,
) -> None:
    """A rate without bound at one step: its loss is finite, and nothing is after it."""
    usual = 1.0 if sgd else 1e-2
    monkeypatch.setattr(RATE, lambda _, step, *more: rates.get(step, usual))
    trainer = start("full" if kind == "full" else LORA, sgd=sgd, **changes)
    events: list[object] = []
    with pytest.raises(TrainingDiverged, match=message):
        trainer.fit(events.append)
    assert all(np.isfinite([e.loss, e.norm]).all() for e in events if isinstance(e, Step))
    assert not any(isinstance(e, Save | Validated) for e in events)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_parameters_that_are_not_finite_are_never_written(
    start: Open, model: Path, tmp_path: Path, kind: str, value: float
) -> None:
    trainer = start("full" if kind == "full" else LORA)
    session, p = trainer.trainable.session, trainer.trainable.params[3]
    before = tmp_path / "out.gguf"
    before.write_bytes(b"an earlier result")
    spoiled = session.read(p.name).copy()
    spoiled.reshape(-1)[5] = value
    session.write(p.name, spoiled)
    with GGUFFile.open(model) as gguf, pytest.raises(TrainingDiverged, match="has a number that is NaN or infinite"):
        save_result(before, trainer.trainable, gguf, hparams_of(gguf))
    with pytest.raises(TrainingDiverged, match="has a number that is NaN or infinite"):
        save_checkpoint(before, trainer, "llama")
    assert before.read_bytes() == b"an earlier result"
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("part", ["lora_a", "first_moments", "second_moments"])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused(start: Open, tmp_path: Path, part: str) -> None:
    save_checkpoint(path := tmp_path / "c.gguf", start(LORA), "llama")
    reader = GGUFReader(path, "r+")
    spoiled = next(t for t in reader.tensors if part in t.name)
    spoiled.data.reshape(-1)[-1] = np.nan
    reader.data.flush()
    with pytest.raises(ModelFileError, match=rf"c.gguf: tensor '\S*{part}' has a number that is NaN or infinite"):
        read_checkpoint(path)


def test_numbers_too_large_for_the_files_type_are_refused(start: Open, model: Path, tmp_path: Path) -> None:
    trainer = start("full")
    session, p = trainer.trainable.session, trainer.trainable.params[-1]
    assert len(p.shape) == 2
    session.write(p.name, np.full(p.shape, 1e6, np.float32))
    with GGUFFile.open(model) as gguf:
        h = hparams_of(gguf)
        with pytest.raises(TrainingDiverged, match="too large for F16"):
            save_result(tmp_path / "out.gguf", trainer.trainable, gguf, h, "f16")
        save_result(tmp_path / "out.gguf", trainer.trainable, gguf, h, "bf16")  # has the range of f32


@pytest.mark.parametrize("at", [0, 2])
def test_a_step_whose_model_has_no_gradient_is_not_saved(start: Open, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Parameters so large that the loss is that of a guess, finite, and the next gradient is not."""
    monkeypatch.setattr(RATE, lambda _, step, *more: 1e8 if step == at else 1e-3)
    trainer = start("full", save_every=1)
    events: list[object] = []
    with pytest.raises(TrainingDiverged, match=rf"at step {at + 1}: loss after it \d.*, gradient norm nan"):
        trainer.fit(events.append)
    assert [e.iteration for e in events if isinstance(e, Save)] == list(range(1, at + 1))


@pytest.mark.parametrize("how", ["save", "save_checkpoint", "save_peft"])
@pytest.mark.parametrize("rate", [math.inf, 1e12])
def test_a_callback_that_saves_writes_no_model_that_has_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rate: float
) -> None:
    """The step before was sound, and its own loss is finite: what is saved is the model after it."""
    monkeypatch.setattr(RATE, lambda _, step, *more: rate if step == 1 else 1e-3)
    written: list[int] = []

    def save(event: object) -> None:
        if isinstance(event, Step):
            getattr(trainer, how)(tmp_path / f"{event.iteration}")
            written.append(event.iteration)

    rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 8
    options = {"ctx_size": 32, "batch_size": 4, "iterations": 4, "device": "cpu", "threads": 1}
    told = pytest.raises(logitless.TrainingError, match=r"at step 2: |a number that is NaN or infinite")
    with logitless.Trainer(None, rows, callbacks=[save], **options) as trainer, told:  # type: ignore[arg-type]
        trainer.fit()
    assert written == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_loss_that_falls_is_saved_without_another_gradient(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RATE, lambda *_: 1e-2)
    monkeypatch.setattr("logitless.training.trainer.GUESS", 1e3)
    trainer = start("full", save_every=1)
    monkeypatch.setattr(trainer.steps, "gradient_norm", None)  # a call raises
    assert trainer.fit().reason == f"{trainer.settings.iterations} iterations are done"


def test_a_validation_without_labels_is_no_divergence(start: Open) -> None:
    trainer = start(iterations=2)
    dataset, sample = trainer.order.dataset, trainer.order.dataset.sample
    held_out = set(trainer.validation_indices.tolist())

    def without_labels(i: int, rng: object) -> object:
        result = sample(i, rng)
        return replace(result, weights=0 * result.weights) if i in held_out else result

    dataset.sample = without_labels
    assert trainer.fit().reason == "2 iterations are done"

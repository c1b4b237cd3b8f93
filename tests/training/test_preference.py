"""Preference methods against the papers' formulas in float64, and whole runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.training.config import TrainingConfig
from logitless.training.data import packing
from logitless.training.errors import TrainingError
from logitless.training.methods.objective import TokenRows
from logitless.training.methods.registry import OBJECTIVES, objective
from logitless.training.run import FineTuning
from logitless.training.trainer import Measuring, Step, Validated

PAIRS = [
    {"prompt": f"{i} and {i} is ", "chosen": f"{2 * i}.", "rejected": f"{3 * i + 1}, or more, or less."}
    for i in range(16)
]
JUDGED = [{"prompt": f"{i} and {i} is ", "completion": f"{(2 + i % 2) * i}.", "label": i % 2 == 0} for i in range(16)]
CONFIG = TrainingConfig(
    ctx_size=64, batch_size=2, grad_acc=2, iterations=4, learning_rate=1e-2, weight_decay=0.1, lora_r=2
)
Rows = list[dict[str, Any]]


def run(model: Path, method: str, rows: Rows, on_gradients: Any = None, **fields: Any) -> FineTuning:
    config = replace(CONFIG, method=method, **fields)
    return FineTuning(Session([CPUBackend(1)]), model, rows, config, on_gradients=on_gradients)


# -- formulas of the papers, token by token


def sigma(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def dpo(rows: list[list[float]], reference: list[float], values: list[float]) -> float:
    """Equation 7 of arXiv 2305.18290, beta = 0.1."""
    total = 0.0
    for c, r in _twos(len(rows)):
        ratio = (sum(rows[c]) - reference[c]) - (sum(rows[r]) - reference[r])
        total -= np.log(sigma(0.1 * ratio))
    return total / (len(rows) / 2)


def _twos(n: int) -> Iterator[tuple[int, int]]:
    return zip(range(0, n, 2), range(1, n, 2), strict=True)


def orpo(rows: list[list[float]], reference: list[float], values: list[float]) -> float:
    """Equations 4 to 7 of arXiv 2403.07691, lambda = 0.1."""
    ratios, chosen = 0.0, []
    for c, r in _twos(len(rows)):
        pc, pr = np.exp(np.mean(rows[c])), np.exp(np.mean(rows[r]))
        ratios -= np.log(sigma(np.log((pc / (1 - pc)) / (pr / (1 - pr)))))
        chosen += rows[c]
    return float(-np.mean(chosen) + 0.1 * ratios / (len(rows) / 2))


def simpo(rows: list[list[float]], reference: list[float], values: list[float]) -> float:
    """Equation 6 of arXiv 2405.14734, beta = 2, gamma = 1."""
    losses = [-np.log(sigma(2 * np.mean(rows[c]) - 2 * np.mean(rows[r]) - 1)) for c, r in _twos(len(rows))]
    return float(np.mean(losses))


def kto(rows: list[list[float]], reference: list[float], values: list[float], z: float | None = None) -> float:
    """Equation 8 of arXiv 2402.01306 as a loss: weight − value, with both weights 1 and beta = 0.1."""
    if z is None:
        z = kl(rows, reference)
    losses = []
    for own, _ in _twos(len(rows)):
        reward = sum(rows[own]) - reference[own]
        losses.append(1 - sigma(0.1 * (reward - z) if values[own] > 0 else 0.1 * (z - reward)))
    return float(np.mean(losses))


def kl(rows: list[list[float]], reference: list[float]) -> float:
    return max(0.0, float(np.mean([sum(rows[other]) - reference[other] for _, other in _twos(len(rows))])))


FORMULAS: dict[str, Callable[..., float]] = {"dpo": dpo, "orpo": orpo, "simpo": simpo, "kto": kto}


@pytest.mark.parametrize("method", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_slopes_are_the_papers(method: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 8)
    log_probs = -rng.exponential(1.5, lengths.sum())
    row = np.repeat(np.arange(8), lengths)
    reference = np.bincount(row, log_probs, 8) - rng.normal(0.5 * seed, 2, 8)
    values = np.array([1, 0, -1, 0, 1, 0, -1, 0]) if method == "kto" else np.tile([1.0, -1.0], 4)
    learner = objective(method)
    assert learner is not None

    def formula(x: np.ndarray) -> float:
        rows = [x[row == i].tolist() for i in range(8)]
        if method != "kto":
            return FORMULAS[method](rows, reference.tolist(), values.tolist())
        z = kl([log_probs[row == i].tolist() for i in range(8)], reference.tolist())  # has no gradient
        return kto(rows, reference.tolist(), values.tolist(), z)

    result = learner.measure(TokenRows(log_probs, row, values.astype(np.float64), reference))
    assert result.loss == pytest.approx(formula(log_probs), rel=1e-9)
    h = 1e-5
    for i in range(len(log_probs)):
        step = np.zeros(len(log_probs))
        step[i] = h
        slope = (formula(log_probs + step) - formula(log_probs - step)) / (2 * h)
        assert result.slopes[i] == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("method", OBJECTIVES)
def test_extreme_log_probabilities_have_finite_losses(method: str) -> None:
    learner = objective(method)
    assert learner is not None
    for log_probs in ([0.0, -9000.0], [-9000.0, 0.0], [0.0, 0.0]):
        rows = TokenRows(np.array(log_probs), np.arange(2), np.array([1.0, -1.0]), np.zeros(2))
        result = learner.measure(rows)
        assert np.isfinite(result.loss)
        assert np.isfinite(result.slopes).all()


# -- runs


def fitted(run: FineTuning) -> list[Any]:
    events: list[Any] = []
    run.fit(events.append)
    return events


@pytest.mark.parametrize("method", OBJECTIVES)
def test_a_run_learns_the_preference(model: Path, method: str) -> None:
    rows = JUDGED if method == "kto" else PAIRS
    with run(model, method, rows, batch_size=4, grad_acc=1, iterations=24, val_split=0.25) as fine_tuning:
        events = fitted(fine_tuning)
        reference = fine_tuning.trainer.reference
    steps = [e for e in events if isinstance(e, Step)]
    validated = [e for e in events if isinstance(e, Validated)]
    assert (reference is not None) == any(isinstance(e, Measuring) for e in events) == (method in ("dpo", "kto"))
    if method == "dpo":  # nothing is learned yet, and the policy is its reference to the last bit
        assert steps[0].loss == pytest.approx(np.log(2), rel=1e-15)
        assert steps[0].metrics["reward_margin"] == 0
    if method == "kto":
        assert steps[0].loss == 0.5
    assert steps[-1].loss < steps[0].loss
    assert validated[-1].result.n_data == 4
    assert validated[-1].result.metrics["reward_accuracy"] == validated[-1].result.accuracy
    if method != "kto":
        assert validated[-1].result.accuracy > 0.7


def test_windows_and_device_runs_do_not_matter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All windows of a step in one device run, and one window each: the losses are the same."""
    losses = []
    for tokens, n_runs in ((4096, 1), (1, 7)):
        monkeypatch.setattr(packing, "RUN_TOKENS", tokens)
        with run(model, "dpo", PAIRS, batch_size=8, iterations=3) as fine_tuning:
            assert fine_tuning.trainer.settings.grad_acc >= n_runs
            losses.append([e.loss for e in fitted(fine_tuning) if isinstance(e, Step)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_gradient_is_that_of_the_loss(model: Path) -> None:
    """Of all weights: a small step along the gradient changes the loss by its length."""
    gradients: list[dict[str, np.ndarray]] = []
    rate = 1e-4
    fields = {"batch_size": 16, "grad_acc": 1, "iterations": 2, "learning_rate": rate, "optimizer": "sgd"}
    fields |= {"weight_decay": 0.0, "full": True, "lora_r": 4}
    with run(model, "orpo", PAIRS, gradients.append, **fields) as fine_tuning:
        first, second = (e for e in fitted(fine_tuning) if isinstance(e, Step))
    square = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients[0].values())
    assert first.norm == pytest.approx(np.sqrt(square), rel=1e-5)
    assert second.loss - first.loss == pytest.approx(-rate * square, rel=0.02)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_resumed_run_goes_on_to_the_same_bytes(model: Path, tmp_path: Path, method: str) -> None:
    rows = JUDGED if method == "kto" else PAIRS
    results = []
    for stop in (4, 2):
        with run(model, method, rows, iterations=stop, val_split=0.2) as fine_tuning:
            fine_tuning.fit()
            fine_tuning.save_checkpoint(tmp_path / "c.gguf")
            fine_tuning.save(tmp_path / "a.gguf")
        results.append((tmp_path / "a.gguf").read_bytes())
    with run(model, method, rows, val_split=0.2) as fine_tuning:
        assert fine_tuning.resume(tmp_path / "c.gguf")
        events = fitted(fine_tuning)
        fine_tuning.save(tmp_path / "a.gguf")
    assert not any(isinstance(e, Measuring) for e in events)  # the reference is the checkpoint's
    assert (tmp_path / "a.gguf").read_bytes() == results[0] != results[1]
    with run(model, "orpo", PAIRS) as other, pytest.raises(TrainingError, match=f"is a checkpoint of method {method}"):
        other.resume(tmp_path / "c.gguf")
    with run(model, method, rows[:-2]) as other, pytest.raises(TrainingError, match="of other data"):
        other.resume(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("method", "rows", "told"),
    [
        ("dpo", JUDGED, "line 1: is a judged answer"),
        ("dpo", [{"text": "a"}], "line 1: is a text .*; this method learns from pairs"),
        ("kto", [{"prompt": "a", "completion": "b"}], "line 1: is a prompt with its completion"),
        ("kto", JUDGED[:1], "has one example, and kto needs at least two"),
        ("supervised", PAIRS, "line 1: is a pair of answers .*choose a method of preference"),
        ("dpo", [{"prompt": "a", "chosen": "", "rejected": "b"}], "line 1: field 'chosen' is empty"),
    ],
)
def test_rows_of_another_method_are_named(model: Path, method: str, rows: Rows, told: str) -> None:
    with pytest.raises(TrainingError, match=f"rows: {told}"):
        run(model, method, rows)


def test_methods_and_their_hyperparameters_are_checked() -> None:
    with pytest.raises(TrainingError, match="method 'ppo' is not one of supervised, dpo, orpo, kto, simpo"):
        objective("ppo")
    with pytest.raises(TrainingError, match="gamma is of simpo, and the method is dpo"):
        objective("dpo", {"gamma": 1.0})
    with pytest.raises(TrainingError, match="beta is of dpo, orpo, kto, simpo, and the method is supervised"):
        objective("supervised", {"beta": 1.0})


def test_rows_beyond_the_context_lose_their_end_and_are_counted(model: Path) -> None:
    long = {"prompt": "a", "chosen": "b" * 100, "rejected": "c"}
    hopeless = {"prompt": "a" * 100, "chosen": "b", "rejected": "c"}
    with run(model, "dpo", [*PAIRS, long, hopeless]) as fine_tuning:
        assert len(fine_tuning.trainer.order) == 17
        cut, dropped = fine_tuning.warnings
    assert cut.startswith("2 of 18 examples are longer than the context of 64 tokens (the longest has 103)")
    assert dropped == "1 of 18 examples have no token to learn and are dropped"

"""GRPO against its formula, and the trainer's log-probabilities against the sampler's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from logitless.engine.finetuning.rollouts import Rollouts
from logitless.engine.loading.open_model import OpenModel, open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.runner.model_runner import ModelRunner
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.graph.backend import Backend
from logitless.models.synthetic.model import ModelShape
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.config import TrainingConfig
from logitless.training.data.prompts import Prompts
from logitless.training.data.sampler import ExampleSampler
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import Grade
from logitless.training.methods.grpo import GRPO, of_answers
from logitless.training.policy.reinforcement import (
    Answer,
    AskTools,
    PolicyBatch,
    ReinforcementTrainer,
    ToolTurn,
    reference_steps,
)
from logitless.training.policy.served_forward import ServedForward
from logitless.training.scratch import new_model
from logitless.training.step import Steps, outcome
from logitless.training.trainable import Trainable
from logitless.training.trainer import Settled, Step

F64 = np.ndarray[Any, np.dtype[np.float64]]
LENGTH = 64
CONFIG = TrainingConfig(batch_size=2, ctx_size=LENGTH, weight_decay=0.1)


# -- the formula


def by_formula(x: F64, y: F64, reference: F64 | None, row: F64, a: F64, g: GRPO) -> float:
    """Equation 3 of arXiv 2402.03300 with its equation 4, of one batch, token by token."""
    total, n = 0.0, len(a)
    for i in range(n):
        own = 0.0
        for x_t, y_t, r_t in zip(
            x[row == i], y[row == i], (x if reference is None else reference)[row == i], strict=True
        ):
            ratio = np.exp(x_t - y_t)
            clipped = min(max(ratio, 1 - g.clip), 1 + g.clip)
            kl = np.exp(r_t - x_t) - (r_t - x_t) - 1
            own += min(ratio * a[i], clipped * a[i]) - g.beta * kl
        total += own / ((row == i).sum() if g.loss_type == "grpo" else g.max_tokens)
    return -total / n


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_slopes_are_the_formulas(loss_type: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    g = GRPO(n_samples=4, max_tokens=9, beta=0.1 * seed, loss_type=loss_type)
    row = np.repeat(np.arange(8), rng.integers(1, 9, 8))
    old = -rng.exponential(1.5, len(row))
    new = old + rng.normal(0, 0.3, len(row))
    reference = None if not seed else old + rng.normal(0, 0.5, len(row))
    a = g.advantages(rng.normal(size=(2, 4))).reshape(-1)
    result = g.measure(new, old, reference, row, a)
    assert result.loss == pytest.approx(by_formula(new, old, reference, row, a, g), rel=1e-12)
    for i in range(len(row)):
        up, down = new.copy(), new.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        slope = (by_formula(up, old, reference, row, a, g) - by_formula(down, old, reference, row, a, g)) / 2e-6
        assert result.slopes[i] == pytest.approx(slope, abs=1e-8)


def test_advantages_compare_the_answers_to_one_prompt() -> None:
    rewards = np.array([[1.0, 0, 0, 0], [3, 3, 3, 3], [np.nan, 1, 2, np.nan], [np.nan, np.nan, 5, np.nan]])
    plain = GRPO(loss_type="dr_grpo").advantages(rewards)
    np.testing.assert_array_equal(plain, [[0.75, -0.25, -0.25, -0.25], [0] * 4, [0, -0.5, 0.5, 0], [0] * 4])
    scaled = GRPO().advantages(rewards)
    np.testing.assert_allclose(scaled[0], plain[0] / (np.std(rewards[0], ddof=1) + 1e-4))
    np.testing.assert_allclose(scaled[2][1:3], plain[2][1:3] / (np.std([1, 2], ddof=1) + 1e-4))


def test_batches_are_kept_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    answers = tuple(
        Answer(rng.integers(0, 99, n).astype(np.int32), -rng.exponential(size=n).astype(np.float32)) for n in (3, 1, 4)
    )
    results = np.array([7, 8], np.int32)
    answers = (*answers[:2], answers[2].continued(results, answers[0]))
    prompts = tuple(np.arange(n, dtype=np.int32) for n in (2, 5, 1))
    batch = PolicyBatch(prompts, answers, np.array([[0.1, np.nan, 3]]), tuple(a.log_probs * 2 for a in answers), 1)
    back = PolicyBatch.of_arrays(batch.arrays())
    np.testing.assert_array_equal(back.rewards, batch.rewards)
    assert back.n_done == 1
    tokens = [[*b.prompts, *(a.tokens for a in b.answers)] for b in (batch, back)]
    for mine, other in zip(*tokens, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert back.reference is not None
    for a, b, r in zip(answers, back.answers, back.reference, strict=True):
        assert a.log_probs.tobytes() == b.log_probs.tobytes()
        assert r.tobytes() == (a.log_probs * 2).tobytes()
        assert a.is_sampled.tolist() == b.is_sampled.tolist()
    assert back.answers[2].is_sampled.tolist() == [True] * 4 + [False] * 2 + [True] * 3


# -- the trainer and the sampler


class Run:
    """A model that answers requests while an adapter of it is trained."""

    def __init__(self, path: Path, device: str = "cpu", **options: Any) -> None:
        self.model: OpenModel = open_model(path, ModelOptions(device=device, ctx_size=4 * LENGTH, **options))
        self.runner: ModelRunner = self.model.engine()
        self.runner.load()
        self.scheduler: Scheduler = self.model.scheduler(self.runner)
        self.types = self.runner.options.type_k, self.runner.options.type_v
        self.trainable: Trainable = lora(self.runner.session, self.runner.model, LoraOptions(4, seed=1), "run")
        rng = np.random.default_rng(2)
        for name, p in zip(self.trainable.names, self.trainable.params, strict=True):
            if name.endswith("lora_b"):  # an adapter that changes something
                self.runner.session.write(p.name, rng.normal(0, 0.1, p.shape).astype(np.float32))
        self.policy = Rollouts(self.scheduler, self.runner, self.trainable.model, "run")

    def served(self, n: int = 2, prefix: str = "run") -> ServedForward:
        return ServedForward.define(self.runner.session, self.runner.hparams, n, LENGTH, self.types, prefix)

    def trainer(
        self,
        prompts: list[list[int]],
        reward: Callable[[Any, Any], float],
        ask_tools: AskTools | None = None,
        **grpo: Any,
    ) -> ReinforcementTrainer:
        ids = tuple(np.array(p, np.int32) for p in prompts)
        order = ExampleSampler(Prompts(ids, ({},) * len(ids)), np.arange(len(ids), dtype=np.int32), "prompts")
        settings = replace(CONFIG, batch_examples=2, epochs=4, learning_rate=3e-3)
        served = self.served()
        beta = grpo.get("beta", 0.0)
        runner = self.runner
        base = reference_steps(runner.session, runner.model, settings, served, "run") if beta else None
        return ReinforcementTrainer(
            self.trainable,
            settings,
            order,
            np.zeros(0, np.int32),
            grpo=GRPO(n_samples=4, max_tokens=12, **grpo),
            policy=self.policy,
            grade=lambda answers: [Grade(reward(*answer)) for answer in answers],
            ask_tools=ask_tools,
            reference=base,
            prefix="run",
            served=served,
        )

    def close(self) -> None:
        self.runner.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    new_model(tmp_path / "m.gguf", None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=256), seed=3)
    return tmp_path / "m.gguf"


@pytest.fixture
def run(model: Path) -> Iterator[Run]:
    result = Run(model, threads=1)
    yield result
    result.close()


def answers_of(run: Run, n: int, n_tokens: int) -> tuple[list[Any], list[Answer]]:
    prompts = [np.array([1, 70 + i % 7, 100, 40 + i % 3][: 2 + i % 3], np.int32) for i in range(n)]
    return prompts, outcome(run.policy.sample(prompts, list(range(n)), [n_tokens] * n, 0))


def assert_same_log_probs(run: Run, n: int) -> None:
    """The trainer's log-probabilities of sampled tokens are the sampler's, bit for bit."""
    trainer = run.trainer([[1, 70], [1, 71]], lambda *_: 0.0)
    prompts, answers = answers_of(run, -(-n // 48), 48)
    log_probs = _all(trainer._log_probs(trainer.steps, prompts, answers))
    assert sum(len(a.tokens) for a in answers) >= 0.9 * n
    for answer, own in zip(answers, log_probs, strict=True):
        assert answer.log_probs.tobytes() == own.tobytes()


def _all(events: Any) -> Any:
    while True:
        try:
            next(events)
        except StopIteration as done:
            return done.value


@pytest.mark.parametrize("device", ["cpu", "opencl", "vulkan"])
def test_samplers_log_probabilities_are_the_trainers(
    model: Path, device: str, open_device: Callable[[str], Backend], request: pytest.FixtureRequest
) -> None:
    if device != "cpu":
        open_device(device)  # skips without it
    run = Run(model, device)
    assert_same_log_probs(run, 10_000 if request.config.getoption("--long") else 480 if device == "cpu" else 192)
    run.close()


def test_turns_behind_tools_are_sampled_and_learned_alone(run: Run) -> None:
    """A tool is called by every answer of less than 10 tokens: its two tokens have no log-probability and no gradient,
    and what is sampled behind them has the trainer's log-probabilities to the bit."""
    results, graded = np.array([50, 51], np.int32), []

    def ask_tools(answers: Any) -> list[ToolTurn]:
        return [ToolTurn(results if len(tokens) < 10 else None) for tokens, _ in answers]

    def reward(tokens: Any, _: Any) -> float:
        graded.append(tokens)
        return float(tokens.sum() % 7)

    def short(prompts: Any, seeds: Any, most: Any, version: int) -> Any:
        return sample(prompts, seeds, [min(n, 4) for n in most], version)

    trainer, sample = run.trainer([[1, 70], [1, 71]], reward, ask_tools, max_tool_turns=2), run.policy.sample
    run.policy.sample = short  # type: ignore[method-assign]
    _all(trainer._next_batch())
    batch = trainer.batch
    assert batch is not None
    for answer, tokens in zip(batch.answers, graded, strict=True):
        assert answer.tokens[4:6].tolist() == results.tolist()
        assert answer.is_sampled.tolist() == [True] * 4 + [False] * 2 + [True] * 4  # of 12
        assert tokens.tolist() == answer.tokens[answer.is_sampled].tolist()
    own = _all(trainer._log_probs(trainer.steps, batch.prompts, batch.answers))
    for answer, log_probs in zip(batch.answers, own, strict=True):
        assert answer.log_probs.tobytes() == log_probs.tobytes()
    _, windows = _all(trainer._measured_batch(batch))
    learned = sum(int((window.weights != 0).sum()) for window in windows)
    assert learned == sum(8 for reward in trainer.grpo.advantages(batch.rewards).reshape(-1) if reward)


def test_calls_that_never_have_results_end_the_run(run: Run) -> None:
    def ask_tools(answers: Any) -> list[ToolTurn]:
        return [ToolTurn(problem="the endpoint answers 500") for _ in answers]

    trainer = run.trainer([[1, 70], [1, 71]], lambda *_: 0.0, ask_tools, max_tool_turns=1)
    with pytest.raises(TrainingError, match=r"^8 calls of tools have no results: the endpoint answers 500$"):
        _all(trainer._next_batch())


def test_the_trainers_own_forward_pass_rounds_otherwise(run: Run) -> None:
    """What the test above is worth: another sum of the same numbers differs."""
    trainer = run.trainer([[1, 70], [1, 71]], lambda *_: 0.0)
    prompts, answers = answers_of(run, 4, 48)
    plain = Steps(run.trainable, CONFIG, prefix="plain")
    served = _all(trainer._log_probs(trainer.steps, prompts, answers))
    own = _all(trainer._log_probs(plain, prompts, answers))
    assert any(a.tobytes() != b.tobytes() for a, b in zip(served, own, strict=True))
    for a, b in zip(served, own, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_gradients_are_those_of_the_trainers_own_graph(model: Path) -> None:
    run = Run(model, threads=1, cache_type_k="f32", cache_type_v="f32")
    trainer = run.trainer([[1, 70], [1, 71]], lambda *_: 0.0)
    prompts, answers = answers_of(run, 3, 20)
    windows = trainer._windows(prompts, answers)
    result: list[dict[str, Any]] = []
    for served in (run.served(prefix="other"), None):
        steps = Steps(
            run.trainable, CONFIG, prefix=f"{served is None}", on_gradients=lambda g: result.append(g), served=served
        )
        outcome(steps.step([windows], 1, 0.0))
    for name, gradient in result[0].items():
        np.testing.assert_allclose(gradient, result[1][name], rtol=1e-3, atol=1e-4 * np.abs(gradient).max())
    run.close()


@pytest.mark.parametrize("n_updates", [1, 2, 3])
def test_an_epoch_ends_with_the_last_step_on_its_last_answers(run: Run, n_updates: int) -> None:
    """Three prompts, two a batch: an epoch has two batches. The same, if the run is left behind any batch's sampling
    and goes on from there."""

    def rewards(tokens: Any, _: Any) -> float:
        return float(np.mean(tokens % 2))

    trainer = run.trainer([[1, 70], [1, 71], [1, 72]], rewards, n_updates=n_updates)
    ends, n_epochs = [], 0
    events = trainer.work()
    while (event := next(events, None)) is not None:
        if isinstance(event, Step):
            assert trainer.counters.epochs - event.epoch in (0, 1)
            assert event.epoch == n_epochs
            if trainer.counters.epochs > event.epoch:
                ends.append(event.iteration)
            n_epochs = trainer.counters.epochs
        elif isinstance(event, Settled) and event.keep:  # a kill
            state = trainer.state()
            events.close()
            assert trainer.restore(state)
            events = trainer.work()
    assert ends == [2 * n_updates * (i + 1) for i in range(4)]
    assert trainer.counters.iterations == trainer.n_steps == 8 * n_updates


def test_first_steps_are_on_policy_and_later_ones_are_not(run: Run) -> None:
    def rewards(tokens: Any, _: Any) -> float:
        return float(np.mean(tokens % 2))

    trainer = run.trainer([[1, 70], [1, 71], [1, 72]], rewards, n_updates=2, beta=0.05)
    ratios, kls = [], []
    for event in trainer.work():
        if isinstance(event, Settled) and event.keep:
            batch = trainer.batch
            assert batch is not None
            prompts, answers = list(batch.prompts), list(batch.answers)
            own, _ = of_answers(_all(trainer._log_probs(trainer.steps, prompts, answers)))
            told, _ = of_answers([a.log_probs for a in answers])
            assert (np.exp(own - told) == 1).all()
        if isinstance(event, Step):
            ratios.append(event.metrics["ratio"])
            kls.append(event.metrics["kl"])
    assert len(ratios) == trainer.n_steps == 16
    assert ratios[::2] == [1.0] * 8
    assert all(ratio != 1 for ratio in ratios[1::2])
    assert all(kl > 0 for kl in kls)

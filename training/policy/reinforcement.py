"""Reinforcement learning: sampled answers are graded, and the better ones become more likely.

A batch is `n_samples` answers to each of some prompts, by the weights of the moment. The first
optimizer step on it needs no forward pass of its own: the log-probabilities that the sampler told
are the trainer's (training/policy/served_forward.py), so all ratios are 1. What a batch is made of (tokens,
log-probabilities, rewards) is part of the run's state; seeds follow from its place in the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from logitless.graph.execution.session import Session
from logitless.models.model import Model
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Groups, Sample
from logitless.training.data.prompts import Prompts
from logitless.training.data.sampler import ExampleSampler
from logitless.training.data.tokenize_rows import I32, Example
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import Grade
from logitless.training.methods.grpo import GRPO, PolicyLoss, of_answers, reward_metrics
from logitless.training.methods.objective import F64
from logitless.training.policy.served_forward import ALIGNMENT, ServedForward
from logitless.training.reporting.results import Result, means
from logitless.training.step import Slice, Steps
from logitless.training.trainable import FULL, Trainable
from logitless.training.trainer import (
    Control,
    Event,
    LogMessage,
    OffDeviceWork,
    Settled,
    Step,
    Trainer,
    Validated,
    Validating,
    n_steps_of,
)

F32 = npt.NDArray[np.float32]
Answered = Sequence[tuple[I32, Mapping[str, Any]]]  # sampled tokens of answers, with the items that they answer
GradeAll = Callable[[Answered], list[Grade]]  # their grades, in order
_OF_BATCH, _OF_VALIDATION = 5, 6  # of seeds
SLICES = 16  # of sampling, after which the run may be paused or cancelled


@dataclass(frozen=True)
class Answer:
    """A sampled answer: its tokens, with the one that ends it, and the log-probabilities of those
    that were sampled. `inserted` (n,): True for the tokens of tools' results; None: there are none."""

    tokens: I32
    log_probs: F32
    inserted: npt.NDArray[np.bool_] | None = None

    @property
    def is_sampled(self) -> npt.NDArray[np.bool_]:
        """(n,) True for the tokens that the model sampled."""
        return np.ones(len(self.tokens), bool) if self.inserted is None else ~self.inserted

    def continued(self, results: I32, turn: Answer) -> Answer:
        """The answer with tools' results, and a turn that goes on from them."""
        tokens = np.concatenate([self.tokens, results, turn.tokens]).astype(np.int32)
        inserted = np.concatenate([~self.is_sampled, np.ones(len(results), bool), ~turn.is_sampled])
        return Answer(tokens, np.concatenate([self.log_probs, turn.log_probs]), inserted)


@dataclass(frozen=True)
class ToolTurn:
    """Results of the tools that an answer calls at its end. `tokens`: the results as the chat
    template writes them, up to the next turn's begin; None: no tool is called, or `problem` says why
    there are none. `timed_out`: it is that time ran out."""

    tokens: I32 | None = None
    problem: str = ""
    timed_out: bool = False


AskTools = Callable[[Answered], list[ToolTurn]]  # of each answer, in order
T = TypeVar("T")
Sampling = Generator[Slice | OffDeviceWork, None, T]  # by slices of the device's time, or by other processes


class Policy(Protocol):
    """Samples from the weights that are being trained, as they are."""

    def sample(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: Sequence[int], version: int
    ) -> Sampling[list[Answer]]:
        """An answer to each prompt, each by its own seed and of at most so many tokens, in slices.
        `version`: changes with the weights."""
        ...


@dataclass(frozen=True)
class PolicyBatch:
    """R answers that are learned from. `n_done`: optimizer steps on it so far."""

    prompts: tuple[I32, ...]
    answers: tuple[Answer, ...]
    rewards: F64  # (P, n); NaN: not graded
    reference: tuple[F32, ...] | None  # log-probabilities before the run
    n_done: int = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All of it, as a checkpoint keeps it: int32 and float64."""
        measured: dict[str, npt.NDArray[Any]] = {
            "shape": np.array([*self.rewards.shape, self.n_done], np.int32),
            "prompt_lengths": np.array([len(ids) for ids in self.prompts], np.int32),
            "prompt_tokens": np.concatenate(self.prompts).astype(np.int32),
            "answer_lengths": np.array([len(a.tokens) for a in self.answers], np.int32),
            "answer_tokens": np.concatenate([a.tokens for a in self.answers]).astype(np.int32),
            "answer_sampled": np.concatenate([a.is_sampled for a in self.answers]).astype(np.int32),
            "log_probs": np.concatenate([a.log_probs for a in self.answers]).astype(np.float64),
            "rewards": self.rewards.reshape(-1),
        }
        if self.reference is not None:
            measured["reference"] = np.concatenate(self.reference).astype(np.float64)
        return measured

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> PolicyBatch:
        n_prompts, n, n_done = arrays["shape"].tolist()

        def parts(name: str, lengths: npt.NDArray[Any], kind: Any) -> list[npt.NDArray[Any]]:
            return np.split(arrays[name].astype(kind), np.cumsum(lengths)[:-1])

        lengths = arrays["answer_lengths"]
        sampled = parts("answer_sampled", lengths, bool)
        n_sampled = np.array([part.sum() for part in sampled])
        tokens, log_probs = parts("answer_tokens", lengths, np.int32), parts("log_probs", n_sampled, np.float32)
        inserted = [None if part.all() else ~part for part in sampled]
        reference = parts("reference", n_sampled, np.float32) if "reference" in arrays else None
        return cls(
            tuple(parts("prompt_tokens", arrays["prompt_lengths"], np.int32)),
            tuple(map(Answer, tokens, log_probs, inserted)),
            arrays["rewards"].reshape(n_prompts, n),
            None if reference is None else tuple(reference),
            n_done,
        )


class ReinforcementTrainer(Trainer):
    """A run that learns from rewards. The examples of its order are prompts."""

    def __init__(
        self,
        *args: Any,
        grpo: GRPO,
        policy: Policy,
        grade: GradeAll,
        ask_tools: AskTools | None = None,
        reference: Steps | None = None,
        **named: Any,
    ) -> None:
        """As a Trainer. `ask_tools`: answers the calls of up to `grpo.max_tool_turns` turns of an
        answer. `reference`: graphs of the weights that a `beta` above 0 holds on to."""
        super().__init__(*args, **named)
        self.grpo, self.policy, self.grade, self._reference_steps = grpo, policy, grade, reference
        self._ask_tools = ask_tools
        self.batch: PolicyBatch | None = None
        self._order_before: dict[str, Any] | None = None
        self.steps.accumulates()
        if grpo.beta > 0 and reference is None:
            raise TrainingError("beta needs a reference")

    @property
    def method(self) -> str:
        return self.grpo.NAME

    @property
    def n_steps(self) -> int:
        assert isinstance(self.order, ExampleSampler)
        return n_steps_of(self.order, self.settings, self.grpo)

    @property
    def _epoch(self) -> int:
        # `samples` has those of a batch that is sampled, also before its steps
        return self.counters.epochs

    @property
    def _prompts(self) -> Prompts:
        dataset: Any = self.order.dataset
        return dataset  # type: ignore[no-any-return]

    def _step(self, control: Control) -> Generator[Event, None, Step]:
        s, c = self.settings, self.counters
        if self.batch is None or self.batch.n_done == self.grpo.n_updates:
            yield from self._next_batch()
        batch = self.batch
        assert batch is not None
        measured, windows = yield from self._measured_batch(batch)
        batches = [windows[i : i + s.batch_size] for i in range(0, len(windows), s.batch_size)]
        _, norm = yield from self.steps.step(batches, c.iterations + 1, control.rate, 1.0)
        self.batch = replace(batch, n_done=batch.n_done + 1)
        c.iterations += 1
        c.tokens += sum(len(a.tokens) for a in batch.answers)
        self.just_initialized = False
        metrics = {**reward_metrics(batch.rewards), **measured.metrics}
        if self.batch.n_done == self.grpo.n_updates:
            c.epochs = c.samples // len(self.order)
        self.epoch_result.add(measured.loss, len(batch.answers), 0, metrics)
        summary = means(metrics)
        return Step(
            c.iterations,
            self.n_steps,
            control.epoch,
            (c.samples - 1) % len(self.order) + 1,
            len(self.order),
            measured.loss,
            summary.get("mean_reward", math.nan),
            norm,
            control.rate,
            self._factor(control),
            len(windows) * s.n_ctx,
            self.epoch_result,
            summary,
        )

    # -- batches

    def _next_batch(self) -> Generator[Event, None, None]:
        """Sample and grade the next answers."""
        n, first = self.grpo.n_samples, self.counters.samples
        assert isinstance(self.order, ExampleSampler)
        self._order_before = self.order.state()  # until the batch is there, the run has not changed
        indices = self.order.draw(self.settings.n_logical)
        seeds = [_seed(self.order.seed, _OF_BATCH, first + i, k) for i in range(len(indices)) for k in range(n)]
        prompts, items = self._repeated(indices, n)
        answers = yield from self._answers(prompts, items, seeds)
        rewards = yield from self._graded(answers, items)
        reference = None
        if self.grpo.beta > 0:
            assert self._reference_steps is not None
            reference = yield from self._log_probs(self._reference_steps, prompts, answers)
        if not self.steps.is_served:  # the server rounds otherwise than the trainer
            own = yield from self._log_probs(self.steps, prompts, answers)
            answers = [replace(a, log_probs=x) for a, x in zip(answers, own, strict=True)]
        self.batch = PolicyBatch(
            tuple(prompts), tuple(answers), rewards.reshape(-1, n), None if reference is None else tuple(reference)
        )
        self.counters.samples += len(indices)
        self._order_before = None
        yield Settled(keep=True)

    def _answers(
        self, prompts: Sequence[I32], items: Sequence[Mapping[str, Any]], seeds: Sequence[int], *, settles: bool = True
    ) -> Generator[Event, None, list[Answer]]:
        """Answers with the turns that follow tools' results. See `_sampled`."""
        most = self.grpo.max_tokens
        answers = yield from self._sampled(prompts, seeds, [most] * len(prompts), settles=settles)
        for turn in range(1, 1 + (self.grpo.max_tool_turns if self._ask_tools is not None else 0)):
            results = yield from self._tool_results(answers, items)
            results = {i: ids for i, ids in results.items() if len(answers[i].tokens) + len(ids) < most}
            if not results:
                break
            begun = [np.concatenate([prompts[i], answers[i].tokens, ids]) for i, ids in results.items()]
            room = [most - len(answers[i].tokens) - len(ids) for i, ids in results.items()]
            of_turn = [_seed(seeds[i], turn) for i in results]
            turns = yield from self._sampled(begun, of_turn, room, settles=settles)
            for (i, ids), answer in zip(results.items(), turns, strict=True):
                answers[i] = answers[i].continued(ids, answer)
        return answers

    def _tool_results(
        self, answers: Sequence[Answer], items: Sequence[Mapping[str, Any]]
    ) -> Generator[Event, None, dict[int, I32]]:
        """Results of the tools that answers call at their ends, by the answers' indices.
        TrainingError: there are none for any call."""
        conversations, ask = _answered(answers, items), self._ask_tools
        assert ask is not None
        work = OffDeviceWork(lambda: ask(conversations))
        yield work
        turns: list[ToolTurn] = work.outcome()
        problems = [turn.problem for turn in turns if turn.problem]
        results = {i: turn.tokens for i, turn in enumerate(turns) if turn.tokens is not None}
        if problems:
            summary = f"{len(problems)} calls of tools have no results: {problems[0][:300]}"
            if not results:
                raise TrainingError(summary)
            yield LogMessage(f"{summary}; their answers end there", "warn")
        return results

    def _sampled(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: Sequence[int], *, settles: bool
    ) -> Generator[Event, None, list[Answer]]:
        """Answers by the weights of the moment. `settles`: the run may be left between two slices,
        because it samples the same ones again."""
        sampling = self.policy.sample(prompts, seeds, max_tokens, self.counters.iterations)
        n = 0
        try:
            while True:
                yield next(sampling)
                n += 1
                if settles and n % SLICES == 0:
                    yield Settled()
        except StopIteration as done:
            answers: list[Answer] = done.value
            return answers
        finally:
            sampling.close()

    def _repeated(self, indices: npt.NDArray[Any], n: int) -> tuple[list[I32], list[Mapping[str, Any]]]:
        each = [int(i) for i in indices for _ in range(n)]
        return [self._prompts.tokens[i] for i in each], [self._prompts.items[i] for i in each]

    def _graded(self, answers: Sequence[Answer], items: Sequence[Mapping[str, Any]]) -> Generator[Event, None, F64]:
        """Rewards (R,); NaN for an answer that could not be graded. TrainingError: none could."""
        answered = _answered(answers, items)
        work = OffDeviceWork(lambda: self.grade(answered))
        yield work
        grades: list[Grade] = work.outcome()
        problems = [grade.problem for grade in grades if grade.problem]
        if problems:
            summary = f"{len(problems)} of {len(grades)} answers could not be graded: {problems[0][:300]}"
            if len(problems) == len(grades):
                raise TrainingError(summary)
            yield LogMessage(f"{summary}; they are left out", "warn")
        return np.array([math.nan if grade.problem else grade.reward for grade in grades], np.float64)

    def _groups_of(self, prompts: Sequence[I32], answers: Sequence[Answer]) -> Groups:
        def example(prompt: I32, answer: Answer) -> tuple[Example, ...]:
            learn = np.concatenate([np.zeros(len(prompt), bool), answer.is_sampled])
            return (Example(np.concatenate([prompt, answer.tokens]).astype(np.int32), learn),)

        return Groups(map(example, prompts, answers), self.settings.n_ctx, name="answers", alignment=ALIGNMENT)

    def _windows(self, prompts: Sequence[I32], answers: Sequence[Answer]) -> list[Sample]:
        groups = self._groups_of(prompts, answers)
        return [groups.window(pieces) for pieces in groups.pack(np.arange(len(groups), dtype=np.int32))]

    def _log_probs(
        self, steps: Steps, prompts: Sequence[I32], answers: Sequence[Answer]
    ) -> Generator[Event, None, list[F32]]:
        """Log-probabilities of the answers' tokens, by a forward pass."""
        measured: list[F32] = [np.zeros(0, np.float32)] * len(answers)
        windows, n = self._windows(prompts, answers), self.settings.batch_size
        for i in range(0, len(windows), n):
            part = windows[i : i + n]
            outputs = yield from steps.evaluation(part)
            for window, losses in zip(part, outputs.losses.reshape(-1, self.settings.n_ctx), strict=False):
                row = window.rows_of_tokens()
                for k in window.rows:
                    if k >= 0:
                        measured[k] = -losses[(row == k) & (window.weights > 0)]
            yield Slice()
        return measured

    def _measured_batch(self, batch: PolicyBatch) -> Generator[Event, None, tuple[PolicyLoss, list[Sample]]]:
        """Loss of a batch, and windows with the weights of its gradient."""
        old, row = of_answers([a.log_probs for a in batch.answers])
        new = old  # by the weights that they were sampled from
        if batch.n_done:
            own = yield from self._log_probs(self.steps, batch.prompts, batch.answers)
            new, _ = of_answers(own)
        reference = None if batch.reference is None else of_answers(batch.reference)[0]
        advantages = self.grpo.advantages(batch.rewards).reshape(-1)
        measured = self.grpo.measure(new, old, reference, row, advantages)
        slopes = np.split(measured.slopes, np.cumsum([len(a.log_probs) for a in batch.answers])[:-1])
        # answers without a gradient take no part; one at least, as there is a step
        learned = [i for i, slope in enumerate(slopes) if slope.any()] or [0]
        windows = self._windows([batch.prompts[i] for i in learned], [batch.answers[i] for i in learned])
        self._recent = windows
        weighted = []
        for window in windows:
            weights, of = np.zeros(len(window.weights), np.float32), window.rows_of_tokens()
            for k in window.rows:
                if k >= 0:
                    weights[(of == k) & (window.weights > 0)] = -slopes[learned[k]]
            weighted.append(replace(window, weights=weights))
        return measured, weighted

    # -- validation

    def _between(self, step: Step) -> Generator[Event, None, None]:
        if self.batch is not None and self.batch.n_done == self.grpo.n_updates:
            self.batch = None
        yield from super()._between(step)

    def _validate(self) -> Generator[Event, None, None]:
        self._validated = self.counters.iterations
        if not len(self.validation_indices):
            return
        n = self.grpo.eval_samples
        prompts, items = self._repeated(self.validation_indices, n)
        at = self.counters.iterations
        seeds = [
            _seed(self.order.seed, _OF_VALIDATION, i, k) for i in range(len(self.validation_indices)) for k in range(n)
        ]
        answers = yield from self._answers(prompts, items, seeds, settles=False)
        rewards = yield from self._graded(answers, items)
        metrics = reward_metrics(rewards.reshape(-1, n))
        result = Result()
        result.add(-means(metrics).get("mean_reward", math.nan), len(answers), 0, metrics)
        yield Validating(len(answers), len(answers), result)
        self.stopping.validated(result.loss, at)
        yield Validated(at, self.counters.epochs, result)

    # -- state

    def state(self) -> dict[str, Any]:
        state = {**super().state(), "batch": {} if self.batch is None else self.batch.arrays()}
        return state if self._order_before is None else {**state, "order": self._order_before}

    def restore(self, state: dict[str, Any], *, force_reshuffle: bool = False) -> bool:
        same = super().restore(state, force_reshuffle=force_reshuffle)
        arrays = state.get("batch", {})
        self.batch = PolicyBatch.of_arrays(arrays) if arrays and same else None
        return same


def reference_steps(
    session: Session, model: Model, s: TrainingConfig, served: ServedForward | None, prefix: str
) -> Steps:
    """Graphs of the log-probabilities of a model that the run does not change."""
    frozen = Trainable(FULL, session, model, (), ())
    plain = structs.replace(s, optimizer="sgd", neftune_noise_alpha=0.0, use_checkpointing=True)
    return Steps(frozen, plain, prefix=f"{prefix}.reference", apart=True, served=served)


def _answered(answers: Sequence[Answer], items: Sequence[Mapping[str, Any]]) -> Answered:
    return [(a.tokens[a.is_sampled], item) for a, item in zip(answers, items, strict=True)]


def _seed(*of: int) -> int:
    """A seed of a request; the greatest one means a random seed."""
    return int(np.random.SeedSequence(of).generate_state(1)[0]) % 0xFFFFFFFF

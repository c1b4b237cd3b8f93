"""Training loop: optimizer steps over shuffled windows, validation after each epoch, checkpoints.

`Trainer.work` is a generator that makes one device run, or (`apart`) a part of one, at a time, so
that the device's owner can do other work in between. `fit` runs it to the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from logitless.training.config import SUPERVISED, TrainingConfig
from logitless.training.data.packing import Groups, Sample
from logitless.training.data.run_media import RunMedia
from logitless.training.data.sampler import ExampleSampler, Sampler
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingDiverged
from logitless.training.methods.grpo import GRPO
from logitless.training.methods.objective import F32, F64, Measured, Objective, token_rows, weighted
from logitless.training.policy.served_forward import ServedForward
from logitless.training.reporting.results import Result, means
from logitless.training.schedule import Stopping, rate_at
from logitless.training.step import GradientHook, Slice, Steps
from logitless.training.trainable import Trainable

GUESS = 0.9  # of the loss of a model that knows nothing, log n_vocab
Metrics = Mapping[str, tuple[float, int]]  # sum, number of values


@dataclass
class Counters:
    """Exact counts of steps, samples, tokens and epochs done."""

    iterations: int = 0  # optimizer steps
    samples: int = 0  # or examples
    tokens: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Step:
    """Event: an optimizer step is done. `result` sums up this epoch's steps, measured before each update."""

    iteration: int
    n_steps: int  # of the whole run; 0: not known
    epoch: int
    sample: int  # samples of this epoch so far
    n_samples: int
    loss: float
    accuracy: float
    norm: float
    rate: float
    factor: float
    n_tokens: int
    result: Result
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the training method


@dataclass(frozen=True)
class Encoding:
    """Event before the first step: number of encoded tiles of images and sounds, of `n_media`."""

    medium: int
    n_media: int


@dataclass(frozen=True)
class Measuring:
    """Event: windows of data whose reference log-probabilities are known, before the first step."""

    sample: int
    n_samples: int


@dataclass(eq=False)
class OffDeviceWork:
    """Event: work without the device, such as grading. The event's receiver may do it
    elsewhere and set `result` before it goes on; else the trainer does it itself."""

    call: Callable[[], Any]
    result: Any = None

    def outcome(self) -> Any:
        """The result, computed here if need be."""
        if self.result is None:
            self.result = self.call()
        return self.result


@dataclass(frozen=True)
class LogMessage:
    """Event: a message about the run."""

    message: str
    level: str = "info"


@dataclass(frozen=True)
class Validating:
    """Event: one validation batch is done."""

    sample: int
    n_samples: int
    result: Result


@dataclass(frozen=True)
class Validated:
    iteration: int
    epoch: int
    result: Result


@dataclass(frozen=True)
class Save:
    """Event: time to write a checkpoint; `last`: the run is over."""

    iteration: int
    last: bool = False


@dataclass(frozen=True)
class Settled:
    """Event: between two steps; `Trainer.state` now describes the run completely. `keep`: it has
    what cannot be computed again, such as rewards."""

    keep: bool = False


@dataclass(frozen=True)
class Finished:
    reason: str
    cancelled: bool = False


Event = (
    Slice
    | Step
    | Encoding
    | Measuring
    | OffDeviceWork
    | LogMessage
    | Validating
    | Validated
    | Save
    | Settled
    | Finished
)


@dataclass
class Control:
    """Settings of the next optimizer step that a callback may change."""

    iteration: int
    epoch: int
    rate: float
    cancel: bool = False


def n_steps_of(order: Sampler | ExampleSampler, s: TrainingConfig, grpo: GRPO | None = None) -> int:
    """Optimizer steps of a whole run; `grpo`: of reinforcement."""
    by_epochs = order.n_batches(s.epochs, s.n_logical) if s.epochs > 0 else 0
    by_epochs *= 1 if grpo is None else grpo.n_updates
    return min(n for n in (by_epochs, s.iterations) if n > 0)


class Trainer:
    """One training run: optimizer steps, validation, events. Everything that its future depends on
    is in `state()`.

    Callbacks, all called on the thread that runs `work` or `fit`:

    - `before_step(control)` before each optimizer step; it may change `control.rate` or set
    `control.cancel`.
    - `on_gradients(gradients)` after the backward pass of each step and before the optimizer: f32
      arrays by parameter name (`trainable.names`), the gradient of the mean loss over the step's
      labels, summed over its micro-batches and not clipped yet. It returns a mapping with the
      arrays that it changed, or None to leave all as they are:

          def average(gradients):  # data parallel: the mean over processes with equally many labels
          a step
              return {name: all_reduce(g) / n_processes for name, g in gradients.items()}

      Without it nothing is copied: gradients stay on the device."""

    def __init__(  # noqa: PLR0913  (parts of a run, most of which few runs have)
        self,
        trainable: Trainable,
        settings: TrainingConfig,
        order: Sampler | ExampleSampler,
        validation_indices: I32,
        *,
        objective: Objective | None = None,
        media: RunMedia | None = None,
        stopping: Stopping | None = None,
        before_step: Callable[[Control], None] | None = None,
        on_gradients: GradientHook | None = None,
        prefix: str = "train",
        apart: bool = False,
        served: ServedForward | None = None,
    ) -> None:
        """`objective`: the training method, whose data are `Groups`; None: supervised learning.
        `media`: images and sounds among the samples' tokens, if there are some. `served`: the forward pass is
        the server's."""
        self.trainable, self.settings, self.order, self.objective = trainable, settings, order, objective
        self.reference: F64 | None = None  # (rows,): log-probability of each row before the first step
        self.validation_indices = validation_indices
        self.stopping = stopping or Stopping()
        self.before_step = before_step
        self.counters = Counters()
        self.steps = Steps(
            trainable, settings, prefix=prefix, apart=apart, media=media, on_gradients=on_gradients, served=served
        )
        self.epoch_result = Result()
        self.just_initialized = True

    @property
    def method(self) -> str:
        """Name of the training method."""
        return SUPERVISED if self.objective is None else self.objective.NAME

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return n_steps_of(self.order, self.settings)

    def work(self) -> Generator[Event, None, None]:
        """Run to the end, one event at a time; closing the generator ends the run between two slices."""
        yield from self._encode()
        yield from self.steps.settle()
        if self.objective is not None and self.objective.HAS_REFERENCE and self.reference is None:
            yield from self._measure_reference()
        reason, cancelled = "", False
        while not reason:
            reason = self._limit() if self.counters.iterations >= self.n_steps else self.stopping.stale
            if reason:
                break
            control = self._control()
            if self.before_step is not None:
                self.before_step(control)
            if control.cancel:
                reason, cancelled = "cancelled", True
                break
            step = yield from self._step(control)
            yield from self._check(step)
            yield step
            reason = self.stopping.update(step.loss) or ""
            yield from self._between(step)
            yield Settled()
        if not (cancelled or self._validated == self.counters.iterations):
            yield from self._validate()
        yield from self._check_model()
        yield Save(self.counters.iterations, last=True)
        yield Finished(reason, cancelled)

    _validated = -1  # iteration of the last validation

    def fit(self, on_event: Callable[[Event], None] | None = None) -> Finished:
        """Run to the end."""
        last: Event = Finished("")
        for last in self.work():
            if on_event is not None:
                on_event(last)
        assert isinstance(last, Finished)
        return last

    def _encode(self) -> Generator[Event, None, None]:
        """Encode the images and sounds, if there are some; a job can be left between two of them."""
        for part in self.steps.encode():
            if isinstance(part, float):
                yield Slice(part)
            else:
                assert self.steps.media is not None
                yield Encoding(part, self.steps.media.n_tiles)
                yield Settled()

    def _limit(self) -> str:
        s = self.settings
        if 0 < s.iterations <= self.counters.iterations:
            return f"{s.iterations} iterations are done"
        return f"{s.epochs:g} epochs are done"

    def _control(self) -> Control:
        epoch = self._epoch
        rate = rate_at(self.settings, self.counters.iterations, epoch)
        return Control(self.counters.iterations, epoch, rate)

    def _factor(self, control: Control) -> float:
        """A step's rate as a part of the peak."""
        assert self.settings.learning_rate is not None
        return control.rate / self.settings.learning_rate

    @property
    def _epoch(self) -> int:
        """Epochs that are over before the next step."""
        return self.counters.samples // len(self.order)

    def _step(self, control: Control) -> Generator[Event, None, Step]:
        s, c, n_samples = self.settings, self.counters, len(self.order)
        if c.samples // n_samples != max(0, c.samples - s.n_logical) // n_samples:
            self.epoch_result = Result()
        n_items, windows = self.order.size(s.n_logical), self.order.take(s.n_logical)
        self._recent = windows
        total, measured = 0.0, None
        if self.objective is not None:
            losses = yield from self._losses(windows)
            measured, windows = self._measured(windows, losses)
            total = 1.0  # slopes are those of the mean already
        batches = [windows[i : i + s.batch_size] for i in range(0, len(windows), s.batch_size)]
        results, norm = yield from self.steps.step(batches, c.iterations + 1, control.rate, total)
        n_labels = sum(r.n_data for r in results)
        if measured is None:
            n_data, n_correct = n_labels, sum(r.n_correct for r in results)
            loss = math.fsum(r.total for r in results) / max(1, n_data)
            metrics: Metrics = {}
        else:
            n_labels = len(measured.slopes)
            n_data, n_correct = measured.n_examples, measured.n_correct
            loss, metrics = measured.loss, measured.metrics
        c.iterations += 1
        c.samples += n_items
        c.tokens += n_labels
        c.epochs = c.samples // n_samples
        self.just_initialized = False
        self.epoch_result.add(loss, n_data, n_correct, metrics)
        accuracy = n_correct / max(1, n_data)
        return Step(
            c.iterations,
            self.n_steps,
            control.epoch,
            (c.samples - 1) % n_samples + 1,
            n_samples,
            loss,
            accuracy,
            norm,
            control.rate,
            self._factor(control),
            len(windows) * s.n_ctx,
            self.epoch_result,
            means(metrics) or {"mean_token_accuracy": accuracy},
        )

    # -- divergence

    _loss = _norm = math.nan  # of the last step
    _checked = -1  # iteration after which the model was found to be sound
    _recent: Sequence[Sample] = ()  # windows of the last step

    def _check(self, step: Step) -> Generator[Event, None, None]:
        """TrainingDiverged: the step's loss or gradient is not finite, or, where the step may be saved, those
        of the model after it."""
        self._loss, self._norm = step.loss, step.norm
        if not (math.isfinite(step.loss) and math.isfinite(step.norm)):
            self._diverged("loss", step.loss)
        if self._validates(step) or self._saves or step.iteration >= self.n_steps:
            yield from self._check_model()

    def _check_model(self) -> Generator[Event, None, None]:
        """TrainingDiverged: the loss of the last step's windows is not finite after it, or their gradient. This
        is measured only where the loss has risen or is that of a guess: parameters that are too large make it so."""
        i, samples = self.counters.iterations, self._recent[: self.settings.batch_size]
        if self._checked != i and samples:
            outputs = yield from self.steps.evaluation(samples)
            loss = outputs.total / max(1, outputs.n_data)
            guess = GUESS * math.log(self.trainable.model.hparams.n_vocab)
            if math.isfinite(loss) and outputs.n_data and not loss < min(guess, self._loss):
                self._norm = yield from self.steps.gradient_norm(samples)
            if not (math.isfinite(loss) and math.isfinite(self._norm)):
                self._diverged("loss after it", loss)
            self._checked = i

    def check(self) -> None:
        """TrainingDiverged: the model after the last step has no finite loss, or gradient."""
        for _ in self._check_model():
            pass

    def _diverged(self, what: str, loss: float) -> NoReturn:
        numbers = f"{what} {loss:.4g}, gradient norm {self._norm:.4g}"
        raise TrainingDiverged(
            f"the run diverged at step {self.counters.iterations}: {numbers}; a lower learning rate may help"
        )

    # -- training methods

    @property
    def _groups(self) -> Groups:
        assert isinstance(self.order.dataset, Groups)
        return self.order.dataset

    def _losses(self, windows: Sequence[Sample]) -> Generator[Event, None, list[F32]]:
        """−log-probability of each label (T,) of each window."""
        n, n_ctx = self.settings.batch_size, self.settings.n_ctx
        collected: list[F32] = []
        for i in range(0, len(windows), n):
            outputs = yield from self.steps.evaluation(windows[i : i + n])
            collected += list(outputs.losses.reshape(-1, n_ctx))
            yield Slice()
        return collected

    def _measured(self, windows: Sequence[Sample], losses: Sequence[F32]) -> tuple[Measured, list[Sample]]:
        """Loss of these windows, and the windows with the weights of its gradient."""
        assert self.objective is not None
        groups = self._groups
        reference = self.reference if self.reference is not None else np.full(len(groups.values), np.nan)
        rows, _, places = token_rows(windows, losses, groups.values, reference)
        measured = self.objective.measure(rows)
        return measured, weighted(windows, places, measured.slopes)

    def _measure_reference(self) -> Generator[Event, None, None]:
        """Measure the log-probability of every row, which the run has not changed yet."""
        groups = self._groups
        reference = np.full(len(groups.values), np.nan)
        indices = np.concatenate([self.order.indices, self.validation_indices])
        n, windows = self.order.validation(indices)
        done = 0
        while samples := list(islice(windows, self.settings.batch_size)):
            losses = yield from self._losses(samples)
            rows, numbers, _ = token_rows(samples, losses, groups.values, reference)
            reference[numbers] = rows.sums
            done += len(samples)
            yield Measuring(done, n)
        self.reference = reference

    def _between(self, step: Step) -> Generator[Event, None, None]:
        if self._validates(step):
            yield from self._validate()
        if self._saves and step.iteration < self.n_steps:
            yield Save(step.iteration)

    def _validates(self, step: Step) -> bool:
        every = self.settings.validate_every
        return step.iteration % every == 0 if every > 0 else self.counters.epochs > step.epoch

    @property
    def _saves(self) -> bool:
        return self.settings.save_every > 0 and self.counters.iterations % self.settings.save_every == 0

    def _validate(self) -> Generator[Event, None, None]:
        self._validated = self.counters.iterations
        if not len(self.validation_indices):
            return
        result = Result()
        n, windows = self.order.validation(self.validation_indices)
        done = 0
        every: list[Sample] = []
        losses: list[F32] = []
        while samples := list(islice(windows, self.settings.batch_size)):
            outputs = yield from self.steps.evaluation(samples)
            if self.objective is None:
                result.add(outputs.total / max(1, outputs.n_data), outputs.n_data, outputs.n_correct)
            else:  # the rows of an example may be in different windows
                every += samples
                losses += list(outputs.losses.reshape(-1, self.settings.n_ctx))
            done += len(samples)
            yield Validating(done, n, result)
        if every:
            measured, _ = self._measured(every, losses)
            result.add(measured.loss, measured.n_examples, measured.n_correct, measured.metrics)
        if result.n_data and not math.isfinite(result.loss):
            self._diverged("validation loss", result.loss)
        self.stopping.validated(result.loss, self.counters.iterations)
        yield Validated(self.counters.iterations, self.counters.epochs, result)

    # -- state

    def state(self) -> dict[str, Any]:
        """State of the run without tensors."""
        r = self.epoch_result
        return {
            "counters": replace(self.counters),
            "order": self.order.state(),
            "stopping": self.stopping.counters(),
            "epoch_result": Result(r.n_data, r.n_correct, list(r.losses), list(r.weights), dict(r.sums)),
            "just_initialized": self.just_initialized,
        }

    def restore(self, state: dict[str, Any], *, force_reshuffle: bool = False) -> bool:
        """Resume from a state. False: the data differ, and their order begins anew."""
        self.counters = replace(state["counters"])
        self.stopping.restore(state["stopping"])
        if state["order"]["samples_hash"] != self.order.hash:  # other data validate
            self.stopping.forget_validations()
        self.epoch_result = state["epoch_result"]
        self.just_initialized = state["just_initialized"]
        return self.order.restore(state["order"], force_reshuffle=force_reshuffle)

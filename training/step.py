"""Training step graphs: evaluation ⊂ gradient ⊂ optimizer step, built from one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.execution.session import Build, DeviceBytes, Measurement
from logitless.graph.ops.shape import after
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.ops.training.optimizer import (
    N_ADAMW,
    N_SGD,
    accumulate,
    adamw_params,
    adamw_step,
    clear,
    clip_factor,
    norm_of_sums,
    sgd_params,
    sgd_step,
    square_sums,
)
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.batch import Memory, Rows, Sequences
from logitless.training.adapters.neftune import Neftune
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Sample
from logitless.training.data.run_media import RunMedia
from logitless.training.errors import TrainingError
from logitless.training.head import Loss, evaluation, gradients, logit_chunks
from logitless.training.policy.served_forward import ServedForward, sampled_loss
from logitless.training.trainable import Trainable

Feeds = dict[str, npt.NDArray[Any]]
# Gets the gradients of a step, f32 arrays by parameter name; returns those that it changed, or
# None.
GradientHook = Callable[[dict[str, npt.NDArray[np.float32]]], Mapping[str, npt.NDArray[np.float32]] | None]
T = TypeVar("T")
Arrays = list[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Event: a slice of a device run is done, and the device is free for other work, such as a
    step of requests. `following`: expected seconds of the next slice, 0 if unknown."""

    following: float = 0.0


Slices = Generator[Slice, None, T]


class GradientWorkers(Protocol):
    """Processes that compute gradients of micro-batches together."""

    def gradients(self, steps: Steps, batches: Sequence[Callable[[], Feeds]]) -> Slices[tuple[list[Arrays], Arrays]]:
        """The outputs of each micro-batch, and the gradients of all: for each parameter the sum from
        the first micro-batch to the last, as one process sums them. `batches`: inputs of each."""
        ...


def outcome(parts: Slices[T]) -> T:
    """Run a sliced computation to its end; returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            value: T = done.value
            return value


@dataclass(frozen=True)
class BatchResult:
    """Result of one device run. `losses` (rows,): one per label, 0 where the label does not count."""

    losses: npt.NDArray[np.float32]
    n_data: int
    n_correct: int

    @property
    def total(self) -> float:
        return float(self.losses.sum(dtype=np.float64))


@dataclass(frozen=True)
class Footprint:
    """Bytes of a run on one device.

    `weights`: frozen ones, in the device's layout. `gradients`: sums over the micro-batches of a
    step; those of one micro-batch are in the `arena`, with all other intermediate results."""

    device: str
    weights: int
    parameters: int
    optimizer: int
    gradients: int
    arena: int
    feeds: int

    @property
    def total(self) -> int:
        return self.weights + self.parameters + self.optimizer + self.gradients + self.arena + self.feeds


class Steps:
    """Plans and optimizer state of one run. `prefix` separates the runs of one session."""

    def __init__(
        self,
        trainable: Trainable,
        config: TrainingConfig,
        *,
        segment: int = 0,
        prefix: str = "train",
        apart: bool = False,
        media: RunMedia | None = None,
        on_gradients: GradientHook | None = None,
        served: ServedForward | None = None,
    ) -> None:
        """`apart`: plans in memory of their own, so that others can run between a run's parts.
        `served`: the forward pass is the server's; sequences begin at multiples of its alignment.
        `media`: those among the samples' tokens, if there are some.

        `on_gradients`: called with the gradients of each step before the optimizer uses them; they
        take memory as large as the parameters, and a trip to the host."""
        n_batch, n_ctx = config.batch_size, config.n_ctx
        if n_batch < 1 or n_ctx < 1:
            raise TrainingError(f"a batch of {n_batch} samples of {n_ctx} tokens cannot be trained on")
        self.trainable, self.config = trainable, config
        self.n_batch, self.n_ctx, self.prefix = n_batch, n_ctx, prefix
        self._apart = prefix if apart else ""
        self.media = media
        self.on_gradients = on_gradients
        noise = Neftune(config.neftune_noise_alpha, config.seed)
        self.noise = noise if noise.alpha else None
        self.workers: GradientWorkers | None = None  # those that share the micro-batches of a step
        # less memory, the same bits, a second forward pass; layers between two checkpoints, 0: as
        # the formula has it
        # a served forward writes caches, so it cannot be computed again
        self.segment = segment if config.use_checkpointing and served is None else None
        self._served = served
        session, params = trainable.session, trainable.params
        kinds = "mv" if config.optimizer == "adamw" else ""
        self.moments = [[session.define(f"{prefix}.{k}.{p.name}", p.shape) for k in kinds] for p in params]
        self._totals: list[Tensor] = []  # gradient sums over micro-batches
        self._ahead: dict[str, Measurement] = {}  # of plans not made yet

    @property
    def optimizer_nbytes(self) -> int:
        return sum(t.nbytes for pair in self.moments for t in pair)

    def state_names(self) -> list[str]:
        """Names of all variables of the run."""
        own = [*self.trainable.state, *(t for pair in self.moments for t in pair), *self._totals]
        return [*(t.name for t in own), *(self._served.names if self._served is not None else ())]

    def forget(self) -> None:
        """Free the memory of the run, its parameters included."""
        self.trainable.session.delete(self.state_names(), self._apart)

    # -- graphs

    def _inputs(self) -> tuple[Rows, Memory]:
        if self._served is not None:
            return self._served.inputs()
        sequences = Sequences.feeds(self.n_batch, self.n_ctx)
        if self.media is not None:
            sequences = self.media.added(sequences)
        return sequences, sequences

    @property
    def _loss(self) -> Loss:
        return cross_entropy if self._served is None else sampled_loss

    def _evaluate(self) -> list[Tensor]:
        return evaluation(self.trainable.model, self._inputs(), self._loss)

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        params, model = self.trainable.params, self.trainable.model
        if self.noise is not None:
            noise = feed("noise", self._noise_shape)
            model = replace(model, weights=replace(model.weights, noise=noise))
        grads, outputs = gradients(
            model,
            self._inputs(),
            params,
            segment=self.segment,
            loss=self._loss,
        )
        missing = [p.name for p in params if p not in grads]
        if missing:
            raise TrainingError(f"tensor '{missing[0]}' has no influence on the loss")
        return [grads[p] for p in params], outputs

    def _accumulate(self) -> list[Tensor]:
        gradients, outputs = self._gradients()
        return [*outputs, *(accumulate(total, g) for total, g in zip(self._totals, gradients, strict=True))]

    def _gradient(self) -> list[Tensor]:
        gradients, outputs = self._gradients()
        return [*outputs, *gradients]

    def _norm(self) -> list[Tensor]:
        gradients, _ = self._gradients()
        return [norm_of_sums(*map(square_sums, gradients))]

    def _step(self) -> list[Tensor]:
        """Forward, backward and optimizer in one device run."""
        gradients, outputs = self._gradients()
        return [*outputs, *self._update(gradients)]

    def _step_of_totals(self) -> list[Tensor]:
        return [*self._update(self._totals), *(clear(total) for total in self._totals)]

    def _update(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Optimizer steps, and the global gradient norm.

        Clipping needs the norm first, so all gradients live at once; without it each is freed after
        its own step. SGD is llama.cpp's: no clipping, and all tensors decay."""
        o = self.config
        sums = [square_sums(g) for g in gradients]
        norm = norm_of_sums(*sums)
        factor = clip_factor(norm, feed("clip", ())) if o.optimizer == "adamw" and o.max_grad_norm > 0 else const(1.0)
        size = (N_ADAMW if o.optimizer == "adamw" else N_SGD,)
        usual = feed("optimizer", size)
        of_b = feed("optimizer_b", size) if o.lora_plus_ratio != 1 else usual
        updates = []
        t = self.trainable
        for name, p, moments, g, s in reversed(
            list(zip(t.names, t.params, self.moments, gradients, sums, strict=True))
        ):
            g, params = after(g, s), of_b if name.endswith(".lora_b") else usual
            if o.optimizer == "adamw":
                decays = len(p.shape) >= o.adam_decay_min_ndim
                updates.append(adamw_step(p, *moments, g, params, factor, decays=decays))
            else:
                updates.append(sgd_step(p, g, params, factor))
        return [*updates, norm]

    @property
    def is_served(self) -> bool:
        """True if the forward pass is the server's."""
        return self._served is not None

    def accumulates(self) -> None:
        """Accumulate the gradients of every step, also of one with a single device run."""
        self._define_totals()

    def _define_totals(self) -> None:
        if not self._totals:
            session = self.trainable.session
            self._totals = [session.define(f"{self.prefix}.g.{p.name}", p.shape) for p in self.trainable.params]

    def everything(self) -> list[Tensor]:
        """A graph with every node kind of training."""
        return self._step()

    def footprint(self, n_runs: int = 1) -> list[Footprint]:
        """Bytes of a run on each device, for `n_runs` micro-batches a step. Nothing is allocated
        on devices; memory of the process (kernels, programs) is, for as long as this object
        lives."""
        builds = self._builds(n_runs)
        if self.media is not None:
            builds = {"media": partial(self.media.largest, self.trainable.session), **builds}
        needed, self._planned = self.trainable.session.planned_bytes(builds.values())
        parameters = {p.name for p in self.trainable.params}
        moments = {t.name for pair in self.moments for t in pair}
        totals = {t.name for t in self._totals}

        def of(device: DeviceBytes, names: set[str]) -> int:
            return sum(n for name, n in device.by_variable.items() if name in names)

        return [
            Footprint(
                d.device,
                weights=d.weights + d.variables - sum(of(d, names) for names in (parameters, moments, totals)),
                parameters=of(d, parameters),
                optimizer=of(d, moments),
                gradients=of(d, totals),
                arena=d.arena,
                feeds=d.feeds,
            )
            for d in needed
        ]

    def _builds(self, n_runs: int) -> dict[str, Build]:
        """Graphs of the run by plan name, in the order of planning."""
        builds: dict[str, Build] = {"step": self._step}
        if n_runs > 1 or self._totals or self.on_gradients is not None:
            self._define_totals()
            builds = {"accumulate": self._accumulate, "update": self._step_of_totals}
        return {**builds, "evaluate": self._evaluate, "norm": self._norm}

    def plan_ahead(self, n_runs: int) -> list[Tensor]:
        """Measure the run's plans ahead, on any thread; returns the nodes of all of them."""
        session, builds = self.trainable.session, self._builds(n_runs)
        self._ahead = dict(zip(builds, session.measure_all(builds.values()), strict=True))
        for p in self.trainable.params:
            session.load_initial(p.name)
        return [t for placement, _ in self._ahead.values() for t in placement.order]

    def settle(self) -> Slices[None]:
        """Upload the parameters to their devices, where plans were made ahead."""
        homes = {name: b for placement, _ in self._ahead.values() for name, b in placement.variable_backend.items()}
        if homes:
            for _ in self.trainable.session.upload(homes, [p.name for p in self.trainable.params]):
                yield Slice()

    # -- runs

    def evaluate(self, samples: Sequence[Sample], more: Feeds | None = None) -> BatchResult:
        """Loss and accuracy without an update. `more`: inputs of the model itself."""
        return outcome(self.evaluation(samples, more))

    def evaluation(self, samples: Sequence[Sample], more: Feeds | None = None) -> Slices[BatchResult]:
        """`evaluate` in slices."""
        feeds = {**self.feeds(samples, 1.0), **(more or {})}
        outputs = yield from self._run("evaluate", self._evaluate, feeds, self._n_outputs)
        return self._result(samples, outputs)

    def step(
        self, batches: Sequence[Sequence[Sample]], n: int, rate: float, total: float = 0.0
    ) -> Slices[tuple[list[BatchResult], float]]:
        """Optimizer step n (from 1) over all micro-batches, in slices: their results, and the
        gradient norm. A run whose steps may have several accumulates the gradients of all steps.
        The loss is the samples' weighted sum over `total`; 0: over the sum of their weights."""
        total = total or sum(float(w.weights.sum()) for samples in batches for w in samples) or 1.0
        if len(batches) == 1 and not self._totals and self.on_gradients is None:
            feeds = {**self._noisy(batches[0], total, n, 0), **self._optimizer_feeds(n, rate)}
            *outputs, norm = yield from self._run("step", self._step, feeds, self._n_outputs, norm=True)
            return [self._result(batches[0], outputs)], float(norm)
        self._define_totals()
        if self.workers is not None:
            every = yield from self._shared(
                self.workers, [partial(self._noisy, s, total, n, i * self.n_batch) for i, s in enumerate(batches)]
            )
        else:
            every = []
            for i, samples in enumerate(batches):
                feeds = self._noisy(samples, total, n, i * self.n_batch)
                every.append((yield from self._run("accumulate", self._accumulate, feeds, self._n_outputs)))
                yield Slice()
        results = [self._result(samples, outputs) for samples, outputs in zip(batches, every, strict=True)]
        if self.on_gradients is not None:
            self._call_hook(self.on_gradients)
        feeds = self._optimizer_feeds(n, rate)
        (norm,) = yield from self._run("update", self._step_of_totals, feeds, 0, norm=True)
        return results, float(norm)

    def _shared(self, workers: GradientWorkers, batches: Sequence[Callable[[], Feeds]]) -> Slices[list[Arrays]]:
        """Let workers accumulate the gradients; returns the outputs of each micro-batch."""
        outputs, sums = yield from workers.gradients(self, batches)
        for total, values in zip(self._totals, sums, strict=True):
            self.trainable.session.write(total.name, values)
        return outputs

    def gradient(self, feeds: Feeds) -> Slices[tuple[Arrays, Arrays]]:
        """Outputs of one micro-batch, and its gradient by each parameter."""
        n = self._n_outputs
        values = yield from self._run("gradient", self._gradient, feeds, n + len(self.trainable.params))
        return values[:n], values[n:]

    def gradient_norm(self, samples: Sequence[Sample]) -> Slices[float]:
        """The norm of one micro-batch's gradient, without an update."""
        (norm,) = yield from self._run("norm", self._norm, self._noisy(samples, 1.0, 0, 0), 1)
        return float(norm)

    def _call_hook(self, hook: GradientHook) -> None:
        """Give the hook copies of the gradients, and write back the returned ones."""
        session, names = self.trainable.session, self.trainable.names
        totals = dict(zip(names, self._totals, strict=True))
        changed = hook({name: session.read(t.name) for name, t in totals.items()})
        for name, value in (changed or {}).items():
            if name not in totals:
                raise TrainingError(f"the gradient hook returned {name!r}, which is no parameter of this run")
            array = np.asarray(value, np.float32)
            if array.shape != totals[name].shape:
                expected = totals[name].shape
                raise TrainingError(f"the gradient hook returned {name!r} of shape {array.shape}, expected {expected}")
            session.write(totals[name].name, array)

    @property
    def _n_outputs(self) -> int:
        """Number of a run's loss and argmax tensors."""
        return 2 * len(logit_chunks(self.trainable.model, self.n_batch * self.n_ctx))

    def _run(
        self, key: str, build: Build, feeds: Feeds, n_outputs: int, *, norm: bool = False
    ) -> Slices[list[npt.NDArray[Any]]]:
        """Run a plan; returns the losses and the norm. Parameters and moments stay on the device."""
        plan = self.trainable.session.cached_plan((self.prefix, key), build, self._apart, self._ahead.pop(key, None))
        fetched: list[int | None] = [None] * n_outputs
        if norm:
            fetched += [*([0] * len(self.trainable.params)), None]
        fetched += [0] * (plan.n_fetches - len(fetched))
        if isinstance(plan, PreemptiblePlan):
            for following in plan.parts(feeds):
                yield Slice(following)
            values = plan.results(fetched)
        else:
            values = plan.run(feeds, fetched)
        return [value for value, n in zip(values, fetched, strict=True) if n is None]

    def _optimizer_feeds(self, n: int, rate: float) -> Feeds:
        o = self.config
        decay = o.weight_decay or 0.0

        def params(rate: float) -> npt.NDArray[np.float32]:
            if o.optimizer == "adamw":
                return adamw_params(n, rate, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, decay=decay)
            return sgd_params(rate, decay=decay)

        feeds: Feeds = {"optimizer": params(rate), "clip": np.array(o.max_grad_norm, np.float32)}
        return feeds if o.lora_plus_ratio == 1 else {**feeds, "optimizer_b": params(rate * o.lora_plus_ratio)}

    @property
    def _noise_shape(self) -> tuple[int, int]:
        return self.n_batch * self.n_ctx, self.trainable.model.hparams.n_embd

    def _noisy(self, samples: Sequence[Sample], total: float, n: int, first: int) -> Feeds:
        """`feeds` of step n's windows from number `first` on, with their noise."""
        feeds = self.feeds(samples, total)
        if self.noise is not None:
            feeds["noise"] = self.noise.of(samples, n, first, self._noise_shape)
        return feeds

    def feeds(self, samples: Sequence[Sample], total: float) -> Feeds:
        """Inputs of a batch, padded with samples that do not count."""
        n, length = self.n_batch, self.n_ctx
        tokens, targets, pos, start = (np.zeros((n, length), np.int32) for _ in range(4))
        weight = np.zeros((n, length), np.float32)
        targets[:] = -1
        for i, w in enumerate(samples):
            tokens[i] = w.tokens
            targets[i] = np.where(w.weights != 0, w.labels, -1)
            weight[i] = w.weights / total
            bounds = np.zeros(length, np.int32)
            bounds[list(w.starts)] = w.starts
            start[i] = np.maximum.accumulate(bounds)
            pos[i] = np.arange(length) - start[i]
        flat = {"tokens": tokens, "targets": targets, "pos": pos, "start": start, "weight": weight}
        feeds: Feeds = {name: array.reshape(-1) for name, array in flat.items()}
        if self._served is not None:
            feeds["targets"] = np.maximum(feeds["targets"], 0)  # labels that do not count weigh 0
            feeds |= self._served.feeds(start)
        if self.media is not None:
            feeds |= self.media.feeds([w.media for w in samples], pos, start)
        return feeds

    def encode(self) -> Iterator[float | int]:
        """Encode the run's images and sounds, if there are some: see RunMedia.encode."""
        if self.media is not None:
            yield from self.media.encode(self.trainable.session, self._apart)

    def _result(self, samples: Sequence[Sample], outputs: Sequence[npt.NDArray[Any]]) -> BatchResult:
        labels = np.concatenate([np.where(w.weights != 0, w.labels, -1) for w in samples])
        counted = labels >= 0
        losses, best = (np.concatenate(outputs[i::2])[: len(labels)] for i in (0, 1))
        losses = np.where(counted, losses, np.float32(0))
        correct = int((best[counted] == labels[counted]).sum())
        return BatchResult(losses, int(counted.sum()), correct)

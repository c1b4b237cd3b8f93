"""A small classifier on a session: its parameters, its plans, and epochs over arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from graph.autodiff import backward
from graph.ops.elementwise import scale, sum_to
from graph.ops.loss import cross_entropy
from graph.ops.optim import N_ADAMW, accumulate, adamw_params, adamw_step, clear, clip_factor, global_norm
from graph.ops.pointwise import argmax
from graph.ops.rows import get_rows
from graph.session import Session
from graph.tensor import Tensor, feed
from training.errors import TrainingError
from training.results import Result

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # parameters, inputs (B, n) → logits (B, classes)


@dataclass(frozen=True)
class Batches:
    """An optimizer step takes `logical` rows, in runs of `physical`."""

    logical: int = 1000
    physical: int = 500

    def __post_init__(self) -> None:
        if self.physical < 1 or self.logical % self.physical:
            raise TrainingError(f"a logical batch of {self.logical} is not a multiple of {self.physical}")


@dataclass(frozen=True)
class Table:
    """Examples: inputs (n, inputs) on the device, labels (n,) here."""

    inputs: Tensor
    labels: I32


class Network:
    """A classifier with AdamW. `parameters` are its first values by name."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, F32],
        forward: Forward,
        n_inputs: int,
        batches: Batches,
        *,
        rate: float = 1e-3,
        decay: float = 0.0,
    ) -> None:
        self.session, self.batches, self.rate, self.decay = session, batches, rate, decay
        self._forward, self._n_inputs = forward, n_inputs
        self.params = {name: _state(session, name, values) for name, values in parameters.items()}
        kinds = "mvg"
        self._states = {n: [session.define(f"{k}.{n}", p.shape) for k in kinds] for n, p in self.params.items()}
        self.n_steps = 0

    def table(self, name: str, x: F32, y: I32) -> Table:
        """Put examples where the network is: x (n, inputs), y (n,). A batch is then a list of their numbers."""
        if x.shape != (len(y), self._n_inputs):
            raise TrainingError(f"inputs of shape {x.shape} for {len(y)} labels and {self._n_inputs} inputs")
        return Table(_state(self.session, name, x), y)

    def _losses(self, data: Table) -> tuple[Tensor, Tensor]:
        n = self.batches.physical
        logits = self._forward(self.params, get_rows(data.inputs, feed("rows", (n,), "i32")))
        return cross_entropy(logits, feed("y", (n,), "i32")), argmax(logits)

    def _evaluate(self, data: Table) -> list[Tensor]:
        return list(self._losses(data))

    def _accumulate(self, data: Table) -> list[Tensor]:
        losses, best = self._losses(data)
        gradients = backward(scale(sum_to(losses, shape=()), factor=1 / self.batches.logical), [*self.params.values()])
        totals = [accumulate(self._states[n][2], gradients[p]) for n, p in self.params.items()]
        return [losses, best, *totals]

    def _update(self) -> list[Tensor]:
        totals = [states[2] for states in self._states.values()]
        factor = clip_factor(global_norm(totals), feed("clip", ()))
        params = feed("adamw", (N_ADAMW,))
        steps = [
            adamw_step(p, *self._states[n], params, factor, decays=len(p.shape) > 1) for n, p in self.params.items()
        ]
        return [*steps, *(clear(g) for g in totals)]

    def epoch(self, data: Table, order: I32) -> Result:
        """Every whole logical batch of these rows once, in this order."""
        b, result = self.batches, Result()
        if len(order) < b.logical:
            raise TrainingError(f"{len(order)} rows are fewer than one batch of {b.logical}")
        for a in range(0, len(order) - b.logical + 1, b.logical):
            for at in range(a, a + b.logical, b.physical):
                rows = order[at : at + b.physical]
                self._told(result, "accumulate", self._accumulate, data, rows, data.labels[rows])
            self.n_steps += 1
            params = adamw_params(self.n_steps, self.rate, decay=self.decay)
            n = 2 * len(self.params)
            feeds = {"adamw": params, "clip": np.array(0.0, np.float32)}
            plan = self.session.prepare("update", self._update)
            plan.run(feeds, [0] * n)
        return result

    def evaluate(self, data: Table, chosen: I32 | None = None) -> Result:
        """Loss and accuracy of these rows, or of all; the last batch is filled up with rows that do not count."""
        result, n = Result(), self.batches.physical
        chosen = np.arange(len(data.labels), dtype=np.int32) if chosen is None else chosen
        for a in range(0, len(chosen), n):
            part = chosen[a : a + n]
            rows = np.resize(part, n)
            labels = np.where(np.arange(n) < len(part), data.labels[rows], -1)
            self._told(result, "evaluate", self._evaluate, data, rows, labels)
        return result

    def _told(
        self, result: Result, key: str, build: Callable[[Table], list[Tensor]], data: Table, rows: I32, labels: I32
    ) -> None:
        plan = self.session.prepare((key, data.inputs.name), partial(build, data))
        wanted: list[int | None] = [None, None, *([0] * (plan.n_fetches - 2))]
        losses, best = plan.run({"rows": rows, "y": labels}, wanted)[:2]
        n = int((labels >= 0).sum())
        result.add(float(losses.sum(dtype=np.float64)) / n, n, int((best == labels).sum()))


def _state(session: Session, name: str, values: F32) -> Tensor:
    first = np.ascontiguousarray(values, np.float32)
    return session.define(name, first.shape, source=lambda: first.reshape(-1).view(np.uint8))


def he(rng: np.random.Generator, n_out: int, n_in: int) -> F32:
    """Weights for what a ReLU follows (He et al., 2015)."""
    return rng.standard_normal((n_out, n_in), np.float32) * np.float32(math.sqrt(2 / n_in))

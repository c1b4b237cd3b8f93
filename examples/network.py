"""A small classifier on a session: its parameters, its plans, and epochs over arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from logitless.graph.autodiff import backward
from logitless.graph.execution.plan import Array, Plan
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, scale, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.pointwise import argmax
from logitless.graph.ops.shape import after, slice_rows
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.ops.training.optimizer import N_ADAMW, adamw_params, adamw_step
from logitless.graph.tensor import Tensor, const, feed
from logitless.training.errors import TrainingError
from logitless.training.reporting.results import Result

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
        self._moments = {p: [session.define(f"{k}.{n}", p.shape) for k in "mv"] for n, p in self.params.items()}
        self.n_steps = 0

    def table(self, name: str, x: F32, y: I32) -> Table:
        """Put examples where the network is: x (n, inputs), y (n,). A batch is then a list of their
        numbers."""
        if x.shape != (len(y), self._n_inputs):
            raise TrainingError(f"inputs of shape {x.shape} for {len(y)} labels and {self._n_inputs} inputs")
        return Table(_state(self.session, name, x), y)

    def _losses(self, data: Table, rows: Tensor, labels: Tensor) -> list[Tensor]:
        logits = self._forward(self.params, get_rows(data.inputs, rows))
        return [cross_entropy(logits, labels), argmax(logits)]

    def _evaluate(self, data: Table) -> list[Tensor]:
        n = self.batches.physical
        return self._losses(data, feed("rows", (n,), "i32"), feed("y", (n,), "i32"))

    def _step(self, data: Table) -> list[Tensor]:
        """A logical batch: each physical one has its gradients before the next has activations."""
        n, b = self.batches.logical, self.batches.physical
        rows, labels = feed("rows", (n,), "i32"), feed("y", (n,), "i32")
        told: list[Tensor] = []
        total: dict[Tensor, Tensor] = {}
        for a in range(0, n, b):
            part = slice_rows(rows, start=a, stop=a + b)
            own = after(part, *total.values(), *told[-2:]) if told else part
            losses, best = self._losses(data, own, slice_rows(labels, start=a, stop=a + b))
            found = backward(scale(sum_to(losses, shape=()), factor=1 / n), [*self.params.values()])
            total = {p: add(total[p], g) if p in total else g for p, g in found.items()}
            told += [losses, best]
        adamw, one = feed("adamw", (N_ADAMW,)), const(1.0)
        moments = self._moments
        last_first = reversed(total.items())  # what they need is then free again before the others run
        steps = [adamw_step(p, *moments[p], g, adamw, one, decays=len(p.shape) > 1) for p, g in last_first]
        return [*told, *steps]

    def epoch(self, data: Table, order: I32) -> Result:
        """Every whole logical batch of these rows once, in this order."""
        n, result = self.batches.logical, Result()
        if len(order) < n:
            raise TrainingError(f"{len(order)} rows are fewer than one batch of {n}")
        plan = self.session.cached_plan(("step", data.inputs.name), partial(self._step, data))
        for a in range(0, len(order) - n + 1, n):
            self.n_steps += 1
            params = adamw_params(self.n_steps, self.rate, decay=self.decay)
            rows = order[a : a + n]
            self._told(result, plan, {"rows": rows, "y": data.labels[rows], "adamw": params})
        return result

    def evaluate(self, data: Table, chosen: I32 | None = None) -> Result:
        """Loss and accuracy of these rows, or of all; the last batch is filled up with rows that do
        not count."""
        result, n = Result(), self.batches.physical
        chosen = np.arange(len(data.labels), dtype=np.int32) if chosen is None else chosen
        plan = self.session.cached_plan(("evaluate", data.inputs.name), partial(self._evaluate, data))
        for a in range(0, len(chosen), n):
            part = chosen[a : a + n]
            rows = np.resize(part, n)
            labels = np.where(np.arange(n) < len(part), data.labels[rows], -1)
            self._told(result, plan, {"rows": rows, "y": labels})
        return result

    def _told(self, result: Result, plan: Plan, feeds: Mapping[str, Array]) -> None:
        n = self.batches.physical
        labels = feeds["y"].reshape(-1, n)
        wanted = [None] * 2 * len(labels)
        found = plan.run(feeds, [*wanted, *([0] * (plan.n_fetches - len(wanted)))])
        for y, losses, best in zip(labels, found[0::2], found[1::2], strict=False):
            count = int((y >= 0).sum())
            result.add(float(losses.sum(dtype=np.float64)) / count, count, int((best == y).sum()))


def _state(session: Session, name: str, values: F32) -> Tensor:
    first = np.ascontiguousarray(values, np.float32)
    return session.define(name, first.shape, source=lambda: first.reshape(-1).view(np.uint8))


def he(rng: np.random.Generator, n_out: int, n_in: int) -> F32:
    """Weights for what a ReLU follows (He et al., 2015)."""
    return rng.standard_normal((n_out, n_in), np.float32) * np.float32(math.sqrt(2 / n_in))

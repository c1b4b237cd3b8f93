"""A small classifier on a session: its parameters, its plans, and epochs over arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graph.autodiff import backward
from graph.ops.elementwise import scale, sum_to
from graph.ops.loss import cross_entropy
from graph.ops.optim import N_ADAMW, accumulate, adamw_params, adamw_step, clear, clip_factor, global_norm
from graph.ops.pointwise import argmax
from graph.session import Session
from graph.tensor import Tensor, feed
from training.errors import TrainingError
from training.results import Result

F32 = npt.NDArray[np.float32]
Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # parameters, inputs (B, n) → logits (B, classes)


@dataclass(frozen=True)
class Batches:
    """An optimizer step takes `logical` rows, in runs of `physical`."""

    logical: int = 1000
    physical: int = 500

    def __post_init__(self) -> None:
        if self.physical < 1 or self.logical % self.physical:
            raise TrainingError(f"a logical batch of {self.logical} is not a multiple of {self.physical}")


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

    def _losses(self) -> tuple[Tensor, Tensor]:
        n = self.batches.physical
        logits = self._forward(self.params, feed("x", (n, self._n_inputs)))
        return cross_entropy(logits, feed("y", (n,), "i32")), argmax(logits)

    def _evaluate(self) -> list[Tensor]:
        return list(self._losses())

    def _accumulate(self) -> list[Tensor]:
        losses, best = self._losses()
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

    def epoch(self, x: F32, y: npt.NDArray[np.int32], order: Sequence[int] | npt.NDArray[Any]) -> Result:
        """Every whole logical batch of these rows once, in this order."""
        b, result = self.batches, Result()
        if len(order) < b.logical:
            raise TrainingError(f"{len(order)} rows are fewer than one batch of {b.logical}")
        for a in range(0, len(order) - b.logical + 1, b.logical):
            for at in range(a, a + b.logical, b.physical):
                rows = np.asarray(order[at : at + b.physical])
                self._told(result, "accumulate", self._accumulate, x[rows], y[rows])
            self.n_steps += 1
            params = adamw_params(self.n_steps, self.rate, decay=self.decay)
            n = 2 * len(self.params)
            feeds = {"adamw": params, "clip": np.array(0.0, np.float32)}
            plan = self.session.prepare("update", self._update)
            plan.run(feeds, [0] * n)
        return result

    def evaluate(self, x: F32, y: npt.NDArray[np.int32]) -> Result:
        """Loss and accuracy; the last batch is filled up with rows that do not count."""
        result, n = Result(), self.batches.physical
        for a in range(0, len(x), n):
            part = np.arange(a, min(len(x), a + n))
            rows = np.resize(part, n)
            labels = np.where(np.arange(n) < len(part), y[rows], -1).astype(np.int32)
            self._told(result, "evaluate", self._evaluate, x[rows], labels)
        return result

    def _told(
        self, result: Result, key: str, build: Callable[[], list[Tensor]], x: F32, y: npt.NDArray[np.int32]
    ) -> None:
        plan = self.session.prepare(key, build)
        rows: list[int | None] = [None, None, *([0] * (plan.n_fetches - 2))]
        losses, best = plan.run({"x": x, "y": y}, rows)[:2]
        n = int((y >= 0).sum())
        result.add(float(losses.sum(dtype=np.float64)) / n, n, int((best == y).sum()))


def _state(session: Session, name: str, values: F32) -> Tensor:
    first = np.ascontiguousarray(values, np.float32)
    return session.define(name, first.shape, source=lambda: first.reshape(-1).view(np.uint8))


def he(rng: np.random.Generator, n_out: int, n_in: int) -> F32:
    """Weights for what a ReLU follows (He et al., 2015)."""
    return rng.standard_normal((n_out, n_in), np.float32) * np.float32(math.sqrt(2 / n_in))

"""Evaluation results: loss and accuracy with their uncertainties (llama.cpp's ggml_opt_result)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


def means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """The mean of each metric that has a value."""
    return {name: total / n for name, (total, n) in sums.items() if n}


@dataclass
class Result:
    """Adds up batches. `loss` is the mean over tokens that count (of a preference method: over
    examples); its uncertainty comes from the batches' spread."""

    n_data: int = 0  # tokens (labels) that count, or examples
    n_correct: int = 0
    losses: list[float] = field(default_factory=list)  # mean of each batch
    weights: list[float] = field(default_factory=list)  # labels or examples of each batch
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # of a method's metrics, and numbers of values

    def add(
        self, loss: float, n_data: int, n_correct: int, metrics: Mapping[str, tuple[float, int]] | None = None
    ) -> None:
        """One batch: its mean loss over `n_data` labels, and its method's metrics."""
        self.n_data += n_data
        self.n_correct += n_correct
        self.losses.append(loss)
        self.weights.append(float(n_data))
        for name, (total, n) in (metrics or {}).items():
            so_far = self.sums.get(name, (0.0, 0))
            self.sums[name] = so_far[0] + total, so_far[1] + n

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the method's metrics that have a value; of supervised learning the accuracy."""
        return means(self.sums) or {"mean_token_accuracy": self.accuracy}

    @property
    def loss(self) -> float:
        total = sum(self.weights)
        if not total:
            return math.nan
        return math.fsum(x * w for x, w in zip(self.losses, self.weights, strict=True)) / total

    @property
    def loss_uncertainty(self) -> float:
        """Standard error of the mean over batches; NaN for fewer than two."""
        n = len(self.losses)
        if n < 2:
            return math.nan
        mean = math.fsum(self.losses) / n
        variance = math.fsum((x - mean) ** 2 for x in self.losses) / (n - 1)
        return math.sqrt(variance / n)

    @property
    def accuracy(self) -> float:
        return self.n_correct / self.n_data if self.n_data else math.nan

    @property
    def accuracy_uncertainty(self) -> float:
        """√(p (1 − p) / (n − 1))."""
        p, n = self.accuracy, self.n_data
        return math.sqrt(p * (1 - p) / (n - 1)) if n >= 2 else math.nan

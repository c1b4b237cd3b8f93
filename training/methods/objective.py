"""Training method: rows → groups of token rows; their log-probabilities → loss, slopes and metrics.

A step measures the log-probabilities first (a forward pass), asks the method, and then runs the
gradient of Σ slope · log-probability, which is the gradient of the loss. So a method is a few lines
of float64 arithmetic on the host, and needs no graph: a group may lie in several windows and device
runs. Supervised learning is the case whose slopes do not depend on log-probabilities, and has no
measuring pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from logitless.training.data.dataset_rows import DatasetRow, RowAnswer
from logitless.training.data.packing import Sample
from logitless.training.data.tokenize_rows import Example

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Encode = Callable[[DatasetRow, RowAnswer], Example]  # the tokens of a row's prompt with an answer
Group = tuple[Example, ...]  # token rows of one example of the data


@dataclass(frozen=True)
class TokenRows:
    """Log-probabilities of a batch's R token rows: n learned tokens, sorted by row. The rows of an
    example follow each other."""

    log_probs: F64  # (n,)
    row: I64  # (n,): the row of each token, from 0
    values: F64  # (R,): how each row was judged, as its method's `groups` has set it
    reference: F64  # (R,): log-probability of each row before the run's first step; NaN: not measured

    @property
    def counts(self) -> F64:
        """(R,): learned tokens of each row, at least 1."""
        return self._sum(np.ones(len(self.row)))

    @property
    def sums(self) -> F64:
        """(R,): log-probability of each row, which is the sum of its tokens'."""
        return self._sum(self.log_probs)

    def _sum(self, values: F64) -> F64:
        return np.bincount(self.row, values, len(self.values)).astype(np.float64, copy=False)

    def spread(self, slopes: F64) -> F64:
        """(n,): slopes by the rows' sums (R,) as slopes by the tokens' log-probabilities."""
        return slopes[self.row]


@dataclass(frozen=True)
class Measured:
    """A batch's loss (a mean over its examples), its slope by each log-probability, the examples
    that are as they should be, and metrics as (sum, number of values)."""

    loss: float
    slopes: F64  # (n,)
    n_examples: int
    n_correct: int
    metrics: Mapping[str, tuple[float, int]]


class Objective(Protocol):
    """A training method. Its fields are its hyperparameters; `registry.METHODS` lists all."""

    NAME: ClassVar[str]
    HAS_REFERENCE: ClassVar[bool]  # the rows are measured once before the first step

    def groups(self, records: Iterable[DatasetRow], encode: Encode, name: str) -> Iterator[Group]:
        """Token rows of each example. TrainingError: a row is of another method's data."""
        ...

    def measure(self, rows: TokenRows) -> Measured:
        """Loss, slopes and metrics of a batch."""
        ...


def token_rows(
    windows: Sequence[Sample], losses: Sequence[F32], values: F64, reference: F64
) -> tuple[TokenRows, I64, list[I64]]:
    """The rows of these windows; their numbers in the dataset (R,), sorted; and of each window the
    place of its learned tokens in `TokenRows`.

    `losses`: −log-probability of each window's labels (T,); `values`, `reference`: of all rows of
    the dataset."""
    numbers = [w.rows_of_tokens()[w.weights > 0] for w in windows]
    every = np.concatenate(numbers)
    order = np.argsort(every, kind="stable")
    result, row = np.unique(every, return_inverse=True)
    log_probs = -np.concatenate([x[w.weights > 0] for w, x in zip(windows, losses, strict=True)]).astype(np.float64)
    places = np.empty(len(every), np.int64)
    places[order] = np.arange(len(every))
    ends = np.cumsum([len(n) for n in numbers])
    rows = TokenRows(log_probs[order], row[order], values[result], reference[result])
    return rows, result, np.split(places, ends[:-1])


def weighted(windows: Sequence[Sample], places: Sequence[I64], slopes: F64) -> list[Sample]:
    """Windows whose weighted cross entropy has the gradient of the loss: −slope at each label."""
    result = []
    for window, at in zip(windows, places, strict=True):
        weights = np.zeros(len(window.weights), np.float32)
        weights[window.weights > 0] = -slopes[at]
        result.append(replace(window, weights=weights))
    return result

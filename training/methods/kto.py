"""KTO: preference optimization of single answers that are labelled good or bad."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from logitless.training.data.dataset_rows import DatasetRow, RowAnswer
from logitless.training.errors import TrainingError
from logitless.training.methods.objective import Encode, Group, Measured, TokenRows
from logitless.training.methods.preference import sigmoid


@dataclass(frozen=True)
class KTO:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8).

    With an answer's reward h = x − x₀, x₀ before the run's first step: w · (1 − σ(β · (h − z))) for
    a good answer and w · (1 − σ(β · (z − h))) for a bad one. z is the mean reward of answers to
    other prompts, at least 0 and taken as a constant. The second row of an example is its prompt
    with the answer of the example after it; the last one has the first's."""

    NAME: ClassVar[str] = "kto"
    HAS_REFERENCE: ClassVar[bool] = True

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def groups(self, records: Iterable[DatasetRow], encode: Encode, name: str) -> Iterator[Group]:
        first = last = None
        for record in _judged(records, name):
            if last is not None:
                yield _group(last, record, encode)
            first, last = first or record, record
        if first is last:
            raise TrainingError(f"{name}: has one example, and kto needs at least two")
        assert first is not None
        assert last is not None
        yield _group(last, first, encode)

    def measure(self, rows: TokenRows) -> Measured:
        rewards = (rows.sums - rows.reference).reshape(-1, 2)
        judged = rows.values.reshape(-1, 2)[:, 0]
        n, good = len(judged), judged > 0
        baseline = max(0.0, float(rewards[:, 1].mean()))
        weights = np.where(good, self.desirable_weight, self.undesirable_weight)
        likes = sigmoid(self.beta * judged * (rewards[:, 0] - baseline))
        slopes = np.zeros((n, 2))
        slopes[:, 0] = -weights * self.beta * judged * likes * (1 - likes) / n
        scaled = self.beta * rewards[:, 0]
        right = int((judged * (rewards[:, 0] - baseline) > 0).sum())
        metrics = {
            "reward_chosen": (float(scaled[good].sum()), int(good.sum())),
            "reward_rejected": (float(scaled[~good].sum()), int((~good).sum())),
            "reward_accuracy": (float(right), n),
            "kl": (baseline * n, n),
        }
        loss = float((weights * (1 - likes)).mean())
        return Measured(loss, rows.spread(slopes.reshape(-1)), n, right, metrics)


def _judged(records: Iterable[DatasetRow], name: str) -> Iterator[DatasetRow]:
    """Rows with one answer each; a pair is two of them."""
    for record in records:
        if not record.answers:
            raise TrainingError(
                f"{name}: line {record.line}: is {record.format}; kto learns from 'prompt', 'completion', 'label', "
                "or from pairs"
            )
        for answer in record.answers:
            yield replace(record, answers=(answer,))


def _group(record: DatasetRow, after: DatasetRow, encode: Encode) -> Group:
    (answer,), (other,) = record.answers, after.answers
    if bool(answer.messages) != bool(other.messages):
        other = RowAnswer("".join(str(m.get("content") or "") for m in other.messages), ())
    return encode(record, answer), encode(record, replace(other, value=0.0))

"""Preference methods (DPO, ORPO, SimPO): raise the chosen answer's likelihood over the rejected one's.

In a pair, c and r are the log-probabilities of the two answers, and σ is the logistic function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.errors import TrainingError
from logitless.training.methods.objective import F64, Encode, Group, Measured, TokenRows


def log_sigmoid(x: F64) -> F64:
    """ln σ(x), without overflow."""
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: F64) -> F64:
    return np.exp(log_sigmoid(x))


@dataclass(frozen=True)
class Pairs:
    """Base of the methods on pairs: rows in twos, the chosen one first."""

    HAS_REFERENCE: ClassVar[bool] = False

    def groups(self, records: Iterable[DatasetRow], encode: Encode, name: str) -> Iterator[Group]:
        for record in records:
            if len(record.answers) != 2:
                raise TrainingError(
                    f"{name}: line {record.line}: is {record.format}; this method learns from pairs: 'prompt', "
                    "'chosen', 'rejected', or 'input', 'preferred_output', 'non_preferred_output'"
                )
            yield tuple(encode(record, answer) for answer in record.answers)

    def _measured(self, rows: TokenRows, loss: F64, slopes: F64, rewards: F64) -> Measured:
        """`loss` (P,), `slopes` by the rows' sums and `rewards` (P, 2) of P pairs."""
        n = len(loss)
        margins = rewards[:, 0] - rewards[:, 1]
        n_correct = int((margins > 0).sum())
        sums = rows.sums.reshape(-1, 2)
        metrics = {
            "reward_chosen": (float(rewards[:, 0].sum()), n),
            "reward_rejected": (float(rewards[:, 1].sum()), n),
            "reward_margin": (float(margins.sum()), n),
            "reward_accuracy": (float(n_correct), n),
            "log_prob_chosen": (float(sums[:, 0].sum()), n),
            "log_prob_rejected": (float(sums[:, 1].sum()), n),
        }
        return Measured(float(loss.mean()), rows.spread(slopes.reshape(-1)), n, n_correct, metrics)


@dataclass(frozen=True)
class DPO(Pairs):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    −ln σ(β · ((c − c₀) − (r − r₀))), with c₀ and r₀ before the run's first step. A reward is
    β · (c − c₀)."""

    NAME: ClassVar[str] = "dpo"
    HAS_REFERENCE: ClassVar[bool] = True

    beta: float = 0.1

    def measure(self, rows: TokenRows) -> Measured:
        rewards = self.beta * (rows.sums - rows.reference).reshape(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        slope = -self.beta * sigmoid(-margins) / len(margins)
        return self._measured(rows, -log_sigmoid(margins), np.stack([slope, -slope], 1), rewards)


@dataclass(frozen=True)
class ORPO(Pairs):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7).

    The loss of supervised learning of the chosen answers (the mean over their tokens), and
    −β · ln σ(ln odds(c̄) − ln odds(r̄)) of the mean log-probabilities of a token c̄ and r̄, with
    odds(x) = eˣ / (1 − eˣ). A reward is β · c̄."""

    NAME: ClassVar[str] = "orpo"

    beta: float = 0.1

    def measure(self, rows: TokenRows) -> Measured:
        counts = rows.counts.reshape(-1, 2)
        means = rows.sums.reshape(-1, 2) / counts
        n = len(means)
        # 1 − eˣ, which is 0 where a token is certain: at least the spacing of numbers near 1
        rest = np.maximum(-np.expm1(means), np.finfo(np.float64).eps)
        odds = means - np.log(rest)
        ratio = odds[:, 0] - odds[:, 1]
        n_chosen = counts[:, 0].sum()
        supervised = -rows.sums.reshape(-1, 2)[:, 0].sum() / n_chosen
        slope = -self.beta * sigmoid(-ratio)[:, None] / (rest * counts * n)
        slopes = slope * np.array([1.0, -1.0])
        slopes[:, 0] -= 1 / n_chosen
        return self._measured(rows, supervised - self.beta * log_sigmoid(ratio), slopes, self.beta * means)


@dataclass(frozen=True)
class SimPO(Pairs):
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734, equation 6).

    −ln σ(β · c̄ − β · r̄ − γ) of the mean log-probabilities of a token c̄ and r̄. A reward is β · c̄."""

    NAME: ClassVar[str] = "simpo"

    beta: float = 2.0
    gamma: float = 1.0

    def measure(self, rows: TokenRows) -> Measured:
        counts = rows.counts.reshape(-1, 2)
        rewards = self.beta * rows.sums.reshape(-1, 2) / counts
        above = rewards[:, 0] - rewards[:, 1] - self.gamma
        slope = -self.beta * sigmoid(-above)[:, None] / (counts * len(above))
        return self._measured(rows, -log_sigmoid(above), slope * np.array([1.0, -1.0]), rewards)

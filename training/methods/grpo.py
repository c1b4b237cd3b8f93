"""Group relative policy optimization: answers to one prompt are judged against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
LOSSES = ("grpo", "dr_grpo")


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of a batch of answers, its slope by each token's log-probability, and metrics as (sum, number of values)."""

    loss: float
    slopes: F64  # (n,)
    metrics: Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class GRPO:
    """Shao et al. 2024 (arXiv 2402.03300), and Dr. GRPO: Liu et al. 2025 (arXiv 2503.20783).

    Of a token with log-probability x, y when it was sampled, and r of the reference: ratio
    e = eˣ⁻ʸ, and the loss −min(e · A, clip(e, 1 − clip, 1 + clip) · A) + β · (eʳ⁻ˣ − (r − x) − 1).
    The advantage A is an answer's reward minus the mean of its prompt's answers. "grpo" divides it
    by their deviation, and weighs a token 1 / (answers · tokens of its answer); "dr_grpo" does not,
    and weighs all tokens 1 / (answers · `max_tokens`)."""

    NAME: ClassVar[str] = "reinforcement"

    n_samples: int = 8  # answers to a prompt
    n_updates: int = 1  # optimizer steps on the same answers
    max_tokens: int = 128  # of an answer
    max_tool_turns: int = 0  # turns of an answer whose calls of tools get results
    beta: float = 0.0
    clip: float = 0.2
    loss_type: str = "grpo"
    eval_samples: int = 1  # answers to a prompt that validates

    def advantages(self, rewards: F64) -> F64:
        """(P, n) of rewards (P, n); NaN rewards are of no answer, and have no advantage."""
        valid = np.isfinite(rewards)
        n = valid.sum(1, keepdims=True)
        filled = np.where(valid, rewards, 0.0)
        centred = np.where(valid, filled - filled.sum(1, keepdims=True) / np.maximum(n, 1), 0.0)
        if self.loss_type == "grpo":
            deviation = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(n - 1, 1))
            centred = centred / (deviation + 1e-4)
        return np.where(n > 1, centred, 0.0)

    def measure(self, new: F64, old: F64, reference: F64 | None, row: I64, advantages: F64) -> PolicyLoss:
        """Loss of R answers: log-probabilities (n,) of their tokens, the answer `row` (n,) of each, advantages (R,)."""
        n_rows = len(advantages)
        counts = np.bincount(row, minlength=n_rows)
        lengths = np.maximum(counts, 1) if self.loss_type == "grpo" else np.full(n_rows, self.max_tokens)
        weights = (1 / (n_rows * lengths))[row]
        a, ratio = advantages[row], np.exp(new - old)
        bounded = np.clip(ratio, 1 - self.clip, 1 + self.clip)
        gain = np.minimum(ratio * a, bounded * a)
        clipped = ((a > 0) & (ratio > 1 + self.clip)) | ((a < 0) & (ratio < 1 - self.clip))
        losses, slopes = -gain, np.where(clipped, 0.0, -ratio * a)
        metrics = {
            "ratio": (float(ratio.sum()), len(ratio)),
            "clip_fraction": (float(clipped.sum()), len(ratio)),
            "completion_tokens": (float(counts.sum()), n_rows),
        }
        if reference is not None:
            off = reference - new
            kl = np.expm1(off) - off
            losses = losses + self.beta * kl
            slopes = slopes - self.beta * np.expm1(off)
            metrics["kl"] = float(kl.sum()), len(kl)
        return PolicyLoss(float((weights * losses).sum()), weights * slopes, metrics)


def reward_metrics(rewards: F64) -> dict[str, tuple[float, int]]:
    """Metrics of rewards (P, n): their mean, their mean deviation within a prompt, answers without one."""
    valid = np.isfinite(rewards)
    own = [row[ok] for row, ok in zip(rewards, valid, strict=True) if ok.any()]
    return {
        "mean_reward": (float(rewards[valid].sum()), int(valid.sum())),
        "reward_std": (float(sum(r.std() for r in own)), len(own)),
        "ungraded": (float((~valid).sum()), 1),
    }


def of_answers(values: Sequence[npt.NDArray[np.float32]]) -> tuple[F64, I64]:
    """Values of each answer's tokens, one after another (n,), and the answer of each (n,)."""
    row = np.repeat(np.arange(len(values)), [len(v) for v in values])
    return np.concatenate([*values, np.zeros(0, np.float32)]).astype(np.float64), row

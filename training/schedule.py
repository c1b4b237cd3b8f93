"""Learning rate schedules (warm-up, cosine, halving) and stopping rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from logitless.training.config import TrainingConfig

MOST_WARMUP = 100  # steps


def default_warmup(n_steps: int) -> int:
    """Warm-up steps of a run of so many: a tenth, at most 100."""
    return min(MOST_WARMUP, n_steps // 10)


def factor_at(c: TrainingConfig, step: float, epoch: int = 0) -> float:
    """Factor of the peak rate, in [0, 1], at optimizer step `step` (from 0) of epoch `epoch` (from 0).

    `cosine`: linear warm-up, then a cosine down to `cos_decay_min`. With restarts every period is
    `cos_decay_restart` times longer than the one before, counted from the end of the warm-up;
    without, the cosine is counted from step 0, as llama.cpp's trainer does. `adam_min_alpha` is a
    floor for all of it, the warm-up too. `halving`: the rate falls to `learning_rate_min` over
    `decay_epochs`, by powers of one half, constant within an epoch. `constant`: warm-up only."""
    assert c.learning_rate is not None
    assert c.warmup is not None
    if c.schedule == "halving":
        return _halved(c, c.learning_rate, epoch)
    s = 1.0
    if step < c.warmup:
        s = step / c.warmup
    elif c.schedule == "cosine":
        s = _cosine(c, step, c.warmup)
    m = c.adam_min_alpha / c.learning_rate
    return m + s * (1 - m)


def _halved(c: TrainingConfig, peak: float, epoch: int) -> float:
    """0.5 ** (epoch · log2(peak / least) / decay_epochs), not below the least rate."""
    least = c.learning_rate_min
    if least <= 0 or least >= peak:
        return 1.0
    rate: float = 0.5 ** (epoch * math.log2(peak / least) / (c.decay_epochs or c.epochs or 1))
    return max(rate, least / peak)


def _cosine(c: TrainingConfig, step: float, warmup: int) -> float:
    period = float(max(1, c.cos_decay_steps))
    if c.enable_restart:
        at = float(step - warmup)
        while at > period:
            at -= period
            period *= c.cos_decay_restart
    else:
        at = min(float(step), period)
    wave = 0.5 * (1 + math.cos(math.pi * at / period))
    return c.cos_decay_min + (1 - c.cos_decay_min) * wave


def rate_at(c: TrainingConfig, step: float, epoch: int = 0) -> float:
    """The learning rate of a step."""
    assert c.learning_rate is not None
    return c.learning_rate * factor_at(c, step, epoch)


@dataclass(slots=True)
class Stopping:
    """Rules that end a run early; a value of 0 or less disables a rule. `update` after every optimizer step."""

    past: int = 0  # compare with the loss this many steps ago
    delta: float = 1e-5  # the relative change that still counts as progress
    max_no_improvement: int = 0  # steps without a new best loss
    epsf: float = 0.0  # the relative change from one step to the next that is none
    patience: int = 0  # validations without a new best validation loss

    best_loss: float = math.inf
    previous_loss: float = math.inf
    no_improvement: int = 0
    history: tuple[float, ...] = ()
    n_updates: int = 0
    best_valid_loss: float = math.inf
    best_step: int = 0  # of the best validation loss
    n_worse: int = 0  # validations since

    def update(self, loss: float) -> str | None:
        """Reason to stop after a step with this loss, or None."""
        self.n_updates += 1
        if self.past > 0:
            if len(self.history) == self.past:
                rate = (self.history[0] - loss) / (abs(loss) or 1.0)
                if self.delta > 0 and abs(rate) < self.delta:
                    return f"the loss changed by less than {self.delta:g} in {self.past} steps (--opt-delta)"
            self.history = (*self.history, loss)[-self.past :]
        if self.epsf > 0 and abs(loss - self.previous_loss) / (abs(loss) or 1.0) < self.epsf:
            return f"the loss changed by less than {self.epsf:g} in a step (--adam-epsf)"
        self.previous_loss = loss
        if loss < self.best_loss:
            self.best_loss, self.no_improvement = loss, 0
        else:
            self.no_improvement += 1
            if 0 < self.max_no_improvement <= self.no_improvement:
                return f"no improvement in {self.no_improvement} steps (--opt-max-no-improvement)"
        return None

    def validated(self, loss: float, step: int) -> None:
        """Note a validation loss after optimizer step `step`; see `stale`."""
        if loss < self.best_valid_loss:
            self.best_valid_loss, self.best_step, self.n_worse = loss, step, 0
        else:
            self.n_worse += 1

    def forget_validations(self) -> None:
        """Begin anew with the validation losses."""
        self.best_valid_loss, self.best_step, self.n_worse = math.inf, 0, 0

    @property
    def stale(self) -> str:
        """Reason to stop because validation losses do not fall any more, or ""."""
        if 0 < self.patience <= self.n_worse:
            return f"no lower validation loss than that of step {self.best_step} in {self.n_worse} validations"
        return ""

    def counters(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return {
            "best_loss": self.best_loss,
            "previous_loss": self.previous_loss,
            "no_improvement": self.no_improvement,
            "history": self.history,
            "n_updates": self.n_updates,
            "best_valid_loss": self.best_valid_loss,
            "best_step": self.best_step,
            "n_worse": self.n_worse,
        }

    def restore(self, counters: dict[str, Any]) -> None:
        for name, value in counters.items():
            setattr(self, name, value)

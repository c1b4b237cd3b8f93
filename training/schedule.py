"""Learning rate schedules (warm-up, cosine, halving) and stopping rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from logitless.training.errors import TrainingError

MOST_WARMUP = 100  # steps


def default_warmup(n_steps: int) -> int:
    """Warm-up steps of a run of so many: a tenth, at most 100."""
    return min(MOST_WARMUP, n_steps // 10)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rate at a step. Names and defaults are llama.cpp's.

    `cosine`: linear warm-up, then a cosine down to `cos_decay_min`. With restarts every period is
    `cos_decay_restart` times longer than the one before, counted from the end of the warm-up;
    without, the cosine is counted from step 0, as llama.cpp's trainer does. `min_alpha` is a floor
    for all of it, the warm-up too. `halving`: the rate falls from `alpha` to `lr_min` over
    `decay_epochs`, by powers of one half, constant within an epoch. `constant`: warm-up only."""

    alpha: float = 1e-3
    kind: str = "cosine"  # "cosine" | "halving" | "constant"
    warmup: int = 100
    cos_decay_steps: int = 1000
    cos_decay_min: float = 0.1
    cos_decay_restart: float = 1.1
    enable_restart: bool = False
    min_alpha: float = 0.0
    lr_min: float = 0.0
    decay_epochs: float = 0.0  # 0: all epochs of the run

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "halving", "constant"):
            raise TrainingError(f"schedule {self.kind!r} is not cosine, halving or constant")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise TrainingError(f"the learning rate must be positive, not {self.alpha} (--learning-rate)")
        if self.enable_restart and self.cos_decay_restart < 1:
            raise TrainingError(f"cos-decay-restart must be at least 1, not {self.cos_decay_restart}")

    def factor(self, step: int, epoch: int = 0, n_epochs: float = 1) -> float:
        """Factor of the peak rate, in [0, 1], at optimizer step `step` (from 0) of epoch `epoch` (from 0)."""
        if self.kind == "halving":
            return self._halved(epoch, n_epochs)
        s = 1.0
        if step < self.warmup:
            s = step / self.warmup
        elif self.kind == "cosine":
            s = self._cosine(step)
        m = self.min_alpha / self.alpha
        return m + s * (1 - m)

    def _cosine(self, step: int) -> float:
        period = float(max(1, self.cos_decay_steps))
        if self.enable_restart:
            at = float(step - self.warmup)
            while at > period:
                at -= period
                period *= self.cos_decay_restart
        else:
            at = min(float(step), period)
        wave = 0.5 * (1 + math.cos(math.pi * at / period))
        return self.cos_decay_min + (1 - self.cos_decay_min) * wave

    def _halved(self, epoch: int, n_epochs: float) -> float:
        """0.5 ** (epoch · log2(alpha / lr_min) / decay_epochs), not below lr_min."""
        if self.lr_min <= 0 or self.lr_min >= self.alpha:
            return 1.0
        span = self.decay_epochs or n_epochs
        rate: float = 0.5 ** (epoch * math.log2(self.alpha / self.lr_min) / span)
        return max(rate, self.lr_min / self.alpha)

    def rate(self, step: int, epoch: int = 0, n_epochs: float = 1) -> float:
        return self.alpha * self.factor(step, epoch, n_epochs)


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


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW or SGD, with the defaults of llama.cpp's trainer. `decay` is multiplied by the rate; of
    the rest SGD has nothing."""

    kind: str = "adamw"  # "adamw" | "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.1
    decay_min_ndim: int = 2  # tensors with fewer dimensions are spared from decay
    gclip: float = 1.0  # of the gradient's norm over all parameters; 0: none
    lora_plus_ratio: float = 1.0  # factor of the rate of LoRA's B (LoRA+, Hayou et al., 2024)

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "sgd"):
            raise TrainingError(f"optimizer {self.kind!r} is not adamw or sgd")
        for name, value, flag in (
            ("beta1", self.beta1, "--adam-beta1"),
            ("beta2", self.beta2, "--adam-beta2"),
            ("decay", self.decay, "--weight-decay"),
        ):
            if not 0 <= value <= 1:
                raise TrainingError(f"adam-{name} must be between 0 and 1, not {value} ({flag})")

"""Hyperparameters of a job: OpenAI's names and further ones; "auto" is chosen from the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from logitless.training.schedule import OptimizerSettings, default_warmup

if TYPE_CHECKING:
    from logitless.training.data.tokenize_rows import I32

# tokens of a step, about: fewer leave the device idle, more learn less from the same data
BATCH_TOKENS = 512
FILLED = 0.95  # part of a batch's windows that its examples fill, so that few batches need one more
MIN_STEPS = 50  # steps of a run that batch_size "auto" leaves, if there are so many examples
MOST_EXAMPLES = 256  # of a batch with batch_size "auto"


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a job that runs.

    Batches and epochs count examples. `learning_rate_multiplier` scales `base_rate`. `own`: those
    of the training method, such as dpo's beta. `early_stopping_patience`: epochs
    without a lower validation loss until the job ends; 0: it runs to its end.
    """

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    context_length: int
    warmup_steps: int
    lora_r: int = 8
    lora_alpha: float = 0.0
    lora_target_modules: Sequence[str] = ()
    lora_rslora: bool = False
    lora_dora: bool = False
    lora_init: str = "gaussian"
    lora_plus_ratio: float = 1.0
    neftune_noise_alpha: float = 0.0
    optimizer: str = "adamw"
    weight_decay: float = 0.1  # of sgd 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    chat_template: str = ""  # "": the model's
    full: bool = False
    validation_split: float = 0.0
    early_stopping_patience: int = 0
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        return OptimizerSettings(
            kind=self.optimizer,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            decay=self.weight_decay,
            gclip=self.max_grad_norm,
            lora_plus_ratio=self.lora_plus_ratio,
        )

    def as_row(self) -> dict[str, Any]:
        """All of them by name, as a job shows them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "own"}
        return {**values, **self.own}


DEFAULTS = {f.name: "auto" if f.default is MISSING else f.default for f in fields(Hyperparameters) if f.name != "own"}


OF_ADAM = ("adam_beta1", "adam_beta2", "max_grad_norm")  # SGD has neither moments nor clipping
REINFORCED: dict[str, Any] = {  # hyperparameters that only this method has
    "compute_multiplier": 1.0,
    "eval_interval": "auto",
    "eval_samples": 1,
    "reasoning_effort": "default",
    "n_samples": "auto",
    "n_updates": 1,
    "max_completion_tokens": "auto",
    "max_tool_turns": 0,
    "beta": 0.0,
    "clip_range": 0.2,
    "loss_type": "grpo",
}


def base_rate(method: str, *, full: bool) -> float:
    """Learning rate with a multiplier of 1; all weights need less than an adapter."""
    from logitless.training.methods.registry import learning_rate

    return learning_rate(method) * (0.01 if full else 1.0)


def resolved(
    asked: Mapping[str, Any], lengths: I32, longest: int, n_ctx_train: int, own: Mapping[str, float] | None = None
) -> Hyperparameters:
    """Hyperparameters of a job, with a number for each "auto".

    `lengths` (examples,): tokens of the training examples without their rows' last ones, which are
    labels alone; `longest`: of the longest row, those that validate too; `own`: hyperparameters of
    the method. As OpenAI does it, few
    examples are seen more often and many in larger batches; here a batch has also the tokens that
    fill a device run.
    """
    from logitless.training.data.load import context_of

    values = {**DEFAULTS, **{name: value for name, value in asked.items() if name in DEFAULTS}}

    def auto(name: str, value: float) -> None:
        if values[name] == "auto":
            values[name] = value

    n, mean = len(lengths), float(lengths.mean())
    auto("context_length", context_of(longest, n_ctx_train))
    auto("n_epochs", epochs_of(n))
    auto("batch_size", _batch(n, mean, values["n_epochs"]))
    batch_tokens = min(values["batch_size"], n) * mean
    auto("learning_rate_multiplier", round(min(2.0, max(0.5, math.sqrt(batch_tokens / BATCH_TOKENS))), 2))
    auto("warmup_steps", default_warmup(values["n_epochs"] * math.ceil(n / values["batch_size"])))
    return Hyperparameters(**values, own=dict(own or {}))


def epochs_of(n: int) -> int:
    """3, but more for fewer than 34 examples (at most 25) and fewer for more than 8,333."""
    if 3 * n < 100:
        return min(25, 100 // n)
    return max(1, min(3, 25_000 // n))


def _batch(n: int, mean: float, n_epochs: int) -> int:
    """0.2 % of the examples, or so many as fill a step; fewer if the run had too few steps."""
    filling = max(round(0.002 * n), int(FILLED * BATCH_TOKENS / mean))
    return max(1, min(filling, MOST_EXAMPLES, n_epochs * n // MIN_STEPS, n))


def told(asked: Mapping[str, Any], found: Hyperparameters, n: int, mean: float) -> str:
    """Line about the choices for "auto"; "": there was none."""
    auto = {k: v for k, v in found.as_row().items() if {**DEFAULTS, **asked}.get(k, "auto") == "auto"}
    chosen = [f"{k}={v:g}" for k, v in auto.items() if not isinstance(v, str)]
    if not chosen:
        return ""
    return f"Hyperparameters chosen from {n} examples of {mean:.0f} tokens on average: {', '.join(chosen)}"

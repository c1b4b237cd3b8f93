"""Hyperparameters of a job: a number for each "auto", chosen from the data as OpenAI does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from logitless.training.config import AUTO, REINFORCEMENT, TrainingConfig, config_of_job, job_defaults
from logitless.training.errors import TrainingError
from logitless.training.schedule import default_warmup

if TYPE_CHECKING:
    from logitless.training.data.tokenize_rows import I32

# tokens of a step, about: fewer leave the device idle, more learn less from the same data
BATCH_TOKENS = 512
FILLED = 0.95  # part of a batch's windows that its examples fill, so that few batches need one more
MIN_STEPS = 50  # steps of a run that batch_size "auto" leaves, if there are so many examples
MOST_EXAMPLES = 256  # of a batch with batch_size "auto"
N_SAMPLES, BATCH, MAX_COMPLETION = 8, 8, 256  # "auto": answers to a prompt, prompts of a step, tokens of an answer
MIN_BATCHES = 64  # of a run with n_epochs "auto": a batch teaches little, and repeated prompts get new answers


def base_rate(method: str, *, full: bool) -> float:
    """Learning rate with a multiplier of 1; all weights need less than an adapter."""
    from logitless.training.methods.registry import learning_rate

    return learning_rate(method) * (0.01 if full else 1.0)


class Choices:
    """Values of a job's hyperparameters, of which those that are "auto" can be chosen."""

    def __init__(self, row: Mapping[str, Any], method: str) -> None:
        defaults = dict(job_defaults(method))
        if row.get("optimizer") == "sgd":
            defaults["weight_decay"] = 0.0
        self.method, self.automatic = method, [name for name in defaults if row.get(name, AUTO) == AUTO]
        self.values = {
            name: row[name] if row.get(name, AUTO) != AUTO else default for name, default in defaults.items()
        }

    def choose(self, name: str, value: float) -> None:
        if self.values[name] == AUTO:
            self.values[name] = value

    def config(self, seed: int) -> TrainingConfig:
        """The configuration of the job."""
        from msgspec.structs import replace

        config = config_of_job(self.values, self.method, seed)
        return replace(config, learning_rate=base_rate(self.method, full=config.full))


def resolved(
    row: Mapping[str, Any], lengths: I32, longest: int, n_ctx_train: int, method: str = "supervised", seed: int = 0
) -> TrainingConfig:
    """The configuration of a job that learns from data, with a number for each "auto".

    `lengths` (examples,): tokens of the training examples without their rows' last ones, which are
    labels alone; `longest`: of the longest row, those that validate too. As OpenAI does it, few
    examples are seen more often and many in larger batches; here a batch has also the tokens that
    fill a device run."""
    from logitless.training.data.load import context_of

    c, n, mean = Choices(row, method), len(lengths), float(lengths.mean())
    c.choose("context_length", context_of(longest, n_ctx_train))
    c.choose("n_epochs", epochs_of(n))
    c.choose("batch_size", _batch(n, mean, c.values["n_epochs"]))
    batch_tokens = min(c.values["batch_size"], n) * mean
    c.choose("learning_rate_multiplier", round(min(2.0, max(0.5, math.sqrt(batch_tokens / BATCH_TOKENS))), 2))
    c.choose("warmup_steps", default_warmup(c.values["n_epochs"] * math.ceil(n / c.values["batch_size"])))
    return c.config(seed)


def resolved_rewards(row: Mapping[str, Any], n: int, longest: int, n_ctx: int, seed: int = 0) -> TrainingConfig:
    """The configuration of a job that learns from rewards. `n`: prompts to train on; `longest`: tokens
    of the longest prompt; `n_ctx`: of the model's context. TrainingError: an answer has no room."""
    c = Choices(row, REINFORCEMENT)
    c.choose("n_samples", max(2, round(N_SAMPLES * c.values["compute_multiplier"])))
    c.choose("max_completion_tokens", max(1, min(MAX_COMPLETION, n_ctx - 1 - longest)))
    room_of(longest, c.values["max_completion_tokens"], n_ctx)
    c.choose("batch_size", min(n, BATCH))
    n_batches = math.ceil(n / c.values["batch_size"])
    c.choose("n_epochs", max(epochs_of(n), math.ceil(MIN_BATCHES / n_batches)))
    c.choose("learning_rate_multiplier", 1.0)
    n_steps = math.ceil(c.values["n_epochs"] * n_batches) * c.values["n_updates"]
    c.choose("warmup_steps", default_warmup(n_steps))
    c.choose("eval_interval", max(1, n_steps // 10))
    return c.config(seed)


def room_of(longest: int, max_tokens: int, n_ctx: int) -> int:
    """Tokens of a window for the longest prompt and an answer. TrainingError: more than `n_ctx`."""
    from logitless.training.policy.served_forward import ALIGNMENT

    if longest + max_tokens >= n_ctx:
        raise TrainingError(
            f"max_completion_tokens: {max_tokens} and the longest prompt's {longest} tokens exceed the context of "
            f"{n_ctx}"
        )
    return -(-(longest + max_tokens) // ALIGNMENT) * ALIGNMENT


def epochs_of(n: int) -> int:
    """3, but more for fewer than 34 examples (at most 25) and fewer for more than 8,333."""
    if 3 * n < 100:
        return min(25, 100 // n)
    return max(1, min(3, 25_000 // n))


def _batch(n: int, mean: float, n_epochs: int) -> int:
    """0.2 % of the examples, or so many as fill a step; fewer if the run had too few steps."""
    filling = max(round(0.002 * n), int(FILLED * BATCH_TOKENS / mean))
    return max(1, min(filling, MOST_EXAMPLES, n_epochs * n // MIN_STEPS, n))


def choices_line(row: Mapping[str, Any], values: Mapping[str, Any], method: str, n: int, mean: float) -> str:
    """Line about the choices for "auto"; "": there was none."""
    automatic = {name for name, default in job_defaults(method).items() if default == AUTO}
    chosen = [f"{k}={values[k]:g}" for k in values if k in automatic and row.get(k, AUTO) == AUTO]
    if not chosen:
        return ""
    return f"Hyperparameters chosen from {n} examples of {mean:.0f} tokens on average: {', '.join(chosen)}"

"""Reinforcement jobs: their hyperparameters, prompts and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from logitless.engine.finetuning.hyperparameters import (
    DEFAULTS,
    REINFORCED,
    Hyperparameters,
    base_rate,
    epochs_of,
    told,
)
from logitless.engine.finetuning.job import Prepared
from logitless.engine.finetuning.sampled_answers import AnswerReader, grading, tools_of
from logitless.engine.finetuning.store import Row, Store
from logitless.training.data.packing import RUN_TOKENS
from logitless.training.data.prompts import Prompts, prompts_of
from logitless.training.data.sampler import ExampleSampler, split
from logitless.training.data.sources import rows_of
from logitless.training.errors import TrainingError
from logitless.training.methods.grpo import GRPO
from logitless.training.policy.reinforcement import Policy, ReinforcementTrainer, reference_steps
from logitless.training.policy.served_forward import ALIGNMENT, ServedForward, is_served
from logitless.training.schedule import Schedule, default_warmup
from logitless.training.trainer import Settings

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.dataset_rows import DatasetRow
    from logitless.training.graders.grade import Grader
    from logitless.training.trainable import Trainable

N_SAMPLES, BATCH, MAX_COMPLETION = 8, 8, 256  # "auto": answers to a prompt, prompts of a step, tokens of an answer
MIN_BATCHES = 64  # of a run with n_epochs "auto": a batch teaches little, and repeated prompts get new answers


def resolved(asked: Mapping[str, Any], n: int, longest: int, n_ctx: int) -> Hyperparameters:
    """Hyperparameters with a number for each "auto". `n`: prompts to train on; `longest`: tokens of
    the longest prompt; `n_ctx`: of the model's context. TrainingError: an answer has no room."""
    values = {**REINFORCED, **DEFAULTS, **asked}

    def auto(name: str, value: float) -> None:
        if values[name] == "auto":
            values[name] = value

    auto("n_samples", max(2, round(N_SAMPLES * values["compute_multiplier"])))
    auto("max_completion_tokens", max(1, min(MAX_COMPLETION, n_ctx - 1 - longest)))
    values["context_length"] = room_of(longest, values["max_completion_tokens"], n_ctx)
    auto("batch_size", min(n, BATCH))
    auto("n_epochs", max(epochs_of(n), math.ceil(MIN_BATCHES / math.ceil(n / values["batch_size"]))))
    auto("learning_rate_multiplier", 1.0)
    n_steps = math.ceil(values["n_epochs"] * math.ceil(n / values["batch_size"])) * values["n_updates"]
    auto("warmup_steps", default_warmup(n_steps))
    auto("eval_interval", max(1, n_steps // 10))
    own = {name: values.pop(name) for name in REINFORCED}
    return Hyperparameters(**{name: values[name] for name in DEFAULTS}, own=own)


def room_of(longest: int, max_tokens: int, n_ctx: int) -> int:
    """Tokens of a window for the longest prompt and an answer. TrainingError: more than `n_ctx`."""
    if longest + max_tokens >= n_ctx:
        raise TrainingError(
            f"max_completion_tokens: {max_tokens} and the longest prompt's {longest} tokens exceed the context of "
            f"{n_ctx}"
        )
    return -(-(longest + max_tokens) // ALIGNMENT) * ALIGNMENT


def grpo_of(h: Hyperparameters) -> GRPO:
    """The method with a job's hyperparameters."""
    own = h.own
    return GRPO(
        n_samples=own["n_samples"],
        n_updates=own["n_updates"],
        max_tokens=own["max_completion_tokens"],
        max_tool_turns=own["max_tool_turns"],
        beta=own["beta"],
        clip=own["clip_range"],
        loss_type=own["loss_type"],
        eval_samples=own["eval_samples"],
    )


def settings_of(h: Hyperparameters, n_steps: int) -> Settings:
    """The settings of a run: windows of one answer's length."""
    return Settings(
        n_ctx=h.context_length,
        n_batch=max(1, RUN_TOKENS // h.context_length),
        n_examples=h.batch_size,
        n_epochs=h.n_epochs,
        max_steps=0,
        validate_every=h.own["eval_interval"],
        schedule=Schedule(
            alpha=base_rate("reinforcement", full=h.full) * h.learning_rate_multiplier,
            warmup=h.warmup_steps,
            cos_decay_steps=max(1, n_steps),
        ),
        optimizer=h.optimizer_settings,
    )


def prepare_reinforcement(
    job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx: int
) -> Prepared:
    """Read a job's prompts. TrainingError names the line or the hyperparameter that is wrong."""
    asked: Row = job["hyperparameters"]
    effort = asked.get("reasoning_effort", "default")
    variables = {} if effort == "default" else {"reasoning_effort": effort}

    def prompts(id: str) -> Prompts:
        if not store.file_path(id).exists():
            raise TrainingError(f"the file {id} is gone")

        def records() -> Iterator[DatasetRow]:
            return rows_of(store.file_path(id), id, (store.get("files", id) or {}).get("filename", ""))

        return prompts_of(records(), tokenizer, template, id, **variables)

    found = prompts(job["training_file"])
    n = len(found)
    fraction = float(asked.get("validation_split", 0.0))
    if fraction and n < 2:
        raise TrainingError(f"{job['training_file']}: a validation_split of one prompt leaves none to train on")
    training, validation = (
        split(n, max(fraction, 1 / n), job["seed"])
        if fraction
        else (np.arange(n, dtype=np.int32), np.zeros(0, np.int32))
    )
    if job["validation_file"]:
        found = found.joined(prompts(job["validation_file"]))
        validation = np.arange(n, len(found), dtype=np.int32)
    h = resolved(asked, len(training), int(found.sizes.max()), n_ctx)
    order = ExampleSampler(found, training, job["training_file"], job["seed"])
    grpo = grpo_of(h)
    n_steps = order.n_batches(h.n_epochs, h.batch_size) * grpo.n_updates
    choices = told(asked, h, len(training), float(found.sizes[training].mean()))
    return Prepared(h, settings_of(h, n_steps), order, validation, choices=choices, grpo=grpo)


def reinforcement_trainer(
    prepared: Prepared,
    trainable: Trainable,
    engine: ModelRunner,
    policy: Policy,
    grader: Grader,
    reader: AnswerReader,
    named: Mapping[str, Any],
) -> ReinforcementTrainer:
    """The trainer of a job. `named`: as of every job's trainer. TrainingError: a tool has no endpoint."""
    s, grpo, prefix = prepared.settings, prepared.grpo, named["prefix"]
    assert grpo is not None
    ask_tools = tools_of(grader, grpo.max_tool_turns, reader)
    served = None
    if is_served(engine.hparams):
        types = engine.options.type_k, engine.options.type_v
        served = ServedForward.define(engine.session, engine.hparams, s.n_batch, s.n_ctx, types, prefix)
    return ReinforcementTrainer(
        trainable,
        s,
        prepared.order,
        prepared.validation,
        grpo=grpo,
        policy=policy,
        grade=grading(grader, reader),
        ask_tools=ask_tools,
        reference=reference_steps(engine.session, engine.model, s, served, prefix) if grpo.beta > 0 else None,
        served=served,
        **named,
    )

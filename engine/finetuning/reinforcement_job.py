"""Runs that learn from rewards, of jobs and of the command line: plan and trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from logitless.engine.finetuning.hyperparameters import choices_line, resolved_rewards, room_of
from logitless.engine.finetuning.job import row_source
from logitless.engine.finetuning.sampled_answers import AnswerReader, grading, tools_of
from logitless.engine.records.store import Row, Store
from logitless.engine.runner.model_runner import ModelRunner
from logitless.models.chat.template import ChatTemplate
from logitless.models.tokenizer import Tokenizer
from logitless.training.config import REINFORCEMENT, TrainingConfig, job_row
from logitless.training.data.packing import RUN_TOKENS
from logitless.training.data.prompts import Prompts, prompts_of
from logitless.training.data.sampler import ExampleSampler
from logitless.training.data.tokenize_rows import I32
from logitless.training.graders.grade import Grader
from logitless.training.methods.grpo import GRPO
from logitless.training.policy.reinforcement import Policy, ReinforcementTrainer, reference_steps
from logitless.training.policy.served_forward import ServedForward, is_served
from logitless.training.run import RunPlan, held_out, settings_of
from logitless.training.trainable import Trainable


def grpo_of(c: TrainingConfig) -> GRPO:
    """The method with a configuration's numbers."""
    assert c.max_completion_tokens is not None
    return GRPO(
        n_samples=c.n_samples,
        n_updates=c.n_updates,
        max_tokens=c.max_completion_tokens,
        max_tool_turns=c.max_tool_turns,
        beta=c.beta or 0.0,
        clip=c.clip_range,
        loss_type=c.loss_type,
        eval_samples=c.eval_samples,
    )


def plan_rewards(
    prompts: Prompts, config: TrainingConfig, training: I32, validation: I32, n_ctx: int, name: str, **more: Any
) -> RunPlan:
    """The plan of a run that learns from rewards: windows of one answer's length."""
    assert config.max_completion_tokens is not None
    room = room_of(int(prompts.sizes.max()), config.max_completion_tokens, n_ctx)
    n_batch = max(1, RUN_TOKENS // room)
    settings = replace(settings_of(config), ctx_size=room, batch_size=n_batch, grad_acc=1)
    order = ExampleSampler(prompts, training, name, config.seed, config.shuffle)
    return RunPlan.of(config, settings, order, validation, grpo=grpo_of(config), **more)


def prepare_reinforcement(
    job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx: int
) -> RunPlan:
    """Read a job's prompts. TrainingError names the line or the hyperparameter that is wrong."""
    row, seed = job["hyperparameters"], job["seed"]
    effort = row.get("reasoning_effort", "default")
    variables = {} if effort == "default" else {"reasoning_effort": effort}

    def read(id: str) -> Prompts:
        source = row_source(store, id)
        return prompts_of(source.records(), tokenizer, template, id, **variables)

    prompts = read(job["training_file"])
    n = len(prompts)
    training, validation = held_out(n, float(row.get("validation_split", 0.0)), seed, job["training_file"], "prompt")
    if job["validation_file"]:
        prompts = prompts.joined(read(job["validation_file"]))
        validation = np.arange(n, len(prompts), dtype=np.int32)
    config = resolved_rewards(row, len(training), int(prompts.sizes.max()), n_ctx, seed)
    mean = float(prompts.sizes[training].mean())
    line = choices_line(row, job_row(config), REINFORCEMENT, len(training), mean)
    return plan_rewards(prompts, config, training, validation, n_ctx, job["training_file"], choices=line)


def reinforcement_trainer(
    plan: RunPlan,
    trainable: Trainable,
    engine: ModelRunner,
    policy: Policy,
    grader: Grader,
    reader: AnswerReader,
    **named: Any,
) -> ReinforcementTrainer:
    """The trainer of a plan. `named`: as of every trainer. TrainingError: a tool has no endpoint."""
    s, grpo, prefix = plan.settings, plan.grpo, named.get("prefix", "train")
    assert grpo is not None
    ask_tools = tools_of(grader, grpo.max_tool_turns, reader)
    served = None
    types = engine.options.type_k, engine.options.type_v
    if is_served(engine.hparams, types):
        served = ServedForward.define(engine.session, engine.hparams, s.batch_size, s.n_ctx, types, prefix)
    return ReinforcementTrainer(
        trainable,
        s,
        plan.order,
        plan.validation,
        grpo=grpo,
        policy=policy,
        grade=grading(grader, reader),
        ask_tools=ask_tools,
        reference=reference_steps(engine.session, engine.model, s, served, prefix) if grpo.beta > 0 else None,
        served=served,
        stopping=plan.stopping,
        **named,
    )

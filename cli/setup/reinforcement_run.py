"""The run of `finetune --method reinforcement`: an engine that samples answers beside a trainer."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.progress import COMPILING, show_compiling
from logitless.cli.setup import training_run

if TYPE_CHECKING:
    from logitless.training.adapters.options import LoraOptions
    from logitless.training.checkpoint import Checkpoint
    from logitless.training.graders.grade import Grader
    from logitless.training.methods.grpo import GRPO

N_SLOTS = 8  # answers that are sampled at once


def run(o: SimpleNamespace, path: Path, lora: LoraOptions | None, output: str, resumed: Checkpoint | None) -> int:
    """Train, and write `output` as training_run.run does. TrainingError: the data or the grader."""
    from logitless.engine.finetuning.reinforcement_job import room_of
    from logitless.engine.finetuning.rollouts import Rollouts
    from logitless.engine.finetuning.sampled_answers import AnswerReader, grading, tools_of
    from logitless.engine.loading.open_model import open_model
    from logitless.engine.loading.options import ModelOptions
    from logitless.training.adapters.lora import lora as define_lora
    from logitless.training.data.prompts import prompts_of
    from logitless.training.data.sampler import ExampleSampler, split
    from logitless.training.data.sources import is_rows, rows_of
    from logitless.training.policy.reinforcement import ReinforcementTrainer, n_steps_of, reference_steps
    from logitless.training.policy.served_forward import ServedForward, is_served
    from logitless.training.reporting.plot import refusal
    from logitless.training.schedule import Stopping, default_warmup
    from logitless.training.trainable import full

    if not o.file:
        raise UsageError("--file FILE is required: the rows with prompts to answer")
    if not is_rows(o.file):
        raise UsageError(f"--file {o.file}: reinforcement learns from rows with prompts, such as a .jsonl file")
    if o.plot and (reason := refusal(o.plot)):
        raise UsageError(f"--plot: {reason}")
    training_run.check_outputs(o, output)
    began = time.monotonic()
    grader = grader_of(o)
    model = open_model(path, ModelOptions(device=o.device, threads=o.threads, parallel=N_SLOTS), generates=True)
    prompts = prompts_of(rows_of(o.file, o.file), model.tokenizer, model.template, o.file)
    grpo = grpo_of(o)
    reader = AnswerReader(model.tokenizer, model.template)
    ask_tools = tools_of(grader, grpo.max_tool_turns, reader)
    n_ctx = model.hparams.n_ctx_train
    grpo = replace(grpo, max_tokens=o.max_completion_tokens or min(256, n_ctx - 1 - int(prompts.sizes.max())))
    o.ctx_size = room_of(int(prompts.sizes.max()), grpo.max_tokens, n_ctx)
    options = ModelOptions(
        device=o.device, threads=o.threads, parallel=N_SLOTS, kv_unified=False, ctx_size=N_SLOTS * (o.ctx_size + 16)
    )
    model = open_model(path, options, generates=True)
    seed = max(0, o.seed)
    training, validation = split(len(prompts), o.val_split, seed)
    settings = training_run.settings(o)
    settings = replace(settings, n_batch=max(1, 128 // o.ctx_size), grad_acc=1, n_examples=settings.n_logical)
    order = ExampleSampler(prompts, training, Path(o.file).name, seed, o.shuffle)
    if o.warmup is None and o.learning_rate is None:
        warmup = default_warmup(n_steps_of(order, settings, grpo))
        settings = replace(settings, schedule=replace(settings.schedule, warmup=warmup))
    show_compiling()
    engine = model.engine()
    try:
        engine.load()
        scheduler = model.scheduler(engine)
        session, h = engine.session, engine.hparams
        if lora is not None:
            trainable = define_lora(session, engine.model, lora, gguf=engine.gguf)
        else:
            trainable = full(session, engine.model, engine.gguf, h, o.train_tensors or ["*"])
        types = engine.options.type_k, engine.options.type_v
        served = None
        if is_served(h):
            served = ServedForward.define(session, h, settings.n_batch, settings.n_ctx, types, "train")
        trainer = ReinforcementTrainer(
            trainable,
            settings,
            order,
            validation,
            grpo=grpo,
            policy=Rollouts(scheduler, engine, trainable.model, "train"),
            grade=grading(grader, reader),
            ask_tools=ask_tools,
            reference=reference_steps(session, engine.model, settings, served, "train") if grpo.beta > 0 else None,
            served=served,
            stopping=Stopping(o.opt_past, o.opt_delta, o.opt_max_no_improvement, o.adam_epsf),
        )
        if resumed is not None:
            training_run.resume(o, trainer, resumed)
        training_run.fit(o, trainer, engine.gguf, h, output, began)
    finally:
        COMPILING.end()
        engine.close()
    return 0


def grader_of(o: SimpleNamespace) -> Grader:
    """The grader of --grader. UsageError and CliError: there is none, or it cannot be used."""
    from logitless.training.graders.grade import GraderError, Surroundings
    from logitless.training.graders.parse import parse_grader
    from logitless.training.graders.remote import server_at

    if not o.grader:
        raise UsageError("--grader FILE is required: the JSON of the grader that gives the rewards")
    try:
        spec = json.loads(Path(o.grader).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CliError(f"--grader {o.grader}: is no JSON: {' '.join(str(error).split())}") from None
    complete = server_at(o.grader_url, o.grader_api_key or "") if o.grader_url else None
    try:
        return parse_grader(spec, Surroundings(frozenset(o.allow_graders), complete))
    except GraderError as error:
        raise CliError(f"--grader {o.grader}: {error}") from None


def grpo_of(o: SimpleNamespace) -> GRPO:
    """The method with the flags' numbers."""
    from logitless.training.methods.grpo import GRPO

    return GRPO(
        n_samples=o.n_samples,
        n_updates=o.n_updates,
        max_tool_turns=o.max_tool_turns,
        beta=o.beta or 0.0,
        clip=o.clip_range,
        loss_type=o.loss_type,
        eval_samples=o.eval_samples,
    )

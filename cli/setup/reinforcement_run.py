"""The run of `finetune --method reinforcement`: an engine that samples answers beside a trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

from msgspec.structs import replace

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.progress import COMPILING, show_compiling
from logitless.cli.setup import training_run
from logitless.engine.finetuning.hyperparameters import room_of
from logitless.engine.finetuning.reinforcement_job import plan_rewards, reinforcement_trainer
from logitless.engine.finetuning.rollouts import Rollouts
from logitless.engine.finetuning.sampled_answers import AnswerReader
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import Checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.prompts import prompts_of
from logitless.training.data.sampler import split
from logitless.training.data.sources import is_rows, rows_of
from logitless.training.graders.grade import Grader, GraderError, Surroundings
from logitless.training.graders.parse import parse_grader
from logitless.training.graders.remote import server_at
from logitless.training.trainable import full

N_SLOTS = 8  # answers that are sampled at once


def run(
    o: SimpleNamespace,
    path: Path,
    config: TrainingConfig,
    adapter: LoraOptions | None,
    output: str,
    resumed: Checkpoint | None,
) -> int:
    """Train, and write `output` as training_run.run does. TrainingError: the data or the grader."""
    training_run.check_start(o, output)
    if not is_rows(o.file):
        raise UsageError(f"--file {o.file}: reinforcement learns from rows with prompts, such as a .jsonl file")
    began = time.monotonic()
    grader = grader_of(o)
    model = open_model(path, ModelOptions(device=o.device, threads=o.threads, parallel=N_SLOTS), generates=True)
    prompts = prompts_of(rows_of(o.file, o.file), model.tokenizer, model.template, o.file)
    n_ctx, longest = model.hparams.n_ctx_whole, int(prompts.sizes.max())
    most = config.max_completion_tokens or min(256, n_ctx - 1 - longest)
    room = room_of(longest, most, n_ctx)
    options = ModelOptions(
        device=o.device, threads=o.threads, parallel=N_SLOTS, kv_unified=False, ctx_size=N_SLOTS * (room + 16)
    )
    model = open_model(path, options, generates=True)
    config = replace(config, max_completion_tokens=most, batch_examples=config.batch_size * config.grad_acc)
    training, validation = split(len(prompts), config.val_split, config.seed)
    plan = plan_rewards(prompts, config, training, validation, n_ctx, Path(o.file).name)
    show_compiling()
    engine = model.engine()
    try:
        engine.load()
        if adapter is not None:
            trainable = lora(engine.session, engine.model, adapter, gguf=engine.gguf)
        else:
            trainable = full(engine.session, engine.model, engine.gguf, engine.hparams, config.train_tensors)
        policy = Rollouts(model.scheduler(engine), engine, trainable.model, "train")
        reader = AnswerReader(model.tokenizer, model.template)
        trainer = reinforcement_trainer(plan, trainable, engine, policy, grader, reader)
        if resumed is not None:
            training_run.resume(o, trainer, resumed)
        training_run.fit(o, trainer, engine.gguf, engine.hparams, output, began)
    finally:
        COMPILING.end()
        engine.close()
    return 0


def grader_of(o: SimpleNamespace) -> Grader:
    """The grader of --grader. UsageError and CliError: there is none, or it cannot be used."""
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

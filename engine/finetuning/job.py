"""A fine-tuning job's request, and the data and settings that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.engine.errors import InvalidRequest, NotSupported
from logitless.engine.finetuning.store import Row, Store, new_id
from logitless.server.protocol.fields import Fields, article, refuse

if TYPE_CHECKING:
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.packing import PackedExamples
    from logitless.training.data.sampler import Order
    from logitless.training.data.tokenize_rows import I32
    from logitless.training.trainer import Settings

RUN_TOKENS = 128  # of a device run of an adapter's training, or one window
_METHODS = ("supervised", "dpo", "reinforcement")
RUNNING = ("validating_files", "queued", "running")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Hyperparameters:
    """OpenAI's, and ours beside them. `learning_rate_multiplier` is of the trainer's rates: 1e-3 for an adapter, 1e-5
    for all weights (`full`), as llama-finetune's."""

    n_epochs: int = 3
    batch_size: int = 4
    learning_rate_multiplier: float = 1.0
    context_length: int = 128
    lora_r: int = 8
    lora_alpha: float = 0.0
    warmup_steps: int = 0
    full: bool = False


@dataclass(frozen=True)
class Prepared:
    """Everything that a job needs of the host."""

    hyperparameters: Hyperparameters
    settings: Settings
    order: Order
    validation: I32


def new_job(body: Mapping[str, Any], store: Store, base: str, names: set[str], n_ctx_train: int) -> Row:
    """The row of a job. InvalidRequest names the field that is wrong."""
    fields = Fields(body)
    model = fields.text("model")
    if model not in names:
        refuse("model", f"the server has {base!r} to fine-tune, not {model[:200]!r}")
    if not fields.text("training_file"):
        refuse("training_file", "is required")
    for name in ("training_file", "validation_file"):
        id = fields.text(name)
        row = store.get("files", id) if id else None
        if id and row is None:
            refuse(name, f"there is no file {id[:100]!r}")
        if row is not None and row["purpose"] != "fine-tune":
            refuse(name, f"the purpose of {id!r} is {row['purpose']!r}, not 'fine-tune'")
    suffix = fields.text("suffix")
    if len(suffix) > 64 or not all(c.isalnum() or c in "-_." for c in suffix):
        refuse("suffix", "must be at most 64 letters, digits, '-', '_' or '.'")
    if fields.array("integrations"):
        refuse("integrations", "must be empty: this server reports to no other services")
    method = fields.object("method")
    kind = method.get("type", "supervised")
    if kind not in _METHODS:
        refuse("method.type", f"must be one of {', '.join(_METHODS)}")
    if kind != "supervised":
        raise NotSupported(f"field 'method.type': {kind} is not supported yet")
    given = method.get("supervised") if method else None
    if given is not None and not isinstance(given, dict):
        refuse("method.supervised", f"expected an object, got {article(given)}")
    raw = (given or {}).get("hyperparameters") or fields.object("hyperparameters")
    if not isinstance(raw, dict):
        refuse("hyperparameters", f"expected an object, got {article(raw)}")
    h = _hyperparameters(raw, n_ctx_train)
    seed = fields.integer("seed", default=0, low=0, hard=True)
    id = new_id("ftjob")
    return {
        "id": id,
        "object": "fine_tuning.job",
        "created_at": int(time.time()),
        "finished_at": None,
        "started_at": None,
        "estimated_finish": None,
        "model": model,
        "model_name": f"ft:{Path(base).stem}:{suffix or 'logitless'}:{id.removeprefix('ftjob-')[:8]}",
        "fine_tuned_model": None,
        "organization_id": "logitless",
        "status": "queued",
        "training_file": fields.text("training_file"),
        "validation_file": fields.text("validation_file") or None,
        "result_files": [],
        "hyperparameters": asdict(h),
        "method": {"type": "supervised", "supervised": {"hyperparameters": asdict(h)}},
        "metadata": dict(fields.object("metadata")) or None,
        "integrations": [],
        "seed": seed,
        "trained_tokens": None,
        "user_provided_suffix": suffix or None,
        "error": None,
    }


def set_status(store: Store, id: str, allowed: Collection[str], status: str) -> Row | None:
    """Cancel, pause or resume a job; None where its state does not allow that."""

    def change(job: Row) -> Row | None:
        if job["status"] not in allowed:
            return None
        ended = {"finished_at": int(time.time())} if status in ENDED else {}
        return {**job, "status": status, **ended}

    job = store.change("jobs", id, change)
    if job is not None:
        store.add_event(id, f"The job was {status}")
    return job


def _hyperparameters(raw: Mapping[str, Any], n_ctx_train: int) -> Hyperparameters:
    unknown = set(raw) - set(asdict(Hyperparameters()))
    if unknown:
        refuse(f"hyperparameters.{min(unknown)}", "is not known")
    fields = Fields({k: None if v == "auto" else v for k, v in raw.items()})
    if raw.get("full") is True:
        for name in ("lora_r", "lora_alpha"):
            if raw.get(name) is not None:
                refuse(f"hyperparameters.{name}", "is of an adapter, and with full: true there is none")
    default = Hyperparameters()
    try:
        return Hyperparameters(
            fields.integer("n_epochs", default=default.n_epochs, low=1, high=1000, hard=True),
            fields.integer("batch_size", default=default.batch_size, low=1, high=1024, hard=True),
            fields.number(
                "learning_rate_multiplier", default=default.learning_rate_multiplier, low=1e-6, high=1e4, hard=True
            ),
            fields.integer(
                "context_length", default=min(default.context_length, n_ctx_train), low=2, high=1 << 16, hard=True
            ),
            fields.integer("lora_r", default=default.lora_r, low=1, high=1024, hard=True),
            fields.number("lora_alpha", default=default.lora_alpha, low=0, high=1e6, hard=True),
            fields.integer("warmup_steps", default=default.warmup_steps, low=0, hard=True),
            fields.boolean("full"),
        )
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("field '", "field 'hyperparameters.")) from None


def _windows_of_run(batch: int, length: int) -> int:
    """Windows of a device run: tokens of requests wait for it, so a batch is taken in parts of few tokens.

    Not where all weights are trained: their gradients would need memory of their own.
    """
    return next(n for n in range(max(1, min(batch, RUN_TOKENS // length)), 0, -1) if batch % n == 0)


def prepare(job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None) -> Prepared:
    """Read and tokenize the files. TrainingError names the line that is wrong."""
    import numpy as np

    from logitless.training.data.load import DataOptions, jsonl_dataset
    from logitless.training.data.sampler import Order
    from logitless.training.errors import TrainingError
    from logitless.training.schedule import Schedule
    from logitless.training.trainer import Settings

    h = Hyperparameters(**job["hyperparameters"])
    options = DataOptions(n_ctx=h.context_length)

    def rows(id: str) -> PackedExamples:
        try:
            return jsonl_dataset(store.file_path(id), id, tokenizer, template, options)
        except FileNotFoundError:
            raise TrainingError(f"the file {id} is gone") from None

    dataset = rows(job["training_file"])
    n_train = len(dataset)
    validation = np.arange(0, dtype=np.int32)
    if job["validation_file"]:
        dataset = dataset.joined(rows(job["validation_file"]))
        validation = np.arange(n_train, len(dataset), dtype=np.int32)
    n_steps = math.ceil(h.n_epochs * n_train / h.batch_size)
    at_once = h.batch_size if h.full else _windows_of_run(h.batch_size, h.context_length)
    settings = Settings(
        n_ctx=h.context_length,
        n_batch=at_once,
        grad_acc=h.batch_size // at_once,
        n_epochs=h.n_epochs,
        max_steps=0,
        schedule=Schedule(
            alpha=(1e-5 if h.full else 1e-3) * h.learning_rate_multiplier,
            warmup=h.warmup_steps or min(100, n_steps // 10),
            cos_decay_steps=max(1, n_steps),
        ),
    )
    order = Order(dataset, np.arange(n_train, dtype=np.int32), job["training_file"], job["seed"])
    return Prepared(h, settings, order, validation)

"""Fine-tuning job: hyperparameters, status changes, and the data and settings of its training."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from logitless.engine.finetuning.store import Row, Store

if TYPE_CHECKING:
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.packing import PackedExamples
    from logitless.training.data.sampler import Sampler
    from logitless.training.data.tokenize_rows import I32
    from logitless.training.trainer import Settings

RUN_TOKENS = 128  # tokens of a device run of LoRA training, at least one sample
RUNNING = ("validating_files", "queued", "running")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a job: OpenAI's names, and further ones.

    `learning_rate_multiplier` scales the base rate: 1e-3 for LoRA, 1e-5 for a full finetune
    (`full`), as in llama-finetune. `context_length` "auto" is the longest example's, at least 128
    and at most the model's; `warmup_steps` "auto" is a tenth of the steps, at most 100.
    """

    n_epochs: int = 3
    batch_size: int = 4
    learning_rate_multiplier: float = 1.0
    context_length: int | Literal["auto"] = "auto"
    lora_r: int = 8
    lora_alpha: float = 0.0
    warmup_steps: int | Literal["auto"] = "auto"
    full: bool = False


@dataclass(frozen=True)
class Prepared:
    """Tokenized data and settings of a job; nothing of `hyperparameters` is "auto". `warnings`: what
    is not learned as it was given."""

    hyperparameters: Hyperparameters
    settings: Settings
    order: Sampler
    validation: I32
    warnings: tuple[str, ...] = ()


def set_status(store: Store, id: str, allowed: Collection[str], status: str) -> Row | None:
    """Cancel, pause or resume a job; None if its status is not in `allowed`."""

    def change(job: Row) -> Row | None:
        if job["status"] not in allowed:
            return None
        ended = {"finished_at": int(time.time())} if status in ENDED else {}
        return {**job, "status": status, **ended}

    job = store.change("jobs", id, change)
    if job is not None:
        store.add_event(id, f"The job was {status}")
    return job


def _windows_of_run(batch: int, length: int) -> int:
    """Samples of a device run: a batch is split into runs of few tokens, because requests wait for
    them.

    Full finetunes are not split: accumulated gradients would need memory of their own.
    """
    return next(n for n in range(max(1, min(batch, RUN_TOKENS // length)), 0, -1) if batch % n == 0)


def prepare(job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx_train: int) -> Prepared:
    """Read and tokenize a job's files. Raises TrainingError that names the wrong line."""
    import numpy as np

    from logitless.training.data.load import DataOptions, context_of, jsonl_dataset, longest_row
    from logitless.training.data.sampler import Sampler
    from logitless.training.errors import TrainingError
    from logitless.training.schedule import Schedule
    from logitless.training.trainer import Settings

    h = Hyperparameters(**job["hyperparameters"])
    files = [id for id in (job["training_file"], job["validation_file"]) if id]
    for id in files:
        if not store.file_path(id).exists():
            raise TrainingError(f"the file {id} is gone")
    if h.context_length == "auto":
        longest = max(longest_row(store.file_path(id), id, tokenizer, template) for id in files)
        n_ctx = context_of(longest, n_ctx_train)
    else:
        n_ctx = h.context_length
    options = DataOptions(n_ctx=n_ctx)
    warnings: list[str] = []

    def rows(id: str) -> PackedExamples:
        found = jsonl_dataset(store.file_path(id), id, tokenizer, template, options)
        warnings.extend(f"{id}: {line}" for line in found.losses)
        return found

    dataset = rows(job["training_file"])
    n_train = len(dataset)
    validation = np.arange(0, dtype=np.int32)
    if job["validation_file"]:
        dataset = dataset.joined(rows(job["validation_file"]))
        validation = np.arange(n_train, len(dataset), dtype=np.int32)
    n_steps = math.ceil(h.n_epochs * n_train / h.batch_size)
    warmup = min(100, n_steps // 10) if h.warmup_steps == "auto" else h.warmup_steps
    if warmup >= n_steps:
        warnings.append(f"warmup_steps of {warmup}: the {n_steps} steps of the job never reach the learning rate")
    at_once = h.batch_size if h.full else _windows_of_run(h.batch_size, n_ctx)
    settings = Settings(
        n_ctx=n_ctx,
        n_batch=at_once,
        grad_acc=h.batch_size // at_once,
        n_epochs=h.n_epochs,
        max_steps=0,
        schedule=Schedule(
            alpha=(1e-5 if h.full else 1e-3) * h.learning_rate_multiplier,
            warmup=warmup,
            cos_decay_steps=max(1, n_steps),
        ),
    )
    order = Sampler(dataset, np.arange(n_train, dtype=np.int32), job["training_file"], job["seed"])
    h = replace(h, context_length=n_ctx, warmup_steps=warmup)
    return Prepared(h, settings, order, validation, tuple(warnings))

"""Fine-tuning job: status changes, and the data and settings of its training."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logitless.engine.finetuning.hyperparameters import Hyperparameters, resolved, told
from logitless.engine.finetuning.store import Row, Store

if TYPE_CHECKING:
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.packing import Examples
    from logitless.training.data.sampler import ExampleSampler
    from logitless.training.data.tokenize_rows import I32
    from logitless.training.trainer import Settings

RUN_TOKENS = 128  # tokens of a device run, at least one window: requests wait for it
SPREAD = 1.25  # tokens of a window for a whole batch, times those of an average one
RUNNING = ("validating_files", "queued", "running")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Prepared:
    """Tokenized data and settings of a job. `choices`: a line about each "auto"; `warnings`: what
    is not learned as it was given."""

    hyperparameters: Hyperparameters
    settings: Settings
    order: ExampleSampler
    validation: I32
    choices: str = ""
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


def _windows(dataset: Examples, n_train: int, batch_size: int) -> tuple[Examples, int, int]:
    """(dataset with its windows' length, windows of a device run, device runs of a step at most).

    A batch of few tokens gets shorter windows than the context, because padding costs as much as
    tokens do.
    """
    sizes = sorted(dataset.sizes[:n_train].tolist(), reverse=True)
    typical = math.ceil(SPREAD * batch_size * sum(sizes) / n_train)
    most = min(sum(sizes[:batch_size]), typical)
    dataset = dataset.in_windows(min(dataset.n_tokens, -(-max(dataset.longest, most) // 16) * 16))
    n_windows = dataset.most_windows(batch_size)
    n_batch = min(n_windows, max(1, RUN_TOKENS // dataset.n_tokens))
    return dataset, n_batch, math.ceil(n_windows / n_batch)


def prepare(job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx_train: int) -> Prepared:
    """Read and tokenize a job's files. Raises TrainingError that names the wrong line."""
    import numpy as np

    from logitless.training.data.load import jsonl_examples, row_lengths
    from logitless.training.data.sampler import ExampleSampler
    from logitless.training.errors import TrainingError
    from logitless.training.schedule import Schedule
    from logitless.training.trainer import Settings

    asked: Row = job["hyperparameters"]
    warnings: list[str] = []
    files = [id for id in (job["training_file"], job["validation_file"]) if id]
    for id in files:
        if not store.file_path(id).exists():
            raise TrainingError(f"the file {id} is gone")
    lengths = [row_lengths(store.file_path(id), id, tokenizer, template) for id in files]
    if not len(lengths[0]):
        raise TrainingError(f"{files[0]}: has no token to learn")
    h = resolved(asked, lengths[0], max(int(n.max(initial=0)) for n in lengths), n_ctx_train)

    def rows(id: str) -> Examples:
        found = jsonl_examples(store.file_path(id), id, tokenizer, template, h.context_length)
        warnings.extend(f"{id}: {line}" for line in found.losses)
        return found

    dataset = rows(job["training_file"])
    n_train = len(dataset)
    if job["validation_file"]:
        dataset = dataset.joined(rows(job["validation_file"]))
    dataset, n_batch, n_runs = _windows(dataset, n_train, min(h.batch_size, n_train))
    order = ExampleSampler(dataset, np.arange(n_train, dtype=np.int32), job["training_file"], job["seed"])
    n_steps = order.n_batches(h.n_epochs, h.batch_size)
    if h.warmup_steps >= n_steps:
        warnings.append(
            f"warmup_steps of {h.warmup_steps}: the {n_steps} steps of the job never reach the learning rate"
        )
    settings = Settings(
        n_ctx=dataset.n_tokens,
        n_batch=n_batch,
        grad_acc=n_runs,
        n_examples=h.batch_size,
        n_epochs=h.n_epochs,
        max_steps=0,
        schedule=Schedule(
            alpha=(1e-5 if h.full else 1e-3) * h.learning_rate_multiplier,
            warmup=h.warmup_steps,
            cos_decay_steps=max(1, n_steps),
        ),
    )
    validation = np.arange(n_train, len(dataset), dtype=np.int32)
    choices = told(asked, h, n_train, float(lengths[0].mean()))
    return Prepared(h, settings, order, validation, choices, tuple(warnings))

"""Fine-tuning job: status changes, and the data and settings of its training."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
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


def base_of(job: Row) -> str:
    """Name of the base model, which a job that starts from a fine-tuned model has, too."""
    return str(job.get("base") or job["model"])


def checkpoint_path(store: Store, id: str) -> Path:
    """File with everything that a job's run depends on, from which it resumes."""
    return store.folder / "checkpoints" / f"{id}.gguf"


def set_status(store: Store, id: str, allowed: Collection[str], status: str) -> Row | None:
    """Cancel, pause or resume a job, a failed one too; None if its status is not in `allowed`."""

    def change(job: Row) -> Row | None:
        if job["status"] not in allowed:
            return None
        now = int(time.time())
        ended = {"finished_at": now if status in ENDED else None, "estimated_finish": None}
        return {**job, "status": status, "error": None, **ended}

    job = store.change("jobs", id, change)
    if job is not None:
        store.add_event(id, f"The job was {status}")
    return job


def _windows(dataset: Examples, training: I32, batch_size: int) -> tuple[Examples, int, int]:
    """(dataset with its windows' length, windows of a device run, device runs of a step at most).

    A batch of few tokens gets shorter windows than the context, because padding costs as much as
    tokens do.
    """
    sizes = sorted(dataset.sizes[training].tolist(), reverse=True)
    typical = math.ceil(SPREAD * batch_size * sum(sizes) / len(sizes))
    most = min(sum(sizes[:batch_size]), typical)
    dataset = dataset.in_windows(min(dataset.n_tokens, -(-max(dataset.longest, most) // 16) * 16))
    n_windows = dataset.most_windows(batch_size)
    n_batch = min(n_windows, max(1, RUN_TOKENS // dataset.n_tokens))
    return dataset, n_batch, math.ceil(n_windows / n_batch)


def prepare(job: Row, store: Store, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx_train: int) -> Prepared:
    """Read and tokenize a job's files. Raises TrainingError that names the wrong line."""
    import numpy as np

    from logitless.training.data.load import jsonl_examples, row_lengths
    from logitless.training.data.sampler import ExampleSampler, split
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
    n = len(lengths[0])
    if not n:
        raise TrainingError(f"{files[0]}: has no token to learn")
    if fraction := float(asked.get("validation_split", 0.0)):
        if n < 2:
            raise TrainingError(f"{files[0]}: a validation_split of one example leaves none to train on")
        fraction = max(fraction, 1 / n)  # at least one example
    training, validation = (
        split(n, fraction, job["seed"]) if fraction else (np.arange(n, dtype=np.int32), np.zeros(0, np.int32))
    )
    h = resolved(asked, lengths[0][training], max(int(n.max(initial=0)) for n in lengths), n_ctx_train)

    def rows(id: str) -> Examples:
        found = jsonl_examples(store.file_path(id), id, tokenizer, template, h.context_length)
        warnings.extend(f"{id}: {line}" for line in found.losses)
        return found

    dataset = rows(job["training_file"])
    if job["validation_file"]:
        dataset = dataset.joined(rows(job["validation_file"]))
        validation = np.arange(n, len(dataset), dtype=np.int32)
    dataset, n_batch, n_runs = _windows(dataset, training, h.batch_size)
    order = ExampleSampler(dataset, training, job["training_file"], job["seed"])
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
    choices = told(asked, h, len(training), float(lengths[0][training].mean()))
    return Prepared(h, settings, order, validation, choices, tuple(warnings))

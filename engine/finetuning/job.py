"""Fine-tuning job: status changes, and the data and settings of its training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from logitless.engine.finetuning.hyperparameters import Hyperparameters, base_rate, resolved, told
from logitless.engine.finetuning.status import ENDED
from logitless.engine.finetuning.store import Row, Store, event_of

if TYPE_CHECKING:
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.dataset_rows import DatasetRow
    from logitless.training.data.media import MediaReader
    from logitless.training.data.packing import Examples, Groups
    from logitless.training.data.run_media import RunMedia
    from logitless.training.data.sampler import ExampleSampler
    from logitless.training.data.tokenize_rows import I32
    from logitless.training.methods.grpo import GRPO
    from logitless.training.methods.objective import Objective
    from logitless.training.reporting.trackers import Trackers
    from logitless.training.trainer import Settings, Step, Trainer, Validated


@dataclass(frozen=True)
class Prepared:
    """Tokenized data and settings of a job. `choices`: a line about each "auto"; `warnings`: what
    is not learned as it was given."""

    hyperparameters: Hyperparameters
    settings: Settings
    order: ExampleSampler
    validation: I32
    objective: Objective | None = None
    media: RunMedia | None = None
    choices: str = ""
    warnings: tuple[str, ...] = ()
    grpo: GRPO | None = None  # of reinforcement


def base_of(job: Row) -> str:
    """Name of the base model, which a job that starts from a fine-tuned model has, too."""
    return str(job.get("base") or job["model"])


def method_of(job: Row) -> str:
    """Name of a job's training method."""
    return str((job.get("method") or {}).get("type", "supervised"))


def method_row(method: str, hyperparameters: Row, grader: Row | None = None) -> Row:
    """A job's `method`, as OpenAI's API has it."""
    return {"type": method, method: {"hyperparameters": hyperparameters, **({"grader": grader} if grader else {})}}


def template_of(job: Row, tokenizer: Tokenizer, template: ChatTemplate | None) -> ChatTemplate | None:
    """The chat template of a job's rows: its own, or the model's. TrainingError: it is not usable."""
    from logitless.models.chat.errors import ChatTemplateError
    from logitless.models.chat.template import from_metadata
    from logitless.training.errors import TrainingError

    source = job["hyperparameters"].get("chat_template")
    if not source:
        return template
    try:
        return from_metadata({}, tokenizer, source)
    except ChatTemplateError as error:
        raise TrainingError(f"hyperparameters.chat_template: {' '.join(str(error).split())}") from None


def grader_row(job: Row) -> Row | None:
    """The grader of a job that learns from rewards."""
    grader: Row | None = job["method"].get("reinforcement", {}).get("grader") if job.get("method") else None
    return grader


def trackers_of(job: Row, trainer: Trainer, folder: Path, told: Callable[[str], None]) -> Trackers:
    """The trackers of a job's integrations; `folder`: of their files."""
    from logitless.training.reporting.trackers import Integration, RunInfo, Trackers, configuration

    found = []
    for row in job.get("integrations") or ():
        own = {name: value for name, value in row[row["type"]].items() if value is not None}
        project, tags = own.get("project", own.get("experiment", "")), tuple(own.get("tags", ()))
        found.append(Integration(row["type"], project, own.get("name", ""), own.get("entity", ""), tags))
    config = {"model": job["model"], **configuration(trainer), **job["hyperparameters"]}
    run = RunInfo(folder, job["id"], job["model_name"], config, trainer.counters.iterations)
    return Trackers(found, run, told)


def metrics_of(event: Step | Validated) -> Row:
    """Metrics of an event, as a job's events have them."""
    from logitless.training.reporting.trackers import measured

    found = measured(event)
    assert found is not None
    return {"step": found[0], **found[1]}


def checkpoint_path(store: Store, id: str) -> Path:
    """File with everything that a job's run depends on, from which it resumes."""
    return store.folder / "checkpoints" / f"{id}.gguf"


def failure_of(error: Exception, store: Store, id: str) -> Row:
    """The `error` of a job that failed; of one that diverged it names the last checkpoint."""
    from logitless.training.errors import TrainingDiverged, TrainingError

    code = "invalid_training_file" if isinstance(error, TrainingError) else "server_error"
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TrainingDiverged):
        code, names = "training_diverged", [row["fine_tuned_model_checkpoint"] for row in store.checkpoints(id)]
        message += f"; the last checkpoint is {names[0]}" if names else "; there is no checkpoint"
    return {"code": code, "message": message, "param": None}


def set_status(store: Store, id: str, allowed: Collection[str], status: str) -> Row | None:
    """Cancel, pause or resume a job, a failed one too; None if its status is not in `allowed`."""

    def change(job: Row) -> Row | None:
        if job["status"] not in allowed:
            return None
        now = int(time.time())
        ended = {"finished_at": now if status in ENDED else None, "estimated_finish": None}
        return {**job, "status": status, "error": None, **ended}

    return store.change("jobs", id, change, [event_of(f"The job was {status}")])


def metrics_table(metrics: Sequence[Row], method: str) -> str:
    """CSV of a job's metrics, a line an event: OpenAI's columns, and all of the method's own."""
    columns = {
        "step": "step",
        "train_loss": "train_loss",
        "train_accuracy": "train_mean_token_accuracy" if method == "supervised" else "train_reward_accuracy",
        "valid_loss": "full_valid_loss",
    }
    if method != "supervised":
        names = dict.fromkeys(k for m in metrics for k in m if k.startswith(("train_", "full_valid_")))
        columns |= {k.removeprefix("full_"): k for k in names if k not in columns.values()}
    lines = [",".join(columns)]
    lines += [",".join("" if m.get(k) is None else str(m[k]) for k in columns.values()) for m in metrics]
    return "\n".join(lines)


def media_reader(job: Row, store: Store, open_media: Callable[[], RunMedia]) -> MediaReader:
    """Reader of the images and sounds in a job's rows: data URIs, and files that the job's owner may see."""
    from logitless.training.data.media import MediaReader

    def may_see(row: Row) -> bool:
        return row.get("owner", "") in ("", job.get("owner", ""))

    return MediaReader(open_media, uploaded=lambda id: store.media_path(id, may_see))


def prepare(
    job: Row,
    store: Store,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    n_ctx_train: int,
    media: MediaReader | None = None,
) -> Prepared:
    """Read and tokenize a job's files. Raises TrainingError that names the wrong line."""
    import numpy as np

    from logitless.training.adapters.neftune import Neftune
    from logitless.training.data.load import Reader
    from logitless.training.data.sampler import ExampleSampler, split
    from logitless.training.data.sources import rows_of
    from logitless.training.errors import TrainingError
    from logitless.training.methods.registry import hyperparameters, objective
    from logitless.training.schedule import Schedule
    from logitless.training.trainer import Settings

    asked: Row = job["hyperparameters"]
    method = method_of(job)
    own = {name: asked.get(name, default) for name, default in hyperparameters(method).items()}
    reader = Reader(tokenizer, template, objective(method, own), media)
    warnings: list[str] = []
    files = [id for id in (job["training_file"], job["validation_file"]) if id]
    for id in files:
        if not store.file_path(id).exists():
            raise TrainingError(f"the file {id} is gone")

    def records(id: str) -> Iterator[DatasetRow]:
        return rows_of(store.file_path(id), id, (store.get("files", id) or {}).get("filename", ""))

    lengths = [reader.lengths(records(id), id) for id in files]
    sizes = lengths[0].sizes
    n = len(sizes)
    if not n:
        raise TrainingError(f"{files[0]}: has no token to learn")
    if fraction := float(asked.get("validation_split", 0.0)):
        if n < 2:
            raise TrainingError(f"{files[0]}: a validation_split of one example leaves none to train on")
        fraction = max(fraction, 1 / n)  # at least one example
    training, validation = (
        split(n, fraction, job["seed"]) if fraction else (np.arange(n, dtype=np.int32), np.zeros(0, np.int32))
    )
    h = resolved(asked, sizes[training], max(found.longest for found in lengths), n_ctx_train, own)

    def rows(id: str) -> Examples | Groups:
        found = reader.by_example(records(id), id, h.context_length)
        warnings.extend(f"{id}: {line}" for line in found.losses)
        return found

    dataset = rows(job["training_file"])
    if job["validation_file"]:
        dataset = dataset.joined(rows(job["validation_file"]))  # type: ignore[arg-type]
        validation = np.arange(n, len(dataset), dtype=np.int32)
    dataset, n_batch, n_runs = dataset.lay(training, h.batch_size)
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
            alpha=base_rate(method, full=h.full) * h.learning_rate_multiplier,
            warmup=h.warmup_steps,
            cos_decay_steps=max(1, n_steps),
        ),
        optimizer=h.optimizer_settings,
        noise=Neftune(h.neftune_noise_alpha, job["seed"]),
    )
    choices = told(asked, h, len(training), float(sizes[training].mean()))
    found = None if media is None else media.media
    return Prepared(h, settings, order, validation, reader.objective, found, choices, tuple(warnings))

"""Fine-tuning job: status changes, and the data and settings of its training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from logitless.engine.finetuning.hyperparameters import choices_line, resolved
from logitless.engine.finetuning.status import ENDED
from logitless.engine.records.store import Row, Store, event_of
from logitless.training.config import TrainingConfig, config_of_job, job_row
from logitless.training.errors import TrainingDiverged, TrainingError

if TYPE_CHECKING:
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.data.media import MediaReader
    from logitless.training.data.run_media import RunMedia
    from logitless.training.data.tokenize_rows import I32
    from logitless.training.reporting.trackers import Trackers
    from logitless.training.run import RowSource, RunPlan
    from logitless.training.trainer import Step, Trainer, Validated


def base_of(job: Row) -> str:
    """Name of the base model, which a job that starts from a fine-tuned model has, too."""
    return str(job.get("base") or job["model"])


def method_of(job: Row) -> str:
    """Name of a job's training method."""
    return str((job.get("method") or {}).get("type", "supervised"))


def method_row(method: str, hyperparameters: Row, grader: Row | None = None) -> Row:
    """A job's `method`, as OpenAI's API has it."""
    return {"type": method, method: {"hyperparameters": hyperparameters, **({"grader": grader} if grader else {})}}


def grader_row(job: Row) -> Row | None:
    """The grader of a job that learns from rewards."""
    grader: Row | None = job["method"].get("reinforcement", {}).get("grader") if job.get("method") else None
    return grader


def trackers_of(job: Row, trainer: Trainer, folder: Path, report: Callable[[str], None]) -> Trackers:
    """The trackers of a job's integrations; `folder`: of their files."""
    from logitless.training.reporting.trackers import Integration, RunInfo, Trackers, configuration

    integrations = []
    for row in job.get("integrations") or ():
        own = {name: value for name, value in row[row["type"]].items() if value is not None}
        project, tags = own.get("project", own.get("experiment", "")), tuple(own.get("tags", ()))
        integrations.append(Integration(row["type"], project, own.get("name", ""), own.get("entity", ""), tags))
    config = {"model": job["model"], **configuration(trainer), **job["hyperparameters"]}
    run = RunInfo(folder, job["id"], job["model_name"], config, trainer.counters.iterations)
    return Trackers(integrations, run, report)


def metrics_of(event: Step | Validated) -> Row:
    """Metrics of an event, as a job's events have them."""
    from logitless.training.reporting.trackers import measured

    integrations = measured(event)
    assert integrations is not None
    return {"step": integrations[0], **integrations[1]}


def checkpoint_path(store: Store, id: str) -> Path:
    """File with everything that a job's run depends on, from which it resumes."""
    return store.folder / "checkpoints" / f"{id}.gguf"


def failure_of(error: Exception, store: Store, id: str) -> Row:
    """The `error` of a job that failed; of one that diverged it names the last checkpoint."""
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


def row_source(store: Store, id: str) -> RowSource:
    """Rows of an uploaded file. TrainingError: it is gone."""
    from logitless.training.data.sources import rows_of
    from logitless.training.run import RowSource

    path, filename = store.file_path(id), (store.get("files", id) or {}).get("filename", "")
    if not path.exists():
        raise TrainingError(f"the file {id} is gone")
    return RowSource(id, lambda: rows_of(path, id, filename))


def prepare(
    job: Row,
    store: Store,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    n_ctx_train: int,
    media: MediaReader | None = None,
) -> RunPlan:
    """Read and tokenize a job's files. Raises TrainingError that names the wrong line."""
    from logitless.training.data.load import Reader
    from logitless.training.run import objective_of, plan_examples

    row, method, seed = job["hyperparameters"], method_of(job), job["seed"]
    first = config_of_job(row, method, seed)
    line = ""

    def choose(lengths: I32, longest: int) -> TrainingConfig:
        nonlocal line
        config = resolved(row, lengths, longest, n_ctx_train, method, seed)
        line = choices_line(row, job_row(config), method, len(lengths), float(lengths.mean()))
        return config

    sources = [row_source(store, id) for id in (job["training_file"], job["validation_file"]) if id]
    reader = Reader(tokenizer, template, objective_of(first), media)
    plan = plan_examples(first, sources[0], sources[1] if len(sources) > 1 else None, reader, choose)
    warnings, warmup = plan.warnings, plan.settings.warmup or 0
    if warmup >= plan.n_steps:
        never = f"the {plan.n_steps} steps of the job never reach the learning rate"
        warnings += (f"warmup_steps of {warmup}: {never}",)
    return replace(plan, choices=line, warnings=warnings)

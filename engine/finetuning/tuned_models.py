"""Fine-tuned models of a store by name: the results of jobs, and the checkpoints of their epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.job import checkpoint_path
from logitless.engine.finetuning.status import ENDED
from logitless.engine.records.store import Row, Store


@dataclass(frozen=True)
class TunedModel:
    """A model that requests can name. `path`: its file, an adapter or a whole model."""

    name: str
    job: Row
    path: str
    is_checkpoint: bool

    @property
    def whole(self) -> bool:
        return bool(self.job["hyperparameters"].get("full"))


def tuned_models(store: Store) -> Iterator[TunedModel]:
    """All of them, the oldest job's first. The model of a job that runs is its newest checkpoint."""
    for job in reversed(store.all("jobs")):
        rows = store.checkpoints(job["id"])
        for row in reversed(rows):
            yield TunedModel(row["fine_tuned_model_checkpoint"], job, row["path"], True)
        if rows and job.get("model_name"):
            yield TunedModel(job["model_name"], job, job.get("model_path") or rows[0]["path"], False)


def find(store: Store, name: str) -> TunedModel | None:
    """The model of this name, or None."""
    return next((model for model in tuned_models(store) if model.name == name), None)


def delete(store: Store, model: TunedModel) -> list[str]:
    """Delete a model, with its checkpoints if it is a job's result; returns the deleted names.

    InvalidRequest: its job is not over, or a checkpoint is the result itself."""
    job = model.job
    if job["status"] not in ENDED:
        raise InvalidRequest(f"the job {job['id']} of the model {model.name} is {job['status']}: cancel it first")
    own = [other for other in tuned_models(store) if other.job["id"] == job["id"]]
    if model.is_checkpoint:
        if any(other.path == model.path and not other.is_checkpoint for other in own):
            raise InvalidRequest(f"the checkpoint {model.name} is the model {job['model_name']} itself: delete that")
        own = [model]
    if not model.is_checkpoint:
        checkpoint_path(store, job["id"]).unlink(missing_ok=True)
    paths = {other.path for other in own}
    store.forget_checkpoints(job["id"], paths)  # `Store` sweeps the contents after a kill
    for path in paths:
        Path(path).unlink(missing_ok=True)
    return [other.name for other in own]

"""Files and fine-tuning jobs of a router: one store for all models.

The router keeps files and reports jobs; the server of a job's model does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from logitless.engine.finetuning.job import base_of, set_status
from logitless.engine.finetuning.status import RUNNING
from logitless.engine.finetuning.tuned_models import TunedModel, delete, tuned_models
from logitless.engine.records.store import Row, Store
from logitless.server.api.openai.tuning_context import no_folder

POLL = 0.3  # seconds between two looks at the store, to which the models' servers write


class RouterJobs:
    """Files and fine-tuning jobs below `folder`; "": there are none."""

    def __init__(self, folder: str) -> None:
        self._store = Store(folder) if folder else None
        self.listeners: set[asyncio.Event] = set()

    @property
    def store(self) -> Store:
        """The store. NotSupported: there is none."""
        if self._store is None:
            raise no_folder()
        return self._store

    def check(self, path: Path, filename: str, goes_on: Callable[[], None]) -> None:
        """TrainingError names a line that is no record. The model's server checks the text when a job begins."""
        from logitless.training.data.sources import rows_of

        for _ in rows_of(path, filename, filename):
            goes_on()

    def set_status(self, id: str, allowed: Collection[str], status: str) -> Row | None:
        """Cancel or pause a job; its server notices between two steps."""
        return set_status(self.store, id, allowed, status)

    # -- models of jobs

    def base_of(self, name: str) -> str:
        """The base model of a finetune's name; "": no job has this name."""
        jobs = self._store.all("jobs") if self._store is not None and name.startswith("ft:") else []
        names = (name, name.rpartition("@")[0])  # the second: without a checkpoint's number
        return next((base_of(job) for job in jobs if job["model_name"] in names), "")

    def tuned(self, *, checkpoints: bool) -> Iterator[tuple[str, str]]:
        """(name, base model) of every finetune, and of every checkpoint if they are asked for."""
        for model in tuned_models(self._store) if self._store is not None else ():
            if checkpoints or not model.is_checkpoint:
                yield model.name, base_of(model.job)

    def delete_model(self, model: TunedModel) -> None:
        """Delete a model that no server has loaded. InvalidRequest: its job is not over."""
        delete(self.store, model)

    def unfinished(self) -> list[str]:
        """Models that unfinished jobs need, the oldest job first."""
        jobs = self._store.all("jobs") if self._store is not None else []
        return list(dict.fromkeys(base_of(job) for job in reversed(jobs) if job["status"] in RUNNING))

    # -- changes by the models' servers

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Wake the listeners on changes of the store within the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if self._store is not None:
                self._store.close()

    async def _watch(self) -> None:
        version = -1
        while self._store is not None:
            await asyncio.sleep(POLL)
            if self.listeners:
                version, before = self._store.version, version
                for listener in self.listeners if version != before else ():
                    listener.set()

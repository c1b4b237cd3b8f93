"""Files and fine-tuning jobs of a router: one store for all models. The router keeps files and
reports jobs; the server of a job's model does the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from logitless.engine.finetuning.job import RUNNING, set_status
from logitless.engine.finetuning.store import Row, Store
from logitless.server.api.openai.tuning_context import no_folder

LOOK = 0.3  # seconds between two looks at what the models' servers have written


class RouterDesk:
    """`folder`: "" where there are no files and jobs."""

    def __init__(self, folder: str) -> None:
        self._store = Store(folder) if folder else None
        self.listeners: set[asyncio.Event] = set()

    @property
    def store(self) -> Store:
        """NotSupported: there is none."""
        if self._store is None:
            raise no_folder()
        return self._store

    def check(self, path: Path, filename: str) -> None:
        """TrainingError names a line that is no record. Whether its text suits a model shows when a job begins."""
        from logitless.training.data.dataset_rows import read_rows

        with path.open("rb") as file:
            for _ in read_rows(file, filename):
                pass

    def set_status(self, id: str, allowed: Collection[str], status: str) -> Row | None:
        """Cancel or pause a job; its server notices between two steps."""
        return set_status(self.store, id, allowed, status)

    # -- which model is meant

    def base_of(self, name: str) -> str:
        """The model that a job's result belongs to; "" if no job has made one of this name."""
        jobs = self._store.all("jobs") if self._store is not None and name.startswith("ft:") else []
        names = (name, name.rpartition("@")[0])  # the second: of a checkpoint
        return next((str(job["model"]) for job in jobs if job["model_name"] in names), "")

    def tuned(self) -> Iterator[tuple[str, str]]:
        """(name, the model it was made from) of everything that jobs have made."""
        for job in reversed(self._store.all("jobs") if self._store is not None else []):
            made = [row["fine_tuned_model_checkpoint"] for row in self.store.checkpoints(job["id"])]
            for name in [job["model_name"], *made] if made else []:
                yield name, job["model"]

    def unfinished(self) -> list[str]:
        """The models that jobs wait for, the longest first."""
        jobs = self._store.all("jobs") if self._store is not None else []
        return list(dict.fromkeys(job["model"] for job in reversed(jobs) if job["status"] in RUNNING))

    # -- what others have written

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Tell the listeners about changes meanwhile."""
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
        known = -1
        while self._store is not None:
            await asyncio.sleep(LOOK)
            if self.listeners:
                known, before = self._store.version, known
                for listener in self.listeners if known != before else ():
                    listener.set()

"""Fine-tuning context of an application: the loaded model's or a router's store of files and jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

from logitless.engine.errors import NotSupported, unkept
from logitless.engine.finetuning.tuned_models import TunedModel
from logitless.engine.finetuning.worker import FineTuningWorker
from logitless.engine.records.store import Row, Store
from logitless.frontend.workers import to_thread
from logitless.server.api.context import CONTEXT

T = TypeVar("T")


class Desk(Protocol):
    """Interface that the endpoints of files and jobs use."""

    @property
    def store(self) -> Store: ...

    def check(self, path: Path, filename: str, goes_on: Callable[[], None]) -> None:
        """TrainingError names the line of a file that cannot be trained on. `goes_on` is called often and may raise."""

    def delete_model(self, model: TunedModel) -> None:
        """InvalidRequest: the model is still needed."""

    def set_status(self, id: str, allowed: Collection[str], status: str) -> Row | None:
        """Cancel, pause or resume a job; None where its state does not allow that."""


async def on_disk(problem: str, work: Callable[[], T]) -> T:
    """The result of work on the store, which waits for the disk. `problem`: the beginning of the error
    where the disk refuses."""
    try:
        return await to_thread(work)
    except OSError as error:
        raise unkept(problem, error) from None


DESK: web.AppKey[Desk] = web.AppKey("desk", Desk)
LISTENERS: web.AppKey[set[asyncio.Event]] = web.AppKey("listeners", set[asyncio.Event])  # a job may have changed

SILENCE: web.AppKey[float] = web.AppKey("silence", float)  # seconds for each STRIDE of a file that a client sends


def desk_of(request: web.Request) -> Desk:
    """The application's own, else the loaded model's."""
    return request.app[DESK] if DESK in request.app else tuning_of(request)


def tuning_of(request: web.Request) -> FineTuningWorker:
    """The fine-tuning part of the loaded model."""
    tuning = request.app[CONTEXT].served.tuning
    if tuning is None:
        raise no_folder()
    return tuning


def no_folder() -> NotSupported:
    return NotSupported("files and fine-tuning need a folder: start the server with --data-dir DIR")

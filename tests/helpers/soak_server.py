"""`logitless serve` that checks every page and slot after each step and times slot release."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from logitless.cli.main import main
from logitless.engine.async_engine import AsyncEngine
from logitless.engine.scheduler.scheduler import Scheduler
from tests.helpers.scheduler_checks import check_pages

BROKEN = 3  # exit code of a page or slot in a wrong state
step, cancel, drop = Scheduler.step, AsyncEngine.cancel, AsyncEngine._drop
asked: dict[Any, tuple[int, float]] = {}
n_steps = 0
notes = os.environ.get("SOAK_NOTES")


def checked_step(self: Scheduler) -> Any:
    global n_steps
    events = step(self)
    n_steps += 1
    try:
        check_pages(self)
    except AssertionError as error:
        print(f"BROKEN: {error!r}", file=sys.stderr, flush=True)
        os._exit(BROKEN)
    return events


def noted_cancel(self: AsyncEngine, stream: Any) -> None:
    asked[stream] = n_steps, time.perf_counter()
    cancel(self, stream)


def noted_drop(self: AsyncEngine, scheduler: Scheduler, ticket: Any) -> None:
    drop(self, scheduler, ticket)
    began = asked.pop(ticket.stream, None)
    if notes and began is not None:
        with open(notes, "a") as file:
            file.write(f"{n_steps - began[0]} {1000 * (time.perf_counter() - began[1]):.3f}\n")


Scheduler.step, AsyncEngine.cancel, AsyncEngine._drop = checked_step, noted_cancel, noted_drop  # type: ignore[method-assign]
sys.exit(main())

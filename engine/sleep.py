"""--sleep-idle-seconds: a model that nobody needs gives its memory back, and is loaded again for the next request.

llama-server's semantics (tools/server, "Sleeping on Idle"). Only requests that need the model count as use: those that
merely look (/health, /props, /models, /slots, /metrics) neither wake it nor keep it awake.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from logitless.engine.errors import ServerFault
from logitless.engine.stats import SchedulerStats


class Sleeper(Protocol):
    """Something that holds memory: an engine, a draft model."""

    def sleep(self) -> None:
        """Give up all memory; only `wake` may be called next."""

    def wake(self) -> None:
        """Be as before; after an error `sleep` and `wake` may be called again."""


class Sleep:
    """When to sleep, and waking up. `asleep` may be read by any thread; everything else is the engine's."""

    def __init__(
        self,
        seconds: float,
        parts: Sequence[Sleeper],
        stats: SchedulerStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parts` wake up in this order; an earlier one may be needed by the later ones."""
        self.seconds = seconds
        self._parts = tuple(parts)
        self._stats = stats
        self._clock = clock
        self._used = clock()

    @property
    def asleep(self) -> bool:
        return self._stats.sleeping > 0

    def left(self) -> float | None:
        """Seconds until it is time to sleep; None: it sleeps already."""
        return None if self.asleep else max(0.0, self._used + self.seconds - self._clock())

    def begin(self, count: Callable[[], object] = lambda: None) -> None:
        """Sleep. `count` brings gauges up to date before anybody can see that the model sleeps."""
        try:
            for part in reversed(self._parts):
                part.sleep()
            gc.collect()  # plans and the graphs that they were made of know each other
            _trim()
            count()
        finally:
            self._stats.sleeping = 1

    def use(self) -> bool:
        """The model is needed now: whether it slept. ServerFault says why it cannot be loaded again; the next one
        who needs it tries again."""
        slept = self.asleep
        if slept:
            try:
                for part in self._parts:
                    part.wake()
            except Exception as error:
                self.begin()
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ServerFault(f"the model sleeps and could not be loaded again: {reason}") from error
            self._stats.sleeping = 0
        self._used = self._clock()
        return slept


def _trim() -> None:
    """Have glibc give back the pages that it keeps for later; other allocators do that by themselves, or cannot."""
    with suppress(OSError, AttributeError, TypeError):  # no such library (TypeError: Windows), or no such function
        ctypes.CDLL(None).malloc_trim(0)

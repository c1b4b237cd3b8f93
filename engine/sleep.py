"""Sleep mode: unloads an idle model (--sleep-idle-seconds, Ollama's keep_alive 0), loads it for the next request.

The semantics are llama-server's (tools/server, "Sleeping on Idle"). Only requests that need the
model count as use: /health, /props, /models, /slots and /metrics neither wake it nor keep it awake.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import TIMEOUT_MAX
from typing import Protocol

from logitless.engine.errors import ServerFault


class Sleeper(Protocol):
    """Holder of memory that can sleep: model runner, KV cache, draft model."""

    def sleep(self) -> None:
        """Free all memory; only `wake` may be called next."""

    def wake(self) -> None:
        """Restore the state before `sleep`.

        After an error, `sleep` and `wake` may be called again."""


class Sleep:
    """Idle timer, sleep and wake-up of a model.

    Any thread may read `asleep`; the rest is the engine thread's."""

    def __init__(
        self,
        seconds: float,
        parts: Sequence[Sleeper],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds`: idle time; 0: no limit. `parts` wake in this order; later ones may need earlier ones."""
        self.seconds = seconds or TIMEOUT_MAX
        self._parts = tuple(parts)
        self._clock = clock
        self._used = clock()
        self.asleep = False

    def left(self) -> float | None:
        """Seconds until it is time to sleep; None: it sleeps already."""
        return None if self.asleep else min(TIMEOUT_MAX, max(0.0, self._used + self.seconds - self._clock()))

    def expire(self) -> None:
        """End the idle time: it is time to sleep, unless the model is used before."""
        self._used = self._clock() - self.seconds

    def begin(self) -> None:
        """Put the model to sleep. The statistics stay as they were when it was last awake."""
        try:
            for part in reversed(self._parts):
                part.sleep()
            gc.collect()  # plans and graphs form reference cycles
            trim_memory()
        finally:
            self.asleep = True

    def use(self) -> bool:
        """Wake the model if it sleeps (returns True then) and restart the idle timer.

        Raises ServerFault if the model cannot be loaded again; the next call tries again."""
        slept = self.asleep
        if slept:
            try:
                for part in self._parts:
                    part.wake()
            except Exception as error:
                self.begin()
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ServerFault(f"the model sleeps and could not be loaded again: {reason}") from error
            self.asleep = False
        self._used = self._clock()
        return slept


def trim_memory() -> None:
    """Have glibc return free memory to the system; other allocators do so by themselves, or cannot."""
    # no such library (TypeError: Windows), or no such function
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

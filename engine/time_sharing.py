"""Time slicing: shares the device between steps of requests and background training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

REMEMBERED = 15  # steps whose median is the usual step time
LONGEST = 1.25  # longest time slice, in time slices that a usual step earns
SAVED = 4.0  # unused time that is saved up, in the same unit


class Background(Protocol):
    """Background job that the engine thread runs in parts. Any thread may ask `ready`."""

    @property
    def ready(self) -> bool: ...

    @property
    def pending(self) -> bool:
        """True if an off-thread task that needs the loaded model will make it ready."""

    def run(self, seconds: float, waits: Callable[[], object]) -> None:
        """Run for about so many seconds, less when a request `waits`."""

    def close(self) -> None:
        """Save the state for a later resume; the engine thread ends."""


class TimeSlicer:
    """Time slicer: gives background work at most `share` of the device's time while requests run.

    Each step of requests earns time, and background work spends it in a time slice after the step.
    Time that was overspent is repaid by later steps, so the share holds for parts of any length. A
    slow step earns as much in proportion, but spread over several slices, so that one delay does
    not cause another."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._earned = 0.0  # seconds
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._due = False  # there was a step since the last time slice

    @property
    def left(self) -> float:
        """Seconds that background work may take before the next step of requests."""
        if self.share >= 1:
            return math.inf
        return max(0.0, min(self._earned, LONGEST * self._usual())) if self._due else 0.0

    def stepped(self, seconds: float) -> None:
        """Record a step of requests. Unused time is saved up to a limit."""
        if self.share < 1:
            self._steps.append(seconds)
            self._earned = min(self._earned + self._of(seconds), SAVED * self._usual())
            self._due = True

    def ran(self, seconds: float) -> None:
        """Record background work, in seconds, while requests waited."""
        self._earned -= seconds
        self._due = False

    def _of(self, seconds: float) -> float:
        """Seconds that a step earns."""
        return seconds * self.share / (1 - self.share)

    def _usual(self) -> float:
        from statistics import median

        return self._of(median(self._steps)) if self._steps else 0.0

"""How two kinds of work share one device: requests' steps, and training in their gaps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Protocol

REMEMBERED = 15  # steps: their median is what clients are used to
LONGEST = 1.25  # a turn may be so many times as long as the one that a usual step earns
SAVED = 4.0  # such turns that may be owed


class Background(Protocol):
    """Work that the engine's thread does beside requests, a part at a time. Any thread may ask `ready`."""

    @property
    def ready(self) -> bool: ...

    @property
    def pending(self) -> bool:
        """Whether something is under way elsewhere that will make it ready, and needs the model as it is."""

    def run(self, seconds: float) -> None:
        """Go on for about so long."""

    def close(self) -> None:
        """The thread ends: keep what is needed to go on another day."""


class Turns:
    """While requests run, background work gets at most `share` of the device's time; alone it gets all of it.

    Steps earn time and background work spends it, a turn after each step. What took longer than what was earned is
    paid for by later steps, so the share holds for parts of any length. A step that took long earns as much, but over
    several turns: otherwise what holds up one token would hold up the next one, too.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._earned = 0.0  # seconds
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._due = False  # there was a step since the last turn

    @property
    def left(self) -> float:
        """Seconds that the background may take before the next step of requests."""
        if self.share >= 1:
            return math.inf
        return max(0.0, min(self._earned, LONGEST * self._usual())) if self._due else 0.0

    def stepped(self, seconds: float) -> None:
        """A step of requests took so long. Little is saved up of what was not used."""
        if self.share < 1:
            self._steps.append(seconds)
            self._earned = min(self._earned + self._of(seconds), SAVED * self._usual())
            self._due = True

    def ran(self, seconds: float) -> None:
        """Background work took so long while requests waited."""
        self._earned -= seconds
        self._due = False

    def _of(self, seconds: float) -> float:
        """What a step earns."""
        return seconds * self.share / (1 - self.share)

    def _usual(self) -> float:
        return self._of(statistics.median(self._steps)) if self._steps else 0.0

"""How two kinds of work share one device: requests' steps, and training in their gaps."""

from __future__ import annotations

import math
from typing import Protocol


class Background(Protocol):
    """Work that the engine's thread does beside requests, a part at a time. Any thread may ask `ready`."""

    @property
    def ready(self) -> bool: ...

    def run(self, seconds: float) -> None:
        """Go on for about so long."""

    def close(self) -> None:
        """The thread ends: keep what is needed to go on another day."""


class Turns:
    """While requests run, background work gets at most `share` of the device's time; alone it gets all of it.

    Steps earn time and background work spends it. What took longer than what was earned is paid for by later steps, so
    the share holds for parts of any length.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._earned = 0.0  # seconds

    @property
    def left(self) -> float:
        """Seconds that the background may take before the next step of requests."""
        return math.inf if self.share >= 1 else max(0.0, self._earned)

    def stepped(self, seconds: float) -> None:
        """A step of requests took so long. What was not used is not saved up."""
        if self.share < 1:
            self._earned = min(self._earned, 0.0) + seconds * self.share / (1 - self.share)

    def ran(self, seconds: float) -> None:
        """Background work took so long while requests waited."""
        self._earned -= seconds

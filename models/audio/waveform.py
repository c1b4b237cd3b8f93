"""Waveform: mono sound at 16 kHz, which audio encoders read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

RATE = 16_000  # samples a second


@dataclass(frozen=True, eq=False)
class Waveform:
    """A piece of mono sound: samples (n,) in float32, −1 … 1, RATE a second."""

    samples: npt.NDArray[np.float32]

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    @cached_property
    def digest(self) -> bytes:
        """Hash of the samples, 16 bytes. Equal digests have equal rows."""
        return blake2b(np.ascontiguousarray(self.samples).data, digest_size=16).digest()

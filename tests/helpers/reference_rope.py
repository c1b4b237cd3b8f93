"""RoPE frequencies of the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.helpers.reference_model import Spec


def plain(s: Spec, base: float = 10000.0, factors: float = 1.0, magnitude: float = 1.0, divide: float = 1.0) -> Any:
    """RoPE frequencies without scaling, or with linear scaling."""
    n = s.keys.get("rope.dimension_count", s.d)
    frequency = base ** (-np.arange(0, n, 2) / n) / np.linspace(1, factors, n // 2) / divide
    return lambda layer: (frequency, magnitude)


def yarn(s: Spec, factor: float, original: int, attn: float = 1.0) -> Any:
    """YaRN (NTK by parts), from the paper: wavelength ratios, with a ramp between 32 and 1 turns."""
    n, base = s.d, 10000.0
    i = np.arange(n // 2)
    f = base ** (-2 * i / n)
    low, high = (n * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), n - 1)
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    mixed = f * (1 - ramp) + f / factor * ramp
    return lambda layer: (mixed, attn * (0.1 * math.log(factor) + 1))

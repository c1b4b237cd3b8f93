"""RoPE scaling parameters: none, linear, YaRN, LongRoPE."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RopeScalingType(StrEnum):
    """Values of rope.scaling.type."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE scaling for positions beyond the training context (`rope.scaling.*`)."""

    # per-frequency factors are tensors, for any type
    kind: RopeScalingType = RopeScalingType.NONE
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0  # part of YaRN's change of magnitude that is undone

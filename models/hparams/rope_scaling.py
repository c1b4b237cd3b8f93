"""RoPE scaling parameters: none, linear, YaRN, LongRoPE."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the training context are handled (`rope.scaling.*`)."""

    kind: str = "none"  # one of ROPE_SCALINGS; factors of each frequency are tensors, whatever the kind
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0  # how much of what YaRN does to the magnitude is taken back

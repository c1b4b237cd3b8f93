"""Facts of the loaded model that /props and /v1/models report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What /props and /v1/models tell about the loaded model."""

    n_ctx: int  # the longest sequence of one slot, as the scheduler enforces it
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    nbytes: int = 0
    vocab_type: int = 0
    ftype: str = ""
    generates: bool = True  # false: the model makes vectors of texts and nothing else

"""Model info: facts of the loaded model that /props and /v1/models report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes and file type of the loaded model."""

    n_ctx: int  # tokens of the longest sequence of one slot
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    nbytes: int = 0
    vocab_type: int = 0
    ftype: str = ""
    generates: bool = True  # False: the model only makes embeddings

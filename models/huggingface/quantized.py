"""Quantized checkpoints: weights of fewer bits, and their scales, as tensors of GGUF's types."""

from __future__ import annotations

from logitless.models.huggingface.checkpoint import FLOATS, Checkpoint, Weight, plain
from logitless.models.huggingface.config import Config


def weights_of(checkpoint: Checkpoint, config: Config) -> dict[str, Weight]:
    """Weights by name. ModelFileError: a type that is not supported."""
    weights = {}
    for name, stored in checkpoint.tensors.items():
        if stored.dtype not in FLOATS:
            raise checkpoint.error(name, f"has the type {stored.dtype}, which is not supported")
        weights[name] = plain(stored)
    return weights

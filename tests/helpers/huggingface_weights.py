"""Weights of tiny Hugging Face checkpoints, drawn by tensor name, for tests and scripts/huggingface_oracle.py."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

IDS = [256, 72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33]  # the prompt
STEP = 4  # every such token's log-probability is compared


def weight(name: str, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers that make activations of about 1: matrices by their inputs, vectors near one half; of tables of experts
    by token six ids."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("tid2eid"):
        return (random.integers(0, 6, (shape[0], 1)) + np.arange(shape[1])) % 6
    values = random.standard_normal(shape)
    if not len(shape):  # a bound of activations
        values = np.array((-1 if name.endswith("min") else 1) * (0.5 + abs(values)))
    elif len(shape) == 1:
        values = 0.5 + 0.2 * values
    else:
        values *= 0.3 if "embed" in name else 1.5 / math.sqrt(shape[-1])
    return values.astype(np.float32)


def pixels(side: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A square picture, (side, side, 3)."""
    return np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)


def spectrogram(n_mel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Frames of 30 seconds, (3000, n_mel)."""
    return np.random.default_rng(n_mel).normal(0, 0.5, (3000, n_mel)).astype(np.float32)

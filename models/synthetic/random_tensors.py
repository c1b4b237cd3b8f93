"""Random weights of a GGUF file.

Quantising a billion numbers would take minutes, so a large tensor is put together from a pool of a
million quantised ones: each of its rows is a random sequence of blocks of the pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitless.models.gguf.write import Data, Key, Progress, write_gguf
from logitless.models.quantization.quantize import block_of, quantize

_POOL = 1 << 20  # elements quantised for each type and standard deviation
_CHUNK = 1 << 23  # bytes put together before each write


@dataclass(frozen=True)
class RandomTensor:
    """A tensor of normally distributed weights, by its GGUF name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    std: float
    mean: float = 0.0

    @property
    def row_bytes(self) -> int:
        block, nbytes = block_of(self.dtype)
        return self.shape[-1] // block * nbytes

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])


def write_random(
    path: str | Path,
    arch: str,
    keys: Mapping[str, Key],
    tensors: Iterable[RandomTensor],
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Write a file of these keys and tensors."""
    pools: dict[tuple[str, float], NDArray[np.uint8]] = {}

    def data(i: int, t: RandomTensor) -> Data:
        return Data(lambda: _rows(t, np.random.default_rng([seed, i]), pools, seed), t.shape, t.dtype)

    write_gguf(path, arch, keys, [(t.name, data(i, t)) for i, t in enumerate(tensors)], progress)


def _rows(
    tensor: RandomTensor, rng: np.random.Generator, pools: dict[tuple[str, float], NDArray[np.uint8]], seed: int
) -> Iterator[NDArray[Any]]:
    """The tensor's bytes, or its numbers in f32, some rows at a time."""
    row = tensor.shape[-1]
    unit = max(block_of(tensor.dtype)[0], 32)  # elements taken from the pool together
    n_rows_at_once = max(1, _CHUNK // max(tensor.row_bytes, row * 4 if row == unit else 0))
    # a row of one unit would repeat as soon as there are more rows than units
    direct = row % unit != 0 or row == unit or tensor.n_rows * row <= 1 << 15
    for first in range(0, tensor.n_rows, n_rows_at_once):
        n = min(n_rows_at_once, tensor.n_rows - first)
        if direct:
            values = rng.standard_normal((n, row), np.float32)
            values *= np.float32(tensor.std)
            values += np.float32(tensor.mean)
            yield values if tensor.dtype == "f32" else quantize(values, tensor.dtype)
        else:
            pool = _pool(tensor, unit, pools, seed)
            picks = rng.integers(0, len(pool), n * (row // unit))
            chunk = pool.take(picks, axis=0)
            yield chunk.view(np.float32) if tensor.dtype == "f32" else chunk


def _pool(
    tensor: RandomTensor, unit: int, pools: dict[tuple[str, float], NDArray[np.uint8]], seed: int
) -> NDArray[np.uint8]:
    key = (tensor.dtype, tensor.std)
    if key not in pools:
        rng = np.random.default_rng([seed, 1 << 31, len(pools)])
        values = rng.standard_normal((_POOL // unit, unit), np.float32) * np.float32(tensor.std)
        pools[key] = quantize(values, tensor.dtype)
    return pools[key]

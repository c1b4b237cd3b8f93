"""Moves: differences between tensors of Hugging Face and of GGUF, as functions of their numbers.

A move reads and returns numbers (f32 where the GGUF tensor is f32) or the bytes of block types, whose rows it may put
in another order, but not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.huggingface.config import Config

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def _same(shape: Shape, config: Config) -> Shape:
    return shape


@dataclass(frozen=True)
class Move:
    """`of`: the numbers; `shape`: the shape of the result; `floats`: blocks cannot be moved so, and become floats."""

    of: Callable[[Array, Config], Array]
    shape: Callable[[Shape, Config], Shape] = _same
    floats: bool = False


def _pairs_in_turn(heads: str) -> Move:
    """Rows of queries or keys: of each head the first half of rotated pairs and then the second → pairs in turn."""

    def of(array: Array, config: Config) -> Array:
        n = config.count(heads, "num_attention_heads")
        return array.reshape(n, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return Move(of)


PAIRS_OF_QUERIES, PAIRS_OF_KEYS = _pairs_in_turn("num_attention_heads"), _pairs_in_turn("num_key_value_heads")
PLUS_ONE = Move(lambda array, _: array + np.float32(1), floats=True)
MINUS_EXP = Move(lambda array, _: -np.exp(array), floats=True)


def reshaped(shape: Callable[[Shape, Config], Shape]) -> Move:
    """The same numbers in another shape."""
    return Move(lambda array, config: array.reshape(shape(array.shape, config)), shape, floats=True)


TAPS = reshaped(lambda shape, _: (shape[0], shape[-1]))  # of a convolution by columns (n, 1, taps)
COLUMN = reshaped(lambda shape, _: (shape[0], 1))


def _transposed(shape: Shape, _: Config) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


TRANSPOSED = Move(lambda array, _: array.swapaxes(-1, -2), _transposed, floats=True)


def part(i: int, n: int) -> Move:
    """The i-th of n equal ranges of rows, of a matrix or of each expert."""

    def rows(shape: Shape, _: Config) -> Shape:
        return (*shape[:-2], shape[-2] // n, shape[-1]) if len(shape) > 1 else (shape[0] // n,)

    def of(array: Array, _: Config) -> Array:
        axis = max(0, array.ndim - 2)
        size = array.shape[axis] // n
        return np.take(array, range(i * size, (i + 1) * size), axis)

    return Move(of, rows)


def then(first: Move, second: Move) -> Move:
    """Both, one after the other."""
    return Move(
        lambda array, config: second.of(first.of(array, config), config),
        lambda shape, config: second.shape(first.shape(shape, config), config),
        first.floats or second.floats,
    )

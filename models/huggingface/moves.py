"""Moves: differences between tensors of Hugging Face and of GGUF, as functions of their numbers.

A move reads and returns numbers (f32 where the GGUF tensor is f32) or the bytes of block types, whose rows it may put
in another order, but not change."""

from __future__ import annotations

import math
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
    """`of`: the numbers; `shape`: the shape of the result; `counts`: it is a sum or product, of f32 then;
    `floats`: blocks cannot be moved so; `inverse`: the numbers before, None where they are not written."""

    of: Callable[[Array, Config], Array]
    shape: Callable[[Shape, Config], Shape] = _same
    counts: bool = False
    floats: bool = False
    inverse: Callable[[Array, Config], Array] | None = None


def _pairs_in_turn(heads: str) -> Move:
    """Rows of queries or keys: of each head the first half of rotated pairs and then the second → pairs in turn."""

    def of(array: Array, config: Config) -> Array:
        n = config.count(heads, "num_attention_heads")
        return array.reshape(n, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def inverse(array: Array, config: Config) -> Array:
        n = config.count(heads, "num_attention_heads")
        return array.reshape(n, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return Move(of, inverse=inverse)


PAIRS_OF_QUERIES, PAIRS_OF_KEYS = _pairs_in_turn("num_attention_heads"), _pairs_in_turn("num_key_value_heads")
PLUS_ONE = Move(lambda array, _: array + np.float32(1), counts=True, inverse=lambda array, _: array - np.float32(1))
MINUS_EXP = Move(lambda array, _: -np.exp(array), counts=True)


def _shared_heads(axis: int) -> Move:
    """PLaMo's queries: head h reads key h % n → the heads of a key are neighbours."""

    def of(array: Array, config: Config) -> Array:
        shared = config.count("n_shared_head")
        heads = array.swapaxes(0, axis)
        own = heads.reshape(shared, config.count("num_attention_heads") // shared, -1, *heads.shape[1:])
        return own.swapaxes(0, 1).reshape(heads.shape).swapaxes(0, axis)

    return Move(of, floats=axis > 0)


SHARED_HEADS, SHARED_COLUMNS = _shared_heads(0), _shared_heads(1)


def times(*names: str) -> Move:
    """The product with settings, of which some may be missing."""

    def of(array: Array, config: Config) -> Array:
        return array * np.float32(np.prod([config.number(name, default=1.0) for name in names]))

    return Move(of, counts=True)


def reshaped(shape: Callable[[Shape, Config], Shape]) -> Move:
    """A move that gives numbers another shape."""
    return Move(lambda array, config: array.reshape(shape(array.shape, config)), shape)


TAPS = reshaped(lambda shape, _: (shape[0], shape[-1]))  # of a convolution by columns (n, 1, taps)
LERPS = reshaped(lambda shape, _: (shape[0], 1, 1, shape[-1]))  # RWKV's, as llama.cpp wants them
# QRWKV 6's inputs r, k, v, w, g in RWKV 6's order w, k, v, r, g: fifths of rows, or matrices of a stack
INPUTS = Move(lambda a, _: a.reshape(5, -1, a.shape[-1])[[3, 1, 2, 0, 4]].reshape(a.shape))
COLUMN = reshaped(lambda shape, _: (shape[0], 1))
VECTOR = reshaped(lambda shape, _: (math.prod(shape),))


def _vector_of_heads(shape: Shape, c: Config) -> Shape:
    size = c.count("head_size", "head_dim", default=c.head_dim)
    if shape[-1] != size:
        raise ValueError(f"has heads of {shape[-1]} numbers, config.json of {size}")
    return (math.prod(shape),)


HEADS = reshaped(_vector_of_heads)
GROUPS = reshaped(lambda shape, c: (n := max(1, c.count("mamba_n_groups", "n_groups")), shape[0] // n))


def _transposed(shape: Shape, _: Config) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


TRANSPOSED = Move(
    lambda array, _: array.swapaxes(-1, -2), _transposed, floats=True, inverse=lambda array, _: array.swapaxes(-1, -2)
)


def half(i: int, *, in_turn: bool = False, axis: int = -2) -> Move:
    """The first (0) or second (1) half of the rows of a matrix, or of each expert; `in_turn`: every second row."""

    def rows(shape: Shape, _: Config) -> Shape:
        new = list(shape)
        if new[axis] % 2:
            raise ValueError(f"has {new[axis]} rows, of which no half is one of two matrices")
        new[axis] //= 2
        return tuple(new)

    def of(array: Array, _: Config) -> Array:
        n = array.shape[axis] // 2
        return np.take(array, range(i, 2 * n, 2) if in_turn else range(i * n, (i + 1) * n), axis)

    return Move(of, rows)


def then(first: Move, second: Move) -> Move:
    """Both, one after the other."""
    return Move(
        lambda array, config: second.of(first.of(array, config), config),
        lambda shape, config: second.shape(first.shape(shape, config), config),
        first.counts or second.counts,
        first.floats or second.floats,
    )


def third(i: int) -> Move:
    """Queries (0), keys (1) or values (2) of one matrix."""

    def rows(shape: Shape, _: Config) -> Shape:
        if shape[0] % 3:
            raise ValueError(f"has {shape[0]} rows, of which no third is one of three matrices")
        return shape[0] // 3, *shape[1:]

    return Move(lambda array, _: array.reshape(3, -1, *array.shape[1:])[i], rows)


Groups = Callable[[Config], tuple[int, int]]  # groups of queries, a key and a value; queries in each


def _parts(array: Array, groups: tuple[int, int]) -> list[Array]:
    """Rows of the queries, keys and values of one matrix that has them group by group."""
    n, n_queries = groups
    rows = array.reshape(n, n_queries + 2, -1, *array.shape[1:])
    parts = rows[:, :n_queries], rows[:, n_queries : n_queries + 1], rows[:, n_queries + 1 :]
    return [part.reshape(-1, *array.shape[1:]) for part in parts]


def _parts_apart(groups: Groups) -> Move:
    """All queries before all keys before all values."""
    return Move(lambda array, config: np.concatenate(_parts(array, groups(config))))


def part_of_groups(i: int) -> Move:
    """The queries (0), keys (1) or values (2) of grouped-query attention."""

    def groups(config: Config) -> tuple[int, int]:
        n = config.count("num_key_value_heads", "num_attention_heads")
        return n, config.count("num_attention_heads") // max(1, n)

    def shape(before: Shape, config: Config) -> Shape:
        n, n_queries = groups(config)
        size = before[0] // max(1, n * (n_queries + 2))
        return (n * size * (1 if i else n_queries), *before[1:])

    return Move(lambda array, config: _parts(array, groups(config))[i], shape)


def _falcon_groups(config: Config) -> tuple[int, int]:
    n = falcon_groups(config)
    return n, config.count("num_attention_heads") // max(1, n)


def falcon_groups(config: Config) -> int:
    """Falcon's heads of keys."""
    if config.flag("new_decoder_architecture"):
        return config.count("num_kv_heads", "num_attention_heads")
    return 1 if config.flag("multi_query", default=True) else config.count("num_attention_heads")


HEADS_APART = _parts_apart(lambda config: (config.count("num_attention_heads"), 1))
FALCON_APART = _parts_apart(_falcon_groups)


def _latent(which: int) -> Move:
    """Rows of the keys (0) or values (1) of each head of DeepSeek's `kv_b_proj`; keys are transposed, as MLA reads
    them."""

    def sizes(config: Config) -> tuple[int, int, int]:
        return config.count("num_attention_heads"), config.count("qk_nope_head_dim"), config.count("v_head_dim")

    def shape(before: Shape, config: Config) -> Shape:
        n, n_key, n_value = sizes(config)
        return (n, n_value, before[-1]) if which else (n, before[-1], n_key)

    def of(array: Array, config: Config) -> Array:
        n, n_key, n_value = sizes(config)
        heads = array.reshape(n, n_key + n_value, -1)
        return heads[:, n_key:] if which else heads[:, :n_key].swapaxes(1, 2)

    return Move(of, shape, floats=not which)


LATENT_KEYS, LATENT_VALUES = _latent(0), _latent(1)


def _linear_attention(gates: bool) -> Move:
    """Queries, keys and values, or gates, of Qwen 3 Next's `in_proj_qkvz`, which has them group by group."""

    def ends(config: Config) -> tuple[int, list[int]]:
        n, n_key = config.count("linear_num_key_heads"), config.count("linear_key_head_dim")
        n_value = config.count("linear_num_value_heads") // max(1, n) * config.count("linear_value_head_dim")
        return n, [0, n_key, 2 * n_key, 2 * n_key + n_value, 2 * (n_key + n_value)]

    def shape(before: Shape, config: Config) -> Shape:
        n, e = ends(config)
        return (n * (e[4] - e[3] if gates else e[3]), before[1])

    def of(array: Array, config: Config) -> Array:
        n, e = ends(config)
        groups = array.reshape(n, e[4], *array.shape[1:])
        ranges = [(e[3], e[4])] if gates else [(e[0], e[1]), (e[1], e[2]), (e[2], e[3])]
        return np.concatenate([groups[:, start:stop].reshape(-1, *array.shape[1:]) for start, stop in ranges])

    return Move(of, shape)


LINEAR_QKV, LINEAR_GATES = _linear_attention(False), _linear_attention(True)


def _of_mamba(array: Array, config: Config) -> Array:
    """Falcon H1's in_proj with the factors of its five ranges of rows: gate, input, B, C, time steps."""
    n, n_heads = config.count("mamba_d_ssm"), config.count("mamba_n_heads")
    n_state = config.count("mamba_n_groups") * config.count("mamba_d_state")
    factors = [float(factor) for factor in config.items("ssm_multipliers")] or [1.0] * 5
    rows = np.repeat(factors, [n, n, n_state, n_state, n_heads]) * config.number("ssm_in_multiplier", default=1.0)
    return array * rows.astype(np.float32)[:, None]


MAMBA_IN = Move(_of_mamba, counts=True)


def _of_mlp(i: int) -> Move:
    """Falcon H1's factor of the gate (0) or the output (1)."""

    def of(array: Array, config: Config) -> Array:
        factors = [float(factor) for factor in config.items("mlp_multipliers")] or [1.0, 1.0]
        return array * np.float32(factors[i])

    return Move(of, counts=True)


GATE_FACTOR, DOWN_FACTOR = _of_mlp(0), _of_mlp(1)


def tiled(size: str = "", *, behind_keys: bool = False, axis: int = 0) -> Move:
    """Value heads of linear attention, grouped by their key heads → the first of each group, the second …, as ggml
    repeats keys. `size`: the setting of a head's rows, "": 1; `behind_keys`: queries and keys are before them."""

    def moved(array: Array, config: Config, inverse: bool) -> Array:
        n_keys, n = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
        start = 2 * n_keys * config.count("linear_key_head_dim") if behind_keys else 0
        array = array.swapaxes(0, axis)
        before = (n // n_keys, n_keys) if inverse else (n_keys, n // n_keys)
        heads = array[start:].reshape(*before, -1, *array.shape[1:])
        values = heads.swapaxes(0, 1).reshape(array[start:].shape)
        return np.concatenate([array[:start], values]).swapaxes(0, axis)

    return Move(
        lambda array, config: moved(array, config, False),
        floats=axis > 0,
        inverse=lambda array, config: moved(array, config, True),
    )

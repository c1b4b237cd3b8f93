"""What a file says of its layers that keep a state in the place of keys and values, with GGUF's own names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.architectures import ARCHITECTURES
from models.keys import Keys


@dataclass(frozen=True, slots=True)
class Recurrent:
    """`layers`: which ones. A convolution of `n_taps` runs over `n_columns`; heads of the delta rule, if there are
    any, hold `size` × `size` numbers each."""

    layers: tuple[bool, ...]
    n_taps: int
    n_columns: int
    n_key_heads: int = 0
    n_heads: int = 0
    size: int = 0

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of a sequence's state: the rows before the next one."""
        return self.n_taps - 1, self.n_columns

    @property
    def delta_shape(self) -> tuple[int, int, int]:
        return self.n_heads, self.size, self.size

    @property
    def nbytes(self) -> int:
        """A sequence's state in all layers."""
        return 4 * sum(self.layers) * (math.prod(self.conv_shape) + math.prod(self.delta_shape))


def read_recurrent(keys: Keys, n_layer: int, n_embd: int) -> Recurrent | None:
    """None where no layer keeps a state. ModelFileError names the key at fault."""
    kind = ARCHITECTURES[keys.arch].recurrent
    if not kind:
        return None
    layers = _without_heads(keys, n_layer) if kind == "conv" else _but_every(keys, n_layer)
    if not any(layers):
        return None
    if kind == "conv":
        n_taps = keys.count("shortconv.l_cache")
        _check_taps(keys, "shortconv.l_cache", n_taps)
        return Recurrent(layers, n_taps, n_embd)
    n_key_heads, n_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    size, n_taps = keys.count("ssm.state_size"), keys.count("ssm.conv_kernel")
    if n_heads % n_key_heads:
        raise keys.error("ssm.time_step_rank", f"is {n_heads}: so many heads cannot share {n_key_heads} of keys")
    if keys.count("ssm.inner_size") != n_heads * size:
        raise keys.error("ssm.inner_size", f"is not that of {n_heads} heads of {size}, which is not supported")
    _check_taps(keys, "ssm.conv_kernel", n_taps)
    columns = (2 * n_key_heads + n_heads) * size
    return Recurrent(layers, n_taps, columns, n_key_heads, n_heads, size)


def _check_taps(keys: Keys, key: str, n: int) -> None:
    if not 2 <= n <= 64:
        raise keys.error(key, f"is {n}; supported are 2 to 64")


def _without_heads(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Layers that the file gives no heads of keys (LFM 2)."""
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, np.ndarray) or heads.shape != (n_layer,) or heads.dtype.kind not in "iu":
        raise keys.error("attention.head_count_kv", f"is not a number for each of {n_layer} layers")
    return tuple((heads == 0).tolist())


def _but_every(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """All but each so many-th, or those that the file names."""
    named = keys.get("attention.recurrent_layers")
    if named is not None:
        key = "attention.recurrent_layers"
        if not isinstance(named, np.ndarray) or len(named) < n_layer:
            raise keys.error(key, f"is not a flag for each of {n_layer} layers")
        layers = tuple(named[:n_layer].astype(bool).tolist())
    else:
        key, period = "full_attention_interval", keys.count("full_attention_interval", 4)
        layers = tuple((layer + 1) % period != 0 for layer in range(n_layer))
    if all(layers):
        raise keys.error(key, f"leaves none of {n_layer} layers that attends, which is not supported")
    return layers

"""Per-layer sizes: head counts and widths that may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.models.architectures.registry import TRAITS
from logitless.models.errors import ModelFileError
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.mla import MLAParams


@dataclass(frozen=True, slots=True)
class LayerSizes:
    n_ff: int  # of the block for all rows; 0: the layer has no feed-forward block
    n_head: int
    n_head_kv: int  # 0: it does not attend
    head_dim: int
    rope_dim: int  # elements of a head that turn
    value_dim: int  # elements of a value head; less than head_dim: zeros fill the cached row


def read_n_heads(keys: Keys, n_blocks: int) -> tuple[int, ...]:
    """Number of query heads of each layer; 0: the layer does not attend."""
    attention, key = TRAITS[keys.arch].attention, "attention.head_count"
    if not attention.enabled:
        return (0,)
    n_heads = keys.counts(key, n_blocks, or_none=attention.optional)
    if not any(n_heads):
        raise keys.error(key, "is 0: no layer attends")
    return n_heads


def read_layer_sizes(
    keys: Keys, n_blocks: int, n_ff: int | None, is_local: Sequence[bool], mla: MLAParams | None = None
) -> tuple[LayerSizes, tuple[LayerSizes, ...]]:
    """The largest sizes, with the heads of full-attention layers; and each layer's, or () if they
    are all alike. All 0: the model has neither attention nor feed-forward blocks.

    `n_ff`: default width; `is_local`: the sliding-window layers, whose heads may have their own
    size (gemma4); `mla`: heads are the compressed KV row then. ModelFileError names the key at
    fault."""
    architecture = TRAITS[keys.arch]
    if not architecture.attention.enabled:
        return LayerSizes(keys.count("feed_forward_length") if architecture.states.feed_forward else 0, *[0] * 5), ()
    n_embd, n_heads = keys.count("embedding_length"), read_n_heads(keys, n_blocks)
    n_head = max(n_heads)
    widths = keys.counts(
        "feed_forward_length",
        n_blocks,
        n_ff,
        or_none=architecture.states.one_sublayer or architecture.attention.optional,
    )
    if architecture.ffn.half_width:
        widths = tuple(width // 2 for width in widths)
    if mla is not None:
        layers = tuple(LayerSizes(width, n_head, 1, mla.width, mla.n_rope, mla.width) for width in widths)
        return max(layers, key=lambda layer: layer.n_ff), layers if len(set(layers)) > 1 else ()
    n_head_kv = _n_head_kv(keys, n_blocks, n_head)
    if architecture.attention.optional and any(kv and not ff for ff, kv in zip(widths, n_head_kv, strict=True)):
        raise keys.error("feed_forward_length", "is 0 where a layer attends")
    for of_queries, n in zip(n_heads, n_head_kv, strict=True):
        if n and (not of_queries or of_queries % n):
            raise ModelFileError(keys.file, f"{of_queries} heads cannot share {n} key/value heads")
    if "attention.key_length" not in keys and len(set(n_heads) - {0}) > 1:
        raise keys.error("attention.head_count", "differs between layers, and attention.key_length is missing")
    if "attention.key_length" not in keys and n_embd % n_head:
        raise ModelFileError(keys.file, f"embedding_length {n_embd} is not a multiple of head_count {n_head}")
    full = _head(keys, "", n_embd // n_head, None)
    windowed = _head(keys, "_swa", *full)
    if architecture.rope.half_of_full:
        full = full[0], full[1] // 2, full[2]
    heads = [windowed if local else full for local in is_local]
    layers = tuple(map(LayerSizes, widths, n_heads, n_head_kv, *zip(*heads, strict=True)))
    return LayerSizes(max(widths), n_head, max(n_head_kv), *full), layers if len(set(layers)) > 1 else ()


def _n_head_kv(keys: Keys, n_blocks: int, n_head: int) -> tuple[int, ...]:
    """KV heads of each layer; recurrent layers without any count as the others."""
    key = "attention.head_count_kv"
    value = keys.get(key)
    if TRAITS[keys.arch].states.kind and isinstance(value, np.ndarray) and value.shape == (n_blocks,):
        some = set(value[value != 0].tolist())
        if len(some) != 1 or not 0 < (n := int(some.pop())) < 1 << 31:
            raise keys.error(key, "is not one number for all layers that attend")
        return (n,) * n_blocks
    return keys.counts(key, n_blocks, n_head, or_none=TRAITS[keys.arch].attention.optional)


def _head(keys: Keys, which: str, size: int, turned: int | None, value: int | None = None) -> tuple[int, int, int]:
    """Head size, RoPE size and size of a value, with defaults for missing keys."""
    head_dim = keys.count(f"attention.key_length{which}", size)
    value_dim = keys.count(f"attention.value_length{which}", min(value or head_dim, head_dim))
    if value_dim > head_dim:
        raise ModelFileError(
            keys.file,
            f"value_length{which} {value_dim} is more than key_length{which} {head_dim}, which is not supported",
        )
    # files of Nemotron H say how much would turn, and mean nothing by it
    if not TRAITS[keys.arch].rope.enabled:
        return head_dim, head_dim, value_dim
    rope_dim = keys.count(f"rope.dimension_count{which}", min(turned or head_dim, head_dim))
    if rope_dim % 2 or rope_dim > head_dim:
        raise keys.error(f"rope.dimension_count{which}", f"is {rope_dim}, the heads have {head_dim}")
    return head_dim, rope_dim, value_dim

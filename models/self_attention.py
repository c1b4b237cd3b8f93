"""Rotary grouped-query self-attention over any memory: one layer of any architecture here.

A layer's keys and values may be those of an earlier one, which then are in the memory already.
"""

from __future__ import annotations

from typing import NamedTuple

from graph.ops.norm import rms_norm
from graph.ops.rope import rope
from graph.ops.shape import reshape
from graph.tensor import Tensor, const
from models.batch import Memory, Weighing
from models.hparams import Hparams
from models.weights import Weights


class Side(NamedTuple):
    """Rows that ask, or rows that are seen."""

    b: Weights  # the layer's, for these rows
    x: Tensor  # (T, n_embd), normalised
    angles: Tensor  # (T, 2, n/2); not used by a layer without rotary embedding


KeysValues = tuple[Tensor, Tensor]  # (T, H_kv, D) each


def keys_values(seen: Side, h: Hparams, layer: int) -> KeysValues:
    """A layer's own."""
    size = h.sizes(layer)
    x = seen.b.linear("attn_k", seen.x)
    values = seen.b.linear("attn_v", seen.x) if "attn_v" in seen.b else x
    v = reshape(values, shape=(-1, size.n_head_kv, size.head_dim))
    if h.kind.value_norm:
        v = rms_norm(v, const(1.0), eps=h.eps)
    return _turned(seen, "attn_k", x, h, layer), v


def self_attention(asking: Side, seen: KeysValues, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """(T, n_embd) for the rows that ask."""
    q = _turned(asking, "attn_q", asking.b.linear("attn_q", asking.x), h, layer)
    window = h.window if h.is_local(layer) else 0
    how = Weighing(h.attention_scale, window, h.attn_softcap, asking.b.get("attn_sinks"))
    y = memory.attend(layer, q, *seen, how)
    return asking.b.linear("attn_output", reshape(y, shape=(y.shape[0], -1)))


def _turned(side: Side, name: str, x: Tensor, h: Hparams, layer: int) -> Tensor:
    """(T, heads, head_dim): queries or keys, normalised where the file has a norm for them, then turned."""
    weight = side.b.get(f"{name}_norm")
    if weight is not None and h.kind.row_norm:
        x = rms_norm(x, weight, eps=h.eps)
    x = reshape(x, shape=(x.shape[0], -1, h.sizes(layer).head_dim))
    if weight is not None and not h.kind.row_norm:
        x = rms_norm(x, weight, eps=h.eps)
    return rope(x, side.angles, interleaved=h.interleaved) if h.has_rope(layer) else x

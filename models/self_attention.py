"""Rotary grouped-query self-attention over any memory: one layer of any architecture here."""

from __future__ import annotations

from graph.ops.norm import rms_norm
from graph.ops.rope import rope
from graph.ops.shape import reshape
from graph.tensor import Tensor
from models.batch import Memory
from models.hparams import Hparams
from models.weights import Weights


def self_attention(b: Weights, h: Hparams, x: Tensor, angles: Tensor, memory: Memory, layer: int) -> Tensor:
    q = reshape(b.linear("attn_q", x), shape=(-1, h.n_head, h.head_dim))
    k = reshape(b.linear("attn_k", x), shape=(-1, h.n_head_kv, h.head_dim))
    v = reshape(b.linear("attn_v", x), shape=(-1, h.n_head_kv, h.head_dim))
    if "attn_q_norm" in b:
        q, k = rms_norm(q, b["attn_q_norm"], eps=h.eps), rms_norm(k, b["attn_k_norm"], eps=h.eps)
    q, k = (rope(t, angles, interleaved=h.interleaved_rope) for t in (q, k))
    window = h.window if h.is_local(layer) else 0
    y = memory.attend(layer, q, k, v, scale=h.attention_scale, window=window, cap=h.attn_softcap)
    return b.linear("attn_output", reshape(y, shape=(-1, h.n_head * h.head_dim)))

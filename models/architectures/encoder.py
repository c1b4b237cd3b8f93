"""Encoder: bidirectional, post-norm embedding models, BERT (Devlin et al., 2018) and its relatives.

Positions are learned, or RoPE (nomic-bert, which has GLU or, in every second layer, MoE)."""

from __future__ import annotations

from logitless.graph.ops.elementwise import add
from logitless.graph.ops.gather import get_rows
from logitless.graph.tensor import Tensor
from logitless.models.architectures.attention import AttentionInputs, keys_values, self_attention
from logitless.models.architectures.feed_forward import feed_forward
from logitless.models.architectures.rope import Rotary
from logitless.models.batch import Memory, Rows, Texts
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.weights import Weights


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Hidden states (T, n_embd) of bidirectional encoders with post-LN."""
    assert isinstance(rows, Texts)
    x = w.embedding(rows.tokens)  # (T, n_embd)
    if "token_types" in w:
        x = add(x, get_rows(w["token_types"], rows.types))
    if h.learned_positions:
        x = add(x, get_rows(w["position_embd"], rows.pos))
    x = w.norm("token_embd_norm", x, h)
    (angles, _), bias = rotary.angles(rows.pos), rotary.score_bias(rows.pos)
    for layer in range(h.n_layer):
        b = w.block(layer)
        side = AttentionInputs(b, x, angles, bias=bias)
        attended = self_attention(side, keys_values(side, h, layer), h, memory, layer)
        before, x = x, b.norm("attn_output_norm", add(x, attended), h)
        if "attn_norm_2" in b:  # a second residual sum (Jina's for code)
            x = b.norm("attn_norm_2", add(x, before), h)
        x = b.norm("layer_output_norm", add(x, feed_forward(b, h, layer, x, x)), h)
    return x

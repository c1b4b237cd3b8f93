"""Gemma 2 and 3: scaled embeddings, a norm on both sides of each sublayer, GeGLU, local layers, soft caps."""

from __future__ import annotations

from graph.ops.elementwise import add, gelu, mul, scale
from graph.ops.rows import get_rows
from graph.tensor import Tensor
from models.batch import Memory, Rows
from models.hparams import Hparams
from models.rope import Rotary
from models.self_attention import Side, self_attention
from models.weights import Weights


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Tokens in, hidden states (R, n_embd) of `rows.out` out."""
    x = scale(w.embedding(rows.tokens), factor=h.embedding_scale)  # (T, n_embd)
    far, near = rotary.angles(rows.pos), rotary.local_angles(rows.pos)
    for layer in range(h.n_layer):
        b = w.block(layer)
        asking = seen = Side(b, b.norm("attn_norm", x, h.eps), near if h.is_local(layer) else far)
        if layer == h.n_layer - 1 and rows.out is not None:  # what the others would ask, nobody needs
            w, x = w.of_rows(rows.out.ids), get_rows(x, rows.out.ids)  # (R, n_embd)
            b = w.block(layer)
            angles = rotary.local_angles if h.is_local(layer) else rotary.angles
            asking = Side(b, b.norm("attn_norm", x, h.eps), angles(rows.out.pos))
        y = self_attention(asking, seen, h, memory, layer)
        x = add(x, b.norm("post_attention_norm", y, h.eps))
        y = geglu(b, b.norm("ffn_norm", x, h.eps))
        x = add(x, b.norm("post_ffw_norm", y, h.eps), name=f"blk.{layer}")
    return w.norm("output_norm", x, h.eps)


def geglu(b: Weights, x: Tensor) -> Tensor:
    return b.linear("ffn_down", mul(gelu(b.linear("ffn_gate", x)), b.linear("ffn_up", x)))

"""BERT (Devlin et al., 2018): learned positions, full attention, layer norms after each sublayer."""

from __future__ import annotations

from graph.ops.elementwise import add, gelu
from graph.ops.rows import get_rows
from graph.ops.shape import reshape
from graph.tensor import Tensor
from models.batch import Memory, Rows, Texts, Weighing
from models.hparams import Hparams
from models.rope import Rotary
from models.weights import Weights


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Tokens in, hidden states (T, n_embd) out."""
    assert isinstance(rows, Texts)
    x = add(w.embedding(rows.tokens), get_rows(w["token_types"], rows.types))  # (T, n_embd)
    x = add(x, get_rows(w["position_embd"], rows.pos))
    x = w.norm("token_embd_norm", x, h)
    for layer in range(h.n_layer):
        b = w.block(layer)
        q, k, v = (reshape(b.linear(f"attn_{c}", x), shape=(-1, h.n_head, h.head_dim)) for c in "qkv")
        y = memory.attend(layer, q, k, v, Weighing(h.attention_scale))
        x = b.norm("attn_output_norm", add(x, b.linear("attn_output", reshape(y, shape=(-1, h.n_embd)))), h)
        y = b.linear("ffn_down", gelu(b.linear("ffn_up", x)))
        x = b.norm("layer_output_norm", add(x, y), h)
    return x

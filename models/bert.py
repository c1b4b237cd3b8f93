"""BERT (Devlin et al., 2018) and its relatives, which make vectors: full attention, layer norms after each sublayer.

Positions are learned, or turn queries and keys (nomic-bert, whose feed-forward blocks are gated or, in every second
layer, experts).
"""

from __future__ import annotations

from graph.ops.elementwise import add
from graph.ops.rope import rope
from graph.ops.rows import get_rows
from graph.ops.shape import reshape
from graph.tensor import Tensor
from models.batch import Memory, Rows, Texts, Weighing
from models.decoder import feed_forward, mixture
from models.hparams import Hparams
from models.rope import Rotary
from models.weights import Weights


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Tokens in, hidden states (T, n_embd) out."""
    assert isinstance(rows, Texts)
    x = w.embedding(rows.tokens)  # (T, n_embd)
    if "token_types" in w:
        x = add(x, get_rows(w["token_types"], rows.types))
    if h.kind.learned_positions:
        x = add(x, get_rows(w["position_embd"], rows.pos))
    x = w.norm("token_embd_norm", x, h)
    angles, _ = rotary.angles(rows.pos)
    for layer in range(h.n_layer):
        b = w.block(layer)
        heads = {"q": h.n_head, "k": h.n_head_kv, "v": h.n_head_kv}
        q, k, v = (reshape(b.linear(f"attn_{c}", x), shape=(-1, n, h.head_dim)) for c, n in heads.items())
        if not h.kind.learned_positions:
            q, k = (rope(t, angles, interleaved=h.interleaved) for t in (q, k))
        y = memory.attend(layer, q, k, v, Weighing(h.attention_scale))
        x = b.norm(
            "attn_output_norm", add(x, b.linear("attn_output", reshape(y, shape=(-1, h.n_head * h.head_dim)))), h
        )
        experts = h.experts_of(layer)
        y = mixture(b, h, experts, x) if experts else feed_forward(b, h, x)
        x = b.norm("layer_output_norm", add(x, y), h)
    return x

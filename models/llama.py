"""Llama and its relatives: RMS norm, rotary grouped-query attention, SwiGLU.

llama, mistral, qwen2, qwen3, phi3 and ernie4_5 differ only in the optional weights that the file holds (projection
biases, norms of each head's queries and keys, fused matrices, which models/weights.py takes apart), so one function
serves them all; mixtral and qwen3moe, too, whose SwiGLU is a mixture of experts; granite, which scales what goes in,
what blocks add and what comes out; smollm3, where every fourth layer has no rotary embedding; and gpt-oss, whose
attention has sinks and whose experts have biases and clamp what joins gate and up.
"""

from __future__ import annotations

from graph.ops.elementwise import add, glu_clamped, mul, scaled, silu
from graph.ops.experts import expert_order, expert_rows, expert_sum, expert_weights, top_experts
from graph.ops.rows import get_rows
from graph.tensor import Tensor
from models.batch import Memory, Rows
from models.hparams import Hparams
from models.rope import Rotary
from models.self_attention import Side, self_attention
from models.weights import Weights

ALPHA = 1.702  # of gpt-oss's sigmoid


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Tokens in, hidden states (R, n_embd) of `rows.out` out."""
    x = scaled(w.embedding(rows.tokens), h.embedding_scale)  # (T, n_embd)
    angles = rotary.angles(rows.pos)
    for layer in range(h.n_layer):
        b = w.block(layer)
        asking = seen = Side(b, b.norm("attn_norm", x, h.eps), angles)
        if layer == h.n_layer - 1 and rows.out is not None:  # what the others would ask, nobody needs
            w, x = w.of_rows(rows.out.ids), get_rows(x, rows.out.ids)  # (R, n_embd)
            b = w.block(layer)
            asking = Side(b, b.norm("attn_norm", x, h.eps), rotary.angles(rows.out.pos))
        x = add(x, scaled(self_attention(asking, seen, h, memory, layer), h.residual_scale))
        y = b.norm("ffn_norm", x, h.eps)
        y = mixture(b, h, y) if h.n_expert else swiglu(b, y)
        x = add(x, scaled(y, h.residual_scale), name=f"blk.{layer}")
    return w.norm("output_norm", x, h.eps)


def swiglu(b: Weights, x: Tensor, which: str = "") -> Tensor:
    gate, up = b.linear(f"ffn_gate{which}", x), b.linear(f"ffn_up{which}", x)
    return b.linear(f"ffn_down{which}", mul(silu(gate), up))


def mixture(b: Weights, h: Hparams, x: Tensor) -> Tensor:
    """(T, n_embd): what the likeliest experts of each row make of it, by their probabilities among each other (Mixtral:
    Jiang et al., 2024; llama.cpp's softmax over all experts, divided by the chosen ones' sum, is the same number)."""
    logits = b.linear("ffn_gate_inp", x)  # (T, n_expert)
    ids = top_experts(logits, n=h.n_expert_used)
    order = expert_order(ids, n=h.n_expert)
    rows = expert_rows(x, order)  # (T · n_expert_used, n_embd)
    gate, up = (b.experts(name, rows, order, h.n_expert) for name in ("ffn_gate_exps", "ffn_up_exps"))
    gated = glu_clamped(gate, up, alpha=ALPHA, limit=h.glu_limit) if h.glu_limit else mul(silu(gate), up)
    y = b.experts("ffn_down_exps", gated, order, h.n_expert)
    y = expert_sum(y, expert_weights(logits, ids), order)
    return add(y, swiglu(b, x, "_shexp")) if h.n_ff_shared else y

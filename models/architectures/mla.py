"""Multi-head latent attention (MLA; DeepSeek-AI, 2024): one compressed row a token in the KV cache.

All heads' keys and values derive from that row.

The weight-absorbed form computes no keys or values: each head's part of the key matrix multiplies
the query, which then meets the compressed rows themselves, and its part of the value matrix
multiplies their weighted sum. So there is one KV head, whose row is the RoPE part and then the
compressed part; values are the same rows."""

from __future__ import annotations

from logitless.graph.ops.elementwise import broadcast_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.moe import expert_order, expert_rows, top_experts
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import set_block, take_columns
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.attention import AttentionInputs, gated, index_queries
from logitless.models.batch import AttentionParams, KeysValues, Memory
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.mla import MLAParams


def mla_keys(inputs: AttentionInputs, h: Hparams, layer: int) -> KeysValues:
    """The compressed KV row of each token: one key head, whose rows serve as values, too; and the indexer's key."""
    row = rms_norm(inputs.b.linear("attn_kv_a", inputs.x), inputs.b["attn_kv_a_norm"], eps=h.eps)
    row = concat_columns(inputs.b.linear("attn_k_turned", inputs.x), row) if "attn_k_turned" in inputs.b else row
    k = reshape(row, shape=(-1, 1, h.head_dim))
    k = rope(k, inputs.angles, interleaved=h.interleaved) if h.rotary else k
    return KeysValues(k, None)


def mla_attention(queries: AttentionInputs, kv: KeysValues, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """Attention block output (T, n_embd) of the query rows."""
    assert h.mla is not None
    heads = Heads(queries, h.mla, h.n_head)
    low = heads.low_rank(h.eps)
    q = heads.queries(low)
    q = rope(q, queries.angles, interleaved=h.interleaved) if h.rotary else q
    # (T, n_head, width)
    sinks = (queries.b["attn_sinks"],) if "attn_sinks" in queries.b else ()
    index = index_queries(queries, low, h, layer)
    params = AttentionParams(h.attention_scale, sinks=sinks, indexer=h.indexer_of(layer), index_q=index)
    rows = memory.attend(layer, queries.scaled_query(q), kv, params)
    y = heads.values(rows)
    if "attn_gate" in queries.b:
        by_head = reshape(y, shape=(y.shape[0], h.n_head, -1))
        y = reshape(gated(by_head, queries.b.linear("attn_gate", queries.x), h), shape=y.shape)
    return queries.b.linear("attn_output", y)


class Heads:
    """Per-head products of the weight-absorbed form, for T query rows. Head weights are stored
    like experts'."""

    def __init__(self, inputs: AttentionInputs, mla: MLAParams, n_head: int) -> None:
        self._inputs, self._mla, self._n = inputs, mla, n_head
        rows = inputs.x.shape[0]
        nothing = broadcast_to(const(0.0), shape=(rows, n_head))
        # of equal ones the first: 0, 1, 2, …
        self._order = expert_order(top_experts(nothing, n=n_head), n=n_head)

    def low_rank(self, eps: float) -> Tensor:
        """Rows (T, n) that queries derive from: of low rank, or the hidden state."""
        b, x = self._inputs.b, self._inputs.x
        return rms_norm(b.linear("attn_q_a", x), b["attn_q_a_norm"], eps=eps) if self._mla.q_rank else x

    def queries(self, low: Tensor) -> Tensor:
        """Absorbed queries (T, n_head, width)."""
        b, mla = self._inputs.b, self._mla
        q = b.linear("attn_q_b" if mla.q_rank else "attn_q", low)
        q = reshape(q, shape=(-1, mla.n_nope + mla.n_rope))  # (T · n_head, …)
        plain = take_columns(q, 0, mla.n_nope)
        absorbed = self._by_token(b.experts("attn_k_b", self._by_head(plain), self._order, self._n, mla.rank))
        both = concat_columns(take_columns(q, mla.n_nope, mla.n_rope), absorbed) if mla.n_rope else absorbed
        return reshape(both, shape=(-1, self._n, mla.width))

    def values(self, rows: Tensor) -> Tensor:
        """Head outputs (T, n_head · n_value) of attention-weighted rows (T, n_head, width)."""
        b, mla = self._inputs.b, self._mla
        sums = self._by_head(take_columns(reshape(rows, shape=(-1, mla.width)), mla.n_rope, mla.rank))
        heads = b.experts("attn_v_b", sums, self._order, self._n, mla.n_value)
        return reshape(self._by_token(heads), shape=(-1, self._n * mla.n_value))

    def _by_head(self, x: Tensor) -> Tensor:
        """x (T · n_head, K) from token-major to head-major order."""
        return expert_rows(x, self._order)

    def _by_token(self, y: Tensor) -> Tensor:
        places = reshape(slice_rows(self._order, start=1, stop=2), shape=(y.shape[0],))
        return get_rows(y, places)


def concat_columns(a: Tensor, b: Tensor) -> Tensor:
    """Columns of a (R, M) and b (R, N) side by side, (R, M + N)."""
    rows, n = a.shape
    both = broadcast_to(const(0.0), shape=(rows, n + b.shape[1]))
    return set_block(set_block(both, a, start=(0, 0)), b, start=(0, n))

"""Multi-head latent attention (MLA; DeepSeek-AI, 2024): one compressed row a token in the KV cache.

All heads' keys and values derive from that row.

The weight-absorbed form computes no keys or values: each head's part of the key matrix multiplies
the query, which then meets the compressed rows themselves, and its part of the value matrix
multiplies their weighted sum. So there is one KV head, whose row is the RoPE part and then the
compressed part; values are the same rows.

DeepSeek V4 has such rows, too, of the last tokens and of blocks of tokens. RoPE rotates their last
elements, which are values as well, so the output is rotated back (graph/ops/attention/compressed.py)."""

from __future__ import annotations

from logitless.graph.ops.elementwise import broadcast_to, scaled
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.moe import expert_order, expert_rows, top_experts
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import concat, set_block, take_block, take_columns
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.attention import AttentionInputs, gated, index_queries
from logitless.models.batch import AttentionParams, Cached, KeysValues, Memory
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.mla import OVERLAPPING, POOLS, MLAParams


def mla_keys(inputs: AttentionInputs, h: Hparams, layer: int) -> KeysValues:
    """The compressed KV row of each token: one key head, whose rows serve as values, too; and the indexer's key."""
    row = rms_norm(inputs.b.linear("attn_kv_a", inputs.x), inputs.b["attn_kv_a_norm"], eps=h.eps)
    row = concat(inputs.b.linear("attn_k_turned", inputs.x), row) if "attn_k_turned" in inputs.b else row
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


def rope_of_last(x: Tensor, angles: Tensor, n: int, *, sign: float = 1.0) -> Tensor:
    """x (T, H, D) with RoPE of the last n elements of each head."""
    rows, heads, size = x.shape
    start = (0, 0, size - n)
    part = rope(take_block(x, start=start, shape=(rows, heads, n)), angles, interleaved=True, sign=sign)
    return set_block(x, part, start=start)


def compressed_keys(inputs: AttentionInputs, h: Hparams, layer: int) -> KeysValues:
    """The row of each token, which serves as key and value (DeepSeek V4)."""
    row = rms_norm(inputs.b.linear("attn_kv", inputs.x), inputs.b["attn_kv_a_norm"], eps=h.eps)
    return KeysValues(rope_of_last(reshape(row, shape=(-1, 1, h.head_dim)), inputs.angles, h.rope_dim), None)


def keep_rows(inputs: AttentionInputs, k: Tensor, h: Hparams, memory: Memory, layer: int) -> None:
    """Write the rows k of a layer's tokens and of the blocks that they end, if the model compresses its cache."""
    if h.compression is None:
        return
    assert isinstance(memory, Cached)
    b, size = inputs.b, h.compression.blocks[layer]
    names = POOLS[: len(h.compression.pooled(layer, h.head_dim))]
    pools = (concat(*(b.linear(f"{name}_{part}", inputs.x) for part in ("kv", "gate"))) for name in names)
    memory.keep(layer, k, *(reshape(x, shape=(x.shape[0], 1, -1)) for x in pools))
    for i, name in enumerate(names):
        rows = memory.pool(layer, i, b[f"{name}_ape"], overlap=size == OVERLAPPING)
        rows = rms_norm(rows, b[f"{name}_norm"], eps=h.eps)
        rows = rope_of_last(reshape(rows, shape=(rows.shape[0], 1, -1)), inputs.starts[size], h.rope_dim)
        memory.store_blocks(layer, i, rows, size)


def compressed_attention(queries: AttentionInputs, _: KeysValues, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """Attention block output (T, n_embd) of the query rows."""
    assert isinstance(memory, Cached)
    c, b, x = h.compression, queries.b, queries.x
    assert c is not None
    low = rms_norm(b.linear("attn_q_a", x), b["attn_q_a_norm"], eps=h.eps)
    q = rms_norm(reshape(b.linear("attn_q_b", low), shape=(-1, h.n_head, h.head_dim)), const(1.0), eps=h.eps)
    q, index = rope_of_last(q, queries.angles, h.rope_dim), tuple[Tensor, ...]()
    if c.indexes(layer):
        each = reshape(b.linear("indexer.attn_q_b", low), shape=(-1, c.index_heads, c.index_size))
        weights = scaled(b.linear("indexer.proj", x), (c.index_heads * c.index_size) ** -0.5)
        index = rope_of_last(each, queries.angles, h.rope_dim), weights
    sizes = {"top_k": c.top_k, "size": c.blocks[layer], "window": c.window}
    y = memory.attend_blocks(layer, q, b["attn_sinks"], index, scale=h.attention_scale, **sizes)
    y = rope_of_last(y, queries.angles, h.rope_dim, sign=-1.0)
    n = c.n_groups  # each with a matrix of its own, as experts are
    order = expert_order(top_experts(broadcast_to(const(0.0), shape=(x.shape[0], n)), n=n), n=n)
    rows = expert_rows(reshape(y, shape=(x.shape[0] * n, -1)), order)
    out = b.experts("attn_output_a", rows, order, n, c.rank)
    out = get_rows(out, reshape(slice_rows(order, start=1, stop=2), shape=(out.shape[0],)))
    return b.linear("attn_output_b", reshape(out, shape=(x.shape[0], -1)))


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
        both = concat(take_columns(q, mla.n_nope, mla.n_rope), absorbed) if mla.n_rope else absorbed
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

"""Self-attention layer: grouped-query attention with RoPE, over the KV cache or a training batch.

A layer with KV sharing reads the keys and values of an earlier layer, which the memory has already.

Attention may be sparse (DeepSeek-AI, 2025: V3.2): an indexer chooses a token's cells, by keys of its own. Where one
stands for a pool of neighbouring cells (GLM 5.3, Qwen 4), a token's is that of the pool which it would end, and only
those of tokens that end one are read. What it needs of the tokens before is a convolution's state."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

from logitless.graph.ops.elementwise import add, broadcast_to, mul, scale, scaled, sum_to
from logitless.graph.ops.norm import centred, layer_norm, rms_norm
from logitless.graph.ops.pointwise import clamp, sigmoid, softplus
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, set_block, take_block, take_columns, transpose
from logitless.graph.ops.training.loss import softmax
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.architecture import Indexer, KeyPool, OutputGate, QKNorm
from logitless.models.batch import AttentionParams, Cached, KeysValues, Memory, RecurrentMemory
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.layer_sizes import LayerSizes
from logitless.models.hparams.mla import IndexerParams
from logitless.models.weights.weights import Weights

LN_2 = log(2)
LAYER_NORM_EPS = 1e-6


class AttentionInputs(NamedTuple):
    """Layer inputs of the rows that have queries, or of those that have keys and values."""

    b: Weights  # of the layer, with the rows' LoRA scales
    x: Tensor  # (T, n_embd), normalised
    angles: Tensor  # (T, 2, n/2) RoPE cos and sin
    query_scale: Tensor | None = None  # (T, 1, 1): attention-temperature scale of queries
    bias: tuple[Tensor, ...] = ()  # of scores, as AttentionParams has it
    starts: Mapping[int, Tensor] = {}  # angles of the first positions of blocks, by their size

    def scaled_query(self, q: Tensor) -> Tensor:
        """Queries (T, H, D) times their attention-temperature scale."""
        return q if self.query_scale is None else mul(q, self.query_scale)


def keys_values(inputs: AttentionInputs, h: Hparams, layer: int) -> KeysValues:
    """Keys and values of a layer with its own KV cache."""
    size = h.sizes(layer)
    x = inputs.b.linear("attn_k", inputs.x)
    values = inputs.b.linear("attn_v", inputs.x) if "attn_v" in inputs.b else x
    v = reshape(clamped(values, h), shape=(-1, size.n_head_kv, size.value_dim))
    if h.architecture.attention.value_norm:
        v = rms_norm(v, const(1.0), eps=h.eps)
    if size.value_dim < size.head_dim:
        flat = reshape(v, shape=(-1, size.value_dim))
        zeros = broadcast_to(const(0.0), shape=(flat.shape[0], size.head_dim - size.value_dim))
        v = reshape(concat(flat, zeros), shape=(-1, size.n_head_kv, size.head_dim))
    return KeysValues(_with_rope(inputs, "attn_k", clamped(x, h), h, layer), v)


def self_attention(queries: AttentionInputs, kv: KeysValues, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """Attention block output (T, n_embd) of the query rows."""
    x, gate = queries.b.linear("attn_q", queries.x), None
    size = h.sizes(layer)
    if "attn_gate" in queries.b:
        gate = queries.b.linear("attn_gate", queries.x)
    elif h.architecture.attention.gate is OutputGate.WITH_QUERY:
        x, gate = _query_and_gate(x, size)
    q = _with_rope(queries, "attn_q", clamped(x, h), h, layer)
    # both norms' weights go to the query, so that cached keys can be shifted
    if h.architecture.attention.qk_norm_after_rope:
        q = mul(q, mul(queries.b["attn_q_norm"], queries.b["attn_k_norm"]))
    window = h.window if h.is_local(layer) else 0
    sinks = (queries.b["attn_sinks"],) if "attn_sinks" in queries.b else ()
    chunked = h.architecture.attention.chunked and window > 0
    causal_images = chunked or (h.architecture.attention.images_in_window and not window)
    params = AttentionParams(h.attention_scale, window, h.attn_softcap, sinks, causal_images, chunked, queries.bias)
    params = params._replace(indexer=h.indexer_of(layer), index_q=index_queries(queries, queries.x, h, layer))
    y = memory.attend(layer, queries.scaled_query(q) if h.has_temperature(layer) else q, kv, params)
    if size.value_dim < size.head_dim:
        y = take_block(y, start=(0, 0, 0), shape=(*y.shape[:2], size.value_dim))
    if gate is not None:
        y = gated(y, gate, h)
    y = queries.b.norm("attn_sub_norm", reshape(scaled(y, h.value_scale), shape=(y.shape[0], -1)), h)
    return queries.b.linear("attn_output", y)


def cross_keys_values(b: Weights, x: Tensor, h: Hparams, layer: int) -> KeysValues:
    """Keys and values of the encoder's output x (T, n_embd) in a layer of the decoder."""
    shape = (-1, h.sizes(layer).n_head_kv, h.sizes(layer).head_dim)
    k, v = (reshape(b.linear(f"cross_attn_{name}", x), shape=shape) for name in ("k", "v"))
    return KeysValues(k, v)


def cross_attention(b: Weights, x: Tensor, h: Hparams, memory: Memory, layer: int) -> Tensor:
    """Cross-attention block output (T, n_embd) of x (T, n_embd), without biases by distance."""
    assert isinstance(memory, Cached)
    q = reshape(b.linear("cross_attn_q", x), shape=(x.shape[0], -1, h.sizes(layer).head_dim))
    y = memory.attend_source(layer, q, h.attention_scale)
    return b.linear("cross_attn_output", reshape(y, shape=(x.shape[0], -1)))


def gated(y: Tensor, gate: Tensor, h: Hparams) -> Tensor:
    """Attention output y (T, H, D) times the gate of each element, or of each head."""
    kind = h.architecture.attention.gate
    if kind is OutputGate.SOFTPLUS2:
        gate = scale(softplus(scale(gate, factor=LN_2)), factor=1 / LN_2)
    else:
        gate = softplus(gate) if kind is OutputGate.SOFTPLUS else sigmoid(gate)
    return mul(y, reshape(gate, shape=(*y.shape[:2], -1)))


def clamped(x: Tensor, h: Hparams) -> Tensor:
    """Queries, keys or values within the file's limit, if it has one (OLMo, DBRX)."""
    return clamp(x, low=-h.qkv_limit, high=h.qkv_limit) if h.qkv_limit else x


def _query_and_gate(x: Tensor, size: LayerSizes) -> tuple[Tensor, Tensor]:
    """Split attn_q's output into queries and output gates, (T, n_head · head_dim) each."""
    shape = (x.shape[0], size.n_head, 1, size.head_dim)
    both = reshape(x, shape=(x.shape[0], size.n_head, 2, size.head_dim))
    q, gate = (take_block(both, start=(0, 0, i, 0), shape=shape) for i in range(2))
    return reshape(q, shape=(x.shape[0], -1)), reshape(gate, shape=(x.shape[0], -1))


def _with_rope(inputs: AttentionInputs, name: str, x: Tensor, h: Hparams, layer: int) -> Tensor:
    """Queries or keys (T, heads, head_dim) after qk_norm, where the file has it, and RoPE."""
    x = _qk_norm(inputs, name, x, h, h.sizes(layer).head_dim)
    if h.has_unweighted_norm(layer):  # llama.cpp's is after RoPE, which preserves norms
        x = rms_norm(x, const(1.0), eps=h.eps)
    return rope(x, inputs.angles, interleaved=h.interleaved) if h.has_rope(layer) else x


def _qk_norm(inputs: AttentionInputs, name: str, x: Tensor, h: Hparams, head_dim: int) -> Tensor:
    weight, attention = inputs.b.get(f"{name}_norm"), h.architecture.attention
    if weight is not None and attention.qk_norm is QKNorm.ALL_HEADS:
        x = rms_norm(centred(x) if h.architecture.norm.layer_norm else x, weight, eps=h.eps)
        x = x if (bias := inputs.b.bias(f"{name}_norm")) is None else add(x, bias)
    x = reshape(x, shape=(x.shape[0], -1, head_dim))
    if attention.qk_norm is QKNorm.GAIN:
        x = rms_norm(x, const(1.0), eps=h.eps)
        return x if weight is None else mul(x, weight)
    if weight is None or attention.qk_norm is QKNorm.ALL_HEADS:
        return x
    if attention.qk_norm in (QKNorm.OWN, QKNorm.CENTRED):
        normed = rms_norm(x if attention.qk_norm is QKNorm.OWN else centred(x), const(1.0), eps=h.eps)
        return reshape(mul(reshape(normed, shape=(x.shape[0], -1)), weight), shape=x.shape)
    # RoPE preserves norms
    return rms_norm(x, const(1.0) if attention.qk_norm_after_rope else weight, eps=h.eps)


def index_keys(inputs: AttentionInputs, h: Hparams, layer: int, memory: Memory) -> Tensor | None:
    """Keys (T, 1, size) of a layer's indexer; None: the layer has none, or attends to all cells here."""
    if h.indexer is None or not memory.indexes(layer):
        return None
    (p, kind), b, angles = _indexer(h), inputs.b, inputs.angles
    if kind.latent:
        eps, bias = h.eps if kind.rms_eps else LAYER_NORM_EPS, b.bias("indexer.k_norm")
        assert bias is not None
        k = layer_norm(b.linear("indexer.attn_k", inputs.x), b["indexer.k_norm"], bias, eps=eps)
    else:
        k = b.linear("indexer.k_proj", inputs.x)
    if kind.pool is KeyPool.SOFTMAX:
        k = _softmax_pool(k, b.linear("indexer_compressor_gate", inputs.x), inputs, p, layer, memory)
    elif kind.pool is KeyPool.MEAN:
        k, angles = _mean_pool(k, angles, p, layer, memory)
    k = k if kind.latent else rms_norm(k, b["indexer.k_norm"], eps=h.eps)
    return _index_rope(reshape(k, shape=(-1, 1, p.size)), angles, h)


def index_queries(inputs: AttentionInputs, low: Tensor, h: Hparams, layer: int) -> tuple[Tensor, ...]:
    """Queries (T, n_heads, size) of a layer's own indexer, and the weights (T, n_heads) of its heads if they have
    some; (): the layer has none. `low`: the rows that latent queries derive from."""
    if not h.indexes(layer):
        return ()
    (p, kind), b = _indexer(h), inputs.b
    shape = (-1, p.n_heads, p.size)
    if kind.latent:
        q = _index_rope(reshape(b.linear("indexer.attn_q_b", low), shape=shape), inputs.angles, h)
        return q, scaled(b.linear("indexer.proj", inputs.x), (p.n_heads * p.size) ** -0.5)
    q = rms_norm(reshape(b.linear("indexer.q_proj", inputs.x), shape=shape), b["indexer.q_norm"], eps=h.eps)
    q = _index_rope(q, inputs.angles, h)
    if kind.pool is KeyPool.GREATEST:
        return (q,)
    return q, broadcast_to(const(p.size**-0.5), shape=(q.shape[0], p.n_heads))


def _indexer(h: Hparams) -> tuple[IndexerParams, Indexer]:
    kind = h.architecture.attention.indexer
    assert h.indexer is not None
    assert kind is not None
    return h.indexer, kind


def _index_rope(x: Tensor, angles: Tensor, h: Hparams) -> Tensor:
    """Queries or keys (T, heads, size) with RoPE, whose elements come first."""
    p, kind = _indexer(h)
    if not p.n_rope:
        return x
    if kind.rope_last:
        rows = reshape(x, shape=(-1, p.size))
        n_plain = p.size - p.n_rope
        x = reshape(concat(take_columns(rows, n_plain, p.n_rope), take_columns(rows, 0, n_plain)), shape=x.shape)
    return rope(x, angles, interleaved=kind.interleaved)


def _softmax_pool(
    k: Tensor, gate: Tensor, inputs: AttentionInputs, p: IndexerParams, layer: int, memory: Memory
) -> Tensor:
    """Weighted means (T, size) of the keys of a pool, whose weights are the softmax, for each element, of gates and
    what the file adds to those of each place."""
    assert isinstance(memory, RecurrentMemory)
    n, width, rows = p.pool, 2 * p.size, k.shape[0]
    own = concat(k, gate)
    before = memory.causal_conv(layer, concat(*[own] * (n - 1)), shifts(n, width))
    places = [*(take_columns(before, i * width, width) for i in reversed(range(n - 1))), own]
    logits = (add(take_columns(x, p.size, p.size), inputs.b[f"indexer_ape.{i}"]) for i, x in enumerate(places))

    def by_element(*parts: Tensor) -> Tensor:
        whole = reshape(concat(*parts), shape=(rows, n, p.size))
        return reshape(transpose(whole, axes=(0, 2, 1)), shape=(rows * p.size, n))

    weights = softmax(by_element(*logits))
    keys = by_element(*(take_columns(x, 0, p.size) for x in places))
    return reshape(sum_to(mul(weights, keys), shape=(rows * p.size, 1)), shape=(rows, p.size))


def _mean_pool(k: Tensor, angles: Tensor, p: IndexerParams, layer: int, memory: Memory) -> tuple[Tensor, Tensor]:
    """Means (T, size) of the keys of a pool, and the RoPE angles of its first token."""
    assert isinstance(memory, RecurrentMemory)
    n, rows = p.pool, k.shape[0]
    flat = reshape(angles, shape=(rows, -1))
    taps = broadcast_to(const(0.0), shape=(p.size + flat.shape[1], 1, n))
    taps = set_block(taps, broadcast_to(const(1 / n), shape=(p.size, 1, n)), start=(0, 0, 0))
    taps = set_block(taps, broadcast_to(const(1.0), shape=(flat.shape[1], 1, 1)), start=(p.size, 0, 0))
    pooled = memory.causal_conv(layer, concat(k, flat), taps)
    first = reshape(take_columns(pooled, p.size, flat.shape[1]), shape=angles.shape)
    return take_columns(pooled, 0, p.size), first


def shifts(n: int, width: int = 1) -> Tensor:
    """Taps ((n − 1) · width, 1, n) of a short convolution over the same columns n − 1 times, of which the i-th are
    those of i + 1 rows before."""
    taps, one = broadcast_to(const(0.0), shape=((n - 1) * width, 1, n)), broadcast_to(const(1.0), shape=(width, 1, 1))
    for i in range(n - 1):
        taps = set_block(taps, one, start=(i * width, 0, n - 2 - i))
    return taps

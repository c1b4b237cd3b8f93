"""Decoder forward pass: norms, attention or recurrent layers, feed-forward blocks or MoE.

Architectures differ by their traits (models/architectures/registry.py), by numbers of the file
(models/hparams/hparams.py), and by the weights that the file has: biases, qk_norm, fused matrices
(which models/weights/tensor_map.py splits), attention sinks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scaled, silu, sum_to
from logitless.graph.ops.gather import get_rows, ngram_rows, token_columns
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import clamp, div, sigmoid, sign, sqrt
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, set_block, take_block, take_columns
from logitless.graph.ops.training.loss import softmax
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.attention import (
    AttentionInputs,
    cross_attention,
    index_keys,
    keys_values,
    self_attention,
    shifts,
)
from logitless.models.architectures.feed_forward import feed_forward
from logitless.models.architectures.linear_attention import OUTPUT, channel_mix, recurrent
from logitless.models.architectures.mla import (
    compressed_attention,
    compressed_keys,
    keep_rows,
    mla_attention,
    mla_keys,
)
from logitless.models.architectures.rope import Rotary
from logitless.models.batch import KeysValues, Memory, RecurrentMemory, Rows, rope_positions
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.ssm import NGrams
from logitless.models.weights.weights import Weights

KeysOf = Callable[[AttentionInputs, Hparams, int], KeysValues]
Attention = Callable[[AttentionInputs, KeysValues, Hparams, Memory, int], Tensor]


def forward(
    w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory, layer_inputs: list[Tensor] | None = None
) -> Tensor:
    """Hidden states (R, n_embd) of `rows.out`, after the final norm.

    `layer_inputs` is filled with the residual stream (T, n_embd) before each layer and behind the last, for
    drafters; from the last layer with a KV cache of its own on, it has the rows of `rows.out` only. Of several
    streams the last has all, side by side."""
    layer_inputs = [] if layer_inputs is None else layer_inputs
    x = scaled(w.embedding(rows.tokens), h.embedding_scale)  # (T, n_embd)
    w = w.with_tokens(rows.tokens) if h.experts and h.experts.n_hashed else w
    if rows.media is not None:
        x = rows.media.embedded(x)
        w = w.with_images(rows.media.is_text) if h.architecture.visual_expert else w
    if h.architecture.norm.embedding:
        x = w.norm("token_embd_norm", x, h)
    if h.learned_positions:
        x = add(x, get_rows(w["position_embd"], rows.pos))
    inputs = per_layer_embeddings(w, h, rows.tokens, x) if h.n_embd_per_layer else None
    angles = rotary.angles(rope_positions(rows))
    query_scale, bias = rotary.query_scale(rows.pos), rotary.score_bias(rows.pos)
    starts = rotary.start_angles(rows.pos, h.compression.blocks if h.compression else ())
    keys_of, attention = attention_of(h)
    kv_of: dict[int, KeysValues] = {}
    first_values: list[Tensor] = []
    streams, embedded, n_blocks = streams_of(h, rotary, [x] * max(1, h.n_hyper)), x, h.n_layer // h.n_loops
    for layer in range(h.n_layer):
        if h.norm_between_loops and layer and layer % n_blocks == 0:
            x = w.norm("output_norm", x, h)
        layer_inputs.append(x)
        b, local = w.block(layer % n_blocks), h.is_local(layer)
        if streams is not None:
            streams.enter(w, b, layer, rows.tokens, memory)
            x = streams.input_of(b, "attn", layer)
        y = b.norm("attn_norm", x, h)
        recurrent_output, attends = None, h.attends(layer)
        if r := h.recurrent_of(layer):
            # all rows: the state is sequential
            recurrent_output = recurrent(b, h, r, layer, y, memory, first_values)
            if h.architecture.states.channel_mix:
                x, recurrent_output = channel_mix(b, h, r, layer, x, recurrent_output, memory), None
        if attends and layer < h.n_layer_kv:
            whole = AttentionInputs(b, y, angles[local], starts=starts)
            kv_of[layer] = keys_of(whole, h, layer)._replace(index_k=index_keys(whole, h, layer, memory))
            keep_rows(whole, kv_of[layer].k, h, memory, layer)
        if layer == h.n_layer_kv - 1 and rows.out is not None:  # other rows' queries are not needed
            w, x = w.of_rows(rows.out.ids), get_rows(x, rows.out.ids)  # (R, n_embd)
            inputs = None if inputs is None else get_rows(inputs, rows.out.ids)
            embedded = get_rows(embedded, rows.out.ids) if h.architecture.embedding_skips else embedded
            angles, query_scale = rotary.angles(rope_positions(rows, of_out=True)), rotary.query_scale(rows.out.pos)
            b = w.block(layer % n_blocks)
            if streams is not None:
                streams.take_rows(rows.out.ids)
                x = streams.input_of(b, "attn", layer)
            y = b.norm("attn_norm", x, h)
            recurrent_output = None if recurrent_output is None else get_rows(recurrent_output, rows.out.ids)
        mixed = None
        if attends:
            queries = AttentionInputs(b, y, angles[local], query_scale, bias)
            mixed = attention(queries, kv_of[h.kv_source(layer)], h, memory, layer)
        elif h.architecture.attention.optional and "attn_output" in b:  # linear layer instead of attention (Deci)
            mixed = b.linear("attn_output", y)
        if recurrent_output is not None:
            recurrent_output = b.linear(OUTPUT[h.architecture.states.kind], recurrent_output)
            mixed = recurrent_output if mixed is None else add(mixed, recurrent_output)
        if streams is not None:
            assert mixed is not None
            streams.join_layer(b, layer, mixed)
            streams.steer(w, layer)
            continue
        x, mixed = behind_encoder(b, h, layer, x, mixed, memory)
        x = residual_stream(b, h, layer, x, y, mixed)
        if rows.media is not None:
            x = rows.media.deepstack(layer, x, rows.out if layer >= h.n_layer_kv - 1 else None)
        if inputs is not None:
            x = add(x, per_layer_residual(b, h, layer, inputs, x))
        if h.architecture.embedding_skips:
            x = add(x, mul(embedded, b["layer_output_scale"]))
        elif "layer_output_scale" in b:
            x = mul(x, b["layer_output_scale"])
        x = replace(w.steered(layer, x), name=f"blk.{layer}")
    layer_inputs.append(x if streams is None else concat(*streams.streams))
    return w.norm("output_norm", x if streams is None else streams.input_of(w, "output", h.n_layer), h)


class Streams:
    """Residual of several streams (T, n_embd)."""

    def __init__(self, h: Hparams, streams: list[Tensor]) -> None:
        self.h, self.streams = h, streams

    def take_rows(self, ids: Tensor) -> None:
        """From now on these rows only."""
        self.streams = [get_rows(x, ids) for x in self.streams]

    def steer(self, w: Weights, layer: int) -> None:
        """Add the directions of control vectors."""
        self.streams = [w.steered(layer, x) for x in self.streams]

    def enter(self, w: Weights, b: Weights, layer: int, tokens: Tensor, memory: Memory) -> None:
        """Add what a layer has for the tokens (T,) before its blocks."""

    @abstractmethod
    def input_of(self, b: Weights, name: str, layer: int) -> Tensor:
        """Input (T, n_embd) of a block, before its norm."""

    @abstractmethod
    def join(self, y: Tensor) -> None:
        """Add the output (T, n_embd) of the block whose input was the last."""

    def join_layer(self, b: Weights, layer: int, mixed: Tensor) -> None:
        """Add a layer's attention output (T, n_embd), then that of its feed-forward block."""
        self.join(mixed)
        x = self.input_of(b, "ffn", layer)
        self.join(feed_forward(b, self.h, layer, b.norm("ffn_norm", x, self.h), x))

    def _sum(self, weights: Tensor, columns: range) -> Tensor:
        """Σ of the streams, each times its column of the weights (T, n)."""
        products = (mul(x, take_columns(weights, i, 1)) for x, i in zip(self.streams, columns, strict=True))
        return reduce(add, products)


class ResidualAttention(Streams):
    """Streams of Kimi K3: a block reads attention, with one learned query, over the last stream and those that
    earlier layers set aside. A layer that sets the last aside begins another with its attention's output."""

    def steer(self, w: Weights, layer: int) -> None:
        self.streams[-1] = w.steered(layer, self.streams[-1])

    def input_of(self, b: Weights, name: str, layer: int) -> Tensor:
        self._begins = name == "attn" and layer % self.h.residual_period == 0
        if len(self.streams) == 1:
            return self.streams[0]
        query, each = b[f"{name}_res_score"], (self.streams[0].shape[0], 1)
        scores = (sum_to(rms_norm(x, query, eps=self.h.eps), shape=each) for x in self.streams)
        return self._sum(softmax(concat(*scores)), range(len(self.streams)))

    def join(self, y: Tensor) -> None:
        if self._begins:
            self.streams.append(y)
        else:
            self.streams[-1] = add(self.streams[-1], y)


class HyperConnections(Streams):
    """Manifold-constrained hyper-connections (Xie et al., 2025): a block reads a weighted sum of n streams, which
    are then mixed with each other by a doubly stochastic matrix (Hunyuan 4's are not), plus the block's output."""

    def input_of(self, b: Weights, name: str, layer: int) -> Tensor:
        n = len(self.streams)
        name = "output_hc" if name == "output" else f"hc_{name}"
        if f"{name}_fn" not in b:
            return scaled(reduce(add, self.streams), 1 / n)
        mixes = b.linear(f"{name}_fn", rms_norm(concat(*self.streams), const(1.0), eps=self.h.eps))

        def part(i: int, width: int) -> Tensor:
            own = mul(take_columns(mixes, i * n, width), b[f"{name}_scale.{i}"])
            return add(own, b[f"{name}_base.{i}"])

        eps = const(self.h.hyper_eps)
        if name != "output_hc":
            self._of_output = scaled(sigmoid(part(1, n)), self.h.hyper_magnitude)
            if self.h.hyper_iterations:
                self._mix = self._sinkhorn(part(2, n * n))
            else:
                self._of_output = add(self._of_output, eps)
        return self._sum(add(sigmoid(part(0, n)), eps), range(n))

    def _sinkhorn(self, x: Tensor) -> Tensor:
        """x (T, n · n), from row to column, as a matrix whose rows and columns sum to 1 (Sinkhorn, 1964)."""
        n, eps = len(self.streams), const(self.h.hyper_eps)
        y = add(reshape(softmax(reshape(x, shape=(-1, n))), shape=(x.shape[0], n, n)), eps)
        for i in range(2 * self.h.hyper_iterations - 1):  # columns first and last
            axes = (x.shape[0], 1, n) if i % 2 == 0 else (x.shape[0], n, 1)
            y = div(y, add(sum_to(y, shape=axes), eps))
        return reshape(y, shape=x.shape)

    def join(self, y: Tensor) -> None:
        n = len(self.streams)
        mixed = self.streams
        if self.h.hyper_iterations:
            mixed = [self._sum(self._mix, range(to, n * n, n)) for to in range(n)]
        self.streams = [add(mul(y, take_columns(self._of_output, to, 1)), x) for to, x in enumerate(mixed)]


class GatedConnections(HyperConnections):
    """Hyper-connections whose block reads the mean of the normed streams, each element with a gate (Qwen 4).
    `hashes`: of n-grams, if a layer has embeddings of them."""

    def __init__(self, h: Hparams, streams: list[Tensor], hashes: Tensor | None) -> None:
        super().__init__(h, streams)
        self._hashes = hashes

    def enter(self, w: Weights, b: Weights, layer: int, tokens: Tensor, memory: Memory) -> None:
        grams = self.h.ngrams
        if grams is not None and layer == grams.layer:
            assert isinstance(memory, RecurrentMemory)
            assert self._hashes is not None
            columns = token_columns(tokens, n=grams.n - 1)
            before = memory.causal_conv(layer, columns, shifts(grams.n), 2)
            rows = ngram_rows(tokens, before, self._hashes, n_rows=grams.n_rows, stop=grams.stop)
            embedded = get_rows(w["per_layer_token_embd"], rows)
            self.streams = with_ngrams(b, self.h, grams, embedded, self.streams, memory)

    def input_of(self, b: Weights, name: str, layer: int) -> Tensor:
        n, size = len(self.streams), self.h.n_embd
        name = "output_hc" if name == "output" else f"hc_{name}"
        normed = [rms_norm(x, b[f"{name}_norm.{i}"], eps=self.h.eps) for i, x in enumerate(self.streams)]
        whole = concat(*normed)
        gates = sigmoid(b.linear(f"{name}_up", silu(scaled(b.linear(f"{name}_down", whole), 1 / n))))
        if name != "output_hc":
            self._of_output = scaled(sigmoid(scaled(b.linear(f"{name}_inject", whole), 1 / n)), 2.0)
        gated = (mul(x, take_columns(gates, i * size, size)) for i, x in enumerate(normed))
        return scaled(reduce(add, gated), 1 / n)


def with_ngrams(
    b: Weights, h: Hparams, grams: NGrams, embedded: Tensor, streams: list[Tensor], memory: RecurrentMemory
) -> list[Tensor]:
    """The streams (T, n_embd), each plus the embeddings (T · H, width) of n-grams, times a gate by their likeness,
    and a convolution of these."""
    n, size = len(streams), h.n_embd
    embedded = reshape(embedded, shape=(-1, size))
    keys, value, gated = b.linear("ple_key", embedded), b.linear("ple_value", embedded), []
    for i, x in enumerate(streams):
        key = rms_norm(take_columns(keys, i * size, size), b[f"ple_norm_key.{i}"], eps=h.eps)
        query = rms_norm(x, b[f"ple_norm_query.{i}"], eps=h.eps)
        likeness = scaled(sum_to(mul(key, query), shape=(x.shape[0], 1)), size**-0.5)
        gated.append(mul(value, sigmoid(signed_root(likeness))))
    normed = concat(*(rms_norm(x, b[f"ple_norm_conv.{i}"], eps=h.eps) for i, x in enumerate(gated)))
    mixed = silu(memory.causal_conv(grams.layer, normed, dilated(b["ple_conv1d"], grams.n), 1))
    parts = (take_columns(mixed, i * size, size) for i in range(n))
    return [add(x, add(own, part)) for x, own, part in zip(streams, gated, parts, strict=True)]


def signed_root(x: Tensor) -> Tensor:
    """The root of |x|, or of 1e-6 where that is less, with the sign of x."""
    return mul(sign(x), sqrt(clamp(mul(sign(x), x), low=1e-6, high=1e30)))


def dilated(taps: Tensor, step: int) -> Tensor:
    """Taps (C, 1, K) of a convolution `step` rows apart, (C, 1, (K − 1) · step + 1)."""
    columns, _, n = taps.shape
    own, apart = mul(taps, const(1.0)), broadcast_to(const(0.0), shape=(columns, 1, (n - 1) * step + 1))
    for i in range(n):
        apart = set_block(apart, take_block(own, start=(0, 0, i), shape=(columns, 1, 1)), start=(0, 0, i * step))
    return apart


def streams_of(h: Hparams, rotary: Rotary, streams: list[Tensor]) -> Streams | None:
    """The residual's streams, which begin as these (T, n_embd); None: there is one."""
    if h.hyper_rank:
        return GatedConnections(h, streams, rotary.hashes)
    if h.n_hyper:
        return HyperConnections(h, streams)
    return ResidualAttention(h, streams) if h.residual_period else None


def attention_of(h: Hparams) -> tuple[KeysOf, Attention]:
    """The functions of keys/values and of attention: MLA's or grouped-query attention's."""
    if h.compression:
        return compressed_keys, compressed_attention
    return (mla_keys, mla_attention) if h.mla else (keys_values, self_attention)


def behind_encoder(
    b: Weights, h: Hparams, layer: int, x: Tensor, mixed: Tensor | None, memory: Memory
) -> tuple[Tensor, Tensor | None]:
    """The residual stream x with the attention output `mixed`, and the output of cross-attention; both as they are
    without an encoder."""
    if not h.n_encoder or mixed is None:
        return x, mixed
    x = add(x, mixed)
    return x, cross_attention(b, b.norm("cross_attn_norm", x, h), h, memory, layer)


def residual_stream(b: Weights, h: Hparams, layer: int, x: Tensor, y: Tensor, mixed: Tensor | None) -> Tensor:
    """Residual stream after a layer: x (T, n_embd) plus the attention output `mixed` plus the
    feed-forward block; y: x after the attention norm."""
    with_attention = x
    if mixed is not None:
        with_attention = add(x, scaled(b.norm("post_attention_norm", mixed, h), h.residual_scale))
    if not h.feeds(layer):
        return with_attention
    if "ffn_norm" not in b and (mixed is None or h.architecture.ffn.parallel):
        ffn_input = y
    else:
        ffn_input = b.norm("ffn_norm", x if h.parallel else with_attention, h)
    before = x if h.architecture.moe.early_router else with_attention
    y = b.norm("post_ffw_norm", feed_forward(b, h, layer, ffn_input, before), h)
    return add(with_attention, scaled(y, h.residual_scale))


def per_layer_embeddings(w: Weights, h: Hparams, tokens: Tensor, x: Tensor) -> Tensor:
    """Per-layer embeddings (PLE) (T, n_layer · P), P = n_embd_per_layer: a projection of the token
    embeddings x (T, n_embd), and its mean with a table's rows where the file has one."""
    n = h.n_embd_per_layer
    projected = scaled(w.linear("per_layer_model_proj", x), h.n_embd**-0.5)
    normed = rms_norm(reshape(projected, shape=(-1, n)), w["per_layer_proj_norm"], eps=h.eps)
    normed = reshape(normed, shape=projected.shape)
    if "per_layer_token_embd" not in w:
        return normed
    own = scaled(get_rows(w["per_layer_token_embd"], tokens), n**0.5)
    return scaled(add(normed, own), 0.5**0.5)


def per_layer_residual(b: Weights, h: Hparams, layer: int, inputs: Tensor, x: Tensor) -> Tensor:
    """A layer's PLE (T, n_embd), gated by x (T, n_embd), to be added to the residual stream."""
    n = h.n_embd_per_layer
    own = take_columns(inputs, layer * n, n)
    return b.norm("post_norm", b.linear("proj", mul(gelu(b.linear("inp_gate", x)), own)), h)

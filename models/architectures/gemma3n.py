"""Gemma 3n: AltUp residual streams (Baykal et al., 2023), LAuReL, Gaussian top-k feed-forward.

LAuReL is Menghani et al., 2024.

The streams are one tensor (T, A, n_embd); stream 0 runs through the layers."""

from __future__ import annotations

from dataclasses import replace

from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scaled, sub, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import centred
from logitless.graph.ops.pointwise import div, relu, sqrt, square, tanh
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import add_block, set_block, take_block
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.attention import AttentionInputs, keys_values, self_attention
from logitless.models.architectures.decoder import per_layer_embeddings, per_layer_residual
from logitless.models.architectures.rope import Rotary
from logitless.models.batch import KeysValues, Memory, Rows, rope_positions
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.weights import Weights

HALF = 0.5**0.5  # keeps the size of a sum of two


def forward(w: Weights, h: Hparams, rotary: Rotary, rows: Rows, memory: Memory) -> Tensor:
    """Hidden states (R, n_embd) of `rows.out`, after the final norm."""
    x = scaled(w.embedding(rows.tokens), h.embedding_scale)  # (T, n_embd)
    if rows.media is not None:
        x = rows.media.embedded(x)
    inputs = per_layer_embeddings(w, h, rows.tokens, x)
    streams = spread(w, h, x)
    angles = rotary.angles(rope_positions(rows))
    of_queries = angles
    kv_of: dict[int, KeysValues] = {}
    for layer in range(h.n_layer):
        b, local = w.block(layer), h.is_local(layer)
        streams = predicted(b, h, streams)
        y = b.norm("attn_norm", stream(streams, 0), h)
        if layer < h.n_layer_kv:
            kv_of[layer] = keys_values(AttentionInputs(b, y, angles[local]), h, layer)
        # as in models/architectures/decoder.py
        if layer == h.n_layer_kv - 1 and rows.out is not None:
            w, inputs = w.of_rows(rows.out.ids), get_rows(inputs, rows.out.ids)
            flat = get_rows(reshape(streams, shape=(streams.shape[0], -1)), rows.out.ids)
            streams = reshape(flat, shape=(-1, *streams.shape[1:]))
            of_queries = rotary.angles(rope_positions(rows, of_out=True))
            b = w.block(layer)
            y = b.norm("attn_norm", stream(streams, 0), h)
        attended = self_attention(AttentionInputs(b, y, of_queries[local]), kv_of[h.kv_source(layer)], h, memory, layer)
        attended = add(stream(streams, 0), b.norm("post_attention_norm", attended, h))
        laurel = add(y, b.norm("laurel_post_norm", b.linear("laurel_r", b.linear("laurel_l", y)), h))
        x = scaled(add(attended, laurel), HALF)
        x = add(x, b.norm("post_ffw_norm", feed_forward(b, h, layer, b.norm("ffn_norm", x, h)), h))
        streams = corrected(b, h, streams, x)
        x = per_layer_residual(b, h, layer, inputs, mul(stream(streams, 0), b["altup_correct_scale"]))
        others = (x.shape[0], h.n_streams - 1, h.n_embd)
        more = broadcast_to(reshape(x, shape=(-1, 1, h.n_embd)), shape=others)
        streams = w.steered(layer, add_block(streams, more, start=(0, 1, 0)))
        streams = replace(streams, name=f"blk.{layer}")
    return w.norm("output_norm", gathered(w, h, streams), h)


def stream(streams: Tensor, i: int) -> Tensor:
    """Stream i, (T, n_embd)."""
    n, _, n_embd = streams.shape
    return reshape(take_block(streams, start=(0, i, 0), shape=(n, 1, n_embd)), shape=(n, n_embd))


def spread(w: Weights, h: Hparams, x: Tensor) -> Tensor:
    """AltUp streams (T, A, n_embd) of embeddings (T, n_embd): these, and projections scaled to
    their norm."""
    n = x.shape[0]
    x = reshape(x, shape=(n, 1, h.n_embd))
    others = reshape(w.linear("altup_proj", reshape(x, shape=(n, h.n_embd))), shape=(n, -1, h.n_embd))
    return set_block(broadcast_to(x, shape=(n, h.n_streams, h.n_embd)), as_long(others, x), start=(0, 1, 0))


def gathered(w: Weights, h: Hparams, streams: Tensor) -> Tensor:
    """Mean (T, n_embd) of stream 0 and the projections of the others, scaled to its norm."""
    total = first = stream(streams, 0)
    for i in range(1, h.n_streams):
        total = add(total, as_long(w.linear(f"altup_unembd_proj.{i - 1}", stream(streams, i)), first))
    return scaled(total, 1 / h.n_streams)


def as_long(x: Tensor, other: Tensor) -> Tensor:
    """x (…, n) scaled to the norm of other (…, n)."""
    lengths = (sqrt(sum_to(square(t), shape=(*t.shape[:-1], 1))) for t in (other, x))
    return mul(x, div(*lengths))


def predicted(b: Weights, h: Hparams, streams: Tensor) -> Tensor:
    """AltUp prediction (T, A, n_embd): each stream plus the router's mix of all streams."""
    n, a, n_embd = streams.shape
    coefficients = reshape(b.linear("altup_predict_coef", routed(b, h, stream(streams, 0))), shape=(n, a, a))
    total = streams
    for i in range(a):
        part = take_block(streams, start=(0, i, 0), shape=(n, 1, n_embd))
        total = add(total, mul(take_block(coefficients, start=(0, 0, i), shape=(n, a, 1)), part))
    return total


def corrected(b: Weights, h: Hparams, streams: Tensor, x: Tensor) -> Tensor:
    """AltUp correction (T, A, n_embd): predictions plus the router's share of the difference of
    x (T, n_embd) to stream 0."""
    n, a, n_embd = streams.shape
    shares = add(b.linear("altup_correct_coef", routed(b, h, x)), const(1.0))
    away = reshape(sub(x, stream(streams, 0)), shape=(n, 1, n_embd))
    return add(streams, mul(reshape(shares, shape=(n, a, 1)), away))


def routed(b: Weights, h: Hparams, x: Tensor) -> Tensor:
    """AltUp router outputs (T, A)."""
    return tanh(b.linear("altup_router", scaled(b.norm("altup_router_norm", x, h), 1 / h.n_embd)))


def feed_forward(b: Weights, h: Hparams, layer: int, x: Tensor) -> Tensor:
    gate, deviations = b.linear("ffn_gate", x), h.sparsity[layer]
    if deviations is not None:
        gate = largest(gate, deviations)
    return b.linear("ffn_down", mul(gelu(gate), b.linear("ffn_up", x)))


def largest(x: Tensor, deviations: float) -> Tensor:
    """Gaussian top-k: excess of elements of a row (T, n) over mean + `deviations` · std, else 0."""
    away = centred(x)
    variance = scaled(sum_to(square(away), shape=(x.shape[0], 1)), 1 / (x.shape[1] - 1))
    return relu(sub(away, scaled(sqrt(variance), deviations)))

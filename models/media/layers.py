"""Layers that encoders share: convolutions of maps, attention with scores by the distance of rows."""

from __future__ import annotations

from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.conv import patches
from logitless.graph.ops.elementwise import broadcast_to, mul, scale, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import concat, take_block, take_columns, transpose
from logitless.graph.tensor import Tensor, const
from logitless.models.media.projector_weights import ProjectorWeights


def near_rows(x: Tensor, ids: Tensor, n: int) -> Tensor:
    """Patches (P, C · n) of n rows of x (T, C) each, each element's numbers side by side; id T is a row of zeros."""
    rows = reshape(get_rows(pad_rows(x, before=0, after=1), ids), shape=(-1, n, x.shape[1]))
    return reshape(transpose(rows, axes=(0, 2, 1)), shape=(-1, x.shape[1] * n))


def depthwise(x: Tensor, weight: Tensor, ids: Tensor, taps: Tensor, n: int) -> Tensor:
    """Depthwise convolution (P, C) of rows x (T, C) with n rows of weight (…, C): of each tap the `ids` of the rows
    that it reads, T for zeros, and its own number as often in `taps`."""
    parts = mul(get_rows(pad_rows(x, before=0, after=1), ids), get_rows(weight, taps))
    parts = reshape(parts, shape=(n, -1, x.shape[1]))
    return reshape(sum_to(parts, shape=(1, *parts.shape[1:])), shape=(-1, x.shape[1]))


def convolved(
    w: ProjectorWeights, name: str, x: Tensor, n_out: int = 0, *, side: int, stride: int = 1, needs_bias: bool = False
) -> Tensor:
    """The convolution of maps (N, H, W, C) with zeros around them."""
    n, height, width, channels = x.shape
    near = reshape(patches(x, size=(side, side), stride=stride, padding=side // 2), shape=(-1, side**2, channels))
    near = reshape(transpose(near, axes=(0, 2, 1)), shape=(-1, channels * side**2))
    y = w.linear(name, near, n_out, (side, side), needs_bias=needs_bias)
    return reshape(y, shape=(n, -(-height // stride), -(-width // stride), -1))


def scored_attention(
    qkv: list[Tensor], scores: Tensor, places: Tensor, count: Tensor, *, heads: int, factor: float
) -> Tensor:
    """Attention output (T, H · D) of queries, keys and values (T · H, D), whose scores q·k · factor have
    those of `scores` (T · H, P) with each key's `places` (T · H, P) added."""
    (rows, d), n = qkv[0].shape, scores.shape[1]
    q, k = concat(scale(qkv[0], factor=factor), scores), concat(qkv[1], places)
    v = concat(qkv[2], broadcast_to(const(0.0), shape=(rows, n)))
    q, k, v = (reshape(t, shape=(rows // heads, heads, d + n)) for t in (q, k, v))
    y = full_attention(q, k, v, count, length=q.shape[0] // count.shape[0], scale=1.0)
    return reshape(take_columns(reshape(y, shape=(rows, d + n)), 0, d), shape=(rows // heads, heads * d))


def distance_scores(q: Tensor, vectors: Tensor) -> Tensor:
    """Products (n · size · m, size) of queries (n, size, m, D) and the vector (2 · size − 1, D) of their
    distance from each place along the second axis; that of the longest way back to a place first."""
    n, size, m, d = q.shape
    rows = reshape(transpose(q, axes=(0, 2, 1, 3)), shape=(n * m * size, d))
    rows = reshape(linear(rows, vectors), shape=(n * m, size * (2 * size - 1)))
    # line i has its product with place j at size − 1 − i + j: rows that are one shorter begin with it
    rows = take_block(rows, start=(0, size - 1), shape=(n * m, size * (2 * size - 2)))
    rows = take_columns(reshape(rows, shape=(n * m * size, 2 * size - 2)), 0, size)
    rows = transpose(reshape(rows, shape=(n, m, size, size)), axes=(0, 2, 1, 3))
    return reshape(rows, shape=(n * size * m, size))

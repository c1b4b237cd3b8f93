"""Attention scores by the distance of rows: as columns beside queries and keys, so that one product adds them."""

from __future__ import annotations

from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import broadcast_to, scale
from logitless.graph.ops.linear import linear
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, take_block, take_columns, transpose
from logitless.graph.tensor import Tensor, const


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

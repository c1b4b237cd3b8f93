"""Encoder attention (embedding models): bidirectional within a text; mean pooling of rows."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, Case, op


def is_bias(size: int, heads: int, length: int) -> bool:
    """True if a bias of this size has as many numbers for each head: those of n ≥ length rows."""
    n, rest = divmod(size, heads)
    return not rest and n % 2 == 1 and n >= 2 * length - 1


@op(
    "q f32 (N, H, D)",
    "k f32 (N, G, D)",
    "v f32 (N, G, D)",
    "count i32 (W) in 1:length + 1",
    "bias f32 (B)?",
    gives="q",
    needs="H % G == 0 and length > 0 and W * length == N and (bias is None or is_bias(B, H, length))",
)
def full_attention(
    q: Array, k: Array, v: Array, count: Array, bias: Array | None = None, *, length: int, scale: float, reach: int = -1
) -> Array:
    """softmax(scale · q·k) · v within windows of `length` rows: q (N, H, D), k and v (N, H_kv, D) →
    (N, H, D).

    Every row of window w sees its first count[w] rows, count (N / length,) i32 from 1 to `length`:
    what follows them fills the window up. Query head i reads key head i · H_kv // H. With a `reach`
    of 0 or more a row sees only rows that are at most so far away; 0 comes out where there are
    none. `bias` (H · (2·n − 1)), n ≥ length, is added to the scores: each head's n − 1 to those of a
    row and itself, its last ones to those of later rows."""
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for w, n in enumerate(count):
        rows, text = slice(w * length, (w + 1) * length), slice(w * length, w * length + int(n))
        s = np.einsum("thd,shd->hts", q[rows], np.repeat(k[text], group, 1)) * scale
        if bias is not None:
            of_heads = bias.reshape(q.shape[1], -1)
            s += of_heads[:, of_heads.shape[1] // 2 + np.arange(int(n)) - np.arange(length)[:, None]]
        if reach >= 0:
            s = np.where(np.abs(np.arange(length)[:, None] - np.arange(int(n))) <= reach, s, -np.inf)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        out[rows] = np.einsum("hts,shd->thd", e / np.where(total, total, 1), np.repeat(v[text], group, 1))
    return out


@op("x f32 (N, K)", "first i32 (R) in :N", "count i32 (R) in 1:N + 1", gives="f32 (R, K)")
def mean_rows(x: Array, first: Array, count: Array) -> Array:
    """The means of rows first[r] … first[r] + count[r] − 1 of x (N, n), one after the other: (R,
    n); first and count (R,) i32, count ≥ 1."""
    return np.stack([x[f : f + n].mean(0) for f, n in zip(first, count, strict=True)])


def _case(r: np.random.Generator, *shape: int) -> Case:
    length, heads, kv_heads, size, reach, *n_bias = shape
    q, k, v = (r.normal(size=(3 * length, h, size)) for h in (heads, kv_heads, kv_heads))
    count = np.array([length, 1, (length + 1) // 2], np.int32)
    bias = [r.normal(size=heads * (2 * n - 1)) * 2 for n in n_bias]
    return [q, k, v, count, *bias], {"length": length, "scale": size**-0.5, "reach": reach}


for _shape in (
    (7, 4, 2, 8, -1),
    (33, 3, 1, 20, -1),
    (64, 2, 2, 16, -1),
    (1, 2, 2, 4, -1),
    (70, 4, 2, 16, 3),
    (70, 4, 2, 16, -1, 90),
    (7, 4, 2, 8, -1, 7),
    (20, 2, 1, 8, 0),
    (90, 2, 1, 8, 40),
    (500, 2, 1, 10, -1),  # more rows than a kernel takes at once
    (700, 1, 1, 8, 270),
):
    full_attention.case(_case, *_shape)


@mean_rows.case
def _(r: np.random.Generator) -> Case:
    first, count = np.array([0, 3, 9, 2], np.int32), np.array([10, 1, 1, 7], np.int32)
    return [r.normal(size=(10, 37)), first, count], {}

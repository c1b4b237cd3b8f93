"""Causal attention of training: within windows of equal length, without a cache; its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, op
from logitless.graph.ops.attention.paged_attention import random_sinks
from logitless.graph.ops.shape import split_rows
from logitless.graph.tensor import Tensor

SOURCES = "q f32 (N, H, D)", "k f32 (N, G, D)", "v f32 (N, G, D)", "start i32 (N)|(2, N) in :length"
NEEDS = "H % G == 0 and length > 0 and N % length == 0 and window >= 0 and cap >= 0"


def _windows(
    q: Array,
    k: Array,
    start: Array,
    sinks: Array | None,
    *,
    length: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Iterator[tuple[slice, int, int, Array, Array | float, Array]]:
    """Rows, head, key head, attention weights (T, T), derivative of scores by q·k, and sink weights
    (T,) of each window's heads."""
    at, slope = np.arange(length), scale
    for i in range(0, len(q), length):
        rows = slice(i, i + length)
        first, last = (start[rows], at) if start.ndim == 1 else start[:, rows]
        first = np.maximum(first, at - window + 1) if window else first
        visible = (at >= first[:, None]) & (at <= last[:, None])
        for h in range(q.shape[1]):
            of = h * k.shape[1] // q.shape[1]
            s = q[rows, h] @ k[rows, of].T * scale
            if cap:
                bounded = np.tanh(s / cap)
                s, slope = cap * bounded, scale * (1 - bounded**2)
            s = np.where(visible, s, -np.inf)
            sink = s.dtype.type(-np.inf) if sinks is None else sinks[h]
            top = np.maximum(s.max(-1), sink)
            e, rest = np.exp(s - top[:, None]), np.exp(sink - top)
            total = e.sum(-1) + rest
            yield rows, h, of, e / total[:, None], slope, rest / total


@op(*SOURCES, "sinks f32 (H)?", gives="q", needs=NEEDS, like=_windows)
def causal_attention(q: Array, k: Array, v: Array, start: Array, sinks: Array | None = None, **attrs: Any) -> Array:
    """softmax(scale · q·k) · v within windows of `length` rows: q (N, H, D), k and v (N, H_kv, D) →
    (N, H, D).

    Row t of a window sees its rows start[t]…t, start (N,) i32 (0 ≤ start[t] ≤ t; more than one text
    may be packed into a window); of start (2, N) the rows start[0, t]…start[1, t], t among them
    (images whose rows see each other). Query head i reads key head i · H_kv // H. `sinks` and the
    attributes `scale`, `window` and `cap` are those of `attention`."""
    out = np.empty_like(q)
    for rows, h, of, p, _, _ in _windows(q, k, start, sinks, **attrs):
        out[rows, h] = p @ v[rows, of]
    return out


@causal_attention.vjp
def _(
    g: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, *sinks: Tensor, **attrs: Any
) -> tuple[Tensor | None, ...]:
    of_rows = split_rows(causal_attention_back(g, q, k, v, start, *sinks, **attrs), (q, k, v))
    return (*of_rows, None, *(sinks_back(g, q, k, v, start, s, **attrs) for s in sinks))


@op("g f32 (N, H, D)", *SOURCES, "sinks f32 (H)?", gives="f32 (N * (H + 2 * G), D)", needs=NEEDS, like=_windows)
def causal_attention_back(
    g: Array, q: Array, k: Array, v: Array, start: Array, sinks: Array | None = None, **attrs: Any
) -> Array:
    """The gradients of q, k and v one after the other, as rows of D: (N·H + 2·N·H_kv, D)."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for rows, h, of, p, slope, _ in _windows(q, k, start, sinks, **attrs):
        dp = g[rows, h] @ v[rows, of].T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope
        dq[rows, h] = ds @ k[rows, of]
        dk[rows, of] += ds.T @ q[rows, h]
        dv[rows, of] += p.T @ g[rows, h]
    return np.concatenate([x.reshape(-1, q.shape[2]) for x in (dq, dk, dv)])


@op("g f32 (N, H, D)", *SOURCES, "sinks f32 (H)", gives="sinks", needs=NEEDS, like=_windows)
def sinks_back(g: Array, q: Array, k: Array, v: Array, start: Array, sinks: Array, **attrs: Any) -> Array:
    """The gradient of the sinks (H,)."""
    total = np.zeros_like(sinks)
    for rows, h, of, p, _, rest in _windows(q, k, start, sinks, **attrs):
        total[h] -= ((p * (g[rows, h] @ v[rows, of].T)).sum(-1) * rest).sum()
    return total


def _arrays(r: np.random.Generator, length: int, heads: int, kv_heads: int, size: int) -> list[Array]:
    n = 2 * length
    at = np.arange(n) % length
    start = np.where(at >= length // 2, length // 2, 0)  # two texts in each window
    start[:length] = 0  # and one in the first
    q, k, v = (r.normal(size=(n, h, size)) for h in (heads, kv_heads, kv_heads))
    return [q, k, v, start.astype(np.int32)]


def _case(
    r: np.random.Generator,
    back: bool,
    with_sinks: bool,
    shape: tuple[int, ...],
    attrs: Mapping[str, float],
    two_way: bool = False,
) -> Case:
    src = _arrays(r, *shape)
    if two_way:  # a few rows of each text see each other
        last = np.arange(2 * shape[0]) % shape[0]
        for rows in (slice(1, 4), slice(shape[0] + 1, shape[0] + 4), slice(-4, None)):
            last[rows] = last[rows].max()
        src[3] = np.stack([src[3], last]).astype(np.int32)
    src = [*src, random_sinks(r, shape[1])] if with_sinks else src
    src = [r.normal(size=src[0].shape), *src] if back else src
    return src, {"length": shape[0], "scale": shape[3] ** -0.5, **attrs}


for _shape, _with_sinks, _attrs in (
    ((7, 4, 2, 8), False, {}),
    ((20, 8, 4, 16), False, {"window": 6}),
    ((33, 3, 1, 20), False, {"cap": 2.0, "window": 5}),
    ((40, 2, 2, 48), False, {}),
    ((7, 4, 2, 8), True, {}),
    ((20, 8, 4, 16), True, {"cap": 2.0, "window": 6}),
):
    causal_attention.case(_case, False, _with_sinks, _shape, _attrs)
    causal_attention_back.case(_case, True, _with_sinks, _shape, _attrs)
    if _with_sinks:
        sinks_back.case(_case, True, True, _shape, _attrs)
for _shape, _attrs in (((9, 4, 2, 8), {}), ((60, 2, 1, 16), {"window": 3, "cap": 2.0})):
    causal_attention.case(_case, False, False, _shape, _attrs, two_way=True)
    causal_attention_back.case(_case, True, False, _shape, _attrs, two_way=True)

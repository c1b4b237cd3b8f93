"""Causal attention of training: within windows of equal length, without a cache; its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, op, require
from logitless.graph.ops.shape import split_rows
from logitless.graph.tensor import Shape, Tensor


def _weights(q: Array, k: Array, start: Array, scale: float, window: int, cap: float) -> tuple[Array, Array]:
    """Attention weights of one window (H, T, T), and the derivative of capped scores by q·k."""
    group = q.shape[1] // k.shape[1]
    s = np.einsum("thd,shd->hts", q, np.repeat(k, group, 1)) * scale
    slope = np.full_like(s, scale)
    if cap:
        bounded = np.tanh(s / cap)
        s, slope = cap * bounded, scale * (1 - bounded**2)
    at = np.arange(len(q))
    first = np.maximum(start, at - window + 1) if window else start
    visible = (at >= first[:, None]) & (at <= at[:, None])
    s = np.where(visible, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True), slope


@op
def causal_attention(
    q: Array, k: Array, v: Array, start: Array, *, length: int, scale: float, window: int = 0, cap: float = 0.0
) -> Array:
    """softmax(scale · q·k) · v within windows of `length` rows: q (N, H, D), k and v (N, H_kv, D) →
    (N, H, D).

    Row t of a window sees its rows start[t]…t, start (N,) i32 (0 ≤ start[t] ≤ t; more than one text
    may be packed into a window). Query head i reads key head i · H_kv // H. `window` > 0 sees only
    the last `window` rows; `cap` > 0 bounds the scores (Gemma 2).
    """
    out = np.empty_like(q)
    for i in range(0, len(q), length):
        rows = slice(i, i + length)
        p, _ = _weights(q[rows], k[rows], start[rows], scale, window, cap)
        out[rows] = np.einsum("hts,shd->thd", p, np.repeat(v[rows], q.shape[1] // k.shape[1], 1))
    return out


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: int) -> None:
    n, heads, size = q.shape
    ok = k.shape == v.shape and k.shape[::2] == (n, size) and heads % k.shape[1] == 0 and start.shape == (n,)
    require(ok and length > 0 and n % length == 0, name, f"shapes disagree (windows of {length})", q, k, v, start)


@causal_attention.shape
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: int, scale: float, window: int = 0, cap: float = 0.0
) -> tuple[Shape, str]:
    _check("causal_attention", q, k, v, start, length)
    return q.shape, q.dtype


@causal_attention.vjp
def _(g: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, **attrs: Any) -> tuple[Tensor | None, ...]:
    return (*split_rows(causal_attention_back(g, q, k, v, start, **attrs), (q, k, v)), None)


@op
def causal_attention_back(
    g: Array,
    q: Array,
    k: Array,
    v: Array,
    start: Array,
    *,
    length: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Array:
    """The gradients of q, k and v one after the other, as rows of D: (N·H + 2·N·H_kv, D)."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(0, len(q), length):
        rows = slice(i, i + length)
        p, slope = _weights(q[rows], k[rows], start[rows], scale, window, cap)
        dp = np.einsum("thd,shd->hts", g[rows], np.repeat(v[rows], group, 1))
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope
        by_head = (length, k.shape[1], group, q.shape[2])
        dq[rows] = np.einsum("hts,shd->thd", ds, np.repeat(k[rows], group, 1))
        dk[rows] = np.einsum("hts,thd->shd", ds, q[rows]).reshape(by_head).sum(2)
        dv[rows] = np.einsum("hts,thd->shd", p, g[rows]).reshape(by_head).sum(2)
    return np.concatenate([x.reshape(-1, q.shape[2]) for x in (dq, dk, dv)])


@causal_attention_back.shape
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: int, **attrs: Any) -> tuple[Shape, str]:
    _check("causal_attention_back", q, k, v, start, length)
    require(g.shape == q.shape, "causal_attention_back", "the gradient must have q's shape", g, q)
    return (q.shape[0] * (q.shape[1] + 2 * k.shape[1]), q.shape[2]), q.dtype


def _arrays(r: np.random.Generator, length: int, heads: int, kv_heads: int, size: int) -> list[Array]:
    n = 2 * length
    at = np.arange(n) % length
    start = np.where(at >= length // 2, length // 2, 0)  # two texts in each window
    start[:length] = 0  # and one in the first
    q, k, v = (r.normal(size=(n, h, size)) for h in (heads, kv_heads, kv_heads))
    return [q, k, v, start.astype(np.int32)]


for _shape, _attrs in (
    ((7, 4, 2, 8), {}),
    ((20, 8, 4, 16), {"window": 6}),
    ((33, 3, 1, 20), {"cap": 2.0, "window": 5}),
    ((40, 2, 2, 48), {}),
):

    def _case(r: np.random.Generator, shape: tuple[int, ...] = _shape, attrs: dict[str, float] = _attrs) -> Case:  # type: ignore[assignment]
        return _arrays(r, *shape), {"length": shape[0], "scale": shape[3] ** -0.5, **attrs}

    def _case_back(r: np.random.Generator, shape: tuple[int, ...] = _shape, attrs: dict[str, float] = _attrs) -> Case:  # type: ignore[assignment]
        src = _arrays(r, *shape)
        return [r.normal(size=src[0].shape), *src], {"length": shape[0], "scale": shape[3] ** -0.5, **attrs}

    causal_attention.case(_case)
    causal_attention_back.case(_case_back)

"""Attention with sinks (gpt-oss): a learned score of each query head takes part in the softmax.

The sink has no value, so the weights of a row's cells may sum to less than 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from logitless.graph.op import Array, Case, op, require
from logitless.graph.ops.attention.causal_attention import causal_attention
from logitless.graph.ops.attention.paged_attention import attention, attention_case, visible_cells
from logitless.graph.ops.shape import split_rows
from logitless.graph.tensor import Shape, Tensor


@op
def attention_sinks(
    q: Array,
    k: Array,
    v: Array,
    tables: Array,
    slot: Array,
    pos: Array,
    sinks: Array,
    *,
    scale: float,
    window: int = 0,
) -> Array:
    """`attention` where exp(sinks), sinks (H,), is added to each head's sum of weights."""
    out = np.empty_like(q)
    for t, h, keys, values in visible_cells(q, k, v, tables, slot, pos, window):
        s = keys @ q[t, h] * scale
        top = max(s.max(), sinks[h])
        e = np.exp(s - top)
        out[t, h] = e @ values / (e.sum() + np.exp(sinks[h] - top))
    return out


@attention_sinks.shape
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    slot: Tensor,
    pos: Tensor,
    sinks: Tensor,
    scale: float,
    window: int = 0,
) -> tuple[Shape, str]:
    require(sinks.shape == q.shape[1:2] and sinks.dtype == "f32", "attention_sinks", "expected sinks (H,)", q, sinks)
    return attention.shape_rule(q, k, v, tables, slot, pos, scale=scale, window=window)


def _windows(
    q: Array, k: Array, start: Array, sinks: Array, length: int, scale: float, window: int
) -> Iterator[tuple[slice, int, int, Array, Array]]:
    """Rows, head, key head, attention weights (T, T) and sink weights (T,) of each window's heads."""
    at = np.arange(length)
    for i in range(0, len(q), length):
        rows = slice(i, i + length)
        first = np.maximum(start[rows], at - window + 1) if window else start[rows]
        visible = (at >= first[:, None]) & (at <= at[:, None])
        for h in range(q.shape[1]):
            of = h * k.shape[1] // q.shape[1]
            s = np.where(visible, q[rows, h] @ k[rows, of].T * scale, -np.inf)
            top = np.maximum(s.max(-1), sinks[h])
            e, rest = np.exp(s - top[:, None]), np.exp(sinks[h] - top)
            total = e.sum(-1) + rest
            yield rows, h, of, e / total[:, None], rest / total


@op
def causal_attention_sinks(
    q: Array, k: Array, v: Array, start: Array, sinks: Array, *, length: int, scale: float, window: int = 0
) -> Array:
    """`causal_attention` where exp(sinks), sinks (H,), is added to each head's sum of weights."""
    out = np.empty_like(q)
    for rows, h, of, p, _ in _windows(q, k, start, sinks, length, scale, window):
        out[rows, h] = p @ v[rows, of]
    return out


@causal_attention_sinks.shape
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, sinks: Tensor, length: int, scale: float, window: int = 0
) -> tuple[Shape, str]:
    require(sinks.shape == q.shape[1:2], "causal_attention_sinks", "expected sinks (H,)", q, sinks)
    return causal_attention.shape_rule(q, k, v, start, length=length, scale=scale, window=window)


@causal_attention_sinks.vjp
def _(
    g: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, sinks: Tensor, **attrs: Any
) -> tuple[Tensor | None, ...]:
    of_rows = split_rows(causal_attention_sinks_back(g, q, k, v, start, sinks, **attrs), (q, k, v))
    return (*of_rows, None, sinks_back(g, q, k, v, start, sinks, **attrs))


@op
def causal_attention_sinks_back(
    g: Array, q: Array, k: Array, v: Array, start: Array, sinks: Array, *, length: int, scale: float, window: int = 0
) -> Array:
    """The gradients of q, k and v one after the other, as rows of D: (N·H + 2·N·H_kv, D)."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for rows, h, of, p, _ in _windows(q, k, start, sinks, length, scale, window):
        dp = g[rows, h] @ v[rows, of].T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        dq[rows, h] = ds @ k[rows, of]
        dk[rows, of] += ds.T @ q[rows, h]
        dv[rows, of] += p.T @ g[rows, h]
    return np.concatenate([x.reshape(-1, q.shape[2]) for x in (dq, dk, dv)])


@causal_attention_sinks_back.shape
def _(g: Tensor, q: Tensor, k: Tensor, *_: Tensor, **attrs: Any) -> tuple[Shape, str]:
    require(g.shape == q.shape, "causal_attention_sinks_back", "the gradient must have q's shape", g, q)
    return (q.shape[0] * (q.shape[1] + 2 * k.shape[1]), q.shape[2]), q.dtype


@op
def sinks_back(
    g: Array, q: Array, k: Array, v: Array, start: Array, sinks: Array, *, length: int, scale: float, window: int = 0
) -> Array:
    """The gradient of the sinks (H,)."""
    total = np.zeros_like(sinks)
    for rows, h, of, p, rest in _windows(q, k, start, sinks, length, scale, window):
        total[h] -= ((p * (g[rows, h] @ v[rows, of].T)).sum(-1) * rest).sum()
    return total


@sinks_back.shape
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, sinks: Tensor, **attrs: Any) -> tuple[Shape, str]:
    return sinks.shape, sinks.dtype


def sinks_case(make: Callable[[np.random.Generator], Case]) -> Callable[[np.random.Generator], Case]:
    """A case of attention with sinks: one takes next to nothing, one takes all of its head."""

    def make_with_sinks(r: np.random.Generator) -> Case:
        sources, attrs = make(r)
        sinks = r.normal(size=sources[0].shape[1]) * 3
        sinks[:2] = -200, 150
        return [*sources, sinks], attrs

    return make_with_sinks


for _types, _heads, _kv_heads, _size, _attrs in (
    ("f32/f32", 4, 2, 8, {}),
    ("f16/f16", 4, 4, 64, {}),
    ("f16/f16", 8, 1, 16, {"window": 20}),
    ("f16/f32", 10, 1, 32, {}),
):
    attention_sinks.case(sinks_case(attention_case(_types, _heads, _kv_heads, _size, **_attrs)))


def _causal_case(
    back: bool, length: int, heads: int, kv_heads: int, size: int, window: int
) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        n = 2 * length
        g, q, k, v = (r.normal(size=(n, h, size)) for h in (heads, heads, kv_heads, kv_heads))
        start = np.where(np.arange(n) % length >= 3, 3, 0).astype(np.int32)
        sources = [q, k, v, start, r.normal(size=heads)]
        return [g, *sources] if back else sources, {"length": length, "scale": size**-0.5, "window": window}

    return make


for _sizes in ((7, 4, 2, 8, 0), (20, 8, 4, 16, 6)):
    causal_attention_sinks.case(_causal_case(False, *_sizes))
    causal_attention_sinks_back.case(_causal_case(True, *_sizes))
    sinks_back.case(_causal_case(True, *_sizes))

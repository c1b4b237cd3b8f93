"""Attention of MLA (DeepSeek-AI, 2024): cached rows that all heads share as keys and as values.

Heads' weights are multiplied with queries instead of keys (models/architectures/mla.py), so one
cache is enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.op import Array, Case, Variable, op, require
from logitless.graph.ops.attention.paged_attention import (
    PAGE,
    attention,
    attention_back,
    attention_case,
    random_sinks,
    require_sinks,
)
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.shape import split_rows
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Shape, Tensor

TURNED = (0, 1, 3, 2)  # a cache of keys as one of values


@op
def latent_attention(
    q: Array, k: Array, tables: Array, slot: Array, pos: Array, sinks: Array | None = None, *, scale: float
) -> Array:
    """`attention` whose values are the keys: q (T, H, D) and the cache k (pages, 1, D, 16) → (T, H, D)."""
    return attention.reference(q, k, k.transpose(TURNED), tables, slot, pos, sinks, scale=scale)


latent_attention.takes(
    "q f32 (T, H, D)", "k cache (pages, 1, D, 16)", "tables i32 (S, P)", "slot i32 (T)", "pos i32 (T)", "sinks f32 (H)?"
)


@latent_attention.shape
def _(
    q: Tensor, k: Tensor, tables: Tensor, slot: Tensor, pos: Tensor, sinks: Tensor | None = None, *, scale: float
) -> tuple[Shape, str]:
    n, _, size = q.shape
    require_sinks("latent_attention", q, sinks)
    ok = k.shape[1:] == (1, size, PAGE) and slot.shape == pos.shape == (n,)
    require(ok, "latent_attention", "shapes disagree", q, k, tables, slot, pos)
    return q.shape, q.dtype


@latent_attention.vjp
def _(
    g: Tensor, y: Tensor, q: Tensor, k: Tensor, tables: Tensor, slot: Tensor, pos: Tensor, *sinks: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    require(not sinks, "latent_attention", "attention sinks have no gradient", q)
    v = transpose(k, axes=TURNED)
    dq, dk, dv = split_rows(attention_back(g, q, k, v, tables, slot, pos, scale=scale), (q, k, v))
    return dq, add(dk, transpose(dv, axes=TURNED)), None, None, None


def _case(dtype: str, heads: int, size: int, with_sinks: bool = False) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        (q, k, _, *rest), attrs = attention_case(f"{dtype}/f32", heads, 1, size)(r)
        assert isinstance(k, Variable)
        return [q, k, *rest, *([random_sinks(r, heads)] if with_sinks else [])], attrs

    return make


for _dtype, _heads, _size in (("f32", 4, 40), ("f16", 13, 576), ("q5_0", 1, 288)):
    latent_attention.case(_case(_dtype, _heads, _size))
latent_attention.case(_case("f16", 13, 40, True))

"""Fused ops: one node that a backend's `fuse` puts in the place of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES
from logitless.graph.op import Array, Case, Variable, Weight, op
from logitless.graph.ops.attention.paged_attention import CACHES, PAGE, attention, attention_case, store_k
from logitless.graph.ops.elementwise import glu
from logitless.graph.ops.linear import ACT_BLOCK, WHOLE_GROUPS, linear, linear_q8, quantize_act
from logitless.graph.ops.moe import ORDER_OF_N, expert_linear, expert_order, expert_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import Shape, Tensor


def n_rows(weights: Sequence[Tensor]) -> int:
    """Rows of all of these matrices."""
    return sum(w.shape[0] for w in weights)


@op("x f32 (T, K)", "*weights weight (_, K)", gives="f32 (T * n_rows(weights),)", needs="weights")
def linear_parts(x: Array, *weights: Array) -> Array:
    """`linear` of x (T, K) with several weights (N_i, K): their results, whole and one after the other, (T · ΣN_i,)."""
    return np.concatenate([linear.reference(x, w).reshape(-1) for w in weights])


@op(
    "x f32 (T, K)",
    ORDER_OF_N,
    "*weights weight (_, K)",
    gives="f32 (R * n_rows(weights) // n,)",
    needs="weights and n > 0 and R % T == 0 and n_rows(weights) % n == 0",
)
def expert_parts(x: Array, order: Array, *weights: Array, n: int) -> Array:
    """`expert_linear` of `expert_rows` of x (T, K) with several weights (n · N_i, K): results as `linear_parts` has."""
    rows = expert_rows.reference(x, order)
    return np.concatenate([expert_linear.reference(rows, w, order, n=n).reshape(-1) for w in weights])


def slice_of_product(whole: Tensor, products: Sequence[Tensor], product: Tensor) -> Tensor:
    """One of the products as its part of `linear_parts` (or `expert_parts`) of all of them."""
    start = sum(s.shape[0] * s.shape[1] for s in products[: products.index(product)])
    part = slice_rows(whole, start=start, stop=start + product.shape[0] * product.shape[1])
    return reshape(part, shape=product.shape, name=product.name)


@op("x f32 (T, K)", "w weight (N, K)", "y f32 (N)|(T, N)", gives="f32 (T, N)")
def linear_add(x: Array, w: Array, y: Array) -> Array:
    """y (T, N) or (N,) + `linear` of x (T, K) and w (N, K)."""
    return y + linear.reference(x, w)


@op("x f32 (T, K)", "gate weight (N, K)", "up weight (N, K)", gives="f32 (T, N)")
def linear_glu(x: Array, gate: Array, up: Array, *, activation: Literal["silu", "gelu"]) -> Array:
    """activation(x · gateᵀ) · (x · upᵀ): x (T, K), gate and up (N, K); "silu" or "gelu"."""
    return glu.reference(linear.reference(x, gate), linear.reference(x, up), activation=activation)


@op(
    "x f32 (T, K)",
    "g f32 (K)",
    "*weights weight (_, K)",
    gives="f32 (T * n_rows(weights),)",
    needs="weights and eps >= 0",
)
def norm_parts(x: Array, g: Array, *weights: Array, eps: float) -> Array:
    """`linear_parts` of `rms_norm` of x (T, K) by g (K,)."""
    return linear_parts.reference(rms_norm.reference(x, g, eps=eps), *weights)


@op("x f32 (T, K)", "g f32 (K)", "gate weight (N, K)", "up weight (N, K)", gives="f32 (T, N)", needs="eps >= 0")
def norm_glu(x: Array, g: Array, gate: Array, up: Array, *, eps: float, activation: Literal["silu", "gelu"]) -> Array:
    """`linear_glu` of `rms_norm` of x (T, K) by g (K,)."""
    return linear_glu.reference(rms_norm.reference(x, g, eps=eps), gate, up, activation=activation)


@op("xq q8_act (T, K)", "gate blocks (N, K)", "up blocks (N, K)", gives="q8_act (T, N)", needs="N % ACT_BLOCK == 0")
def linear_glu_act(xq: Array, gate: Array, up: Array, *, activation: Literal["silu", "gelu"]) -> Array:
    """`linear_glu` of activations that are quantised, quantised again in groups of 32."""
    return quantize_act.reference(linear_glu.reference(xq, gate, up, activation=activation))


@op("gate f32 (…, K)", "up f32 (…, K)", gives="q8_act gate.shape", needs=f"gate.shape == up.shape and {WHOLE_GROUPS}")
def glu_act(gate: Array, up: Array, *, activation: Literal["silu", "gelu"], group: int = ACT_BLOCK) -> Array:
    """`quantize_act` of `glu`."""
    return quantize_act.reference(glu.reference(gate, up, activation=activation), group=group)


@op("xq q8_act (T, K)", "w blocks (N, K)", "y f32 (T, N)", gives="f32 (T, N)")
def linear_q8_add(xq: Array, w: Array, y: Array) -> Array:
    """y (T, N) + `linear_q8` of xq (T, K) and w (N, K)."""
    return y + linear_q8.reference(xq, w)


linear_q8_add.inplace = (2,)


@op(
    "q f32 (T, H, D)",
    *CACHES,
    "pos i32 (T)|(2, T) in :P * 16",
    "sinks f32 (H)?",
    gives="q8_act (T, H * D)",
    needs=f"{attention.needs} and H * D % ACT_BLOCK == 0",
    like=attention,
)
def attention_act(q: Array, *src: Array, **attrs: Any) -> Array:
    """`quantize_act` of `attention`'s tokens, (T, H · D), in groups of 32; `src`: the other sources of `attention`."""
    return quantize_act.reference(attention.reference(q, *src, **attrs).reshape(q.shape[0], -1))


@op("x f32 (…, K)", "w f32 (K)|()", gives="q8_act x.shape", needs=f"eps >= 0 and {WHOLE_GROUPS}")
def rms_norm_act(x: Array, w: Array, *, eps: float, group: int = ACT_BLOCK) -> Array:
    """`quantize_act` of `rms_norm`."""
    return quantize_act.reference(rms_norm.reference(x, w, eps=eps), group=group)


@op(
    "cache cache (pages, H, D, 16)",
    "k f32 (T, H, D)",
    "cells i32 (T) in :pages * 16",
    "angles f32 (T, 2, P)",
    gives="cache",
    needs="2 * P <= D",
    writes=(0,),
)
def store_k_rope(cache: Array, k: Array, cells: Array, angles: Array, *, interleaved: bool, sign: float = 1.0) -> Array:
    """`store_k` of the keys after `rope`."""
    return store_k.reference(cache, rope.reference(k, angles, interleaved=interleaved, sign=sign), cells)


@op("q f32 (T, H, D)", *CACHES, "pos i32 (…, T) in :P * 16", "*others f32", like=attention)
def attention_rope(q: Array, *src: Array, interleaved: bool, sign: float = 1.0, **attrs: Any) -> Array:
    """`attention` of the queries after `rope`; `src`: the other sources of `attention`, then the angles."""
    *others, angles = src
    return attention.reference(rope.reference(q, angles, interleaved=interleaved, sign=sign), *others, **attrs)


@attention_rope.shape
def _(q: Tensor, *src: Tensor, interleaved: bool, sign: float = 1.0, **attrs: Any) -> tuple[Shape, str]:
    *others, angles = src
    rope.result(q, angles, interleaved=interleaved, sign=sign)
    return attention.result(q, *others, **attrs)


for _op in (linear_parts, linear_add, linear_glu, norm_parts, norm_glu, expert_parts):
    _op.tolerance_quantised = linear.tolerance_quantised
store_k_rope.tolerance, attention_rope.tolerance = store_k.tolerance, attention.tolerance


def _weights_case(r: np.random.Generator, dtype: str, t: int, k: int, sizes: tuple[int, ...]) -> Case:
    return ([r.normal(size=(t, k)), *(Weight(r.normal(size=(n, k)), dtype) for n in sizes)], {})


def _experts_case(r: np.random.Generator, dtype: str, t: int, k: int, sizes: tuple[int, ...]) -> Case:
    order = expert_order.reference(np.stack([r.permutation(4)[:2] for _ in range(t)]), n=4)
    return [r.normal(size=(t, k)), order, *(Weight(r.normal(size=(4 * n, k)), dtype) for n in sizes)], {"n": 4}


def _add_case(r: np.random.Generator, dtype: str, t: int, k: int, *, whole: bool) -> Case:
    return [r.normal(size=(t, k)), Weight(r.normal(size=(37, k)), dtype), r.normal(size=(t, 37) if whole else 37)], {}


def _glu_case(r: np.random.Generator, dtype: str, t: int, k: int, activation: Literal["silu", "gelu"]) -> Case:
    x, gate, up = r.normal(size=(t, k)), r.normal(size=(40, k)), r.normal(size=(40, k))
    return [x, Weight(gate / k**0.5, dtype), Weight(up, dtype)], {"activation": activation}


def _normalised_case(r: np.random.Generator, dtype: str, t: int, sizes: tuple[int, ...], **attrs: str) -> Case:
    weights = [Weight(r.normal(size=(n, 512)) / 512**0.5, dtype) for n in sizes]
    return [r.normal(size=(t, 512)), r.normal(size=512), *weights], {"eps": 1e-5, **attrs}


def _store_case(r: np.random.Generator, dtype: str, size: int, *, interleaved: bool) -> Case:
    cache = Variable(r.normal(size=(3, 2, size, PAGE)).astype(np.float16).astype(np.float64), dtype)
    angles = r.normal(size=(3, 2, 4))
    return [cache, r.normal(size=(3, 2, size)), np.array([17, 3, 40]), angles], {"interleaved": interleaved}


def _rotated_case(
    r: np.random.Generator,
    types: str,
    size: int,
    *,
    interleaved: bool,
    with_sinks: bool = False,
    own_positions: bool = False,
    **attrs: float,
) -> Case:
    src, attributes = attention_case(r, types, 4, 2, size, with_sinks=with_sinks, own_positions=own_positions, **attrs)
    angles = r.normal(size=(src[0].shape[0], 2, size // 2 - 1))
    return [*src, angles], {**attributes, "interleaved": interleaved}


for _i, (_dtype, _k) in enumerate({"f16": 50, **dict.fromkeys(BLOCK_TYPES, 512)}.items()):
    linear_parts.case(_weights_case, _dtype, (1, 5, 35)[_i % 3], _k, (33, 16))
    expert_parts.case(_experts_case, _dtype, (1, 5, 35)[_i % 3], _k, (48, 16))
    linear_add.case(_add_case, _dtype, 1 + _i % 4 * 3, _k, whole=_i % 2 == 0)
    linear_glu.case(_glu_case, _dtype, (1, 5, 35)[_i % 3], _k, ("silu", "gelu")[_i % 2])
for _dtype in ("q8_0", "q4_k", "q6_k"):
    norm_parts.case(_normalised_case, _dtype, 1, (33, 16))
    norm_glu.case(_normalised_case, _dtype, 1, (64, 64), activation="silu")
for _t in (1, 3, 35):
    linear_parts.case(_weights_case, "q8_0", _t, 96, (70, 17, 64))
    linear_glu.case(_glu_case, "q8_0", _t, 96, "silu")
for _dtype in ("f32", "f16"):
    store_k_rope.case(_store_case, _dtype, 8, interleaved=True)
    store_k_rope.case(_store_case, _dtype, 11, interleaved=False)
for _types, _size in (("f32/f32", 11), ("f16/f16", 64), ("f16/f32", 32)):
    attention_rope.case(_rotated_case, _types, _size, interleaved=_size == 64)
    attention_rope.case(_rotated_case, _types, _size, interleaved=_size != 64, with_sinks=True)
attention_rope.case(_rotated_case, "f16/f16", 16, interleaved=False, window=20, cap=5.0)
attention_rope.case(_rotated_case, "f16/f16", 16, interleaved=False, window=20, own_positions=True)

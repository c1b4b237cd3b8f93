"""Normalisation: RMS norm (Zhang and Sennrich, 2019) and layer norm."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, op
from logitless.graph.ops.elementwise import mul, scale, sub, sum_to
from logitless.graph.tensor import Tensor, const


@op("x f32 (…, K)", "w f32 (K)|()", gives="x", needs="eps >= 0")
def rms_norm(x: Array, w: Array, *, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · w over the last axis; w has that axis' length."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


@rms_norm.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor | None, ...]:
    return rms_norm_back(mul(g, w), x, eps=eps), sum_to(mul(g, rms_norm(x, const(1.0), eps=eps)), shape=w.shape)


rms_norm.case(lambda r: ([r.normal(size=(4, 37)), r.normal(size=(37,))], {"eps": 1e-5}))
rms_norm.case(lambda r: ([r.normal(size=(3, 5, 16)), r.normal(size=(16,))], {"eps": 1e-6}))


rms_norm.inplace = (0,)


@op("g f32 (…, K)", "x f32 (…, K)", needs="eps >= 0")
def rms_norm_back(g: Array, x: Array, *, eps: float) -> Array:
    """The gradient of x of `rms_norm` without a weight."""
    k = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return k * (g - x * k * k * (g * x).mean(-1, keepdims=True))


rms_norm_back.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 6))], {"eps": 1e-5}))


@op("x f32 (…, K)", "w f32 (K)", "b f32 (K)", gives="x", needs="eps >= 0")
def layer_norm(x: Array, w: Array, b: Array, *, eps: float) -> Array:
    """(x − mean) / sqrt(variance + eps) · w + b over the last axis (Ba, Kiros and Hinton, 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * w + b


def centred(x: Tensor) -> Tensor:
    """x without the mean of its last axis."""
    return sub(x, scale(sum_to(x, shape=(*x.shape[:-1], 1)), factor=1 / x.shape[-1]))


@layer_norm.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor | None, ...]:
    z = centred(x)
    of_w = sum_to(mul(g, rms_norm(z, const(1.0), eps=eps)), shape=w.shape)
    return centred(rms_norm_back(mul(g, w), z, eps=eps)), of_w, sum_to(g, shape=b.shape)


layer_norm.case(lambda r: ([r.normal(size=(5, 37)) + 3, r.normal(size=(37,)), r.normal(size=(37,))], {"eps": 1e-12}))


layer_norm.case(lambda r: ([r.normal(size=(2, 3, 16)), r.normal(size=(16,)), r.normal(size=(16,))], {"eps": 1e-5}))


layer_norm.inplace = (0,)

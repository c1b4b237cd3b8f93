"""Losses and softmax. A loss op gives a number per row; weights and means are `mul` and `sum_to`."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, op
from logitless.graph.ops.elementwise import mul, scale, sub, sum_to
from logitless.graph.tensor import Tensor


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@op("x f32 (…, K)")
def softmax(x: Array) -> Array:
    """exp(x) over its sum along the last axis."""
    return _softmax(x)


softmax.case(lambda r: ([r.normal(size=(5, 37)) * 4], {}))
softmax.case(lambda r: ([r.normal(size=(2, 3, 16)) * 50], {}))


@op("g f32 (…, K)", "y f32 (…, K)")
def softmax_back(g: Array, y: Array) -> Array:
    """y · (g − Σ g·y), y being the softmax itself."""
    return y * (g - (g * y).sum(-1, keepdims=True))


softmax.vjp(lambda g, y, x: (softmax_back(g, y),))
softmax_back.case(lambda r: ([r.normal(size=(4, 37)), _softmax(r.normal(size=(4, 37)))], {}))


softmax.inplace = (0,)
softmax_back.inplace = (0, 1)


@op("logits f32 (R, V)", "targets i32 (R) in -2**31:V", gives="f32 (R,)")
def cross_entropy(logits: Array, targets: Array) -> Array:
    """−ln softmax(logits)[target] of each row: (R, V) and ids (R,) i32 → (R,). A negative target is ignored: 0."""
    rows, ids = np.arange(len(targets)), np.maximum(targets, 0)
    return np.where(targets < 0, 0, -_log_softmax(logits)[rows, ids])


@op("g f32 (R)", "logits f32 (R, V)", "targets i32 (R) in -2**31:V", gives="logits")
def cross_entropy_back(g: Array, logits: Array, targets: Array) -> Array:
    """g · (softmax(logits) − 1 at the target), g (R,); rows that are ignored get zeros."""
    p = _softmax(logits)
    p[np.arange(len(targets)), np.maximum(targets, 0)] -= 1
    return np.where(targets[:, None] < 0, 0, p * g[:, None])


cross_entropy.vjp(lambda g, y, logits, targets: (cross_entropy_back(g, logits, targets), None))
cross_entropy_back.inplace = (1,)


def _targets(r: np.random.Generator) -> tuple[Array, Array]:
    return r.normal(size=(6, 45)) * 5, np.array([0, 44, -1, 7, 7, -100], np.int32)


cross_entropy.case(lambda r: (list(_targets(r)), {}))
cross_entropy_back.case(lambda r: ([r.normal(size=6), *_targets(r)], {}))


@op("logits f32 (R, V)", "targets f32 (R, V)", gives="f32 (R,)")
def soft_cross_entropy(logits: Array, targets: Array) -> Array:
    """−Σ targets · ln softmax(logits) of each row: (R, V) twice → (R,). Each row of targets sums to 1."""
    return -(targets * _log_softmax(logits)).sum(-1)


@soft_cross_entropy.vjp
def _(g: Tensor, y: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor | None, ...]:
    return soft_cross_entropy_back(g, logits, targets), None  # targets are data


@op("g f32 (R)", "logits f32 (R, V)", "targets f32 (R, V)", gives="logits")
def soft_cross_entropy_back(g: Array, logits: Array, targets: Array) -> Array:
    """g · (softmax(logits) − targets), g (R,)."""
    return g[:, None] * (_softmax(logits) - targets)


soft_cross_entropy_back.inplace = (1, 2)


def _distributions(r: np.random.Generator) -> tuple[Array, Array]:
    return r.normal(size=(5, 37)) * 3, _softmax(r.normal(size=(5, 37)))


soft_cross_entropy.case(lambda r: (list(_distributions(r)), {}))
soft_cross_entropy_back.case(lambda r: ([r.normal(size=5), *_distributions(r)], {}))


def square_error(x: Tensor, target: Tensor) -> Tensor:
    """(R,): Σ (x − target)² of each row of (R, K)."""
    d = sub(x, target)
    return sum_to(mul(d, d), shape=(x.shape[0], 1))


def mean(x: Tensor) -> Tensor:
    """The mean of all elements, a scalar."""
    n = x.nbytes // 4
    return scale(sum_to(x, shape=()), factor=1 / n)

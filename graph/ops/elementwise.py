"""Elementwise ops with numpy's broadcasting: arithmetic and activations."""

from __future__ import annotations

from typing import Literal

import numpy as np

from logitless.graph import scalar as s
from logitless.graph.op import Array, Case, op
from logitless.graph.scalar import GELU_SCALE, elementwise, equal, exp, fma, tanh, times_sigmoid, where
from logitless.graph.tensor import Shape, Tensor, const


def unbroadcast(g: Tensor, t: Tensor) -> Tensor:
    """The gradient of a source that was broadcast: summed back to its shape."""
    return g if g.shape == t.shape else sum_to(g, shape=t.shape)


@elementwise
def add(a: Array, b: Array) -> Array:
    """a + b, with numpy's broadcasting."""
    return a + b


add.vjp(lambda g, y, a, b: (unbroadcast(g, a), unbroadcast(g, b)))
add.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 6))], {}))
add.case(lambda r: ([r.normal(size=(5, 37)), r.normal(size=(37,))], {}))


@elementwise
def sub(a: Array, b: Array) -> Array:
    """a − b, with numpy's broadcasting."""
    return a - b


sub.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 6))], {}))
sub.case(lambda r: ([r.normal(size=(5, 37)), r.normal(size=(37,))], {}))


@elementwise
def mul(a: Array, b: Array) -> Array:
    """a · b, element by element, with numpy's broadcasting."""
    return a * b


mul.vjp(lambda g, y, a, b: (unbroadcast(mul(g, b), a), unbroadcast(mul(g, a), b)))
mul.case(lambda r: ([r.normal(size=(4, 33)), r.normal(size=(4, 33))], {}))
mul.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 1))], {}))


@elementwise
def scale(x: Array, *, factor: float) -> Array:
    """x times a constant of the graph."""
    return x * factor


sub.vjp(lambda g, y, a, b: (unbroadcast(g, a), unbroadcast(scale(g, factor=-1.0), b)))
scale.vjp(lambda g, y, x, factor: (scale(g, factor=factor),))
scale.case(lambda r: ([r.normal(size=(3, 35))], {"factor": -1.7}))


def scaled(x: Tensor, factor: float) -> Tensor:
    """Scale x; x itself where the factor is 1."""
    return x if factor == 1 else scale(x, factor=factor)


@op(gives="x shape", needs="broadcasts(shape, x.shape)")
def sum_to(x: Array, *, shape: Shape) -> Array:
    """The sum over the axes along which `shape` was broadcast to x's shape."""
    lead = x.ndim - len(shape)
    x = x.sum(axis=tuple(range(lead))) if lead else x
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1), keepdims=True)


def broadcasts(small: Shape, large: Shape) -> bool:
    """True if numpy broadcasts an array of one shape to the other."""
    lead = len(large) - len(small)
    return lead >= 0 and all(n in (1, m) for n, m in zip(small, large[lead:], strict=True))


sum_to.case(lambda r: ([r.normal(size=(3, 4, 5))], {"shape": (4, 1)}))


for _from, _to in (((70, 40), ()), ((70, 40), (40,)), ((70, 300), (70, 1)), ((3, 4, 5, 6), (3, 1, 5, 1)), ((9,), ())):
    sum_to.case(lambda r, x, y: ([r.normal(size=x)], {"shape": y}), _from, _to)


@op(gives="x shape", needs="broadcasts(x.shape, shape)")
def broadcast_to(x: Array, *, shape: Shape) -> Array:
    """x repeated along axes that it lacks, or has with length 1 (np.broadcast_to)."""
    return np.broadcast_to(x, shape)


sum_to.vjp(lambda g, y, x, shape: (broadcast_to(g, shape=x.shape),))
broadcast_to.vjp(lambda g, y, x, shape: (sum_to(g, shape=x.shape),))
broadcast_to.case(lambda r: ([r.normal(size=(4, 1))], {"shape": (3, 4, 5)}))


for _small, _large in (((), (5, 40)), ((40,), (9, 40)), ((9, 1, 4, 1), (9, 3, 4, 20))):
    broadcast_to.case(lambda r, x, y: ([r.normal(size=x)], {"shape": y}), _small, _large)
for _left, _right in (((1, 6), (4, 6)), ((4, 1), (1, 70)), ((2, 3, 1, 5), (3, 4, 1)), ((), (3, 4)), ((40, 3), (40, 1))):
    for _arithmetic in (add, sub, mul):
        _arithmetic.case(lambda r, a, b: ([r.normal(size=a), r.normal(size=b)], {}), _left, _right)


silu = elementwise(s.silu)


silu.case(lambda r: ([r.normal(size=(4, 37)) * 4], {}))


@elementwise
def silu_back(g: Array, x: Array) -> Array:
    """g times the derivative of `silu` at x."""
    part = 1 / (1 + exp(-x))
    return g * part * fma(x, 1 - part, 1)


silu.vjp(lambda g, y, x: (silu_back(g, x),))
silu_back.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 6))], {}))


gelu = elementwise(s.gelu)


gelu.case(lambda r: ([r.normal(size=(4, 37)) * 3], {}))


@elementwise
def gelu_back(g: Array, x: Array) -> Array:
    """g times the derivative of `gelu` at x."""
    square = x * x
    t = tanh(GELU_SCALE * x * fma(0.044715, square, 1))
    inner = GELU_SCALE * fma(3 * 0.044715, square, 1)
    return g * fma(0.5, 1 + t, 0.5 * x * ((1 - t * t) * inner))


gelu.vjp(lambda g, y, x: (gelu_back(g, x),))
gelu_back.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(4, 6))], {}))


@elementwise
def softcap(x: Array, *, cap: float) -> Array:
    """Soft-cap: cap · tanh(x / cap), within (-cap, cap) (Gemma 2)."""
    return cap * tanh(x / cap)


softcap.needs = "cap > 0"
softcap.vjp(lambda g, y, x, cap: (mul(g, add(const(1.0), scale(mul(y, y), factor=-1.0 / cap**2))),))
softcap.case(lambda r: ([r.normal(size=(4, 37)) * 5], {"cap": 3.0}))


@elementwise
def glu(gate: Array, up: Array, *, activation: Literal["silu", "gelu"]) -> Array:
    """activation(gate) · up: the gated part of a feed-forward block as one op (`activation`: silu or gelu)."""
    return {"silu": s.silu, "gelu": s.gelu}[activation](gate) * up


@glu.vjp
def _(g: Tensor, y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor | None, ...]:
    forward, back = {"silu": (silu, silu_back), "gelu": (gelu, gelu_back)}[activation]
    return back(mul(g, up), gate), mul(g, forward(gate))


glu.case(lambda r: ([r.normal(size=(3, 37)), r.normal(size=(3, 37))], {"activation": "silu"}))
glu.case(lambda r: ([r.normal(size=(3, 37)), r.normal(size=(3, 37))], {"activation": "gelu"}))


@elementwise
def glu_clamped(gate: Array, up: Array, *, alpha: float, limit: float) -> Array:
    """a · sigmoid(alpha · a) · (1 + b), a: the gate of at most `limit`, b: up between −limit and limit (gpt-oss)."""
    a, b = where(gate > limit, limit, gate), where(up > limit, limit, where(up < -limit, -limit, up))
    return times_sigmoid(a, alpha * a) * (1 + b)


glu_clamped.needs = "limit >= 0"


@glu_clamped.vjp
def _(g: Tensor, y: Tensor, gate: Tensor, up: Tensor, alpha: float, limit: float) -> tuple[Tensor | None, ...]:
    return tuple(glu_clamped_back(g, gate, up, alpha=alpha, limit=limit, of=of) for of in ("gate", "up"))


@elementwise
def glu_clamped_back(
    g: Array, gate: Array, up: Array, *, alpha: float, limit: float, of: Literal["gate", "up"]
) -> Array:
    """The gradient of `glu_clamped` for its gate or up (`of`)."""
    a, b = where(gate > limit, limit, gate), where(up > limit, limit, where(up < -limit, -limit, up))
    if of == "up":
        return where(abs(up) < limit, g * times_sigmoid(a, alpha * a), 0)
    part = s.sigmoid(alpha * a)
    return where(gate < limit, g * (1 + b) * part * fma(alpha * a, 1 - part, 1), 0)


glu_clamped_back.needs = "limit >= 0"


glu_clamped.case(lambda r: ([3 * r.normal(size=(5, 37)), 3 * r.normal(size=(5, 37))], {"alpha": 1.7, "limit": 4.0}))


for _of in ("gate", "up"):
    glu_clamped_back.case(
        lambda r, of: ([3 * r.normal(size=(5, 37)) for _ in range(3)], {"alpha": 1.7, "limit": 4.0, "of": of}), _of
    )


@elementwise
def gate(x: Array, factor: Array) -> Array:
    """x times factor, element by element; a factor of 0 gives 0 for any x, so that an adapter
    whose products overflow cannot disturb rows that do not use it."""
    return where(equal(factor, 0), 0, x * factor)


gate.vjp(lambda g, y, x, factor: (gate(g, factor), None))


@gate.case
def _(r: np.random.Generator) -> Case:
    factor = r.normal(size=(5, 37)) * (r.random((5, 37)) < 0.5)
    return [r.normal(size=(5, 37)), factor], {}


def gated(t: Tensor) -> Tensor:
    """Rewrite mul(silu(a), b) as one `glu`; any other product stays. For backends."""
    a, b = t.src
    if a.op in ("silu", "gelu") and a.shape == b.shape:
        return glu(a.src[0], b, activation=a.op)
    return t


for _arithmetic in (add, sub, mul):
    _arithmetic.shape(_arithmetic.broadcast)

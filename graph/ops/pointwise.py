"""Elementwise ops of small networks and their losses; argmax and casts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph import scalar as s
from logitless.graph.dtype import BLOCK_TYPES
from logitless.graph.op import OPS, Array, Case, Op, Variable, Weight, op, require
from logitless.graph.ops.elementwise import mul, scale, sub, unbroadcast
from logitless.graph.scalar import elementwise, where
from logitless.graph.tensor import Shape, Tensor, const


@elementwise
def div(a: Array, b: Array) -> Array:
    """a / b, element by element, with numpy's broadcasting."""
    return a / b


div.shape(div.broadcast)


@div.vjp
def _(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    part = div(g, b)
    return unbroadcast(part, a), unbroadcast(neg(mul(part, y)), b)


for _left, _right in (((4, 33), (4, 33)), ((5, 37), (37,)), ((3, 1), (3, 20)), ((6,), ())):
    div.case(lambda r, a, b: ([r.normal(size=a), r.random(size=b) + 0.5], {}), _left, _right)


def neg(x: Tensor) -> Tensor:
    return scale(x, factor=-1.0)


def square(x: Tensor) -> Tensor:
    return mul(x, x)


def _times(a: Tensor, b: Tensor) -> Tensor:
    return scale(b, factor=a.attrs["value"]) if a.op == "const" else mul(a, b)


def _absolute(x: Tensor) -> Tensor:
    return mul(x, sign(x))


def with_slope(slope: Callable[..., Array]) -> Callable[[Callable[..., Array]], Op]:
    """Decorator: an op of one source; `slope` is the formula of the source's gradient, of the result's
    gradient, the result and the source."""
    tree = slope(s.name("g"), s.name("y"), s.name("x"))

    def vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
        nodes: dict[str, Callable[..., Tensor]] = {**OPS, "mul": _times, "neg": neg, "abs": _absolute}
        return (s.fold(tree, nodes, {"g": g, "y": y, "x": x}, const),)

    def declare(formula: Callable[..., Array]) -> Op:
        declared = elementwise(formula)
        declared.vjp(vjp)
        return declared

    return declare


sqrt = with_slope(lambda g, y, x: 0.5 * g / y)(s.sqrt)
log = with_slope(lambda g, y, x: g / x)(s.log)
exp = with_slope(lambda g, y, x: g * y)(s.exp)
tanh = with_slope(lambda g, y, x: g * (1 - y * y))(s.tanh)
sin = with_slope(lambda g, y, x: g * s.cos(x))(s.sin)
cos = with_slope(lambda g, y, x: -(g * s.sin(x)))(s.cos)
sigmoid = with_slope(lambda g, y, x: g * (y * (1 - y)))(s.sigmoid)


@with_slope(lambda g, y, x: g * s.sigmoid(x))
def softplus(x: Array) -> Array:
    """ln(1 + eˣ)."""
    return where(x > 0, x, 0) + s.log1p(s.exp(-abs(x)))


@elementwise
def step(x: Array) -> Array:
    """1 where x > 0, else 0. Its gradient is zero: no node; so is that of `sign`."""
    return where(x > 0, 1, 0)


@elementwise
def sign(x: Array) -> Array:
    """1, 0 or −1."""
    return where(x > 0, 1, where(x < 0, -1, x))


for _flat in (step, sign):
    _flat.vjp(lambda g, y, x: (None,))


@elementwise
def relu(x: Array) -> Array:
    """x where positive, else 0."""
    return where(x < 0, 0, x)


@elementwise
def relu_back(g: Array, y: Array) -> Array:
    """g where y, the result of `relu`, is not 0."""
    return where(y > 0, g, 0)


relu.vjp(lambda g, y, x: (relu_back(g, y),))
relu_back.case(lambda r: ([r.normal(size=(4, 37)), np.maximum(r.normal(size=(4, 37)), 0)], {}))


@elementwise
def clamp(x: Array, *, low: float, high: float) -> Array:
    """x clamped to [low, high]."""
    return where(x < low, low, where(x > high, high, x))


clamp.needs = "low <= high"
clamp.vjp(lambda g, y, x, low, high: (mul(g, mul(step(sub(x, const(low))), step(sub(const(high), x)))),))
clamp.case(lambda r: ([r.normal(size=(4, 37)) * 2], {"low": -1.5, "high": 0.75}))


@elementwise
def elu(x: Array) -> Array:
    """x where positive, else eˣ − 1 (Clevert et al., 2016)."""
    return where(x > 0, x, s.exp(x) - 1)


@elementwise
def elu_back(g: Array, y: Array) -> Array:
    """g · (1 where y, the result of `elu`, is positive, else y + 1)."""
    return where(y > 0, g, g * (y + 1))


elu.vjp(lambda g, y, x: (elu_back(g, y),))
elu_back.case(lambda r: ([r.normal(size=(4, 37)), np.maximum(r.normal(size=(4, 37)), -0.9)], {}))


for _function in (exp, tanh, sin, cos, step, sign, relu, elu, sigmoid, softplus):
    _function.case(lambda r: ([r.normal(size=(4, 37)) * 2], {}))
for _function in (sigmoid, softplus):  # where one of their exponentials is not finite
    _function.case(lambda r: ([np.array([[-200.0, -90, 90, 200, 0]])], {}))
for _function in (sqrt, log):
    _function.case(lambda r: ([r.random(size=(4, 37)) * 5 + 0.1], {}))
sin.tolerance = cos.tolerance = 2e-5


@op("x f32 (R, K)", gives="i32 (R,) in :K")
def argmax(x: Array) -> Array:
    """The index of the largest of each row, the first of equals: (R, K) → (R,) i32. No gradient passes."""
    return x.argmax(-1).astype(np.int32)


argmax.vjp(lambda g, y, x: (None,))


@argmax.case
def _(r: np.random.Generator) -> Case:
    x = r.normal(size=(6, 45))
    x[2, 3] = x[2, 40] = 9.0
    return [x], {}


@op("x stored")
def cast(x: Array, *, dtype: str) -> Array:
    """x as f32 or f16; x may be a weight of any type. Exact but for the rounding of what is written."""
    return x


@cast.shape
def _(x: Tensor, dtype: str) -> tuple[Shape, str]:
    require(dtype in ("f32", "f16"), "cast", f"{dtype} cannot be written", x)
    require(dtype == "f32" or x.dtype == "f32", "cast", f"{x.dtype} becomes f32 only", x)
    return x.shape, dtype


@cast.vjp
def _(g: Tensor, y: Tensor, x: Tensor, dtype: str) -> tuple[Tensor | None, ...]:
    return (g,)  # gradients are f32 for tensors of any type


cast.tolerance = 5e-4  # f16 has 11 bits


cast.case(lambda r: ([r.normal(size=(4, 37))], {"dtype": "f16"}))


cast.case(lambda r: ([Variable(r.normal(size=(4, 37)).astype(np.float16).astype(np.float64), "f16")], {"dtype": "f32"}))


for _dtype in ("f32", "f16", "bf16", *BLOCK_TYPES):
    cast.case(lambda r, d: ([Weight(r.normal(size=(19, 512)), d)], {"dtype": "f32"}), _dtype)

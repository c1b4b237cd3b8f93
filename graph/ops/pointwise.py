"""Elementwise ops of small networks and their losses; argmax and casts."""

from __future__ import annotations

import numpy as np

from logitless.graph.dtype import DTYPES
from logitless.graph.op import Array, Case, Variable, Weight, op, require
from logitless.graph.ops.elementwise import add, mul, scale, sub, unbroadcast
from logitless.graph.tensor import Shape, Tensor, const


@op
def div(a: Array, b: Array) -> Array:
    """a / b, element by element, with numpy's broadcasting."""
    return a / b


div.shape(div.broadcast)


@div.vjp
def _(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    part = div(g, b)
    return unbroadcast(part, a), unbroadcast(scale(mul(part, y), factor=-1.0), b)


for _left, _right in (((4, 33), (4, 33)), ((5, 37), (37,)), ((3, 1), (3, 20)), ((6,), ())):
    div.case(lambda r, a=_left, b=_right: ([r.normal(size=a), r.random(size=b) + 0.5], {}))  # type: ignore[misc]


def neg(x: Tensor) -> Tensor:
    return scale(x, factor=-1.0)


def square(x: Tensor) -> Tensor:
    return mul(x, x)


@op
def sqrt(x: Array) -> Array:
    """The square root."""
    return np.sqrt(x)


@sqrt.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (div(scale(g, factor=0.5), y),)


@op
def log(x: Array) -> Array:
    """The natural logarithm."""
    return np.log(x)


@log.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (div(g, x),)


@op
def exp(x: Array) -> Array:
    """eˣ."""
    return np.exp(x)


@exp.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (mul(g, y),)


@op
def tanh(x: Array) -> Array:
    """The hyperbolic tangent."""
    return np.tanh(x)


@tanh.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (mul(g, add(const(1.0), scale(mul(y, y), factor=-1.0))),)


@op
def sin(x: Array) -> Array:
    """The sine of x in radians."""
    return np.sin(x)


@sin.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (mul(g, cos(x)),)


@op
def cos(x: Array) -> Array:
    """The cosine of x in radians."""
    return np.cos(x)


@cos.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (scale(mul(g, sin(x)), factor=-1.0),)


@op
def sigmoid(x: Array) -> Array:
    """1 / (1 + e⁻ˣ)."""
    return np.exp(-np.logaddexp(0, -x))


@sigmoid.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (mul(g, mul(y, add(const(1.0), neg(y)))),)


@op
def softplus(x: Array) -> Array:
    """ln(1 + eˣ)."""
    return np.logaddexp(0, x)


@softplus.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (mul(g, sigmoid(x)),)


@op
def step(x: Array) -> Array:
    """1 where x > 0, else 0. Its gradient is zero: no node; so is that of `sign`."""
    return (x > 0).astype(x.dtype)


@op
def sign(x: Array) -> Array:
    """1, 0 or −1."""
    return np.sign(x)


@step.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (None,)


@sign.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (None,)


@op
def relu(x: Array) -> Array:
    """x where positive, else 0."""
    return np.maximum(x, 0)


@relu.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (relu_back(g, y),)


@op
def relu_back(g: Array, y: Array) -> Array:
    """g where y, the result of `relu`, is not 0."""
    return g * (y > 0)


@relu_back.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 37)), np.maximum(r.normal(size=(4, 37)), 0)], {}


@op
def clamp(x: Array, *, low: float, high: float) -> Array:
    """x clamped to [low, high]."""
    return np.clip(x, low, high)


@clamp.shape
def _(x: Tensor, low: float, high: float) -> tuple[Shape, str]:
    require(low <= high, "clamp", f"low must not be above high, {low} is above {high}", x)
    return x.shape, x.dtype


@clamp.vjp
def _(g: Tensor, y: Tensor, x: Tensor, low: float, high: float) -> tuple[Tensor | None, ...]:
    return (mul(g, mul(step(sub(x, const(low))), step(sub(const(high), x)))),)


@clamp.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 37)) * 2], {"low": -1.5, "high": 0.75}


@op
def elu(x: Array) -> Array:
    """x where positive, else eˣ − 1 (Clevert et al., 2016)."""
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


@elu.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (elu_back(g, y),)


@op
def elu_back(g: Array, y: Array) -> Array:
    """g · (1 where y, the result of `elu`, is positive, else y + 1)."""
    return g * np.where(y > 0, 1, y + 1)


@elu_back.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 37)), np.maximum(r.normal(size=(4, 37)), -0.9)], {}


for _function in (exp, tanh, sin, cos, step, sign, relu, elu, sigmoid, softplus):
    _function.case(lambda r: ([r.normal(size=(4, 37)) * 2], {}))
for _function in (sigmoid, softplus):  # where one of their exponentials is not finite
    _function.case(lambda r: ([np.array([[-200.0, -90, 90, 200, 0]])], {}))
for _function in (sqrt, log):
    _function.case(lambda r: ([r.random(size=(4, 37)) * 5 + 0.1], {}))
for _function in (sqrt, log, exp, tanh, sin, cos, step, sign, relu, elu, sigmoid, softplus, clamp):
    _function.inplace = (0,)
for _function in (div, relu_back, elu_back):
    _function.inplace = (0, 1)
sin.tolerance = cos.tolerance = 2e-5


@op
def argmax(x: Array) -> Array:
    """The index of the largest of each row, the first of equals: (R, K) → (R,) i32. No gradient
    passes.
    """
    return x.argmax(-1).astype(np.int32)


argmax.takes("x f32 (R, K)")


@argmax.shape
def _(x: Tensor) -> tuple[Shape, str]:
    require(len(x.shape) == 2, "argmax", "expected x (R, K)", x)
    return x.shape[:1], "i32"


@argmax.vjp
def _(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    return (None,)


@argmax.case
def _(r: np.random.Generator) -> Case:
    x = r.normal(size=(6, 45))
    x[2, 3] = x[2, 40] = 9.0
    return [x], {}


@op
def cast(x: Array, *, dtype: str) -> Array:
    """x as f32 or f16; x may be a weight of any type. Exact but for the rounding of what is
    written.
    """
    return x


cast.takes("x stored")


@cast.shape
def _(x: Tensor, dtype: str) -> tuple[Shape, str]:
    require(dtype in ("f32", "f16"), "cast", f"{dtype} cannot be written", x)
    require(dtype == "f32" or x.dtype == "f32", "cast", f"{x.dtype} becomes f32 only", x)
    return x.shape, dtype


@cast.vjp
def _(g: Tensor, y: Tensor, x: Tensor, dtype: str) -> tuple[Tensor | None, ...]:
    return (g,)  # gradients are f32 for tensors of any type


cast.tolerance = 5e-4  # f16 has 11 bits


@cast.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 37))], {"dtype": "f16"}


@cast.case
def _(r: np.random.Generator) -> Case:
    return [Variable(r.normal(size=(4, 37)).astype(np.float16).astype(np.float64), "f16")], {"dtype": "f32"}


for _dtype in (
    "f32",
    "f16",
    "bf16",
    *(name for name, d in DTYPES.items() if d.quantised and not name.endswith("_act")),
):
    cast.case(lambda r, d=_dtype: ([Weight(r.normal(size=(19, 512)), d)], {"dtype": "f32"}))  # type: ignore[misc]

"""Elementwise kernels. A unit is a row of the last axis; the result may overwrite a source."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, kernel


def _gated(b, x, factor):
    zero = m.fill(x.type.count, 0.0)
    return b.select(b.fcmp_ordered("==", factor, zero), zero, b.fmul(x, factor))


def _silu_back(b, g, x):
    n = x.type.count
    one = m.fill(n, 1.0)
    s = b.fdiv(one, b.fadd(one, m.exp(b, b.fsub(m.fill(n, -0.0), x))))
    return b.fmul(b.fmul(g, s), m.fma(b, x, b.fsub(one, s), one))


def _gelu_back(b, g, x):
    n = x.type.count
    one, half, scale = m.fill(n, 1.0), m.fill(n, 0.5), m.fill(n, 0.7978845608028654)
    square = b.fmul(x, x)
    t = m.tanh(b, b.fmul(b.fmul(scale, x), m.fma(b, m.fill(n, 0.044715), square, one)))
    inner = b.fmul(scale, m.fma(b, m.fill(n, 3 * 0.044715), square, one))
    rest = b.fmul(b.fmul(half, x), b.fmul(b.fsub(one, b.fmul(t, t)), inner))
    return b.fmul(g, m.fma(b, half, b.fadd(one, t), rest))


BINARY_OF = {
    "add": lambda b, x, y: b.fadd(x, y),
    "sub": lambda b, x, y: b.fsub(x, y),
    "mul": lambda b, x, y: b.fmul(x, y),
    "div": lambda b, x, y: b.fdiv(x, y),
    "relu_back": lambda b, g, y: _where_positive(b, y, g, m.fill(y.type.count, 0.0)),
    "elu_back": lambda b, g, y: _where_positive(b, y, g, b.fmul(g, b.fadd(y, m.fill(y.type.count, 1.0)))),
    "silu_back": _silu_back,
    "gelu_back": _gelu_back,
    "gate": _gated,
}


def _silu(b, x):
    return b.fdiv(x, m.logistic_inverse(b, x))


def _gelu(b, x):
    n = x.type.count
    cube = b.fmul(b.fmul(x, x), x)
    inner = b.fmul(m.fill(n, 0.7978845608028654), m.fma(b, m.fill(n, 0.044715), cube, x))
    return b.fmul(b.fmul(m.fill(n, 0.5), x), b.fadd(m.fill(n, 1.0), m.tanh(b, inner)))


def _elu(b, x):
    n = x.type.count
    zero = m.fill(n, 0.0)
    return b.select(b.fcmp_ordered(">", x, zero), x, b.fsub(m.exp(b, x), m.fill(n, 1.0)))


def _where_positive(b, x, yes, no):
    return b.select(b.fcmp_ordered(">", x, m.fill(x.type.count, 0.0)), yes, no)


def _sign(b, x):
    n = x.type.count
    return _where_positive(b, x, m.fill(n, 1.0), _where_positive(b, b.fneg(x), m.fill(n, -1.0), m.fill(n, 0.0)))


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "exp": m.exp,
    "tanh": m.tanh,
    "sqrt": lambda b, x: m.call(b, "sqrt", x),
    "relu": lambda b, x: _where_positive(b, x, x, m.fill(x.type.count, 0.0)),
    "elu": _elu,
    "sigmoid": lambda b, x: b.fdiv(m.fill(x.type.count, 1.0), m.logistic_inverse(b, x)),
    "step": lambda b, x: _where_positive(b, x, m.fill(x.type.count, 1.0), m.fill(x.type.count, 0.0)),
    "sign": _sign,
}


@njit(forceinline=True)
def _softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


# rare, so in f64 and one by one
SCALAR = {"log": math.log, "softplus": _softplus, "sin": math.sin, "cos": math.cos}


@kernel("binary")
def binary(name):
    """Binary op. a: a, b, y, n, bytes between rows of b (0: one row for all, −1: a scalar)."""
    formula = BINARY_OF[name]
    both, one = (m.elementwise(2 - k, k, lambda b, x, s: formula(b, *x, *s)) for k in (0, 1))

    def run(a, begin, end, scratch):
        n, stride = a[3], a[4]
        for r in range(begin, end):
            if stride < 0:
                one(a[0] + r * n * 4, a[2] + r * n * 4, n, f32p(a[1])[0])
            else:
                both(a[0] + r * n * 4, a[1] + r * stride, a[2] + r * n * 4, n)

    return run


@kernel("unary")
def unary(name):
    """Unary op as vector code. a: x, y, n."""
    activate = m.elementwise(1, 0, lambda b, x, s: ACTIVATIONS[name](b, x[0]))

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            activate(a[0] + r * n * 4, a[1] + r * n * 4, n)

    return run


@kernel("scalar")
def scalar(name):
    """Unary op in f64, one by one. a: x, y, n."""
    function = SCALAR[name]

    def run(a, begin, end, scratch):
        n = a[2]
        x, y = f32p(a[0]), f32p(a[1])
        for i in range(begin * n, end * n):
            y[i] = np.float32(function(np.float64(x[i])))

    return run


def glu_function(activation):
    """intrinsic f(gate, up, y, n): y[i] = activation(gate[i]) · up[i]."""
    return m.elementwise(2, 0, lambda b, x, s: b.fmul(ACTIVATIONS[activation](b, x[0]), x[1]))


@kernel("glu")
def glu(name):
    """GLU. a: gate, up, y, n."""
    gated = glu_function(name)

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            gated(a[0] + r * n * 4, a[1] + r * n * 4, a[2] + r * n * 4, n)

    return run


@kernel("glu_clamped")
def glu_clamped():
    """GLU with clamped inputs (gpt-oss). a: gate, up, y, n, bits of alpha, of the limit."""

    def formula(b, x, s):
        n = x[0].type.count
        gate, above = b.select(b.fcmp_ordered(">", x[0], s[1]), s[1], x[0]), b.fcmp_ordered(">", x[1], s[1])
        low = b.fsub(m.fill(n, -0.0), s[1])
        up = b.select(above, s[1], b.select(b.fcmp_ordered("<", x[1], low), low, x[1]))
        swish = b.fdiv(gate, m.logistic_inverse(b, b.fmul(s[0], gate)))
        return b.fmul(swish, b.fadd(m.fill(n, 1.0), up))

    glu_function = m.elementwise(2, 2, formula)

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            at = r * n * 4
            glu_function(a[0] + at, a[1] + at, a[2] + at, n, bits_f32(a[4]), bits_f32(a[5]))

    return run


@kernel("scale")
def scale():
    """Multiply by a constant. a: x, y, n, factor bits."""
    times = m.elementwise(1, 1, lambda b, x, s: b.fmul(x[0], s[0]))

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            times(a[0] + r * n * 4, a[1] + r * n * 4, n, bits_f32(a[3]))

    return run


@kernel("softcap")
def softcap():
    """Soft cap: cap · tanh(x / cap). a: x, y, n, cap bits."""
    bound = m.elementwise(1, 1, lambda b, x, s: b.fmul(s[0], m.tanh(b, b.fdiv(x[0], s[0]))))

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            bound(a[0] + r * n * 4, a[1] + r * n * 4, n, bits_f32(a[3]))

    return run


@kernel("clamp")
def clamp():
    """Numbers within bounds. a: x, y, n, bits of the lowest and the highest."""

    def formula(b, x, s):
        high = b.select(b.fcmp_ordered(">", x[0], s[1]), s[1], x[0])
        return b.select(b.fcmp_ordered("<", x[0], s[0]), s[0], high)

    within = m.elementwise(1, 2, formula)

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            within(a[0] + r * n * 4, a[1] + r * n * 4, n, bits_f32(a[3]), bits_f32(a[4]))

    return run

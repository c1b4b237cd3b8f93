"""Element by element; one row of the last axis a unit."""

from __future__ import annotations

import numpy as np

from backends.cpu.kernels.mathf import exp_f32, tanh_f32
from backends.cpu.kernels.registry import bits_f32, f32p, kernel
from numba import njit


@njit(forceinline=True)
def _add(a, b):
    return a + b


@njit(forceinline=True)
def _mul(a, b):
    return a * b


BINARY = {"add": _add, "mul": _mul}


@kernel("binary")
def binary(name):
    """a: a, b, y, n, bytes between rows of b (0: one row for all, −1: one number for all)."""
    f = BINARY[name]

    def run(a, begin, end, scratch):
        n, stride = a[3], a[4]
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[2] + r * n * 4)
            if stride < 0:
                k = f32p(a[1])[0]
                for i in range(n):
                    y[i] = f(x[i], k)
            else:
                b = f32p(a[1] + r * stride)
                for i in range(n):
                    y[i] = f(x[i], b[i])

    return run


@njit(forceinline=True)
def _silu(x):
    return x / (np.float32(1) + exp_f32(-x))


@njit(forceinline=True)
def _gelu(x):
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + tanh_f32(inner))


ACTIVATIONS = {"silu": _silu, "gelu": _gelu}


@kernel("unary")
def unary(name):
    """a: x, y, n."""
    f = ACTIVATIONS[name]

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[1] + r * n * 4)
            for i in range(n):
                y[i] = f(x[i])

    return run


@kernel("glu")
def glu(name):
    """a: gate, up, y, n."""
    f = ACTIVATIONS[name]

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            gate, up, y = f32p(a[0] + r * n * 4), f32p(a[1] + r * n * 4), f32p(a[2] + r * n * 4)
            for i in range(n):
                y[i] = f(gate[i]) * up[i]

    return run


@kernel("scale")
def scale():
    """a: x, y, n, factor bits."""

    def run(a, begin, end, scratch):
        n, k = a[2], bits_f32(a[3])
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[1] + r * n * 4)
            for i in range(n):
                y[i] = x[i] * k

    return run


@kernel("softcap")
def softcap():
    """a: x, y, n, cap bits."""

    def run(a, begin, end, scratch):
        n, cap = a[2], bits_f32(a[3])
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[1] + r * n * 4)
            for i in range(n):
                y[i] = cap * tanh_f32(x[i] / cap)

    return run

"""Elementwise kernels: formulas of graph/scalar.py as vectors. The result may overwrite a source."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import f32p, kernel
from logitless.graph import scalar
from logitless.graph.ops import pointwise  # noqa: F401  (declares formulas)
from logitless.graph.ops.training import optimizer  # noqa: F401  (declares formulas)


def _gelu(b, x):
    n = x.type.count
    cube = b.fmul(b.fmul(x, x), x)
    inner = b.fmul(m.fill(n, 0.7978845608028654), m.fma(b, m.fill(n, 0.044715), cube, x))
    return b.fmul(b.fmul(m.fill(n, 0.5), x), b.fadd(m.fill(n, 1.0), m.tanh(b, inner)))


OPERATORS = {
    "add": lambda b, x, y: b.fadd(x, y),
    "sub": lambda b, x, y: b.fsub(x, y),
    "mul": lambda b, x, y: b.fmul(x, y),
    "div": lambda b, x, y: b.fdiv(x, y),
    "neg": lambda b, x: b.fsub(m.fill(x.type.count, -0.0), x),
    "abs": lambda b, x: m.call(b, "fabs", x),
    "fma": m.fma,
    "sqrt": lambda b, x: m.call(b, "sqrt", x),
    "exp": m.exp,
    "tanh": m.tanh,
    "sigmoid": lambda b, x: b.fdiv(m.fill(x.type.count, 1.0), m.logistic_inverse(b, x)),
    "times_sigmoid": lambda b, x, z: b.fdiv(x, m.logistic_inverse(b, z)),
    "silu": lambda b, x: b.fdiv(x, m.logistic_inverse(b, x)),
    "gelu": _gelu,
    "less": lambda b, x, y: b.fcmp_ordered("<", x, y),
    "equal": lambda b, x, y: b.fcmp_ordered("==", x, y),
    "where": lambda b, condition, x, y: b.select(condition, x, y),
}


# Trees with a logarithm, a sine or a cosine: rare, so in f64 and one by one.
DOUBLE = {
    **{name: (f"math.{name}({{}})", 8, (0,)) for name in ("log", "log1p", "sin", "cos", "exp")},
    "abs": ("abs({})", 8, (0,)),
    "neg": ("-{}", 6, (7,)),
    "add": ("{} + {}", 4, (4, 5)),
    "less": ("{} < {}", 3, (4, 4)),
    "where": ("({1} if {0} else {2})", 8, (2, 2, 2)),
}


def vectors(key):
    """formula(b, sources, attributes) → vector: a tree of graph/scalar.py as LLVM IR."""
    tree = scalar.tree(key)
    names = (*tree.sources, *tree.attributes)

    def formula(b, x, s):
        values = dict(zip(names, (*x, *s), strict=True))
        table = {name: lambda *args, emit=emit: emit(b, *args) for name, emit in OPERATORS.items()}
        return scalar.fold(tree.result, table, values, lambda value: m.fill(x[0].type.count, value))

    return formula


@kernel("map")
def map_rows(*key):
    """Elementwise op. a: sources, y, n, bits of attributes. A unit is n elements."""
    tree = scalar.tree(":".join(key))
    if tree.operators() <= OPERATORS.keys() | {"number", "name"}:
        return _vector_rows(tree, vectors(":".join(key)))
    return _double_rows(tree)


def _vector_rows(tree, formula):
    each = m.elementwise_rows(len(tree.sources), len(tree.attributes), formula)

    def run(a, begin, end, scratch):
        each(a, begin, end)

    return run


def _double_rows(tree):
    """One source, no attributes."""
    _, text = scalar.text(tree.result, DOUBLE, repr)
    function = njit(forceinline=True)(eval(f"lambda {', '.join(tree.sources)}: {text}", {"math": math}))

    def run(a, begin, end, scratch):
        x, y, n = f32p(a[0]), f32p(a[1]), a[2]
        for i in range(begin * n, end * n):
            y[i] = np.float32(function(np.float64(x[i])))

    return run


@kernel("binary")
def binary(name):
    """Arithmetic; `stride`: bytes between rows of b (0: one row for all, −1: a number)."""
    formula = vectors(name)
    both, one = m.elementwise(2, 0, formula), m.elementwise(1, 1, lambda b, x, s: formula(b, [*x, *s], []))

    def run(a_at, b_at, y_at, n, stride, begin, end, scratch):
        for r in range(begin, end):
            if stride < 0:
                one(a_at + r * n * 4, y_at + r * n * 4, n, f32p(b_at)[0])
            else:
                both(a_at + r * n * 4, b_at + r * stride, y_at + r * n * 4, n)

    return run

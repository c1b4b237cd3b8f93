"""Formulas of elementwise ops against formulas of other authors in float64.

numpy evaluates the tree that kernels are printed from: `test_ops` alone would not find a wrong one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.compiler import kernel_source
from logitless.backends.cpu.lowering.registry import LOWERINGS as CPU_LOWERINGS
from logitless.backends.gpu.lowering import LOWERINGS as GPU_LOWERINGS
from logitless.graph import scalar as s
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import register_all

register_all()


def logistic(x: float) -> float:
    return math.exp(-np.logaddexp(0, -x))


def slope(f: Callable[[float], float], x: float, h: float = 1e-5) -> float:
    """The derivative by a central difference of fourth order."""
    return (8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h)


def gelu(x: float) -> float:
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))  # (1 + tanh z) / 2 is logistic(2z)


def glu_clamped_back(g: float, gate: float, up: float, alpha: float, limit: float, of: str) -> float:
    if of == "gate":
        return g * slope(lambda x: glu_clamped(x, up, alpha, limit), gate)
    return g * slope(lambda x: glu_clamped(gate, x, alpha, limit), up)


def glu_clamped(gate: float, up: float, alpha: float, limit: float) -> float:
    gate = min(gate, limit)
    return gate * logistic(alpha * gate) * (1 + max(-limit, min(up, limit)))


EXPECTED: dict[str, Callable[..., float]] = {
    "add": lambda a, b: math.fsum([a, b]),
    "sub": lambda a, b: math.fsum([a, -b]),
    "mul": lambda a, b: math.prod([a, b]),
    "div": lambda a, b: a * b**-1,
    "scale": lambda x, factor: math.prod([x, factor]),
    "gate": lambda x, factor: x * factor if factor else 0.0,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "tanh": lambda x: 1 - 2 / (math.exp(2 * x) + 1),
    "sin": math.sin,
    "cos": math.cos,
    "sigmoid": logistic,
    "softplus": lambda x: np.logaddexp(0, x),
    "step": lambda x: float(x > 0),
    "sign": np.sign,
    "relu": lambda x: max(x, 0.0),
    "relu_back": lambda g, y: g * (y > 0),
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "elu_back": lambda g, y: g if y > 0 else g * math.exp(math.log1p(y)),
    "clamp": lambda x, low, high: min(max(x, low), high),
    "softcap": lambda x, cap: cap * math.tanh(x / cap),
    "silu": lambda x: x * logistic(x),
    "silu_back": lambda g, x: g * slope(lambda x: x * logistic(x), x),
    "gelu": gelu,
    "gelu_back": lambda g, x: g * slope(gelu, x),
    "glu": lambda gate, up, activation: up * (gelu(gate) if activation == "gelu" else gate * logistic(gate)),
    "glu_clamped": glu_clamped,
    "glu_clamped_back": glu_clamped_back,
    "clip_factor": lambda norm, limit: min(1.0, limit / norm) if limit > 0 else 1.0,
}


@pytest.mark.parametrize("name", sorted(s.FORMULAS))
def test_formula_equals_another_authors_in_float64(name: str) -> None:
    for make in OPS[name].cases:
        sources, attrs = make(np.random.default_rng(3))
        arrays: list[Any] = list(np.broadcast_arrays(*sources))
        expected = [EXPECTED[name](*map(float, row), **attrs) for row in zip(*(a.flat for a in arrays), strict=True)]
        value = OPS[name].reference(*sources, **attrs)
        assert value.dtype == np.float64
        np.testing.assert_allclose(value.reshape(-1), expected, rtol=1e-8, atol=1e-9)


def test_every_formula_has_kernels_on_both_kinds_of_backends() -> None:
    CPUBackend(1).close()  # its lowerings are registered
    importlib.import_module("logitless.backends.gpu.device")  # and those of GPUs
    assert all(name in CPU_LOWERINGS and name in GPU_LOWERINGS for name in s.FORMULAS)


@pytest.mark.parametrize("name", ["relu", "sign", "clamp", "elu", "softplus", "sigmoid", "silu", "gelu"])
def test_formula_of_nan_is_nan(name: str) -> None:
    from logitless.graph.execution.session import Session
    from logitless.graph.tensor import feed

    attrs = {"low": -1.0, "high": 1.0} if name == "clamp" else {}
    x = np.array([[np.nan, -2.0, 0.5]], np.float32)
    backend = CPUBackend(1)
    (value,) = Session([backend]).plan(lambda: [OPS[name](feed("x", (1, 3)), **attrs)]).run({"x": x})
    backend.close()
    assert np.isnan(value).tolist() == [[True, False, False]]


def test_text_keeps_the_order_of_a_tree() -> None:
    forms: dict[str, s.Form] = {
        "add": ("{} + {}", 4, (4, 5)), "sub": ("{} - {}", 4, (4, 5)), "mul": ("{} * {}", 5, (5, 6)),
        "neg": ("-{}", 6, (7,)), "div": ("{} / {}", 5, (5, 6)),
    }  # fmt: skip
    a, b, c = map(s.name, "abc")
    for tree, expected in (
        (a + b + c, "a + b + c"),
        (a + (b + c), "a + (b + c)"),
        (a - (b - c), "a - (b - c)"),
        ((a + b) * c, "(a + b) * c"),
        (a * (b * c), "a * (b * c)"),
        (a / (b / c), "a / (b / c)"),
        (-(0 - a), "-(0.0 - a)"),
        (-(a * b), "-(a * b)"),
        (2 * a, "2.0 * a"),
    ):
        assert s.text(tree, forms, repr) == ([], expected)
    part = a + b
    assert s.text(part * part, forms, repr) == ([("t0", "a + b")], "t0 * t0")


def test_change_of_a_formula_changes_the_digest_of_its_kernels(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = kernel_source._digest.__wrapped__
    before = {module: digest(module) for module in ("elementwise", "rope")}
    for path in ("scalar.py", "ops/elementwise.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((kernel_source.GRAPH_FOLDER / path).read_bytes() + b"\n")
    monkeypatch.setattr(kernel_source, "GRAPH_FOLDER", tmp_path)
    assert digest("elementwise") != before["elementwise"]
    assert digest("rope") == before["rope"]

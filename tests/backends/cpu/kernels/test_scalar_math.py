"""exp, log and tanh of the CPU kernels over every exponent."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from logitless.backends.cpu.kernels.ir import math as emit_math
from logitless.backends.cpu.kernels.ir import scalar_math
from logitless.backends.cpu.kernels.ir.registry import f32p
from tests.helpers.linked_kernel import linked


@functools.cache
def entry_of(name: str) -> Any:
    """Entry of y = f(x) over n values, compiled like any kernel. a: x, y, n."""
    if name.endswith("_exact"):
        function = getattr(scalar_math, name)

        def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
            x, y = f32p(a[0]), f32p(a[1])
            for i in range(a[2]):
                y[i] = function(x[i])

    else:
        vectors = emit_math.elementwise(1, 0, lambda b, x, _: getattr(emit_math, name)(b, x[0]))

        def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
            vectors(a[0], a[1], a[2])

    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3)
    return kind(linked(run))


def compiled(name: str) -> Callable[[np.ndarray], np.ndarray]:
    entry = entry_of(name)

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        y, out = np.empty_like(x), np.zeros(8, np.int64)
        block = np.array([x.ctypes.data, y.ctypes.data, len(x)], np.int64)
        entry(out.ctypes.data, out.ctypes.data, block.ctypes.data, 0, 1, 0)
        return y

    return apply


def ulps(y: np.ndarray, exact: np.ndarray) -> float:
    rounded = exact.astype(np.float32)
    error = np.abs(y.astype(np.float64) - exact) / np.spacing(np.abs(rounded)).astype(np.float64)
    return float(np.where(y == rounded, 0, error).max())


WIDE = np.concatenate((np.linspace(-104, 88.7, 200_000), np.linspace(-1e-3, 1e-3, 1000))).astype(np.float32)
POSITIVE = np.exp2(np.linspace(-148, 127.9, 200_000)).astype(np.float32)


def test_exp() -> None:
    exp = compiled("exp_exact")
    assert ulps(exp(WIDE), np.exp(WIDE.astype(np.float64))) <= 0.5001
    edges = exp(np.array([-np.inf, -1e30, -104.5, 88.8, 1e30, np.inf, 0.0, -0.0]))
    assert edges.tolist() == [0, 0, 0, np.inf, np.inf, np.inf, 1, 1]
    assert np.isnan(exp(np.array([np.nan]))).all()


def test_exp_of_vectors() -> None:
    exp = compiled("exp")
    normal = WIDE[WIDE > -87.3]
    assert ulps(exp(normal), np.exp(normal.astype(np.float64))) <= 1.2
    edges = exp(np.array([-np.inf, -1e30, -87.4, 88.8, 1e30, np.inf, 0.0, -0.0]))
    assert edges.tolist() == [0, 0, 0, np.inf, np.inf, np.inf, 1, 1]
    assert np.isnan(exp(np.array([np.nan]))).all()


def test_exp2_of_vectors() -> None:
    exp2 = compiled("exp2")
    x = np.concatenate((np.linspace(-126, 127, 200_000), np.linspace(-1e-3, 1e-3, 1000))).astype(np.float32)
    assert ulps(exp2(x), np.exp2(x.astype(np.float64))) <= 2.1
    edges = exp2(np.array([-np.inf, -1e30, -126.5, -126.0, -1.0, 0.0, -0.0, 16.0]))
    assert edges.tolist() == [2.0**-126] * 4 + [0.5, 1, 1, 65536]
    payload = np.array([0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(exp2(payload)).all()


def test_logistic_inverse() -> None:
    inverse = compiled("logistic_inverse")
    for low, high, most in ((-10, 80, 4), (-88.3, -10, 21)):
        x = np.concatenate((np.linspace(low, high, 200_000), np.linspace(-1e-3, 1e-3, 1000))).astype(np.float32)
        assert ulps(inverse(x), 1 + np.exp(-x.astype(np.float64))) <= most
    edges = inverse(np.array([-np.inf, -1e38, -89.0, 0.0, -0.0, 17.5, 1e38, np.inf]))
    assert edges.tolist() == [np.inf, np.inf, np.inf, 2, 2, 1, 1, 1]
    assert np.isnan(inverse(np.array([np.nan]))).all()


def test_log() -> None:
    log = compiled("log_exact")
    near = np.linspace(0.5, 2, 100_001).astype(np.float32)
    for x in (POSITIVE, near):
        assert ulps(log(x), np.log(x.astype(np.float64))) <= 0.5001
    assert log(np.array([0.0, -0.0, 1.0, np.inf])).tolist() == [-np.inf, -np.inf, 0, np.inf]
    assert np.isnan(log(np.array([np.nan, -1.0, -np.inf]))).all()


def test_tanh_of_vectors() -> None:
    tanh = compiled("tanh")
    x = np.concatenate((np.linspace(-10, 10, 100_000), np.linspace(-1e-3, 1e-3, 1000), POSITIVE)).astype(np.float32)
    assert ulps(tanh(x), np.tanh(x.astype(np.float64))) <= 3.0
    assert tanh(np.array([-np.inf, np.inf])).tolist() == [-1, 1]
    assert np.isnan(tanh(np.array([np.nan]))).all()

"""Reference evaluation: precision, integers, variables that ops write."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.graph.ops.elementwise import add, silu
from logitless.graph.tensor import const, feed, variable
from logitless.graph.testing.evaluate import evaluate
from tests.helpers.random_graphs import PAIRS, overwritten


def test_evaluate_computes_in_the_requested_precision() -> None:
    x = feed("x", (2,))
    values = np.array([1, 1e-12])
    for dtype, expected in ((np.float64, 1e-12), (np.float32, 0.0)):
        (y,) = evaluate([add(add(x, const(1.0)), const(-1.0))], {"x": values}, {}, dtype)
        assert y.dtype == dtype
        assert y[1] == pytest.approx(expected, rel=1e-3)
        (y,) = evaluate([add(x, x)], {"x": [True, False]}, {}, dtype)  # numbers, whatever type they come in
        assert (y.dtype, y.tolist()) == (dtype, [2.0, 0.0])


def test_evaluate_writes_variables_and_keeps_integers() -> None:
    kv = variable("kv", (3, 2))
    held = np.arange(6.0).reshape(3, 2)
    old, new = silu(kv), overwritten(kv)
    got_new, got_old, ids = evaluate(
        [new, old, feed("i", (2,), "i32")], {"pairs": PAIRS, "i": np.array([1, 2])}, {"kv": held}
    )
    assert got_new is held
    np.testing.assert_array_equal(held, [[0, 1], [0, 1], [4, 5]])
    assert got_old[1, 0] == pytest.approx(2 / (1 + np.exp(-2)))
    assert ids.dtype.kind == "i"

"""Declarations of ops: shape rules, gradients, errors."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.graph.op import OPS, op
from logitless.graph.ops.attention.paged_attention import attention, store_k
from logitless.graph.ops.elementwise import add, glu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import feed, variable
from logitless.graph.testing.evaluate import evaluate


def test_op_declared_twice_is_refused() -> None:
    def silu(x: float) -> float:
        return x

    before = OPS["silu"]
    with pytest.raises(ValueError, match="silu declared twice"):
        op()(silu)
    assert OPS["silu"] is before


def test_op_declaration_defines_shape_and_gradient() -> None:
    try:

        @op()
        def thrice(x: float) -> float:
            return 3 * x

        y = thrice(feed("x", (2, 2)), name="y")
        assert (y.shape, y.dtype, y.name) == ((2, 2), "f32", "y")
        np.testing.assert_array_equal(evaluate([y], {"x": np.ones((2, 2))}, {})[0], 3)
    finally:
        OPS.pop("thrice", None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: add(feed("a", (2, 3)), feed("b", (4,))), r"add: .*f32\[2, 3\].*f32\[4\]"),
        (lambda: glu(feed("a", (2, 3)), feed("b", (2, 4)), activation="silu"), r"glu: .*\[2, 3\].*\[2, 4\]"),
        (lambda: linear(feed("x", (2, 3)), variable("w", (5, 4))), r"linear: .*\[2, 3\].*'w' f32\[5, 4\]"),
        (lambda: get_rows(feed("x", (2, 3)), feed("i", (2,))), r"get_rows: ids must be i32"),
        (lambda: reshape(feed("x", (2, 3)), shape=(4, 2)), r"reshape: cannot become \(4, 2\).*\[2, 3\]"),
        (
            lambda: slice_rows(feed("x", (2, 3)), start=1, stop=3),
            r"slice_rows: needs .*start = 1, stop = 3, N = 2 .*\[2, 3\]",
        ),
        (lambda: rms_norm(feed("x", (2, 3)), feed("w", (2,)), eps=1.0), r"rms_norm: .*\[2, 3\].*\[2\]"),
        (lambda: store_k(variable("k", (1, 2, 8, 16)), feed("x", (3, 2, 4)), feed("c", (3,), "i32")), r"store_k: "),
        (
            lambda: attention(
                feed("q", (3, 2, 8)),
                variable("k", (1, 2, 8, 16)),
                variable("v", (1, 2, 8, 16)),
                *(feed(n, (3,), "i32") for n in "tsp"),
                scale=1.0,
            ),
            r"attention: expected q \(T, H, D\), k \(pages, G, D, 16\).*'k'",
        ),
        (lambda: feed("x", (2, 32), "q8_0"), r"feed 'x': numpy has no q8_0"),
        (lambda: variable("w", (2, 33), "q8_0").nbytes, r"q8_0 packs 32 elements.*\(2, 33\)"),
    ],
)
def test_wrong_shapes_fail_where_the_graph_is_built(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]

"""Roofline costs of nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from logitless.graph.execution.cost import Cost, cost
from logitless.graph.ops.attention.paged_attention import attention, store_k, store_v
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.fused import linear_parts
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed, variable

POS, SLOT = np.array([7, 8, 20], np.int32), np.array([1, 1, 0], np.int32)


def attended(**attrs: int) -> Tensor:
    q = feed("q", (3, 4, 8))
    keys, values = variable("k", (9, 2, 8, 16), "f16"), variable("v", (9, 2, 16, 8), "f32")
    numbers = [feed(name, (3,), "i32") for name in ("slot", "pos")]
    return attention(q, keys, values, variable("tables", (2, 4), "i32"), *numbers, scale=1.0, **attrs)


def weight(dtype: str, n: int, k: int) -> Tensor:
    return variable(f"{dtype}.{n}", (n, k), dtype, constant=True)


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (lambda: add(feed("x", (3, 5)), feed("y", (3, 5))), Cost(3 * 60)),
        (lambda: linear(feed("x", (3, 64)), weight("q8_0", 10, 64)), Cost(768 + 680 + 120, 3 * 640)),
        (lambda: linear(feed("x", (3, 64)), weight("f16", 10, 64)), Cost(768 + 1280 + 120, 0, 3 * 640)),
        (
            lambda: linear_parts(feed("x", (3, 64)), weight("q8_0", 10, 64), weight("q4_0", 6, 64)),
            Cost(768 + 680 + 216 + 192, 3 * 16 * 64),
        ),
        (lambda: get_rows(weight("q8_0", 1000, 64), feed("ids", (3,), "i32")), Cost(3 * 68 + 12 + 768)),
        (
            lambda: store_k(variable("k", (9, 2, 8, 16), "f16"), feed("x", (3, 2, 8)), feed("cells", (3,), "i32")),
            Cost(192 + 12 + 96),
        ),
        (
            lambda: store_v(variable("v", (9, 2, 16, 8), "f32"), feed("x", (3, 2, 8)), feed("cells", (3,), "i32")),
            Cost(192 + 12 + 192),
        ),
        (attended, Cost(2 * 384 + (9 + 21) * 16 * (2 + 4), 0, 2 * 32 * (8 + 9 + 21))),
        (lambda: attended(window=5), Cost(2 * 384 + (6 + 5) * 16 * (2 + 4), 0, 2 * 32 * 15)),
    ],
)
def test_cost_of_a_node(node: Callable[[], Tensor], wanted: Cost) -> None:
    assert cost(node(), {"pos": POS, "slot": SLOT}) == wanted

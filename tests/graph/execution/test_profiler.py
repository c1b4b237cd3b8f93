"""What nodes cost, against numbers worked by hand, and plans with a clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.cost import Cost, cost
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import attention, store_k, store_v
from logitless.graph.ops.elementwise import add, glu
from logitless.graph.ops.fused import linear_parts
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import encode
from tests.helpers.numpy_backend import NumpyBackend

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
def test_cost(node: Callable[[], Tensor], wanted: Cost) -> None:
    assert cost(node(), {"pos": POS, "slot": SLOT}) == wanted


@pytest.mark.parametrize(
    ("make", "dtype"), [(lambda: CPUBackend(1), "q8_0"), (lambda: CPUBackend(2), "q8_0"), (NumpyBackend, "f32")]
)
def test_a_clock_between_nodes_changes_no_bit(make: Callable[[], Backend], dtype: str) -> None:
    rng, backend = np.random.default_rng(3), make()
    session = Session([backend])
    raw = encode(rng.normal(size=(64, 64)), dtype)
    w = session.define("w", (64, 64), dtype, lambda: raw, constant=True)
    seen: list[tuple[list[str], list[float], float]] = []

    def build() -> list[Tensor]:
        x = feed("x", (70, 64))
        y = linear(x, w)
        return [add(glu(y, linear(y, w), activation="silu"), x)]

    feeds = {"x": rng.normal(size=(70, 64)).astype(np.float32)}
    (plain,) = session.plan(build).run(feeds)
    session.observer = lambda nodes, seconds, given: seen.append(
        ([t.op for t in nodes], list(seconds), float(given["x"][0, 0]))
    )
    plan = session.plan(build)
    for _ in range(2):
        (timed,) = plan.run(feeds)
        assert timed.tobytes() == plain.tobytes()
    session.close()
    for ops, seconds, first in seen:
        assert len(ops) == len(seconds)
        assert ops[-1] == "add"
        assert all(s >= 0 for s in seconds)
        assert sum(seconds) > 0
        assert first == feeds["x"][0, 0]
    assert len(seen) == 2

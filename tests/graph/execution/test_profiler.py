"""Profiled plans time every node and keep the bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, glu
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import encode
from tests.helpers.numpy_backend import NumpyBackend

POS, SLOT = np.array([7, 8, 20], np.int32), np.array([1, 1, 0], np.int32)


@pytest.mark.parametrize(
    ("make", "dtype"), [(lambda: CPUBackend(1), "q8_0"), (lambda: CPUBackend(2), "q8_0"), (NumpyBackend, "f32")]
)
def test_profiled_plan_keeps_the_bits(make: Callable[[], Backend], dtype: str) -> None:
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

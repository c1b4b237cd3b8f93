"""Tasks of GEMMs with many rows."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.lowering import gemm
from logitless.graph.execution.session import Session
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed

M, N, K = 300, 320, 1400


def product(monkeypatch: pytest.MonkeyPatch, unit_macs: int) -> tuple[np.ndarray, int]:
    """A product with units of so many multiply-adds, and the number of its tasks."""
    monkeypatch.setattr(gemm, "UNIT_MACS", unit_macs)
    backend = CPUBackend(2)
    session = Session([backend])

    def build() -> list[Tensor]:
        return [linear(feed("x", (M, K)), feed("w", (N, K)))]

    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=shape).astype(np.float32) for name, shape in (("x", (M, K)), ("w", (N, K)))}
    tasks = gemm._gemm("m", "n", build()[0], K, lambda t: 0)
    (result,) = session.plan(build).run(feeds)
    session.close()
    backend.close()
    np.testing.assert_allclose(result, feeds["x"].astype(np.float64) @ feeds["w"].T, rtol=1e-4, atol=1e-3)
    return result, len(tasks)


def test_long_units_are_summed_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, n_whole = product(monkeypatch, 1 << 40)
    parts, n_parts = product(monkeypatch, 1)
    assert n_whole == 1
    assert n_parts > 2
    np.testing.assert_array_equal(parts, whole)


def test_a_unit_of_an_encoder_takes_milliseconds() -> None:
    """4,096 patches through the largest matrix of SigLIP: a decode step waits for no more than a unit."""
    t = linear(feed("x", (4096, 4304)), feed("w", (1152, 4304)))
    for task in gemm._gemm("m", "n", t, 4304, lambda t: 0):
        rows, columns = gemm.blocks("m", 4096, 1152, 4304)
        assert rows * columns * (task.args[-1] - task.args[-2]) <= gemm.UNIT_MACS

"""L-BFGS against functions whose minima are known."""

from __future__ import annotations

import numpy as np

from examples.lbfgs import minimize


def test_lbfgs_finds_known_minima() -> None:

    def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = x[:-1], x[1:]
        g = np.zeros_like(x)
        g[:-1] = -400 * a * (b - a * a) - 2 * (1 - a)
        g[1:] += 200 * (b - a * a)
        return float((100 * (b - a * a) ** 2 + (1 - a) ** 2).sum()), g

    found = minimize(rosenbrock, np.full(6, -1.0), n_iter=200)
    np.testing.assert_allclose(found.x, 1, atol=1e-3)
    assert found.reason == "the gradient is small"
    assert found.losses == sorted(found.losses, reverse=True)
    scales = np.logspace(0, 3, 8)
    bowl = minimize(lambda x: (float((scales * (x - 2) ** 2).sum()), 2 * scales * (x - 2)), np.zeros(8))
    np.testing.assert_allclose(bowl.x, 2, atol=1e-3)
    parts = minimize(rosenbrock, np.full(6, -1.0), n_iter=7)
    rest = minimize(rosenbrock, parts.x, n_iter=8, pairs=parts.pairs)
    assert [*parts.losses, *rest.losses] == found.losses[:15]
    assert minimize(lambda x: (1.0, np.ones(2)), np.zeros(2)).reason == "the line search found nothing better"

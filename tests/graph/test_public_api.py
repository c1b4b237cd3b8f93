"""Public graph API: docstring examples, every device, errors of one line."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest

from logitless import graph
from logitless.backends.errors import DeviceError
from logitless.backends.registry import open_backends
from logitless.graph.backend import Backend
from tests.helpers.numpy_backend import NumpyBackend

RNG = np.random.default_rng(3)
X, TARGET = RNG.normal(size=(16, 3)), RNG.normal(size=(2, 3))


def test_the_docstring_runs() -> None:
    failed, tried = doctest.testmod(graph)
    assert (failed, tried > 5) == (0, True)


def test_every_name_is_there() -> None:
    assert set(graph.__all__) <= set(dir(graph))
    assert all(getattr(graph, name) is not None for name in graph.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = graph.nothing


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "vulkan:0"])
def test_regression_finds_its_weights(device: str, open_device: Callable[[str], Backend]) -> None:
    """Plain gradient descent on a variable: y = x · wᵀ, from rows of y."""
    backends = list({b.name: b for b in (open_device(device), open_device("cpu"))}.values())
    session = graph.Session(backends)
    x, y, w = graph.feed("x", (16, 3)), graph.feed("y", (16, 2)), session.define("w", (2, 3))
    loss = graph.scale(graph.sum_to(graph.square_error(graph.linear(x, w), y), shape=()), factor=1 / 16)
    gradient = graph.backward(loss, [w])[w]
    losses = []
    for _ in range(200):
        value, slope = session.run("step", lambda: [loss, gradient], {"x": X, "y": X @ TARGET.T})
        session.write("w", session.read("w") - np.float32(0.3) * slope)
        losses.append(float(value))
    assert losses[-1] < 1e-6 < losses[0]
    np.testing.assert_allclose(session.read("w"), TARGET, atol=1e-3)
    session.release()


def test_devices_compute_what_numpy_does() -> None:
    x, w = graph.feed("x", (16, 3)), graph.feed("w", (2, 3))
    logits = graph.softmax(graph.gelu(graph.linear(x, w)))
    feeds = {"x": X, "w": TARGET}
    (expected,) = graph.evaluate([logits], feeds)
    with graph.Session(open_backends(["cpu"])) as session:
        (value,) = session.compute([logits], feeds)
    assert (value.shape, value.dtype) == ((16, 2), np.float32)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_errors_name_op_feed_and_device() -> None:
    x, w = graph.feed("x", (16, 3)), graph.feed("w", (2, 4))
    with pytest.raises(ValueError, match=r"^linear: rows of x and of w differ in length \(got <feed 'x' f32\[16, 3\]>"):
        graph.linear(x, w)
    with graph.Session([NumpyBackend()]) as session:
        with pytest.raises(ValueError, match=r"^feed 'x' is missing$"):
            session.compute([graph.silu(x)])
        with pytest.raises(ValueError, match=r"^feed 'x': expected shape \(16, 3\), got \(3,\)$"):
            session.compute([graph.silu(x)], {"x": np.ones(3)})
    with pytest.raises(ValueError, match=r"^the loss must be a scalar, not <silu f32\[16, 3\]>$"):
        graph.backward(graph.silu(x), [x])
    with pytest.raises(DeviceError, match=r"^device 'abacus' is not available"):
        open_backends(["abacus"])

"""Public graph API: docstring examples, every device, errors of one line."""

from __future__ import annotations

import doctest
import inspect
import pydoc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from logitless import graph
from logitless.backends.errors import DeviceError
from logitless.backends.registry import open_backends
from logitless.graph.backend import Backend
from logitless.graph.op import OPS
from logitless.graph.ops.pointwise import argmax
from logitless.graph.testing.conformance import Guarded, register_all
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
    with pytest.raises(ValueError, match=r"^linear: expected x \(T, K\), w \(N, K\) \(got <feed 'x' f32\[16, 3\]>"):
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


def one_line(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r".") as refusal:
        call()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "vulkan:0"])
def test_indices_out_of_range_are_refused_when_they_are_fed(device: str, open_device: Callable[[str], Backend]) -> None:
    session = graph.Session(list({b.name: b for b in (open_device(device), open_device("cpu"))}.values()))
    table, ids, logits = graph.feed("table", (7, 3)), graph.feed("ids", (3,), "i32"), graph.feed("x", (3, 5))
    rows, loss = graph.get_rows(table, ids), graph.cross_entropy(logits, ids)
    feeds = {"table": np.ones((7, 3)), "x": np.ones((3, 5))}
    for bad in (2**30, -1, 7):
        wrong = {**feeds, "ids": [0, bad, 1]}
        assert f"the index {bad} of get_rows" in one_line(partial(session.compute, [rows], wrong))
    assert "the index 5 of cross_entropy" in one_line(lambda: session.compute([loss], {**feeds, "ids": [0, 5, 1]}))
    assert "beyond i32" in one_line(lambda: session.compute([rows], {**feeds, "ids": [0, 2**32, 1]}))
    # the ends of the range, and a target that is ignored
    assert session.compute([rows], {**feeds, "ids": [0, 6, 1]})[0].shape == (3, 3)
    np.testing.assert_allclose(session.compute([loss], {**feeds, "ids": [-1, 0, 4]})[0], np.log([1, 5, 5]), 1e-6)
    # in variables and computed ones
    kept = session.define("kept", (3,), "i32")
    session.compute([graph.get_rows(table, kept)], feeds)
    assert "variable 'kept': the index 7" in one_line(lambda: session.write("kept", np.array([7], np.int32), 8))
    session.write("kept", np.array([6], np.int32), 8)
    assert "argmax" in one_line(
        lambda: session.compute([graph.get_rows(table, argmax(graph.feed("y", (3, 8))))], feeds)
    )
    nan = {**feeds, "y": np.full((3, 7), np.nan)}
    assert session.compute([graph.get_rows(table, argmax(graph.feed("y", (3, 7))))], nan)[0].shape == (3, 3)
    with pytest.raises(ValueError, match="the index -1 of get_rows"):
        graph.evaluate([rows], {**feeds, "ids": np.array([0, -1, 1])})
    session.release()


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "vulkan:0"])
def test_closed_session_refuses(device: str, open_device: Callable[[str], Backend]) -> None:
    session, x = graph.Session([Guarded(open_device(device))]), graph.feed("x", (2, 3))  # whose close does nothing
    session.define("w", (2, 3))
    plan = session.plan(lambda: [graph.silu(x)])
    session.release()
    assert one_line(lambda: plan.run({"x": np.ones((2, 3))})) == "the session has released its memory"
    plan = session.plan(lambda: [graph.silu(x)])
    assert plan.run({"x": np.zeros((2, 3))})[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    session.close()
    calls = (
        lambda: session.compute([graph.silu(x)], {"x": np.ones((2, 3))}),
        lambda: plan.run({"x": np.ones((2, 3))}),
        lambda: session.define("v", (2,)),
        lambda: session.read("w"),
        lambda: session.write("w", np.ones((2, 3), np.float32)),
    )
    assert {one_line(call) for call in calls} == {"the session is closed"}


def test_session_on_a_closed_device_refuses() -> None:
    backend, x = NumpyBackend("abacus"), graph.feed("x", (2, 3))
    session = graph.Session([backend])
    graph.Session([backend]).close()
    assert one_line(lambda: session.compute([graph.silu(x)], {"x": np.ones((2, 3))})) == "device abacus is closed"


def test_wrong_calls_name_op_and_cure() -> None:
    x, i, session = graph.feed("x", (2, 3)), graph.feed("i", (2,), "i32"), graph.Session([NumpyBackend()])
    rows = {
        "softmax: has no attribute 'axis' (its attributes: none)": lambda: graph.softmax(x, axis=0),
        "silu: takes x, not 2 tensors": lambda: graph.silu(x, x),
        "add: b must be a tensor, not float 1.0: const(…) makes one of a number": lambda: graph.add(x, 1.0),
        "add: a must be f32 (got <feed 'i' i32[2]>, <feed 'i' i32[2]>)": lambda: graph.add(i, i),
        "scale: the attribute 'factor' is missing": lambda: graph.scale(x),
        "scale: factor must be float, not str '2'": lambda: graph.scale(x, factor="2"),
        "sum_to: needs broadcasts(shape, x.shape); shape = (5,) (got <feed 'x' f32[2, 3]>)": (
            lambda: graph.sum_to(x, shape=(5,))
        ),
        "feed 'e': a shape is a tuple of lengths from 1 on, not (0, 3)": lambda: graph.feed("e", (0, 3)),
        "variable 'w' is f32, its source gives float64": lambda: (
            session.define("w", (2,), source=lambda: np.ones(2)),  # type: ignore[arg-type, return-value]
            session.read("w"),
        ),
        "feeds must be arrays by name, not list": lambda: session.compute([graph.silu(x)], [1]),  # type: ignore[arg-type]
        "rows of 2 fetches wanted, there are 1": (
            lambda: session.plan(lambda: [graph.silu(x)]).run({"x": np.ones((2, 3))}, [1, 1])
        ),
        "a session needs devices as open_backends gives them, not ['cpu']": lambda: graph.Session(["cpu"]),  # type: ignore[list-item]
        "build must be a function that returns the fetches, not <feed 'x' f32[2, 3]>": lambda: session.plan(x),  # type: ignore[arg-type]
        "fetches must be a list of tensors, not <feed 'x' f32[2, 3]>": lambda: session.compute(x),  # type: ignore[arg-type]
    }
    assert {one_line(call) for call in rows.values()} == set(rows)
    session.define("v", (2,), source=lambda: np.array([1.5, 2.5], np.float32))  # type: ignore[arg-type, return-value]
    assert session.read("v").tolist() == [1.5, 2.5]
    assert graph.scale(x, factor=np.float32(2)).attrs == {"factor": 2.0}  # numpy's numbers are numbers


def test_ops_have_help_and_a_signature() -> None:
    register_all()
    for op in OPS.values():
        assert op.reference.__doc__, op.name
        assert op.name in pydoc.render_doc(op)
    text = pydoc.plain(pydoc.render_doc(graph.rms_norm))
    assert "rms_norm(x, w, *, eps: float)" in text
    assert "Sources: x f32 (…, K); w f32 (K)|()." in text
    assert list(inspect.signature(graph.rms_norm).parameters) == ["x", "w", "eps", "name"]

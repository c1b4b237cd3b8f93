"""Optimizer steps in the graph against closed forms; results do not depend on threads or batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul, scale, sub, sum_to
from logitless.graph.ops.linear import linear
from logitless.graph.ops.pointwise import log
from logitless.graph.ops.training.loss import mean, softmax, square_error
from logitless.graph.ops.training.optimizer import (
    accumulate,
    adamw_params,
    adamw_step,
    clear,
    clip_factor,
    global_norm,
    sgd_params,
    sgd_step,
)
from logitless.graph.tensor import Tensor, const, feed
from logitless.graph.testing.evaluate import evaluate

RATE, DECAY = 0.1, 0.2


def one_step(decays: bool, optimizer: str, g: list[float]) -> Any:
    """Weights of 1, 2, 3 after a first step."""
    backend = CPUBackend(1)
    session = Session([backend])
    w, m, v = (session.define(name, (3,)) for name in "wmv")
    session.write("w", np.array([1, 2, 3], np.float32))
    gradient, one = feed("g", (3,)), const(1.0)
    if optimizer == "adamw":
        step = adamw_step(w, m, v, gradient, feed("p", (9,)), one, decays=decays)
        params = adamw_params(1, RATE, decay=DECAY)
    else:
        step, params = sgd_step(w, gradient, feed("p", (2,)), one, decays=decays), sgd_params(RATE, decay=DECAY)
    (after,) = session.plan(lambda: [step]).run({"g": np.array(g, np.float32), "p": params})
    session.close()
    backend.close()
    return after


@pytest.mark.parametrize("decays", [True, False])
def test_first_optimizer_steps_match_the_closed_form(decays: bool) -> None:
    """The first step of Adam moves by the rate against the gradient's sign, whatever its size;
    decay is apart.
    """
    keep = 1 - RATE * DECAY if decays else 1.0
    expected = [1 * keep - RATE, 2 * keep + RATE, 3 * keep]
    np.testing.assert_allclose(one_step(decays, "adamw", [1e-3, -500.0, 0.0]), expected, rtol=2e-5)
    expected = [1 * keep - RATE * 0.5, 2 * keep + RATE * 4, 3 * keep]
    np.testing.assert_allclose(one_step(decays, "sgd", [0.5, -4.0, 0.0]), expected, rtol=1e-6)


def test_optimizer_step_0_is_refused() -> None:
    with pytest.raises(ValueError, match="step 0"):
        adamw_params(0, RATE)


def product(threads: int, optimizer: str, n_steps: int) -> tuple[list[float], bytes]:
    """Losses and weights of fitting c ≈ a · bᵀ; the rate is fed anew at every step of one plan."""
    backend, rng = CPUBackend(threads), np.random.default_rng(4)
    session = Session([backend])
    shapes = {"a": (40, 5), "b": (70, 5)}
    weights = {name: session.define(name, shape) for name, shape in shapes.items()}
    moments = {name: [session.define(f"{k}.{name}", shape) for k in "mv"] for name, shape in shapes.items()}
    for name, shape in shapes.items():
        session.write(name, rng.normal(size=shape).astype(np.float32) * 0.3)
    c = rng.normal(size=(40, 5)) @ rng.normal(size=(5, 70)) * 0.3

    def build() -> list[Tensor]:
        loss = mean(square_error(linear(weights["a"], weights["b"]), feed("c", c.shape)))
        gradients = backward(loss, list(weights.values()))
        factor = clip_factor(global_norm(list(gradients.values())), feed("clip", ()))
        steps = []
        for name, w in weights.items():
            if optimizer == "adamw":
                steps.append(adamw_step(w, *moments[name], gradients[w], feeds["p"], factor))
            else:
                steps.append(sgd_step(w, gradients[w], feeds["p"], factor))
        return [loss, *steps]

    feeds = {"p": feed("p", (9 if optimizer == "adamw" else 2,))}
    losses = []
    for i in range(n_steps):
        rate = 0.05 * 0.5 ** (i / n_steps * 3)
        params = adamw_params(i + 1, rate) if optimizer == "adamw" else sgd_params(rate)
        loss, *_ = session.run(
            "step", build, {"c": c, "p": params, "clip": np.array(0.0 if optimizer == "adamw" else 9.0)}
        )
        losses.append(float(loss))
    after = b"".join(session.read(name).tobytes() for name in shapes)
    assert session.n_plans_built == 1
    session.close()
    backend.close()
    return losses, after


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_is_deterministic_over_threads(optimizer: str) -> None:
    losses, after = product(1, optimizer, 400)
    assert losses[-1] < 5e-3 * losses[0]
    assert product(2, optimizer, 400) == (losses, after)


@pytest.mark.parametrize(("optimizer", "n", "bound"), [("adamw", 600, 1e-2), ("sgd", 8000, 5e-2)])
def test_optimizer_fits_a_line(optimizer: str, n: int, bound: float) -> None:
    """y = 1.2 x + 3.4 with noise, 201 points in [-100, 100], as llama.cpp's test-opt has it."""
    rng, backend = np.random.default_rng(1234567), CPUBackend(1)
    x = np.arange(-100, 101, dtype=np.float32)[:, None]
    y = (1.2 * x + 3.4 + rng.normal(0, 0.1, x.shape)).astype(np.float32)
    session = Session([backend])
    a, b = session.define("a", (1, 1)), session.define("b", (1,))
    session.write("a", np.ones((1, 1), np.float32))
    session.write("b", np.full(1, 3.0, np.float32))
    moments = [[session.define(f"{k}.{w.name}", w.shape) for k in "mv"] for w in (a, b)]

    def build() -> list[Tensor]:
        params, one = feed("p", (9 if optimizer == "adamw" else 2,)), const(1.0)
        loss = mean(square_error(add(linear(feed("x", x.shape), a), b), feed("y", y.shape)))
        g = backward(loss, [a, b])
        if optimizer == "adamw":
            return [adamw_step(w, *m, g[w], params, one) for w, m in zip((a, b), moments, strict=True)]
        return [sgd_step(w, g[w], params, one) for w in (a, b)]

    best = np.polyfit(x[:, 0].astype(np.float64), y[:, 0], 1)
    for i in range(n):
        # the loss is 3,400 times as steep along the slope as along the rest, and SGD can go no
        # faster than that allows
        params = adamw_params(i + 1, 0.05 * 0.99**i) if optimizer == "adamw" else sgd_params(2.5e-4)
        session.run("step", build, {"x": x, "y": y, "p": params}, [0, 0])
    fitted = float(session.read("a")[0, 0]), float(session.read("b")[0])
    assert fitted == pytest.approx((1.2, 3.4), abs=bound)
    assert fitted == pytest.approx(best, abs=bound)
    session.close()
    backend.close()


def test_accumulated_batches_equal_one_big_batch() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)

    def gradient(session: Session, w: Tensor, rows: int) -> Tensor:
        losses = square_error(linear(feed("x", (rows, 4)), w), feed("y", (rows, 3)))
        return backward(scale(sum_to(losses, shape=()), factor=1 / 6), [w])[w]

    def session_with_weights() -> tuple[Session, Tensor, Tensor]:
        session = Session([CPUBackend(1)])
        w, total = session.define("w", (3, 4)), session.define("total", (3, 4))
        session.write("w", np.ones((3, 4), np.float32))
        return session, w, total

    session, w, total = session_with_weights()
    one = const(1.0)
    (whole,) = session.plan(lambda: [sgd_step(w, gradient(session, w, 6), feed("p", (2,)), one)]).run(
        {"x": x, "y": y, "p": sgd_params(0.1)}
    )
    session.close()
    session, w, total = session_with_weights()

    def micro(last: bool) -> Callable[[], list[Tensor]]:
        def build() -> list[Tensor]:
            held = accumulate(total, gradient(session, w, 2))
            return [sgd_step(w, held, feed("p", (2,)), one), clear(held)] if last else [held]

        return build

    for start in (0, 2, 4):
        values = {"x": x[start : start + 2], "y": y[start : start + 2]}
        out = session.run(start == 4, micro(start == 4), {**values, "p": sgd_params(0.1)} if start == 4 else values)
    np.testing.assert_allclose(out[0], whole, rtol=1e-5)
    assert not session.read("total").any()
    session.close()


@pytest.mark.parametrize(("norm", "limit"), [(10.0, 1.0), (0.1, 1.0), (10.0, 0.0)])
def test_clipping_bounds_the_norm_of_all_gradients(norm: float, limit: float) -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=size) for name, size in (("g.0", 5000), ("g.1", 77))}
    length = np.sqrt(sum((v**2).sum() for v in values.values()))
    values = {name: (v / length * norm).astype(np.float32) for name, v in values.items()}
    gradients = [feed(name, v.shape) for name, v in values.items()]
    factor = clip_factor(global_norm(gradients), feed("limit", ()))
    session = Session([CPUBackend(1)])
    clipped = session.plan(lambda: [mul(g, factor) for g in gradients]).run({**values, "limit": np.array(limit)})
    after = np.sqrt(sum(float((c.astype(np.float64) ** 2).sum()) for c in clipped))
    assert after == pytest.approx(min(norm, limit) if limit > 0 else norm, rel=1e-5)
    session.close()


def test_softmax_gradient_through_log() -> None:
    """Σ ln(softmax · (1 − eps) + eps): the sum of a softmax itself is constant and would prove
    nothing.
    """
    x, eps, h = feed("x", (3, 9)), 0.1, 1e-6
    loss = sum_to(log(add(scale(softmax(x), factor=1 - eps), const(eps))), shape=())
    rng = np.random.default_rng(2)
    value, direction = rng.normal(size=x.shape) * 3, rng.normal(size=x.shape)
    (slope,) = evaluate([backward(loss, [x])[x]], {"x": value}, {})
    ahead, behind = (evaluate([loss], {"x": value + s * h * direction}, {})[0] for s in (1, -1))
    assert (slope * direction).sum() == pytest.approx((ahead - behind) / (2 * h), rel=1e-6)
    plain = sum_to(softmax(x), shape=())
    assert np.abs(evaluate([backward(plain, [x])[x]], {"x": value}, {})[0]).max() < 1e-15


def test_squared_difference_gradient() -> None:
    """Gradients of Σ (a − b)², b broadcast: 2 · (a − b), summed over the broadcast axes."""
    a, b = feed("a", (4, 3)), feed("b", (3,))
    d = sub(a, b)
    gradients = backward(sum_to(mul(d, d), shape=()), [a, b])
    rng = np.random.default_rng(3)
    values = {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=3)}
    at_a, at_b = evaluate([gradients[a], gradients[b]], values, {})
    np.testing.assert_allclose(at_a, 2 * (values["a"] - values["b"]))
    np.testing.assert_allclose(at_b, -2 * (values["a"] - values["b"]).sum(0))

"""Gradient rules of all ops against central differences of the reference, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logitless.graph.autodiff import backward
from logitless.graph.op import OPS, Variable, Weight
from logitless.graph.ops.elementwise import add, mul, scale, silu, sum_to
from logitless.graph.ops.pointwise import cast
from logitless.graph.tensor import Tensor, const, feed, variable
from logitless.graph.testing.conformance import register_all
from logitless.graph.testing.evaluate import evaluate

register_all()
SINKS, POS = 6, 5  # indices of attention's sinks and positions; with sinks or two positions it has no gradient
STEP = 1e-6
# constant wherever they are smooth, or detached: a gradient of zero is no node
FLAT = {"argmax", "detached", "sign", "step"}


def arrays_of(name: str, case: int) -> tuple[list[Any], dict[str, Any]]:
    sources, attrs = OPS[name].cases[case](np.random.default_rng([1, case]))
    return [s.array if isinstance(s, Weight | Variable) else np.asarray(s) for s in sources], attrs


CASES = [
    (name, i)
    for name in sorted(OPS)
    if OPS[name].vjp_rule
    for i in range(len(OPS[name].cases))
    if name != "log_probs" or (arrays_of(name, i)[0][2] >= 0).all()
    if name != "latent_attention" or len(arrays_of(name, i)[0]) < SINKS
    if name != "attention" or (len(arrays := arrays_of(name, i)[0]) == SINKS and arrays[POS].ndim == 1)
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{i}" for name, i in CASES])
def test_gradient_matches_the_slope(name: str, case: int) -> None:
    """⟨g, J v⟩ along one random direction per source."""
    arrays, attrs = arrays_of(name, case)
    feeds: dict[str, Any] = {f"x{i}": a for i, a in enumerate(arrays)}
    leaves = [feed(n, a.shape, "f32" if a.dtype.kind == "f" else "i32") for n, a in feeds.items()]
    y = OPS[name](*leaves, **attrs)
    rng = np.random.default_rng([2, case])
    feeds["g"] = rng.normal(size=y.shape)
    if y.dtype == "i32":  # ids: no gradient passes
        assert OPS[name].vjp_rule(feed("g", y.shape), y, *leaves, **attrs) == (None,) * len(leaves)  # type: ignore[misc]
        return
    y = cast(y, dtype="f32") if y.dtype == "f16" else y
    loss = sum_to(mul(y, feed("g", y.shape)), shape=())
    gradients = backward(loss, [leaf for leaf in leaves if leaf.dtype == "f32"])
    assert bool(gradients) == (name not in FLAT)
    for leaf, gradient in gradients.items():
        direction = rng.normal(size=leaf.shape)
        (slope,) = evaluate([gradient], feeds, {})
        ahead, behind = (
            evaluate([loss], {**feeds, leaf.name: feeds[leaf.name] + sign * STEP * direction}, {})[0]
            for sign in (1, -1)
        )
        assert slope.shape == leaf.shape
        np.testing.assert_allclose((slope * direction).sum(), (ahead - behind) / (2 * STEP), rtol=1e-6, atol=1e-7)


def x_and_loss(shape: tuple[int, ...] = (3, 4)) -> tuple[Tensor, Tensor]:
    x = feed("x", shape)
    return x, sum_to(mul(silu(x), x), shape=())


def test_parameter_with_two_readers_gets_the_sum() -> None:
    x, loss = x_and_loss()
    value = np.random.default_rng(0).normal(size=x.shape)
    (got,) = evaluate([backward(loss, [x])[x]], {"x": value}, {})
    s = 1 / (1 + np.exp(-value))
    np.testing.assert_allclose(got, 2 * value * s + value**2 * s * (1 - s))


def test_inner_nodes_can_be_parameters() -> None:
    x = feed("x", (2,))
    hidden = scale(x, factor=3.0)
    loss = sum_to(mul(hidden, hidden), shape=())
    gradients = backward(loss, [hidden, x])
    at_hidden, at_x = evaluate([gradients[hidden], gradients[x]], {"x": np.array([1.0, 2.0])}, {})
    np.testing.assert_allclose(at_hidden, [6, 12])
    np.testing.assert_allclose(at_x, [18, 36])


def test_parameter_without_influence_has_no_gradient() -> None:
    x, loss = x_and_loss()
    other = variable("w", (5,))
    assert set(backward(loss, [x, other])) == {x}


def test_gradient_of_the_loss_by_itself_is_one() -> None:
    x = feed("x", ())
    assert evaluate([backward(x, [x])[x]], {"x": np.array(4.0)}, {})[0] == 1.0


def test_loss_that_is_no_scalar_is_refused() -> None:
    x = feed("x", (2,))
    with pytest.raises(ValueError, match=r"scalar.*silu.*\[2\]"):
        backward(silu(x), [x])


def test_op_without_a_gradient_rule_is_named() -> None:
    x = feed("x", (2, 3))
    y = OPS["rms_norm_back"](x, x, eps=1e-5)
    with pytest.raises(ValueError, match=r"rms_norm_back.*no gradient"):
        backward(sum_to(y, shape=()), [x])
    # nothing to go through it for
    assert backward(sum_to(add(y, const(0.0)), shape=()), [feed("z", ())]) == {}


def test_gradient_of_latent_attention_without_an_f32_cache_names_the_op() -> None:
    q, tables, ids = feed("q", (3, 4, 32)), feed("tables", (1, 2), "i32"), feed("ids", (3,), "i32")
    y = OPS["latent_attention"](q, variable("k", (2, 1, 32, 16), "f16"), tables, ids, ids, scale=1.0)
    with pytest.raises(ValueError, match=r"^latent_attention: there is no gradient with a cache .*'k' f16"):
        backward(sum_to(y, shape=()), [q])


def test_gradient_of_a_wrong_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPS["silu"], "vjp_rule", lambda g, y, x: (sum_to(g, shape=()),))
    x, loss = x_and_loss()
    with pytest.raises(ValueError, match=r"gradient of silu .*shape \(\)"):
        backward(loss, [x])


def test_backward_is_linear_in_the_graph() -> None:
    """Ten thousand nodes, each read twice: quadratic or recursive work would not end."""
    x = y = feed("x", (1,))
    for _ in range(5000):
        y = add(y, scale(y, factor=0.5))
    gradient = backward(sum_to(y, shape=()), [x])[x]
    assert gradient.shape == (1,)

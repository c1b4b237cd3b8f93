"""Wrong sources, attributes and feeds of every op: one line, or the numpy reference's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.graph.backend import Backend
from logitless.graph.dtype import DTYPES
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS, Variable, Weight
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import difference, register_all
from logitless.graph.testing.evaluate import evaluate

register_all()
# writing ops have variables of their own in test_session; fused ones are made by backends alone
NAMES = sorted(
    name for name, op in OPS.items() if op.cases and not op.writes and "fused" not in op.reference.__module__
)
WRONG_VALUES: list[Any] = [-1, 0, 2**31, 1e300, float("nan"), None, "silu", (0,), (3, -1), (2, 3, 4), [], True, 7]
WRONG_INDICES = [-(2**31), -5, -1, 0, 1, 3, 50, 2**30, 2**31 - 1]


@pytest.fixture(scope="module", params=["cpu", "opencl:0", "vulkan:0"])
def backends(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> list[Backend]:
    return list({b.name: b for b in (open_device(request.param), open_device("cpu"))}.values())


def leaf(name: str, array: Any, dtype: str = "") -> tuple[Tensor, Any]:
    """A feed of the array's type, or of this one, and its value."""
    kind = dtype or {"f": "f32", "u": "u32"}.get(array.dtype.kind, "i32")
    return feed(name, array.shape, kind), np.abs(array).astype(DTYPES[kind].numpy) if dtype else array


def mutated(how: str, arrays: list[Any], attrs: dict[str, Any], pick: Callable[[int], int]) -> dict[str, Any]:
    """Change one thing about the sources, in place, or the attributes; returns those."""
    i = pick(len(arrays))
    if how == "index" and (ids := [j for j, a in enumerate(arrays) if a.dtype.kind == "i"]):
        j = ids[pick(len(ids))]
        arrays[j] = arrays[j].astype(np.int32)
        arrays[j].reshape(-1)[pick(arrays[j].size)] = WRONG_INDICES[pick(len(WRONG_INDICES))]
    elif how == "axis" and arrays[i].ndim:
        axis = pick(arrays[i].ndim)
        arrays[i] = np.concatenate([arrays[i], np.take(arrays[i], [0], axis)], axis)
    elif how == "rank":
        arrays[i] = arrays[i][None] if pick(2) else arrays[i].reshape(-1)
    elif how == "drop":
        del arrays[i]
    elif how == "repeat":
        arrays.append(arrays[i])
    elif how == "swap":
        arrays.reverse()
    elif how == "attribute" and attrs:
        return {**attrs, sorted(attrs)[pick(len(attrs))]: WRONG_VALUES[pick(len(WRONG_VALUES))]}
    elif how == "unknown":
        return {**attrs, "axis": 0}
    return attrs


CHANGES = ["index", "axis", "rank", "drop", "repeat", "swap", "attribute", "unknown", "number", "type"]


@settings(max_examples=100)
@given(
    name=st.sampled_from(NAMES),
    how=st.sampled_from(CHANGES),
    dtype=st.sampled_from(["f16", "i32", "u32"]),
    seed=st.integers(0, 999),
)
def test_wrong_calls_are_one_line_or_the_reference(
    backends: list[Backend], name: str, how: str, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def pick(n: int) -> int:
        return int(rng.integers(n))

    make = OPS[name].cases[pick(min(3, len(OPS[name].cases)))]
    sources, attrs = make(np.random.default_rng(0))
    arrays = [np.asarray(s.array if isinstance(s, (Weight, Variable)) else s) for s in sources]
    arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in arrays]
    attrs = mutated(how, arrays, attrs, pick)
    at = pick(len(arrays)) if how == "type" else -1
    refusal = ""
    try:
        leaves = [leaf(f"x{i}", a, dtype if i == at else "") for i, a in enumerate(arrays)]
        src: list[Any] = [t for t, _ in leaves]
        feeds = {t.name: values for t, values in leaves}
        if how == "number" and src:
            src[0] = 1.0
        node = OPS[name](*src, **attrs)
        with np.errstate(all="ignore"):
            (value,) = Session(backends).compute([node], feeds)
    except ValueError as wrong:
        refusal = str(wrong)
    if refusal:
        assert "\n" not in refusal
        assert refusal.startswith((f"{name}: ", "feed 'x"))
        return
    with np.errstate(all="ignore"):
        (expected,) = evaluate([node], feeds)
    error, detail = difference(np.asarray(expected), value.astype(np.float64) if value.dtype.kind == "f" else value)
    assert error <= max(OPS[name].tolerance, OPS[name].tolerance_quantised, 1e-4), (name, attrs, detail)

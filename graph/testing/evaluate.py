"""The oracle: a graph run on the ops' references, in float64 or any other float type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor


def evaluate(
    roots: Iterable[Tensor],
    feeds: Mapping[str, Any],
    states: Mapping[str, Any],
    dtype: type[np.floating[Any]] = np.float64,
) -> list[Any]:
    """Values of the roots. Arrays of `states` are written in place by ops that write."""
    roots = list(roots)
    value: dict[Tensor, Any] = {}
    for t in toposort(roots):
        if t.op == "feed":
            value[t] = _floats(feeds[t.name], dtype)
        elif t.op == "variable":
            value[t] = states[t.name]
        elif t.op == "const":
            value[t] = np.asarray(t.attrs["value"], dtype)
        else:
            value[t] = OPS[t.op].reference(*(value[s] for s in t.src), **t.attrs)
    return [value[r] for r in roots]


def _floats(array: Any, dtype: type[np.floating[Any]]) -> Any:
    array = np.asarray(array)
    return array.astype(dtype) if array.dtype.kind == "f" else array

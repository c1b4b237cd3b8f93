"""Reference evaluation: a graph run by its ops' numpy references, in float64 by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from logitless.graph.dtype import DTYPES
from logitless.graph.execution.plan import fed
from logitless.graph.indices import checks_of
from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, tensors


def evaluate(
    roots: Iterable[Tensor],
    feeds: Mapping[str, Any],
    variables: Mapping[str, Any] = MappingProxyType({}),
    dtype: type[np.floating[Any]] = np.float64,
) -> list[Any]:
    """The value of each root, in its tensor's shape; floats are computed in `dtype`.

    `feeds`, `variables`: arrays by name; ops that write overwrite the arrays of `variables` in
    place. KeyError names one that is missing, ValueError a feed of a wrong shape or type, or an
    index that is out of bounds."""
    roots = tensors("roots", roots)
    order = toposort(roots)
    value: dict[Tensor, Any] = {}
    for t in order:
        if t.op == "feed":
            array = fed(t.name, feeds[t.name], t.shape, t.dtype)
            value[t] = array.astype(dtype) if np.dtype(DTYPES[t.dtype].numpy).kind == "f" else array
        elif t.op == "variable":
            value[t] = variables[t.name]
        elif t.op == "const":
            value[t] = np.asarray(t.attrs["value"], dtype)
    checks_of(order).check({t.name: value[t] for t in value if t.op != "const"})
    for t in order:
        if not t.is_leaf:
            value[t] = OPS[t.op].reference(*(value[s] for s in t.src), **t.attrs)
    return [value[r] for r in roots]

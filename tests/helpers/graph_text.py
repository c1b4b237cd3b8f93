"""A graph as text, for comparisons."""

from __future__ import annotations

from collections.abc import Iterable

from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor


def dump(roots: Iterable[Tensor]) -> str:
    """Format a graph, one node a line: `%3 = add f32[4, 6] (%1, %2)`."""
    names: dict[Tensor, str] = {}
    lines = []
    for i, t in enumerate(toposort(roots)):
        names[t] = f"%{i}"
        args = ", ".join(names[s] for s in t.src)
        attrs = "".join(f" {k}={v}" for k, v in t.attrs.items())
        lines.append(f"%{i} = {t.op}{' ' + repr(t.name) if t.name else ''} {t.dtype}{list(t.shape)} ({args}){attrs}")
    return "\n".join(lines)

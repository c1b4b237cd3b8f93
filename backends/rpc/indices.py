"""Page tables, cells and row ids that a client sends: kernels trust them, so they are checked first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.op import OPS
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

Bounds = tuple[int, int]  # smallest value, and one more than the largest


@dataclass(slots=True)
class Region:
    """Indices in a client's memory. `checked`: what lies there now is within the bounds."""

    memory: int
    offset: int
    nbytes: int
    bounds: Bounds
    checked: bool = False

    def check(self, offset: int, data: Bytes) -> None:
        """Check what is written to the memory from `offset` on. ValueError: an index is out of bounds."""
        start, stop = max(offset, self.offset), min(offset + len(data), self.offset + self.nbytes)
        if start >= stop:
            return
        part = np.ascontiguousarray(data[start - offset : stop - offset])
        low, high = self.bounds
        values = part[: part.size // 4 * 4].view(np.int32)
        if values.size and (values.min() < low or values.max() >= high):
            bad = values[(values < low) | (values >= high)][0]
            raise ValueError(f"the index {bad} is not between {low} and {high - 1}")
        self.checked = self.checked or (start, stop) == (self.offset, self.offset + self.nbytes)


def bounds_of(nodes: Sequence[Tensor]) -> dict[Tensor, Bounds]:
    """The bounds of all leaves that some node takes indices from; -1 stands for none."""
    found: dict[Tensor, Bounds] = {}
    for t in nodes:
        if t.is_leaf:
            continue
        parameters = inspect.signature(OPS[t.op].reference).parameters
        names = [name for name, p in parameters.items() if p.kind < p.VAR_POSITIONAL]
        for source, bounds in _bounds(dict(zip(names, t.src, strict=False))).items():
            if source.is_leaf and source.dtype == "i32":
                low, high = found.get(source, bounds)
                found[source] = max(low, bounds[0]), min(high, bounds[1])
    return found


def _bounds(src: dict[str, Tensor]) -> dict[Tensor, Bounds]:
    """Bounds of one node's sources, by the names of the op's parameters."""
    found: dict[Tensor, Bounds] = {}
    if "tables" in src:
        found[src["tables"]] = -1, src["k"].shape[0]
        found[src["slot"]] = -1, src["tables"].shape[0]
        found[src["pos"]] = -1, src["tables"].shape[1] * PAGE
    if "cells" in src:
        found[src["cells"]] = -1, src["cache"].shape[0] * PAGE
    if "pairs" in src:
        found[src["pairs"]] = -1, src["cache"].shape[0]
    if "ids" in src and ("table" in src or {"x", "rows"} <= src.keys()):
        found[src["ids"]] = 0, src["table" if "table" in src else "x"].shape[0]
    return found

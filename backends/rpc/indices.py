"""Index checks of the RPC server: page tables, rows, experts, states and targets, before kernels use them.

A client says which nodes are compiled and where each result lies, so an index that an op computes
is trusted only where that op wrote it last, in the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.indices import Bounds, Ranges, computed_bounds, needed_bounds
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor


@dataclass(slots=True)
class Region:
    """Indices in a client's memory. `checked`: the present values are within the bounds."""

    memory: int
    offset: int
    nbytes: int
    bounds: Bounds
    checked: bool = False

    def check(self, offset: int, data: Bytes) -> None:
        """Check the values written to the memory from `offset` on. ValueError: an index is out of bounds."""
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


NOT_LENT = frozenset(("mean_rows",))  # ops with spans of rows, which no bounds of single indices hold
LATE = frozenset(("tables", "cells", "pairs", "chain"))  # sources that may be uploaded before they are fed
SAME = frozenset(("reshape", "slice_rows"))  # ops whose result is a part of their source


def bounds_of(nodes: Sequence[Tensor]) -> dict[Tensor, Ranges]:
    """The bounds of all leaves that some node takes indices from; -1 stands for none.

    ValueError: a node takes indices that an op computes and that may be out of its bounds."""
    found: dict[Tensor, Ranges] = {}
    for t in nodes:
        for source, ranges in _needed(t).items():
            whole = _whole(source)
            if source.dtype != "i32":
                continue
            if whole is not source and len(ranges) > 1:
                raise ValueError(f"{t.op} takes a part of indices")
            if not whole.is_leaf:
                computed = computed_bounds(whole)
                if len(computed) != len(ranges) or not all(map(_within, computed, ranges)):
                    raise ValueError(f"the indices that {t.op} takes from {whole.op} may be out of its bounds")
            elif len(known := found.get(whole, ranges)) != len(ranges):
                raise ValueError(f"{whole.name} holds two kinds of indices")
            else:
                found[whole] = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(known, ranges, strict=True))
    return found


def parts_of(t: Tensor, bounds: Mapping[Tensor, Ranges]) -> list[tuple[int, int, Bounds]]:
    """(start, length, bounds of the indices) of the parts of a tensor's bytes that nodes may take
    indices from. `bounds`: those of leaves."""
    whole = _whole(t)
    ranges = () if t.dtype != "i32" else bounds.get(whole, ()) if whole.is_leaf else computed_bounds(whole)
    n = t.nbytes // len(ranges) if ranges else 0
    return [(i * n, n, each) for i, each in enumerate(ranges)]


def holds(writer: Tensor, t: Tensor) -> bool:
    """True if a node has written indices within t's bounds."""
    computed, needed = computed_bounds(_whole(writer)), computed_bounds(_whole(t))
    return len(computed) == len(needed) > 0 and all(map(_within, computed, needed))


def _whole(t: Tensor) -> Tensor:
    while t.op in SAME:
        (t,) = t.src
    return t


def _within(inner: Bounds, outer: Bounds) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _needed(t: Tensor) -> dict[Tensor, Ranges]:
    """The bounds of a node's indices. Those of LATE sources may be -1, too: feeds are that before
    they are fed, and a client uploads them all at once."""
    needed = needed_bounds(t)
    if not needed or (t.op != "chunk_ends" and LATE.isdisjoint(s.name for s in OPS[t.op].signature.sources)):
        return needed
    return {s: tuple((min(low, -1), high) for low, high in ranges) for s, ranges in needed.items()}

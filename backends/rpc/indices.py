"""Index checks of the RPC server: page tables, rows, experts, states and targets, before kernels use them.

A client says which nodes are compiled and where each result lies, so an index that an op computes
is trusted only where that op wrote it last, in the same program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.op import OPS
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

Bounds = tuple[int, int]  # smallest value, and one more than the largest
Ranges = tuple[Bounds, ...]  # of the equal parts of a tensor


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
SAME = frozenset(("reshape", "slice_rows"))  # ops whose result is a part of their source
_ANY, _END = -(2**31), 2**31


def bounds_of(nodes: Sequence[Tensor]) -> dict[Tensor, Ranges]:
    """The bounds of all leaves that some node takes indices from; -1 stands for none.

    ValueError: a node takes indices that an op computes and that may be out of its bounds.
    """
    found: dict[Tensor, Ranges] = {}
    for t in nodes:
        for source, ranges in _needed(t).items():
            whole = _whole(source)
            if source.dtype != "i32":
                continue
            if whole is not source and len(ranges) > 1:
                raise ValueError(f"{t.op} takes a part of indices")
            if not whole.is_leaf:
                computed = _computed(whole)
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
    ranges = () if t.dtype != "i32" else bounds.get(whole, ()) if whole.is_leaf else _computed(whole)
    n = t.nbytes // len(ranges) if ranges else 0
    return [(i * n, n, each) for i, each in enumerate(ranges)]


def holds(writer: Tensor, t: Tensor) -> bool:
    """True if a node has written indices within t's bounds."""
    computed, needed = _computed(_whole(writer)), _computed(_whole(t))
    return len(computed) == len(needed) > 0 and all(map(_within, computed, needed))


def _whole(t: Tensor) -> Tensor:
    while t.op in SAME:
        (t,) = t.src
    return t


def _within(inner: Bounds, outer: Bounds) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _computed(t: Tensor) -> Ranges:
    """The bounds of the indices that an op computes; none: no other op takes them for indices."""
    if t.op in ("top_experts", "argmax"):
        return ((0, t.src[0].shape[1]),)
    if t.op == "text_begins":
        return ((-1, 1),)
    if t.op == "chunk_starts":
        return ((0, t.attrs["length"]),)
    if t.op == "chunk_ends":
        limit = t.attrs["limit"]
        return (-1, limit), (-1, limit + t.attrs["size"])
    if t.op == "expert_order":
        return (0, t.shape[1]), (0, t.shape[1]), (0, t.attrs["n"])
    return ()


def _needed(t: Tensor) -> dict[Tensor, Ranges]:
    """The bounds of a node's indices, by the source that has them."""
    if t.is_leaf:
        return {}
    parameters = inspect.signature(OPS[t.op].reference).parameters
    names = [name for name, p in parameters.items() if p.kind < p.VAR_POSITIONAL]
    if t.op == "linear_attention_update":
        names = ["q", "k", "v", "decay", "beta", "states", "begin", "end"]
    src = dict(zip(names, t.src, strict=False))
    needed: dict[Tensor, Ranges] = {src[name]: (bounds,) for name, bounds in _bounds(src, t).items()}
    if "tables" in src and src["pos"].op == "chunk_ends":  # the window counts from the second
        limit = needed[src["pos"]][0][1]
        needed[src["pos"]] = (-1, limit), (-1, limit + t.attrs.get("window", 0))
    if "order" in src:
        places = 0, src["order"].shape[1]
        needed[src["order"]] = places, places, (0, t.attrs["n"]) if "n" in t.attrs else (_ANY, _END)
    return needed


def _bounds(src: dict[str, Tensor], t: Tensor) -> dict[str, Bounds]:
    """Bounds of one node's sources, by the names of the op's parameters."""
    found: dict[str, Bounds] = {}
    if "tables" in src:
        found["tables"] = -1, src["k"].shape[0]
        found["slot"] = -1, src["tables"].shape[0]
        found["pos"] = -1, src["tables"].shape[1] * PAGE
    if t.op == "chunk_ends":
        found["pos"] = -1, t.attrs["limit"]
    if "cells" in src:
        found["cells"] = -1, src["cache"].shape[0] * PAGE
    if "pairs" in src:
        found["pairs"] = -1, src["cache"].shape[0]
    for name in {"begin", "end"} & src.keys():
        found[name] = -1, src["states"].shape[0]
    if "targets" in src:  # negative ones are ignored
        found["targets"] = _ANY, src["logits"].shape[1]
    if "start" in src:
        found["start"] = 0, t.attrs["length"]
    if "count" in src:
        found["count"] = 1, t.attrs["length"] + 1
    if "ids" in src and t.op != "log_probs":  # whose ids are words of `sample`
        found["ids"] = 0, _n_rows(src, t)
    if "list_ptr" in src:  # ids of the list are checked by the kernels
        found["list_ptr"] = 0, src["list_id"].shape[0] + 1
    if "mask_row" in src:
        found["mask_row"] = -2, src["mask"].shape[0]
    return found


def _n_rows(src: dict[str, Tensor], t: Tensor) -> int:
    """The number of rows that a node's `ids` choose from."""
    if "n" in t.attrs:  # add_rows, expert_scatter, expert_order
        return int(t.attrs["n"])
    if "table" in src:
        return src["table"].shape[0]
    of = src["logits" if "logits" in src else "x"]
    return of.shape[0 if "rows" in src else 1]

"""Index bounds: smallest and largest index that a node may read from each of its sources.

An index out of its bounds reads or writes memory of others. Ops declare them (declaration.py). Those of
feeds are checked when they are fed, those of variables when they are written, and those that an op
computes where the graph becomes a plan: such an op never gives another value, whatever its numbers are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.op import OPS
from logitless.graph.ops.sampling import samplers
from logitless.graph.tensor import ALIASES, Tensor

Bounds = tuple[int, int]  # smallest value, and one more than the largest
Ranges = tuple[Bounds, ...]  # of the equal parts of a tensor
ANY: Bounds = (-(2**31), 2**31)
COPIES = frozenset(("transpose", "take_block", "set_block", "pad_rows"))  # of words: indices as well


@dataclass(frozen=True)
class IndexPart:
    """Elements start…stop of a leaf that `op` takes for indices within the bounds."""

    op: str
    start: int
    stop: int
    bounds: Bounds

    def check(self, label: str, values: npt.NDArray[Any]) -> None:
        """Check the leaf's values. ValueError names the first that is out of bounds."""
        part = values.reshape(-1)[self.start : self.stop]
        low, high = self.bounds
        if part.min() < low or part.max() >= high:
            bad = part[(part < low) | (part >= high)][0]
            between = f"between {low} and {high - 1}" if low > ANY[0] else f"below {high}"
            raise ValueError(f"{label}: the index {bad} of {self.op} is not {between}")


@dataclass(frozen=True)
class Relation:
    """Leaves whose values belong together (the ends of spans, say), as `op` needs them."""

    op: str
    leaves: tuple[str, ...]
    holds: Callable[..., bool]
    message: str

    def check(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """ValueError unless the relation holds for the leaves' values, by name."""
        if not self.holds(*(values[name] for name in self.leaves)):
            raise ValueError(f"feed {self.leaves[0]!r}: {self.op} needs {self.message}")


@dataclass(frozen=True)
class IndexChecks:
    """Checks of a graph's leaves, by name."""

    parts: Mapping[str, tuple[IndexPart, ...]]
    relations: tuple[Relation, ...] = ()

    def check(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Check the values of all leaves, by name. ValueError names the first that is wrong."""
        for name, parts in self.parts.items():
            for part in parts:
                part.check(repr(name), np.asarray(values[name]))
        for relation in self.relations:
            relation.check(values)


NO_CHECKS = IndexChecks({})


def checks_of(order: Iterable[Tensor]) -> IndexChecks:
    """The checks of a graph's indices.

    ValueError: a node takes indices that an op computes and that may be out of its bounds."""
    parts: dict[str, dict[IndexPart, None]] = {}
    relations: list[Relation] = []
    for t in order:
        if not takes_indices(t.op):
            continue
        for source, ranges in needed_bounds(t).items():
            if source.dtype == "i32":
                for leaf, part in _parts(t.op, source, ranges):
                    parts.setdefault(leaf.name, {})[part] = None
        relations += _relations(t)
    return IndexChecks({name: tuple(found) for name, found in parts.items()}, tuple(relations))


def _parts(op: str, source: Tensor, ranges: Ranges) -> Iterable[tuple[Tensor, IndexPart]]:
    """The parts of leaves that a node's indices come from."""
    start, n = 0, source.size
    while source.op in ALIASES:
        if source.op == "slice_rows":
            start += source.attrs["start"] * (source.size // source.shape[0])
        source = source.src[0]
    if source.is_leaf:
        if source.op != "const":
            each = n // len(ranges)
            for i, bounds in enumerate(ranges):
                if bounds != ANY:
                    yield source, IndexPart(op, start + i * each, start + (i + 1) * each, bounds)
        return
    whole = max(low for low, _ in ranges), min(high for _, high in ranges)
    if source.op in COPIES:
        for s in source.src:
            if s.dtype == "i32":
                yield from _parts(op, s, (whole,))
        if source.op != "pad_rows" or whole[0] <= 0:
            return
    computed = computed_bounds(source)
    if computed and n == source.size and len(computed) == len(ranges):
        pairs = list(zip(computed, ranges, strict=True))
    else:  # a part of them
        each = source.size // max(1, len(computed))
        pairs = [(b, whole) for i, b in enumerate(computed) if i * each < start + n and start < (i + 1) * each]
    if not pairs or not all(needed[0] <= has[0] and has[1] <= needed[1] for has, needed in pairs):
        raise ValueError(f"{op}: the indices that {source!r} computes may be out of bounds")


def computed_bounds(t: Tensor) -> Ranges:
    """The bounds of the indices that an op computes; none: no other op takes them for indices."""
    return _ranges(t, OPS[t.op].result_bounds) if t.op in OPS else ()


def _ranges(t: Tensor, bounds: Iterable[str]) -> Ranges:
    return tuple(OPS[t.op].value(each, t.src, t.attrs) for each in bounds)


@functools.cache
def takes_indices(op: str) -> bool:
    """True if nodes of this op have bounds for one of their sources."""
    return op in OPS and any(s.bounds for s in OPS[op].signature.sources)


def needed_bounds(t: Tensor) -> dict[Tensor, Ranges]:
    """The bounds of a node's indices, by the source that has them."""
    needed: dict[Tensor, Ranges] = {}
    for declared, source in OPS[t.op].signature.pairs(t.src) if takes_indices(t.op) else ():
        if not declared.bounds:
            continue
        ranges = _ranges(t, declared.bounds)
        if source.op == "chunk_ends" and "tables" in _names(t.op):  # the window counts from the second
            ranges = ranges[0], (0, ranges[0][1] + t.attrs.get("window", 0))
        before = needed.get(source, ranges)  # one tensor may be two sources
        needed[source] = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(before, ranges, strict=True))
    return needed


@functools.cache
def _names(op: str) -> tuple[str, ...]:
    return tuple(s.name for s in OPS[op].signature.sources)


def _relations(t: Tensor) -> Iterable[Relation]:
    """Relations that a node needs of its indices. ValueError where they are no feeds."""
    src = dict(zip(_names(t.op), t.src, strict=False))
    if t.op == "mean_rows":
        n = src["x"].shape[0]
        yield _related(t, src, ("first", "count"), lambda a, b: bool((a + b.astype(np.int64) <= n).all()),
                       f"first + count of at most {n} rows")  # fmt: skip
    if "order" in src and _source(src["order"]).op != "expert_order":
        yield _related(t, src, ("order",), _is_order, "what `expert_order` makes of ids")
    if "list_ptr" in src:
        yield _related(
            t, src, ("list_ptr",), lambda ptr: bool((np.diff(ptr) >= 0).all()), "a list_ptr that never falls"
        )
    if "begin" in src and src["begin"].op == "feed":
        yield _related(t, src, ("begin",), lambda begin: bool(begin[0] >= 0), "a first row that begins somewhere")
    if "chain" in src and _source(src["chain"]).op == "feed":
        yield _related(t, src, ("chain",), _are_chains, "chains of samplers, the last of each a selection")
    if "start" in src and src["start"].op == "feed":
        at = np.arange(t.src[0].shape[0]) % t.attrs["length"]
        yield _related(t, src, ("start",), partial(_spans, at), "rows of a window that begin at or before themselves")


def _spans(at: npt.NDArray[Any], start: npt.NDArray[Any]) -> bool:
    first, last = (start, at) if start.ndim == 1 else start
    return bool((first <= at).all() and (last >= at).all())


def _are_chains(chain: npt.NDArray[Any]) -> bool:
    rows = [row[: row.tolist().index(samplers.END)] if samplers.END in row else row for row in chain]
    last = [row[-1] >= samplers.GREEDY for row in rows if len(row)]
    return all(last) and not any(samplers.TEMPERATURE < code < samplers.GREEDY for row in rows for code in row)


def _is_order(order: npt.NDArray[Any]) -> bool:
    places, at, experts = order
    n = np.arange(len(places))
    return bool((np.sort(places) == n).all() and (places[at] == n).all() and (np.diff(experts) >= 0).all())


def _related(
    t: Tensor, src: Mapping[str, Tensor], names: tuple[str, ...], holds: Callable[..., bool], message: str
) -> Relation:
    leaves = [src[name] for name in names]
    if any(leaf.op != "feed" for leaf in leaves):
        raise ValueError(f"{t.op}: {' and '.join(names)} must be feeds (got {', '.join(map(repr, leaves))})")
    return Relation(t.op, tuple(leaf.name for leaf in leaves), holds, message)


def _source(t: Tensor) -> Tensor:
    while t.op in ALIASES:
        t = t.src[0]
    return t

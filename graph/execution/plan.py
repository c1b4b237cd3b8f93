"""Plan: one graph's compiled programs and the locations of its feeds and results, without the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logitless.graph.backend import Backend, Buffer, Bytes, Location, Program
from logitless.graph.dtype import DTYPES
from logitless.graph.execution.expert_cache import ExpertCache, Lookup, Refresh
from logitless.graph.execution.memory import ArenaLayout
from logitless.graph.execution.partition import LOOKUP, TRANSFER, Placement, Segment
from logitless.graph.indices import IndexPart
from logitless.graph.tensor import ALIASES, Shape, Tensor

DeferredFeeds = Callable[[], "Mapping[str, Array]"]
Array = npt.NDArray[Any]


class Life:
    """Tells plans whether their session still has memory and devices."""

    __slots__ = ("_backends", "_end")

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends, self._end = backends, ""

    def end(self, reason: str) -> None:
        self._end = reason

    def require(self) -> None:
        """ValueError when the session's memory is gone, or one of its devices is closed."""
        if self._end:
            raise ValueError(self._end)
        for b in self._backends:
            if b.closed:
                raise ValueError(f"device {b.name} is closed")


class Storage(Protocol):
    """The session's backends and device memory, as far as a plan needs them."""

    backends: list[Backend]
    life: Life
    expert_cache: ExpertCache | None

    def arena(self, b: int, size: int, name: str = "") -> Buffer | None:
        """Memory of backend `b` for results within a run, at least `size` bytes (None for 0)."""

    def buffer(self, t: Tensor, b: int) -> Buffer:
        """The memory of a variable on backend `b`."""


def leaf_uses(placement: Placement, layout: ArenaLayout) -> list[tuple[Tensor, int]]:
    """Every leaf with each backend that reads it; with one if it is only fetched."""
    uses: dict[tuple[Tensor, int], None] = {}  # an ordered set
    for t in placement.order:
        for s in t.src if t.op not in ALIASES else ():
            leaf, b = layout.owners[s][0], placement.backend_of[t]
            if leaf.is_leaf:
                uses[leaf, b] = None
    read = {leaf for leaf, _ in uses}
    for f in placement.fetches:
        leaf = layout.owners[f][0]
        if leaf.is_leaf and leaf not in read:
            b = placement.variable_backend[leaf.name] if leaf.op == "variable" else 0
            uses[leaf, b] = None
    return list(uses)


def input_layout(uses: Sequence[tuple[Tensor, int]], alignments: Sequence[int]) -> tuple[list[int], list[int]]:
    """Offset of each feed and scalar in its backend's input buffer, and these buffers' sizes."""
    offsets, sizes = [], [0] * len(alignments)
    for leaf, b in uses:
        offsets.append(sizes[b])
        if leaf.op != "variable":
            sizes[b] += -(-max(leaf.nbytes, 1) // alignments[b]) * alignments[b]
    return offsets, sizes


class _Locator:
    """Locations of a graph's tensors, while a plan of it is made."""

    def __init__(self, storage: Storage, placement: Placement, layout: ArenaLayout, arena: str) -> None:
        self._storage, self._placement, self._layout = storage, placement, layout
        self._arena = [storage.arena(b, size, arena) for b, size in layout.sizes.items()]
        self.feeds: dict[str, Tensor] = {}
        self.of_feeds: dict[str, dict[int, Location]] = {}  # by name and backend
        self._constants: dict[tuple[Tensor, int], Location] = {}
        self.staged: set[int] = set()  # backends whose inputs are uploaded from an image
        self.inputs = self._locate_inputs(leaf_uses(placement, layout))

    def _locate_inputs(self, uses: Sequence[tuple[Tensor, int]]) -> dict[int, tuple[Location, Bytes]]:
        """Allocate one buffer for feeds and scalars on each backend, and its image on the host.

        The image is the buffer itself where the host sees it, else it is uploaded as a whole."""
        backends = self._storage.backends
        offsets, sizes = input_layout(uses, [b.alignment for b in backends])
        inputs: dict[int, tuple[Location, Bytes]] = {}
        for b, (backend, size) in enumerate(zip(backends, sizes, strict=True)):
            if size:
                location = Location(backend.alloc(size, feeds=True))
                view = backend.host_view(location, size)
                image = np.empty(size, np.uint8) if view is None else view
                image.fill(0xFF)
                inputs[b] = location, image
                if view is None:
                    self.staged.add(b)
        for (leaf, b), offset in zip(uses, offsets, strict=True):
            if leaf.op == "feed":
                if self.feeds.setdefault(leaf.name, leaf) is not leaf:
                    raise ValueError(f"two feeds are named {leaf.name!r}")
                host = inputs[b][1][offset : offset + leaf.nbytes]
                self.of_feeds.setdefault(leaf.name, {})[b] = Location(inputs[b][0].buffer, offset, host)
            elif leaf.op == "const":
                value = np.array([leaf.attrs["value"]], DTYPES[leaf.dtype].numpy)
                self._constants[leaf, b] = Location(inputs[b][0].buffer, offset)
                inputs[b][1][offset : offset + value.nbytes] = value.view(np.uint8)
        return inputs

    def locate(self, t: Tensor, b: int) -> Location:
        """The bytes of t, for a node that runs on backend b."""
        owner, offset = self._layout.owners[t]
        if owner.op == "feed":
            base = self.of_feeds[owner.name][b]
        elif owner.op == "const":
            base = self._constants[owner, b]
        elif owner.op == "variable":
            base = Location(self._storage.buffer(owner, b))
        else:
            base = Location(self._arena[self._placement.backend_of[owner]], self._layout.offsets[owner])
        return Location(base.buffer, base.offset + offset) if offset else base

    def fetches(self, tensors: Sequence[Tensor]) -> list[Fetch]:
        """The source of each of these tensors: its backend and location."""
        sources = [(t, self._source(t)) for t in tensors]
        return [Fetch(self._storage.backends[b], self.locate(t, b), t) for t, b in sources]

    def _source(self, t: Tensor) -> int:
        """The backend that a fetch is brought back from."""
        owner = self._layout.owners[t][0]
        if owner.op == "variable":
            return self._placement.variable_backend[owner.name]
        if owner.op == "feed":
            return next(iter(self.of_feeds[owner.name]))
        return self._placement.backend_of[t]


class Fetch:
    """A result: its location, shape and type."""

    def __init__(self, backend: Backend, location: Location, t: Tensor) -> None:
        self._backend, self._location, self._shape, self._dtype = backend, location, t.shape, t.dtype
        self._nbytes, self._label = t.nbytes, repr(t)
        self._view: Array | None = None  # where the host sees it, and it has rows of numbers
        if t.nbytes and t.shape and DTYPES[t.dtype].numpy is not None:
            view = backend.host_view(location, t.nbytes)
            self._view = None if view is None else as_numbers(view, t.dtype, t.shape)

    def value(self, rows: int | None) -> Array:
        """A copy of the leading rows, or of all."""
        shape, size = self._shape, self._nbytes
        if rows is not None and not (shape and 0 <= rows <= shape[0]):
            raise ValueError(f"{rows} rows wanted of {self._label}")
        if self._view is not None:
            return self._view[:rows].copy()
        if rows is not None:
            shape, size = (rows, *shape[1:]), size * rows // max(1, shape[0])
        if size == 0:
            return np.zeros(shape, DTYPES[self._dtype].numpy or np.uint8)
        return values_of(self._backend.download(self._location, size), self._dtype, shape)


class _Feed:
    """A feed's arrays, in its shape and type, in the input images of its backends."""

    __slots__ = ("arrays", "dtype", "kind", "name", "parts", "shape")

    def __init__(self, leaf: Tensor, images: Sequence[Bytes], parts: Sequence[IndexPart] = ()) -> None:
        """`images`: the feed's own bytes in each. `parts`: those that are indices."""
        self.parts = parts
        self.name, self.shape, self.dtype = leaf.name, leaf.shape, leaf.dtype
        self.kind = np.dtype(DTYPES[leaf.dtype].numpy)
        self.arrays = [image.view(self.kind).reshape(leaf.shape) for image in images]

    def set(self, value: Array | None, *, checked: bool = True) -> None:
        """Copy a value in. ValueError names the feed and what is wrong; `checked`: its indices, too."""
        value = fed(self.name, value, self.shape, self.dtype)
        for part in self.parts if checked else ():
            part.check(f"feed {self.name!r}", value)
        for array in self.arrays:
            np.copyto(array, value, casting="unsafe")

    def replicate(self) -> None:
        """Copy the first array to the other backends' images."""
        for array in self.arrays[1:]:
            array[...] = self.arrays[0]


def fed(name: str, value: Array | None, shape: Shape, dtype: str) -> Array:
    """A feed's value as an array whose numbers its type has. ValueError names the feed."""
    if value is None:
        raise ValueError(f"feed {name!r} is missing")
    try:
        value = np.asarray(value)
    except ValueError:
        raise ValueError(f"feed {name!r}: its rows differ in length") from None
    if value.shape != shape:
        raise ValueError(f"feed {name!r}: expected shape {shape}, got {value.shape}")
    kind = np.dtype(DTYPES[dtype].numpy)
    if value.dtype == kind:
        return value
    if value.dtype.kind not in ("biuf" if kind.kind == "f" else "biu"):
        raise ValueError(f"feed {name!r}: expected {dtype}, got {value.dtype}")
    if kind.kind != "f":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        beyond = value.size and (value.min() < low or value.max() > high)
    else:
        with np.errstate(over="ignore"):
            beyond = bool((np.isinf(value.astype(kind)) & np.isfinite(value)).any())
    if beyond:
        raise ValueError(f"feed {name!r}: numbers from {value.min()} to {value.max()} are beyond {dtype}")
    return value


class Plan:
    """One graph, ready to run as often as wanted. Made by `Session.plan`.

    Hundreds are kept, so a plan has its programs and locations and lets go of the graph, and
    nothing in it refers back to it: what the session drops is free at once."""

    def __init__(self, storage: Storage, placement: Placement, layout: ArenaLayout, arena: str = "") -> None:
        """`arena`: see Session.plan."""
        locator = _Locator(storage, placement, layout, arena)
        self._backends, self._life = storage.backends, storage.life
        parts, self._relations = placement.checks.parts, placement.checks.relations
        self.feeds, self._feed_locations = locator.feeds, locator.of_feeds
        self._inputs, self._staged = locator.inputs, locator.staged
        self.variables = frozenset(t.name for t in placement.order if t.op == "variable")
        self.deferred: set[str] = set()
        self._lookups: dict[Tensor, Lookup] = {}
        # a backend's index (-1: a transfer) and a program; None: the deferred feeds
        self._steps: list[tuple[int, Program] | None] = []
        for segment in placement.segments:
            if segment.deferred and not self.deferred:
                self._steps.append(None)
            self.deferred.update(leaf.name for leaf in segment.deferred)
            if segment.nodes[0].op == LOOKUP:
                self._steps.append((-1, self._lookup(storage, segment, locator)))
            elif segment.nodes[0].op == TRANSFER:
                self._steps.append((-1, _Transfer(storage.backends, placement, locator, segment.nodes[0])))
            else:
                b = segment.backend
                for nodes in self._divide(segment.nodes):
                    self._steps.append((b, self._program(storage.backends[b], nodes, partial(locator.locate, b=b))))
        self._lookups.clear()  # a plan keeps no graph
        self._feeds = {name: _Feed(leaf, self._images(leaf), parts.get(name, ())) for name, leaf in self.feeds.items()}
        self._immediate = [(name, feed) for name, feed in self._feeds.items() if name not in self.deferred]
        self._uploads = [(b, *source) for b, source in self._inputs.items() if b in self._staged]
        self._replicated = [feed for _, feed in self._immediate if len(feed.arrays) > 1]
        # Arrays to write feeds into instead of giving them to a run; deferred ones have to be
        # given.
        self.input_buffers: dict[str, Array] = {name: feed.arrays[0] for name, feed in self._immediate}
        self.n_fetches = len(placement.fetches)
        self._fetches: list[Fetch] = []
        self._set_fetches(partial(locator.fetches, placement.fetches))

    def _lookup(self, storage: Storage, segment: Segment, locator: _Locator) -> Program:
        assert storage.expert_cache is not None
        t = segment.nodes[0]
        if t in self._lookups:
            return Refresh(self._lookups[t])
        self._lookups[t] = storage.expert_cache.lookup(t, partial(locator.locate, b=segment.backend))
        return self._lookups[t]

    def _images(self, leaf: Tensor) -> list[Bytes]:
        locations = self._feed_locations[leaf.name].items()
        return [self._inputs[b][1][at.offset : at.offset + leaf.nbytes] for b, at in locations]

    def _divide(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Divide a segment's nodes into those of one program each."""
        return [nodes]

    def _program(self, backend: Backend, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Program:
        return backend.compile(nodes, locate)

    def _set_fetches(self, fetches: Callable[[], list[Fetch]]) -> None:
        self._fetches = fetches()

    @property
    def programs(self) -> list[Program]:
        return [step[1] for step in self._steps if step is not None and step[0] >= 0]

    def run(
        self,
        feeds: Mapping[str, Array] | None,
        rows: Sequence[int | None] | None = None,
        deferred: DeferredFeeds | None = None,
    ) -> list[Array]:
        """Run the graph: values of the fetches, as they are at the end, each in its tensor's shape.

        `feeds`: arrays by name, in their tensors' shapes; None: they are in `input_buffers`, and
        the caller answers for their indices.
        `rows`: leading rows of each fetch to bring back (None: all of them), without padding.
        `deferred` is called for the deferred feeds, once all that comes before them has been
        started. ValueError names a feed that is missing or has a wrong shape, type or index."""
        self._feed(feeds)
        for step in self._steps:
            if step is not None:
                step[1].run()
            else:
                self._feed_deferred(deferred() if deferred is not None else {}, checked=feeds is not None)
        return self.results(rows)

    def _feed(self, feeds: Mapping[str, Array] | None) -> None:
        self._life.require()
        if feeds is not None:
            if not isinstance(feeds, Mapping):
                raise ValueError(f"feeds must be arrays by name, not {type(feeds).__name__}")
            for name, feed in self._immediate:
                feed.set(feeds.get(name))
            self._check_relations(self.input_buffers)
        else:
            for feed in self._replicated:
                feed.replicate()
        for b, location, image in self._uploads:
            self._backends[b].upload(location, image)

    def results(self, rows: Sequence[int | None] | None = None) -> list[Array]:
        """Values of the fetches after a run; `rows`: see `run`."""
        counts = rows if rows is not None else [None] * len(self._fetches)
        if len(counts) != len(self._fetches):
            raise ValueError(f"rows of {len(counts)} fetches wanted, there are {len(self._fetches)}")
        return [fetch.value(n) for fetch, n in zip(self._fetches, counts, strict=True)]

    def _check_relations(self, values: Mapping[str, Array]) -> None:
        for relation in self._relations:
            if all(name in values for name in relation.leaves):
                relation.check(values)

    def _feed_deferred(self, feeds: Mapping[str, Array], *, checked: bool = True) -> None:
        for name in self.deferred:
            self._feeds[name].set(feeds.get(name), checked=checked)
        if checked:
            self._check_relations({name: self._feeds[name].arrays[0] for name in self.deferred})
        for name in self.deferred:
            for b, at in self._feed_locations[name].items():
                if b in self._staged:
                    image = self._inputs[b][1][at.offset : at.offset + self.feeds[name].nbytes]
                    self._backends[b].upload(at, image)


class _Transfer:
    """A program that copies a node's bytes to another backend."""

    def __init__(self, backends: Sequence[Backend], placement: Placement, locator: _Locator, t: Tensor) -> None:
        b, to = placement.backend_of[t.src[0]], t.attrs["to"]
        self._source, self._start = backends[b], locator.locate(t.src[0], b)
        self._destination, self._end, self._nbytes = backends[to], locator.locate(t, to), t.nbytes

    def run(self) -> None:
        self._destination.upload(self._end, self._source.download(self._start, self._nbytes))


def values_of(raw: Bytes, dtype: str, shape: Shape) -> Array:
    """A copy of bytes as numbers of this shape; bytes of block types stay flat."""
    return as_numbers(np.array(raw), dtype, shape)


def as_numbers(raw: Bytes, dtype: str, shape: Shape) -> Array:
    """A view of bytes as numbers of this shape; bytes of block types stay flat."""
    kind = DTYPES[dtype].numpy
    return raw.view(kind).reshape(shape) if kind is not None else raw


def describe(placement: Placement, layout: ArenaLayout, devices: Sequence[str]) -> str:
    """Format a graph: a line a segment (`gpu: 2 nodes`, `copy to cpu`), a line a node below it.

    A node reads `%3 = add f32[4, 6] (%1, %2) @ 0 +96`: offset in its arena and bytes."""
    lines = [f"{devices[b]}: arena of {size} bytes" for b, size in layout.sizes.items()]
    number = {t: i for i, t in enumerate(placement.order)}
    for segment in placement.segments:
        if segment.nodes[0].op == TRANSFER:
            lines.append(f"copy to {devices[segment.backend]}")
        else:
            lines.append(f"{devices[segment.backend]}: {len(segment.nodes)} nodes")
        for t in segment.nodes:
            owner, at = layout.owners[t]
            where = f"{at} of {owner.name!r}" if owner.is_leaf else str(layout.offsets[owner] + at)
            args = ", ".join(repr(s.name) if s.name and s.is_leaf else f"%{number[s]}" for s in t.src)
            lines.append(f"  %{number[t]} = {t.op} {t.dtype}{list(t.shape)} ({args}) @ {where} +{t.nbytes}")
    return "\n".join(lines)

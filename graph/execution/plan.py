"""One graph made ready: where its bytes lie, what runs it, and nothing of the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logitless.graph.backend import Backend, Buffer, Bytes, Place, Program
from logitless.graph.dtype import DTYPES
from logitless.graph.execution.memory import Layout
from logitless.graph.execution.partition import TRANSFER, Placement
from logitless.graph.tensor import ALIASES, Tensor

Late = Callable[[], "Mapping[str, Array]"]
Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Storage(Protocol):
    """The session's backends and device memory, as far as a plan needs them."""

    backends: list[Backend]

    def arena(self, b: int, size: int, apart: str = "") -> Buffer | None:
        """Memory of backend `b` for intermediate results, at least `size` bytes (None for 0)."""

    def buffer(self, t: Tensor, b: int) -> Buffer:
        """The memory of a state on backend `b`."""


def leaf_uses(placement: Placement, arenas: Layout) -> list[tuple[Tensor, int]]:
    """Every leaf with each backend that needs it: those that read it, and one for a leaf that is only fetched."""
    uses: dict[tuple[Tensor, int], None] = {}  # an ordered set
    for t in placement.order:
        for s in t.src if t.op not in ALIASES else ():
            leaf, b = arenas.roots[s][0], placement.backend_of[t]
            if leaf.is_leaf:
                uses[leaf, b] = None
    read = {leaf for leaf, _ in uses}
    for f in placement.fetches:
        leaf = arenas.roots[f][0]
        if leaf.is_leaf and leaf not in read:
            b = placement.homes[leaf.name] if leaf.op == "state" else 0
            uses[leaf, b] = None
    return list(uses)


def input_layout(uses: Sequence[tuple[Tensor, int]], alignments: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where each feed and scalar lies in its backend's buffer of them, and the sizes of these buffers."""
    offsets, sizes = [], [0] * len(alignments)
    for leaf, b in uses:
        offsets.append(sizes[b])
        if leaf.op != "state":
            sizes[b] += -(-max(leaf.nbytes, 1) // alignments[b]) * alignments[b]
    return offsets, sizes


class _Places:
    """Where the tensors of a graph lie, while a plan of it is made."""

    def __init__(self, storage: Storage, placement: Placement, arenas: Layout, apart: str) -> None:
        self._storage, self._placement, self._layout = storage, placement, arenas
        self._arena = [storage.arena(b, size, apart) for b, size in arenas.sizes.items()]
        self.feeds: dict[str, Tensor] = {}
        self.of_feeds: dict[str, dict[int, Place]] = {}  # by name and backend
        self._constants: dict[tuple[Tensor, int], Place] = {}
        self.staged: set[int] = set()  # backends whose inputs are uploaded from an image
        self.inputs = self._place_inputs(leaf_uses(placement, arenas))

    def _place_inputs(self, uses: Sequence[tuple[Tensor, int]]) -> dict[int, tuple[Place, Bytes]]:
        """Feeds and scalars have one buffer on each backend, and an image of it here that is sent as a whole, where it
        is not the buffer itself."""
        backends = self._storage.backends
        offsets, sizes = input_layout(uses, [b.alignment for b in backends])
        inputs: dict[int, tuple[Place, Bytes]] = {}
        for b, (backend, size) in enumerate(zip(backends, sizes, strict=True)):
            if size:
                place = Place(backend.alloc(size, feeds=True))
                view = backend.host_view(place, size)
                image = np.empty(size, np.uint8) if view is None else view
                image.fill(0xFF)
                inputs[b] = place, image
                if view is None:
                    self.staged.add(b)
        for (leaf, b), offset in zip(uses, offsets, strict=True):
            if leaf.op == "feed":
                if self.feeds.setdefault(leaf.name, leaf) is not leaf:
                    raise ValueError(f"two feeds are named {leaf.name!r}")
                self.of_feeds.setdefault(leaf.name, {})[b] = Place(inputs[b][0].buffer, offset)
            elif leaf.op == "const":
                value = np.array([leaf.attrs["value"]], DTYPES[leaf.dtype].numpy)
                self._constants[leaf, b] = Place(inputs[b][0].buffer, offset)
                inputs[b][1][offset : offset + value.nbytes] = value.view(np.uint8)
        return inputs

    def place(self, t: Tensor, b: int) -> Place:
        """Where t's bytes are, for a node that runs on backend b."""
        root, offset = self._layout.roots[t]
        if root.op == "feed":
            base = self.of_feeds[root.name][b]
        elif root.op == "const":
            base = self._constants[root, b]
        elif root.op == "state":
            base = Place(self._storage.buffer(root, b))
        else:
            base = Place(self._arena[self._placement.backend_of[root]], self._layout.offsets[root])
        return Place(base.buffer, base.offset + offset) if offset else base

    def home(self, t: Tensor) -> int:
        """The backend that a fetch is brought back from."""
        root = self._layout.roots[t][0]
        if root.op == "state":
            return self._placement.homes[root.name]
        if root.op == "feed":
            return next(iter(self.of_feeds[root.name]))
        return self._placement.backend_of[t]


class Fetch:
    """A result: its place, and what its bytes are."""

    def __init__(self, backend: Backend, place: Place, t: Tensor) -> None:
        self._backend, self._place, self._shape, self._dtype = backend, place, t.shape, t.dtype
        self._nbytes, self._label = t.nbytes, repr(t)
        self._seen: Array | None = None  # where the host can see it, and it has rows of numbers
        if t.nbytes and t.shape and DTYPES[t.dtype].numpy is not None:
            view = backend.host_view(place, t.nbytes)
            self._seen = None if view is None else as_numbers(view, t.dtype, t.shape)

    def value(self, rows: int | None) -> Array:
        """A copy of the leading rows, or of all."""
        shape, size = self._shape, self._nbytes
        if rows is not None and not (shape and 0 <= rows <= shape[0]):
            raise ValueError(f"{rows} rows wanted of {self._label}")
        if self._seen is not None:
            return self._seen[:rows].copy()
        if rows is not None:
            shape, size = (rows, *shape[1:]), size * rows // max(1, shape[0])
        if size == 0:
            return np.zeros(shape, DTYPES[self._dtype].numpy or np.uint8)
        return values_of(self._backend.download(self._place, size), self._dtype, shape)


def _fetches(backends: Sequence[Backend], places: _Places, wanted: Sequence[Tensor]) -> list[Fetch]:
    homes = [(t, places.home(t)) for t in wanted]
    return [Fetch(backends[b], places.place(t, b), t) for t, b in homes]


class _Feed:
    """Where a feed's values go: arrays of its shape and type within the images of its backends' inputs."""

    __slots__ = ("dtype", "kind", "name", "places", "shape")

    def __init__(self, leaf: Tensor, images: Sequence[Bytes]) -> None:
        """`images`: the feed's own bytes of each."""
        self.name, self.shape, self.dtype = leaf.name, leaf.shape, leaf.dtype
        self.kind = np.dtype(DTYPES[leaf.dtype].numpy)
        self.places = [image.view(self.kind).reshape(leaf.shape) for image in images]

    def set(self, given: Array | None) -> None:
        if given is None:
            raise ValueError(f"feed {self.name!r} is missing")
        value = np.asarray(given)
        if value.shape != self.shape:
            raise ValueError(f"feed {self.name!r}: expected shape {self.shape}, got {value.shape}")
        if value.dtype != self.kind and value.dtype.kind == "f" and self.kind.kind != "f":
            raise ValueError(f"feed {self.name!r}: expected {self.dtype}, got {value.dtype}")
        for place in self.places:
            np.copyto(place, value, casting="unsafe")

    def spread(self) -> None:
        """What the first place has to the others."""
        for place in self.places[1:]:
            place[...] = self.places[0]


class Plan:
    """One graph, ready to run as often as wanted. Made by `Session.plan`.

    Hundreds are kept, so a plan has its programs and places and lets go of the graph, and nothing in it refers back to
    it: what the session drops is free at once.
    """

    def __init__(self, storage: Storage, placement: Placement, arenas: Layout, apart: str = "") -> None:
        """`apart`: see Session.plan."""
        places = _Places(storage, placement, arenas, apart)
        self._backends = storage.backends
        self.feeds, self._feed_places = places.feeds, places.of_feeds
        self._inputs, self._staged = places.inputs, places.staged
        self.states = frozenset(t.name for t in placement.order if t.op == "state")
        self.late: set[str] = set()
        self._steps: list[tuple[int, Program] | None] = []  # a backend's (-1: a transfer); None: the late feeds
        for segment in placement.segments:
            if segment.late and not self.late:
                self._steps.append(None)
            self.late.update(leaf.name for leaf in segment.late)
            if segment.nodes[0].op == TRANSFER:
                self._steps.append((-1, _Transfer(storage.backends, placement, places, segment.nodes[0])))
            else:
                b = segment.backend
                for nodes in self._cut(segment.nodes):
                    self._steps.append((b, self._program(storage.backends[b], nodes, partial(places.place, b=b))))
        self._feeds = {name: _Feed(leaf, self._images(leaf)) for name, leaf in self.feeds.items()}
        self._at_once = [(name, feed) for name, feed in self._feeds.items() if name not in self.late]
        self._sent = [(b, *to) for b, to in self._inputs.items() if b in self._staged]
        self._in_several = [feed for _, feed in self._at_once if len(feed.places) > 1]
        # Where feeds may be written instead of giving them to a run; late ones have to be given.
        self.room: dict[str, Array] = {name: feed.places[0] for name, feed in self._at_once}
        self.n_fetches = len(placement.fetches)
        self._fetches: list[Fetch] = []
        self._find(partial(_fetches, self._backends, places, placement.fetches))

    def _images(self, leaf: Tensor) -> list[Bytes]:
        places = self._feed_places[leaf.name].items()
        return [self._inputs[b][1][place.offset : place.offset + leaf.nbytes] for b, place in places]

    def _cut(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """A segment's nodes as they become programs."""
        return [nodes]

    def _program(self, backend: Backend, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> Program:
        return backend.compile(nodes, place)

    def _find(self, fetches: Callable[[], list[Fetch]]) -> None:
        self._fetches = fetches()

    @property
    def programs(self) -> list[Program]:
        return [step[1] for step in self._steps if step is not None and step[0] >= 0]

    def run(
        self, feeds: Mapping[str, Array] | None, rows: Sequence[int | None] | None = None, late: Late | None = None
    ) -> list[Array]:
        """Values of the fetches, as they are at the end. ValueError names a feed that is missing or has a wrong shape.

        `feeds`: None if they are in `room`.
        `rows`: how many leading rows of each fetch to bring back (None: all of them), so that padding stays behind.
        `late` is called for the late feeds when all that comes before them has been handed to the devices.
        """
        self._feed(feeds)
        for step in self._steps:
            if step is not None:
                step[1].run()
            else:
                self._feed_late(late() if late is not None else {})
        return self.results(rows)

    def _feed(self, feeds: Mapping[str, Array] | None) -> None:
        if feeds is not None:
            for name, feed in self._at_once:
                feed.set(feeds.get(name))
        else:
            for feed in self._in_several:
                feed.spread()
        for b, place, image in self._sent:
            self._backends[b].upload(place, image)

    def results(self, rows: Sequence[int | None] | None = None) -> list[Array]:
        """Values of the fetches after a run."""
        wanted = rows if rows is not None else [None] * len(self._fetches)
        return [fetch.value(n) for fetch, n in zip(self._fetches, wanted, strict=True)]

    def _feed_late(self, given: Mapping[str, Array]) -> None:
        for name in self.late:
            self._feeds[name].set(given.get(name))
            for b, place in self._feed_places[name].items():
                if b in self._staged:
                    image = self._inputs[b][1][place.offset : place.offset + self.feeds[name].nbytes]
                    self._backends[b].upload(place, image)


class _Transfer:
    """Copies a node's bytes to another backend."""

    def __init__(self, backends: Sequence[Backend], placement: Placement, places: _Places, t: Tensor) -> None:
        b, to = placement.backend_of[t.src[0]], t.attrs["to"]
        self._source, self._start = backends[b], places.place(t.src[0], b)
        self._destination, self._end, self._nbytes = backends[to], places.place(t, to), t.nbytes

    def run(self) -> None:
        self._destination.upload(self._end, self._source.download(self._start, self._nbytes))


def values_of(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    """A copy of bytes as numbers; block types stay bytes."""
    return as_numbers(np.array(raw), dtype, shape)


def as_numbers(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    """The same without a copy."""
    kind = DTYPES[dtype].numpy
    return raw.view(kind).reshape(shape) if kind is not None else raw

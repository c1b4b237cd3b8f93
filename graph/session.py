"""Build → partition → allocate → compile → run: plans by key, and the named state that outlives them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from graph.allocate import Layout, layout
from graph.backend import Backend, Buffer, Bytes, Place, Program
from graph.dtype import DTYPES, nbytes
from graph.partition import TRANSFER, Placement, partition
from graph.tensor import ALIASES, Tensor, state, toposort

Build = Callable[[], Sequence[Tensor]]
Late = Callable[[], "Mapping[str, Array]"]
Array = npt.NDArray[Any]


@dataclass
class _State:
    """`buffers` by backend: one for a mutable state, made when a plan has decided where it lives.

    `initial` holds what is written to a mutable state before that.
    """

    tensor: Tensor
    source: Callable[[], Bytes] | None
    buffers: dict[int, Buffer] = field(default_factory=dict)
    initial: Bytes | None = None

    def first_bytes(self) -> Bytes:
        if self.initial is None:
            given = self.source() if self.source is not None else np.zeros(self.tensor.nbytes, np.uint8)
            if given.nbytes != self.tensor.nbytes:
                raise ValueError(f"state {self.tensor.name!r}: {self.tensor.nbytes} bytes wanted, {given.nbytes} given")
            self.initial = np.array(given)
        return self.initial


@dataclass(frozen=True)
class DeviceBytes:
    """What a plan needs on one device."""

    device: str
    weights: int
    states: int
    arena: int
    feeds: int


def _leaf_uses(placement: Placement, arenas: Layout) -> list[tuple[Tensor, int]]:
    """Every leaf with each backend that needs it: those that read it, and one for a leaf that is only fetched."""
    uses: dict[tuple[int, int], tuple[Tensor, int]] = {}
    for t in placement.order:
        for s in t.src if t.op not in ALIASES else ():
            leaf, b = arenas.roots[id(s)][0], placement.backend_of[id(t)]
            if leaf.is_leaf:
                uses[id(leaf), b] = leaf, b
    read = {i for i, _ in uses}
    for f in placement.fetches:
        leaf = arenas.roots[id(f)][0]
        if leaf.is_leaf and id(leaf) not in read:
            b = placement.homes[leaf.name] if leaf.op == "state" else 0
            uses[id(leaf), b] = leaf, b
    return list(uses.values())


def _input_layout(uses: Sequence[tuple[Tensor, int]], alignments: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where each feed and scalar lies in its backend's buffer of them, and the sizes of these buffers."""
    offsets, sizes = [], [0] * len(alignments)
    for leaf, b in uses:
        offsets.append(sizes[b])
        if leaf.op != "state":
            sizes[b] += -(-max(leaf.nbytes, 1) // alignments[b]) * alignments[b]
    return offsets, sizes


class Plan:
    """One graph, ready to run as often as wanted. Made by `Session.plan`."""

    def __init__(self, session: Session, placement: Placement, arenas: Layout) -> None:
        self._session, self.placement, self.layout = session, placement, arenas
        backends = session.backends
        self._arena = [session.arena(b, size) for b, size in arenas.sizes.items()]
        self.feeds: dict[str, Tensor] = {}
        self._feed_places: dict[str, dict[int, Place]] = {}  # by name and backend
        self._constants: dict[tuple[int, int], Place] = {}
        self._inputs = self._place_inputs(_leaf_uses(placement, arenas))
        self.programs: list[Program] = []
        self.late: set[str] = set()
        self._late: Late | None = None
        self._steps: list[Callable[[], None]] = []
        for segment in placement.segments:
            if segment.late and not self.late:
                self._steps.append(self._feed_late)
            self.late.update(leaf.name for leaf in segment.late)
            if segment.nodes[0].op == TRANSFER:
                self._steps.append(self._transfer(segment.nodes[0]))
            else:
                b = segment.backend
                self.programs.append(backends[b].compile(segment.nodes, partial(self.place, b=b)))
                self._steps.append(self.programs[-1].run)

    def _place_inputs(self, uses: Sequence[tuple[Tensor, int]]) -> dict[int, tuple[Place, Bytes]]:
        """Feeds and scalars have one buffer on each backend, and an image of it here that is sent as a whole."""
        backends = self._session.backends
        offsets, sizes = _input_layout(uses, [b.alignment for b in backends])
        inputs = {
            b: (Place(backends[b].alloc(size, feeds=True)), np.full(size, 0xFF, np.uint8))
            for b, size in enumerate(sizes)
            if size
        }
        for (leaf, b), offset in zip(uses, offsets, strict=True):
            if leaf.op == "feed":
                if self.feeds.setdefault(leaf.name, leaf) is not leaf:
                    raise ValueError(f"two feeds are named {leaf.name!r}")
                self._feed_places.setdefault(leaf.name, {})[b] = Place(inputs[b][0].buffer, offset)
            elif leaf.op == "const":
                value = np.array([leaf.attrs["value"]], DTYPES[leaf.dtype].numpy)
                self._constants[id(leaf), b] = Place(inputs[b][0].buffer, offset)
                inputs[b][1][offset : offset + value.nbytes] = value.view(np.uint8)
        return inputs

    def place(self, t: Tensor, b: int) -> Place:
        """Where t's bytes are, for a node that runs on backend b."""
        root, offset = self.layout.roots[id(t)]
        if root.op == "feed":
            base = self._feed_places[root.name][b]
        elif root.op == "const":
            base = self._constants[id(root), b]
        elif root.op == "state":
            base = Place(self._session.buffer(root, b))
        else:
            base = Place(self._arena[self.placement.backend_of[id(root)]], self.layout.offsets[id(root)])
        return Place(base.buffer, base.offset + offset) if offset else base

    def _transfer(self, t: Tensor) -> Callable[[], None]:
        source_b = self.placement.backend_of[id(t.src[0])]
        source, destination = self._session.backends[source_b], self._session.backends[t.attrs["to"]]
        start, end = self.place(t.src[0], source_b), self.place(t, t.attrs["to"])
        return lambda: destination.upload(end, source.download(start, t.nbytes))

    def _feed_late(self) -> None:
        given = self._late() if self._late is not None else {}
        for name in self.late:
            self._set(self.feeds[name], given.get(name))
            for b, place in self._feed_places[name].items():
                image = self._inputs[b][1][place.offset : place.offset + self.feeds[name].nbytes]
                self._session.backends[b].upload(place, image)

    def run(
        self, feeds: Mapping[str, Array], rows: Sequence[int | None] | None = None, late: Late | None = None
    ) -> list[Array]:
        """Values of the fetches, as they are at the end. ValueError names a feed that is missing or has a wrong shape.

        `rows`: how many leading rows of each fetch to bring back (None: all of them), so that padding stays behind.
        `late` is called for the late feeds when all that comes before them has been handed to the devices.
        """
        self._late = late
        for name, leaf in self.feeds.items():
            if name not in self.late:
                self._set(leaf, feeds.get(name))
        for b, (place, image) in self._inputs.items():
            self._session.backends[b].upload(place, image)
        for step in self._steps:
            step()
        wanted = rows if rows is not None else [None] * len(self.placement.fetches)
        return [self._fetch(t, n) for t, n in zip(self.placement.fetches, wanted, strict=True)]

    def _set(self, leaf: Tensor, given: Array | None) -> None:
        if given is None:
            raise ValueError(f"feed {leaf.name!r} is missing")
        kind = np.dtype(DTYPES[leaf.dtype].numpy)
        value = np.asarray(given)
        if value.shape != leaf.shape:
            raise ValueError(f"feed {leaf.name!r}: expected shape {leaf.shape}, got {value.shape}")
        if value.dtype.kind == "f" and kind.kind != "f":
            raise ValueError(f"feed {leaf.name!r}: expected {leaf.dtype}, got {value.dtype}")
        data = np.asarray(value, kind, order="C").reshape(-1).view(np.uint8)
        for b, place in self._feed_places[leaf.name].items():
            self._inputs[b][1][place.offset : place.offset + len(data)] = data

    def _fetch(self, t: Tensor, rows: int | None) -> Array:
        root = self.layout.roots[id(t)][0]
        if root.op == "state":
            b = self.placement.homes[root.name]
        elif root.op == "feed":
            b = next(iter(self._feed_places[root.name]))
        else:
            b = self.placement.backend_of[id(t)]
        if rows is not None and not (t.shape and 0 <= rows <= t.shape[0]):
            raise ValueError(f"{rows} rows wanted of {t!r}")
        shape = t.shape if rows is None else (rows, *t.shape[1:])
        if 0 in shape:
            return np.zeros(shape, DTYPES[t.dtype].numpy or np.uint8)
        return _values(self._session.backends[b].download(self.place(t, b), nbytes(t.dtype, shape)), t.dtype, shape)


def _values(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    """A copy of bytes as numbers; block types stay bytes."""
    kind = DTYPES[dtype].numpy
    copy: Array = np.array(raw)
    return copy.view(kind).reshape(shape) if kind is not None else copy


class Session:
    """Backends in order of preference, the states that live on them, and the plans made so far."""

    def __init__(self, backends: Sequence[Backend], *, max_plans: int = 256) -> None:
        if not backends:
            raise ValueError("a session needs at least one backend")
        self.backends = list(backends)
        self._states: dict[str, _State] = {}
        self._homes: dict[str, int] = {}
        self._arenas: dict[int, Buffer] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._max_plans = max_plans
        self.n_plans_built = 0

    def define(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "f32",
        source: Callable[[], Bytes] | None = None,
        *,
        constant: bool = False,
    ) -> Tensor:
        """A named state. `source` gives its first bytes (GGUF layout for constants); without one it is zero."""
        if name in self._states:
            raise ValueError(f"state {name!r} is defined twice")
        if constant and source is None:
            raise ValueError(f"constant {name!r} has no data")
        t = state(name, shape, dtype, constant=constant)
        self._states[name] = _State(t, source)
        return t

    def forget(self, names: Iterable[str]) -> None:
        """Drop these states with their memory, and every plan kept that uses one of them."""
        gone = set(names)
        for name in gone:
            self._held(name)
        for key, plan in list(self._plans.items()):
            if any(t.op == "state" and t.name in gone for t in plan.placement.order):
                del self._plans[key]
        for name in gone:
            del self._states[name]
            self._homes.pop(name, None)

    def _held(self, name: str) -> _State:
        if name not in self._states:
            raise KeyError(f"no state is named {name!r}")
        return self._states[name]

    def buffer(self, t: Tensor, b: int) -> Buffer:
        """The memory of a state on a backend, made at first use."""
        held = self._held(t.name)
        if (t.shape, t.dtype, t.attrs) != (held.tensor.shape, held.tensor.dtype, held.tensor.attrs):
            raise ValueError(f"{t!r} is not what this session defined: {held.tensor!r}")
        if b not in held.buffers:
            backend = self.backends[b]
            if held.source is not None and t.attrs["constant"]:
                held.buffers[b] = backend.load(t, held.source())
            else:
                held.buffers[b] = backend.alloc(t.nbytes)
                if held.source is not None or held.initial is not None:
                    backend.upload(Place(held.buffers[b]), held.first_bytes())
                    held.initial = None
        return held.buffers[b]

    def arena(self, b: int, size: int) -> Buffer | None:
        """A backend's memory for what lives within one run. All plans share it, since they run one at a time.

        A plan that needs more gets a larger one, and earlier plans keep theirs: plan (or `reserve`) the largest first.
        """
        held = self._arenas.get(b)
        if size and (held is None or held.nbytes < size):
            self._arenas[b] = held = self.backends[b].alloc(size)
        return held

    def write(self, name: str, data: Array, offset: int = 0) -> None:
        """Overwrite bytes of a mutable state from a byte offset. ValueError names a state that they do not fit."""
        held = self._held(name)
        t, raw = held.tensor, np.ascontiguousarray(data).reshape(-1)
        if t.attrs["constant"]:
            raise ValueError(f"state {name!r} is constant")
        if raw.dtype != np.uint8 and raw.dtype != DTYPES[t.dtype].numpy:
            raise ValueError(f"state {name!r} is {t.dtype}, got {raw.dtype}")
        if offset < 0 or offset + raw.nbytes > t.nbytes:
            raise ValueError(f"state {name!r} has {t.nbytes} bytes, got {raw.nbytes} at {offset}")
        if name in self._homes:
            b = self._homes[name]
            self.backends[b].upload(Place(self.buffer(t, b), offset), raw.view(np.uint8))
        else:
            held.first_bytes()[offset : offset + raw.nbytes] = raw.view(np.uint8)

    def read(self, name: str) -> Array:
        """A copy of a state's values (bytes for block types)."""
        held, b = self._held(name), self._homes.get(name)
        t = held.tensor
        if b is None:
            return _values(held.first_bytes(), t.dtype, t.shape)
        return _values(self.backends[b].download(Place(self.buffer(t, b)), t.nbytes), t.dtype, t.shape)

    def read_bytes(self, name: str, offset: int, nbytes: int) -> Bytes:
        """A copy of some bytes of a mutable state. ValueError when it does not have them."""
        held, b = self._held(name), self._homes.get(name)
        t = held.tensor
        if t.attrs["constant"] or offset < 0 or nbytes < 0 or offset + nbytes > t.nbytes:
            raise ValueError(f"state {name!r} has {t.nbytes} bytes that may be read, not {nbytes} at {offset}")
        if b is None:
            return np.array(held.first_bytes()[offset : offset + nbytes])
        return np.array(self.backends[b].download(Place(self.buffer(t, b), offset), nbytes))

    def measure(self, build: Build, *, eval_order: str = "auto") -> tuple[Placement, Layout]:
        """Placement and memory of a graph, with nothing allocated.

        `eval_order`: whether sources are visited "left" to right, "right" to left, or ("auto") as needs less memory.
        """
        placement = partition(build(), self.backends, self._homes)
        alignments = [b.alignment for b in self.backends]
        orders = {"left": placement.order} if eval_order != "right" else {}
        if eval_order != "left":
            orders["right"] = tuple(toposort(placement.fetches, reverse=True))
        choices = [
            (replace(placement, order=order), layout(order, placement.arena_of, alignments, placement.fetches))
            for order in orders.values()
        ]
        return min(choices, key=lambda choice: sum(choice[1].sizes.values()))

    def device_bytes(self, placement: Placement, arenas: Layout) -> list[DeviceBytes]:
        """What a measured graph needs on each device."""
        weights, states = ([0] * len(self.backends) for _ in range(2))
        uses = _leaf_uses(placement, arenas)
        _, feeds = _input_layout(uses, [b.alignment for b in self.backends])
        for leaf, b in uses:
            if leaf.op == "state" and leaf.attrs["constant"]:
                weights[b] += self.backends[b].constant_nbytes(leaf)
            elif leaf.op == "state":
                states[b] += leaf.nbytes
        return [
            DeviceBytes(backend.name, weights[i], states[i], arenas.sizes.get(i, 0), feeds[i])
            for i, backend in enumerate(self.backends)
        ]

    def reserve(self, build: Build) -> None:
        """Get the arenas that this graph needs, so that smaller plans share them, and decide where its states live."""
        placement, arenas = self.measure(build)
        self._homes.update(placement.homes)
        for b, size in arenas.sizes.items():
            self.arena(b, size)

    def plan(self, build: Build) -> Plan:
        """A plan of its own, not kept."""
        placement, arenas = self.measure(build)
        self._homes.update(placement.homes)
        self.n_plans_built += 1
        return Plan(self, placement, arenas)

    def prepare(self, key: Hashable, build: Build) -> Plan:
        """The plan kept under this key, built at first use; at the limit the least recently used one is dropped."""
        plan = self._plans.pop(key, None)
        if plan is None:
            if len(self._plans) >= self._max_plans:
                del self._plans[next(iter(self._plans))]
            plan = self.plan(build)
        self._plans[key] = plan
        return plan

    def run(
        self,
        key: Hashable,
        build: Build,
        feeds: Mapping[str, Array],
        rows: Sequence[int | None] | None = None,
        late: Late | None = None,
    ) -> list[Array]:
        """Run the plan kept under this key."""
        return self.prepare(key, build).run(feeds, rows, late)

    def close(self) -> None:
        self._plans.clear()
        self._states.clear()
        self._arenas.clear()
        for backend in self.backends:
            backend.close()

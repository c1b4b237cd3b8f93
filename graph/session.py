"""Build → partition → allocate → compile → run: plans by key, and the named state that outlives them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from graph.allocate import Layout, layout, root_of
from graph.backend import Backend, Buffer, Bytes, Place, Program
from graph.dtype import DTYPES, nbytes
from graph.partition import TRANSFER, Placement, partition
from graph.tensor import Tensor, state

Build = Callable[[], Sequence[Tensor]]


@dataclass
class _State:
    tensor: Tensor
    source: Callable[[], Bytes] | None
    buffers: dict[int, Buffer] = field(default_factory=dict)  # by backend; one for a mutable state


@dataclass(frozen=True)
class DeviceBytes:
    """What a plan needs on one device."""

    device: str
    weights: int
    states: int
    arena: int
    feeds: int


class Plan:
    """One graph, ready to run as often as wanted. Made by `Session.plan`."""

    def __init__(self, session: Session, placement: Placement, arenas: Layout) -> None:
        self._session, self.placement, self.layout = session, placement, arenas
        backends = session.backends
        self._arena = [session.arena(i, size) for i, size in arenas.sizes.items()]
        self._feed_places: dict[str, list[tuple[int, Place]]] = {}
        self.feeds: dict[str, Tensor] = {}
        self._constants: dict[tuple[int, int], Place] = {}
        self._place_leaves()
        self._steps: list[Callable[[], None]] = []
        for segment in placement.segments:
            if segment.nodes[0].op == TRANSFER:
                self._steps.append(self._transfer(segment.nodes[0]))
            else:
                b = segment.backend
                program: Program = backends[b].compile(segment.nodes, partial(self.place, b=b))
                self._steps.append(program.run)

    def _place_leaves(self) -> None:
        backends, backend_of = self._session.backends, self.placement.backend_of
        for t in self.placement.order:
            for s in t.src:
                leaf = root_of(s)[0]
                b = backend_of[id(t)]
                if leaf.op == "feed":
                    if self.feeds.setdefault(leaf.name, leaf) is not leaf:
                        raise ValueError(f"two feeds are named {leaf.name!r}")
                    places = self._feed_places.setdefault(leaf.name, [])
                    if all(i != b for i, _ in places):
                        places.append((b, Place(backends[b].alloc(max(leaf.nbytes, 1)))))
                elif leaf.op == "const" and (id(leaf), b) not in self._constants:
                    value = np.array([leaf.attrs["value"]], DTYPES[leaf.dtype].numpy)
                    place = Place(backends[b].alloc(value.nbytes))
                    backends[b].upload(place, value.view(np.uint8))
                    self._constants[id(leaf), b] = place

    def place(self, t: Tensor, b: int) -> Place:
        """Where t's bytes are, for a node that runs on backend b."""
        root, offset = root_of(t)
        if root.op == "feed":
            base = next(p for i, p in self._feed_places[root.name] if i == b)
        elif root.op == "const":
            base = self._constants[id(root), b]
        elif root.op == "state":
            base = Place(self._session.buffer(root, b))
        else:
            arena = self._arena[self.placement.backend_of[id(root)]]
            base = Place(arena, self.layout.offsets[id(root)])
        return Place(base.buffer, base.offset + offset) if offset else base

    def _transfer(self, t: Tensor) -> Callable[[], None]:
        source_b = self.placement.backend_of[id(t.src[0])]
        source, destination = self._session.backends[source_b], self._session.backends[t.attrs["to"]]
        start, end = self.place(t.src[0], source_b), self.place(t, t.attrs["to"])
        return lambda: destination.upload(end, source.download(start, t.nbytes))

    def run(
        self, feeds: Mapping[str, npt.NDArray[Any]], rows: Sequence[int | None] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Values of the fetches. Each feed must have its shape; KeyError or ValueError names the one that does not.

        `rows`: how many leading rows of each fetch to bring back (None: all of them), so that padding stays behind.
        """
        backends = self._session.backends
        for name, leaf in self.feeds.items():
            value = np.ascontiguousarray(feeds[name], DTYPES[leaf.dtype].numpy)
            if value.shape != leaf.shape:
                raise ValueError(f"feed {name!r}: expected shape {leaf.shape}, got {value.shape}")
            data = value.reshape(-1).view(np.uint8)
            for b, place in self._feed_places[name]:
                backends[b].upload(place, data)
        for step in self._steps:
            step()
        wanted = rows if rows is not None else [None] * len(self.placement.fetches)
        return [self._fetch(t, n) for t, n in zip(self.placement.fetches, wanted, strict=True)]

    def _fetch(self, t: Tensor, rows: int | None) -> npt.NDArray[Any]:
        root = root_of(t)[0]
        if root.op == "state":
            b = self.placement.homes.get(root.name, 0)
        elif root.op == "feed":
            b = self._feed_places[root.name][0][0]
        else:
            b = self.placement.backend_of[id(t)]
        shape = t.shape if rows is None else (rows, *t.shape[1:])
        if rows is not None and not (t.shape and 0 <= rows <= t.shape[0]):
            raise ValueError(f"{rows} rows wanted of {t!r}")
        raw = np.array(self._session.backends[b].download(self.place(t, b), nbytes(t.dtype, shape)))
        kind = DTYPES[t.dtype].numpy
        return raw.view(kind).reshape(shape) if kind is not None else raw


class Session:
    """Backends in order of preference, the states that live on them, and the plans made so far."""

    def __init__(self, backends: Sequence[Backend], *, max_plans: int = 256) -> None:
        if not backends:
            raise ValueError("a session needs at least one backend")
        self.backends = list(backends)
        self._states: dict[str, _State] = {}
        self._homes: dict[str, int] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._arenas: dict[int, Buffer] = {}
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
        t = state(name, shape, dtype, constant=constant)
        self._states[name] = _State(t, source)
        return t

    def buffer(self, t: Tensor, b: int) -> Buffer:
        """The memory of a state on a backend, made at first use."""
        held = self._states[t.name]
        if b not in held.buffers:
            backend = self.backends[b]
            if t.attrs["constant"]:
                if held.source is None:
                    raise ValueError(f"constant {t.name!r} has no data")
                held.buffers[b] = backend.load(t, held.source())
            else:
                held.buffers[b] = backend.alloc(t.nbytes)
                if held.source is not None:
                    backend.upload(Place(held.buffers[b]), held.source())
        return held.buffers[b]

    def arena(self, b: int, nbytes: int) -> Buffer | None:
        """The scratch memory that all plans of a backend share, one run at a time. Growing it drops the kept plans."""
        held = self._arenas.get(b)
        if nbytes and (held is None or held.nbytes < nbytes):
            self._plans.clear()
            held = self._arenas[b] = self.backends[b].alloc(nbytes)
        return held

    def _home(self, name: str) -> int:
        """The backend of a mutable state; the first one when no plan has decided yet."""
        return self._homes.setdefault(name, 0)

    def write(self, name: str, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Overwrite bytes of a mutable state from a byte offset."""
        b = self._home(name)
        place = Place(self.buffer(self._states[name].tensor, b), offset)
        self.backends[b].upload(place, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def read(self, name: str) -> npt.NDArray[Any]:
        """A copy of a mutable state's values (bytes for block types)."""
        t, b = self._states[name].tensor, self._home(name)
        raw = np.array(self.backends[b].download(Place(self.buffer(t, b)), t.nbytes))
        kind = DTYPES[t.dtype].numpy
        return raw.view(kind).reshape(t.shape) if kind is not None else raw

    def measure(self, build: Build) -> tuple[Placement, Layout]:
        """Placement and memory of a graph, with nothing allocated."""
        placement = partition(build(), self.backends, self._homes)
        alignments = [b.alignment for b in self.backends]
        arenas = layout(placement.order, lambda t: placement.backend_of[id(t)], alignments, placement.fetches)
        return placement, arenas

    def device_bytes(self, placement: Placement, arenas: Layout) -> list[DeviceBytes]:
        """What a measured graph needs on each device."""
        weights, states, feeds = ([0] * len(self.backends) for _ in range(3))
        seen: set[tuple[int, int]] = set()
        for t in placement.order:
            for s in t.src:
                leaf, b = root_of(s)[0], placement.backend_of[id(t)]
                if (id(leaf), b) in seen:
                    continue
                seen.add((id(leaf), b))
                if leaf.op == "state" and leaf.attrs["constant"]:
                    weights[b] += self.backends[b].constant_nbytes(leaf)
                elif leaf.op == "state":
                    states[b] += leaf.nbytes
                elif leaf.op == "feed":
                    feeds[b] += leaf.nbytes
        return [
            DeviceBytes(backend.name, weights[i], states[i], arenas.sizes.get(i, 0), feeds[i])
            for i, backend in enumerate(self.backends)
        ]

    def reserve(self, build: Build) -> None:
        """Make the arenas large enough for this graph, so that plans up to its size need no more memory."""
        for b, nbytes in self.measure(build)[1].sizes.items():
            self.arena(b, nbytes)

    def plan(self, build: Build) -> Plan:
        """A plan of its own, not kept."""
        placement, arenas = self.measure(build)
        self._homes.update(placement.homes)
        self.n_plans_built += 1
        return Plan(self, placement, arenas)

    def run(
        self,
        key: Hashable,
        build: Build,
        feeds: Mapping[str, npt.NDArray[Any]],
        rows: Sequence[int | None] | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Run the plan kept under this key, built at first use; at the limit the least recently used one is dropped."""
        plan = self._plans.pop(key, None)
        if plan is None:
            if len(self._plans) >= self._max_plans:
                del self._plans[next(iter(self._plans))]
            plan = self.plan(build)
        self._plans[key] = plan
        return plan.run(feeds, rows)

    def close(self) -> None:
        self._plans.clear()
        self._states.clear()
        for backend in self.backends:
            backend.close()

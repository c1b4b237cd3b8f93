"""Build → partition → allocate → compile → run: plans by key, and the named state that outlives them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from logitless.graph.backend import Backend, Buffer, Bytes, Place, Program
from logitless.graph.dtype import DTYPES
from logitless.graph.execution.memory import Layout, layout
from logitless.graph.execution.partition import TRANSFER, Placement, Prefer, partition
from logitless.graph.execution.plan import Array, Late, Plan, input_layout, leaf_uses, values_of
from logitless.graph.execution.preemptible_plan import Divided
from logitless.graph.execution.profiler import Observer, Timed
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, state

Build = Callable[[], Sequence[Tensor]]
Measured = tuple[Placement, Layout]
PIECE_NBYTES = 1 << 20  # of a state that goes to a device, or comes from there, in pieces


@dataclass
class _State:
    """`buffers` by backend: one for a mutable state, made when a plan has decided where it lives.

    `initial` holds what is written to a mutable state before that; of a state that only the host writes, its value.
    """

    tensor: Tensor
    source: Callable[[], Bytes] | None
    buffers: dict[int, Buffer] = field(default_factory=dict)
    initial: Bytes | None = None
    loaded: Callable[[], None] | None = None

    def first_bytes(self) -> Bytes:
        if self.initial is None:
            given = self.source() if self.source is not None else np.zeros(self.tensor.nbytes, np.uint8)
            if given.nbytes != self.tensor.nbytes:
                raise ValueError(f"state {self.tensor.name!r}: {self.tensor.nbytes} bytes wanted, {given.nbytes} given")
            self.initial = np.array(given)
        return self.initial


@dataclass(frozen=True)
class DeviceBytes:
    """What plans need on one device; `named` are the mutable states, whose sum is `states`."""

    device: str
    weights: int
    states: int
    arena: int
    feeds: int
    named: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.weights + self.states + self.arena + self.feeds


class _Nowhere:
    """The place of every node of a program that is made and not run."""

    def __init__(self, backend: Backend) -> None:
        self._place = Place(backend.alloc(1))

    def __call__(self, _: Tensor) -> Place:
        return self._place


class Session:
    """Backends in order of preference, the states that live on them, and the plans made so far."""

    def __init__(self, backends: Sequence[Backend], *, prefer: Prefer | None = None, max_plans: int = 256) -> None:
        """`prefer` says which states are wanted elsewhere than on the first backend that can have them."""
        if not backends:
            raise ValueError("a session needs at least one backend")
        self.backends = list(backends)
        self.prefer = prefer
        self._states: dict[str, _State] = {}
        self._homes: dict[str, int] = {}
        self._host_views: dict[str, memoryview] = {}  # see `host_view`
        self._arenas: dict[tuple[str, int], Buffer] = {}  # by name and backend
        self._plans: dict[Hashable, Plan] = {}
        self._max_plans = max_plans
        self.n_plans_built = 0
        self.eval_order = "auto"  # see `measure`
        self.observer: Observer | None = None  # of the plans made from now on
        self._closed = False

    def define(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "f32",
        source: Callable[[], Bytes] | None = None,
        *,
        constant: bool = False,
        by_host: bool = False,
        loaded: Callable[[], None] | None = None,
    ) -> Tensor:
        """A named state. `source` gives its first bytes (GGUF layout for constants); without one it is zero.

        `loaded` is called when a backend has the source's bytes in memory of its own.
        """
        if name in self._states:
            raise ValueError(f"state {name!r} is defined twice")
        if constant and source is None:
            raise ValueError(f"constant {name!r} has no data")
        t = state(name, shape, dtype, constant=constant, by_host=by_host)
        self._states[name] = _State(t, source, loaded=loaded)
        return t

    def forget(self, names: Iterable[str], apart: str = "") -> None:
        """Drop these states with their memory, every plan kept that uses one of them, and the arenas of that name."""
        gone = set(names)
        for name in gone:
            self._held(name)
        for key, plan in list(self._plans.items()):
            if plan.states & gone:
                del self._plans[key]
        for name in gone:
            del self._states[name]
            self._homes.pop(name, None)
            self._host_views.pop(name, None)
        for held in [held for held in list(self._arenas) if apart and held[0] == apart]:
            del self._arenas[held]

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
                if held.loaded is not None:
                    held.loaded()
            else:
                for _ in self._brought(held, b):
                    pass
        return held.buffers[b]

    def _brought(self, held: _State, b: int) -> Iterator[None]:
        """Give a mutable state memory on a backend and bring its first bytes there, a piece at a time."""
        nbytes = held.tensor.nbytes
        held.buffers[b] = buffer = self.backends[b].alloc(nbytes)
        if held.source is None and held.initial is None:
            return
        data = held.first_bytes()
        for start in range(0, nbytes, PIECE_NBYTES):
            self.backends[b].upload(Place(buffer, start), data[start : start + PIECE_NBYTES])
            yield
        if not held.tensor.attrs.get("by_host"):
            held.initial = held.source = None  # it lives nowhere else
            if held.loaded is not None:
                held.loaded()

    def settle(self, homes: Mapping[str, int], names: Iterable[str]) -> Iterator[None]:
        """Bring mutable states to where they are to live, a piece at a time."""
        for held in (self._held(name) for name in names):
            b = self._homes.setdefault(held.tensor.name, homes[held.tensor.name])
            if b not in held.buffers:
                yield from self._brought(held, b)

    def settle_beside(self, name: str, other: str) -> None:
        """Bring a mutable state to where another one lives, now and not with the first plan; where that has no home
        yet, nothing."""
        if other in self._homes:
            for _ in self.settle({name: self._homes[other]}, [name]):
                pass

    def arena(self, b: int, size: int, apart: str = "") -> Buffer | None:
        """A backend's memory for what lives within one run. All plans of a name share it: they run one at a time.

        A plan that needs more gets a larger one, and earlier plans keep theirs: plan (or `reserve`) the largest first.
        """
        held = self._arenas.get((apart, b))
        if size and (held is None or held.nbytes < size):
            self._arenas[apart, b] = held = self.backends[b].alloc(size)
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
            for b, buffer in held.buffers.items():
                self.backends[b].upload(Place(buffer, offset), raw.view(np.uint8))

    def make_ready(self, name: str) -> None:
        """Have a state's first bytes at hand, where they are still to be brought to a device. Any thread may call."""
        if name not in self._homes:
            self._held(name).first_bytes()

    def read(self, name: str) -> Array:
        """A copy of a state's values (bytes for block types)."""
        held, b = self._held(name), self._homes.get(name)
        t = held.tensor
        if b is None:
            return values_of(held.first_bytes(), t.dtype, t.shape)
        return values_of(self.backends[b].download(Place(self.buffer(t, b)), t.nbytes), t.dtype, t.shape)

    def read_bytes(self, name: str, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        """A copy of some bytes of a mutable state, on request `into` that many bytes. ValueError when it does not have
        them."""
        held, b = self._held(name), self._homes.get(name)
        t = held.tensor
        if t.attrs["constant"] or offset < 0 or nbytes < 0 or offset + nbytes > t.nbytes:
            raise ValueError(f"state {name!r} has {t.nbytes} bytes that may be read, not {nbytes} at {offset}")
        if b is None:
            data = held.first_bytes()[offset : offset + nbytes]
        else:
            data = self.backends[b].download(Place(held.buffers.get(b) or self.buffer(t, b), offset), nbytes)
        if into is None:
            return np.array(data)
        into.data[:] = data.data  # numpy's own copy lets go of the GIL, and waits for it afterwards
        return into

    def host_view(self, name: str) -> memoryview | None:
        """The bytes of a mutable state in place, to copy many pieces between two runs.

        None where its device's memory is not the host's, or it has no memory yet.
        """
        view = self._host_views.get(name)
        if view is None and name in self._homes:
            held, b = self._held(name), self._homes[name]
            if (buffer := held.buffers.get(b)) is not None:
                found = self.backends[b].host_view(Place(buffer), held.tensor.nbytes)
                if found is not None:
                    view = self._host_views[name] = found.data
        return view

    def touch(self, name: str, offset: int, nbytes: int) -> None:
        """Write some bytes of a mutable state as they are, so that the host's system gives the memory for them. A
        device's memory is left alone, and a state that has none."""
        held = self._states.get(name)
        for b, buffer in held.buffers.items() if held is not None else ():
            view = self.backends[b].host_view(Place(buffer, offset), nbytes)
            if view is not None:
                pages = view[:: mmap.PAGESIZE]
                np.bitwise_or(pages, 0, out=pages)

    def placed(self, fetches: Iterable[Tensor]) -> Placement:
        """How a graph is placed where no state has a home yet."""
        return partition(fetches, self.backends, {}, self.prefer)

    def prepare_kernels(self, fetches: Iterable[Tensor]) -> None:
        """Load the kernels that a graph needs, compiled where they are not cached. Any thread may call."""
        placement = self.placed(fetches)
        for b, backend in enumerate(self.backends):
            backend.prepare(placement.nodes_of(b))

    def measure(
        self,
        build: Build,
        *,
        eval_order: str = "",
        held: str | None = None,
        homes: Mapping[str, int] | None = None,
    ) -> Measured:
        """Placement and memory of a graph, with nothing allocated.

        `eval_order`: whether sources are visited "left" to right, "right" to left, or ("auto") as needs less memory;
        "": as the session's.
        `held`: memory that the arenas of this name have anyway costs nothing, so an order that needs no more is as good
        as any.
        `homes`: where states live, if that is not where they live now.
        """
        placement = partition(build(), self.backends, self._homes if homes is None else homes, self.prefer)
        alignments = [b.alignment for b in self.backends]

        def choice(order: tuple[Tensor, ...]) -> tuple[Placement, Layout]:
            return replace(placement, order=order), layout(order, placement.arena_of, alignments, placement.fetches)

        eval_order = eval_order or self.eval_order
        choices = [choice(placement.order)] if eval_order != "right" else []
        if choices and held is not None and all(self._room(held, b) >= n for b, n in choices[0][1].sizes.items()):
            return choices[0]
        if eval_order != "left":
            choices.append(choice(tuple(toposort(placement.fetches, reverse=True))))
        return min(choices, key=lambda choice: sum(choice[1].sizes.values()))

    def measured(self, builds: Iterable[Build]) -> Iterator[Measured]:
        """Placement and memory of graphs whose plans will be made in this order. No device has to do anything, so any
        thread may call."""
        homes = dict(self._homes)
        for build in builds:
            placement, arenas = self.measure(build, homes=homes)
            homes.update(placement.homes)
            yield placement, arenas

    def _room(self, apart: str, b: int) -> int:
        arena = self._arenas.get((apart, b))
        return arena.nbytes if arena is not None else 0

    def device_bytes(self, measured: Iterable[Measured], apart: Iterable[Measured] = ()) -> list[DeviceBytes]:
        """What measured graphs need on each device when they are planned in this order; `apart`: with an arena of
        their own."""
        n = len(self.backends)
        weights: list[dict[str, int]] = [{} for _ in range(n)]
        states: list[dict[str, int]] = [{} for _ in range(n)]
        arenas, feeds = [0] * n, [0] * n
        for group in (measured, apart):
            largest = [0] * n
            for placement, lying in group:
                uses = leaf_uses(placement, lying)
                _, sizes = input_layout(uses, [b.alignment for b in self.backends])
                for leaf, b in uses:
                    if leaf.op == "state" and leaf.attrs["constant"]:
                        weights[b][leaf.name] = self.backends[b].constant_nbytes(leaf)
                    elif leaf.op == "state":
                        states[b][leaf.name] = leaf.nbytes
                for b in range(n):
                    feeds[b] += sizes[b]
                    size = lying.sizes.get(b, 0)
                    if size > largest[b]:  # the earlier plans keep their smaller one
                        arenas[b], largest[b] = arenas[b] + size, size
        return [
            DeviceBytes(backend.name, sum(weights[i].values()), sum(states[i].values()), arenas[i], feeds[i], states[i])
            for i, backend in enumerate(self.backends)
        ]

    def planned_bytes(
        self, builds: Iterable[Build], apart: Iterable[Build] = ()
    ) -> tuple[list[DeviceBytes], list[Program]]:
        """What plans of these graphs will take, made in this order, with nothing allocated. `apart`: see `plan`.

        And their programs, which cannot run: what they hold besides, of kernels and tables, is in the process. As with
        plans, a graph is there only until its programs are made.
        """
        programs: list[Program] = []

        def made(measured: Measured) -> Measured:
            for segment in measured[0].segments:
                if segment.nodes[0].op != TRANSFER:
                    backend = self.backends[segment.backend]
                    programs.append(backend.compile(segment.nodes, _Nowhere(backend)))
            return measured

        return self.device_bytes(map(made, self.measured(builds)), map(made, self.measured(apart))), programs

    def reserve(self, build: Build) -> None:
        """Get the arenas that this graph needs, so that smaller plans share them, and decide where its states live."""
        placement, arenas = self.measure(build)
        self._homes.update(placement.homes)
        for b, size in arenas.sizes.items():
            self.arena(b, size)

    def plan(self, build: Build, apart: str = "", measured: Measured | None = None) -> Plan:
        """A plan of its own, not kept.

        `apart`: the name of an arena; the plan is Divided: between its parts, plans that have another arena may run.
        `measured`: what is known of the graph already.
        """
        placement, arenas = measured or self.measure(build, held=apart)
        self._homes.update(placement.homes)
        self.n_plans_built += 1
        if apart:
            return Divided(self, placement, arenas, apart)
        if self.observer is not None:
            return Timed(self, placement, arenas, self.observer)
        return Plan(self, placement, arenas)

    def prepare(self, key: Hashable, build: Build, apart: str = "", measured: Measured | None = None) -> Plan:
        """The plan kept under this key, built at first use; at the limit the least recently used one is dropped."""
        plan = self._plans.pop(key, None)
        if plan is None:
            if len(self._plans) >= self._max_plans:
                del self._plans[next(iter(self._plans))]
            plan = self.plan(build, apart, measured)
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

    def wait(self) -> None:
        """Return when all devices have done what was started."""
        for backend in self.backends:
            backend.wait()

    def release(self) -> None:
        """Give up all memory; nothing can be run or read afterwards. The backends stay open."""
        self._plans.clear()
        self._host_views.clear()
        self._states.clear()
        self._arenas.clear()

    def close(self) -> None:
        """The same, and the backends are closed. May be called twice."""
        self.release()
        if not self._closed:
            self._closed = True
            for backend in self.backends:
                backend.close()

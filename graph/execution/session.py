"""Session: devices, the named variables on them, and plans cached by key.

A graph becomes a plan in four steps: build, partition (which device runs which node), lay out
(offsets of results in device memory), compile."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from logitless.graph.backend import Backend, Buffer, Bytes, Location, Program
from logitless.graph.dtype import DTYPES, dtype_of
from logitless.graph.execution.division import SEPARATOR, Division
from logitless.graph.execution.expert_cache import CacheMemory, ExpertCache, LayerExperts
from logitless.graph.execution.memory import ArenaLayout, lay_out_arenas
from logitless.graph.execution.partition import BY_HOST, HintOf, Placement, partition
from logitless.graph.execution.plan import Array, DeferredFeeds, Life, Plan, input_layout, leaf_uses, values_of
from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.execution.profiler import Observer, ProfiledPlan
from logitless.graph.indices import IndexChecks, IndexPart
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, tensors, variable

Build = Callable[[], Sequence[Tensor]]  # makes a graph; its fetches
Measurement = tuple[Placement, ArenaLayout]
UPLOAD_NBYTES = 1 << 20  # of one piece of a variable's initial bytes


@dataclass
class _Variable:
    """A variable's memory: `buffers` by backend, one only unless the host alone writes it.

    `initial`: bytes of a mutable variable that no plan has given a device yet; the value itself of
    one that the host alone writes."""

    tensor: Tensor
    source: Callable[[], Bytes] | None
    buffers: dict[int, Buffer] = field(default_factory=dict)
    initial: Bytes | None = None
    on_loaded: Callable[[], None] | None = None

    def initial_bytes(self) -> Bytes:
        if self.initial is None:
            self.initial = (
                np.array(self.source_bytes()) if self.source is not None else np.zeros(self.tensor.nbytes, np.uint8)
            )
        return self.initial

    def source_bytes(self) -> Bytes:
        """The bytes that the source gives. ValueError for another number or type of them."""
        assert self.source is not None
        data, t = self.source(), self.tensor
        if not isinstance(data, np.ndarray) or data.dtype not in (np.uint8, DTYPES[t.dtype].numpy or np.uint8):
            given = data.dtype if isinstance(data, np.ndarray) else type(data).__name__
            raise ValueError(f"variable {t.name!r} is {t.dtype}, its source gives {given}")
        if data.nbytes != t.nbytes:
            raise ValueError(f"variable {t.name!r}: expected {t.nbytes} bytes, its source has {data.nbytes}")
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes that plans need on one device; `variables` is the sum of `by_variable`."""

    device: str
    weights: int
    variables: int
    arena: int
    feeds: int
    by_variable: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.weights + self.variables + self.arena + self.feeds


class Session:
    """Backends in order of preference, variables that live on them, and cached plans."""

    def __init__(self, backends: Sequence[Backend], *, hint_of: HintOf | None = None, max_plans: int = 256) -> None:
        """`hint_of` prefers devices for nodes: see partition. ValueError without a backend."""
        if not backends:
            raise ValueError("a session needs at least one backend")
        if isinstance(backends, str) or not all(hasattr(b, "compile") for b in backends):
            raise ValueError(f"a session needs devices as open_backends gives them, not {backends!r}")
        self.backends = list(backends)
        self.hint_of = hint_of
        self._variables: dict[str, _Variable] = {}
        self._variable_backend: dict[str, int] = {}  # mutable variable → its backend
        self._host_views: dict[str, memoryview] = {}
        self._arenas: dict[tuple[str, int], Buffer] = {}  # by name and backend
        self._plans: dict[Hashable, Plan] = {}
        self._max_plans = max_plans
        self.n_plans_built = 0
        self.eval_order = "auto"  # see `measure`
        self.observer: Observer | None = None  # profiles the plans made from now on
        self.life = Life(self.backends)
        self.division: Division | None = None  # divides weights and caches between devices
        self.expert_cache: ExpertCache | None = None
        self.in_file: frozenset[str] = frozenset()  # constants that the last backend has in a file's memory
        self._index_parts: dict[str, set[IndexPart]] = {}  # of variables that nodes take indices from
        self._closed = False

    # --- variables --------------------------------------------------------------------------------

    def define(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "f32",
        source: Callable[[], Bytes] | None = None,
        *,
        constant: bool = False,
        host_written: bool = False,
        on_loaded: Callable[[], None] | None = None,
    ) -> Tensor:
        """Define a named variable: a leaf of graphs that this session runs.

        `source` gives its initial values or bytes (GGUF layout for constants); without one it is
        zero.
        `host_written`: only the host writes it, every device that reads it has a copy.
        `on_loaded` is called when a backend has the bytes in memory of its own.
        ValueError for a name that is taken, a wrong shape or type, or a constant without a source.
        """
        self.life.require()
        if source is not None and not callable(source):
            raise ValueError(f"variable {name!r}: source must be a function that returns an array")
        if name in self._variables:
            raise ValueError(f"variable {name!r} is defined twice")
        if constant and source is None:
            raise ValueError(f"constant {name!r} has no data")
        t = variable(name, shape, dtype, constant=constant, host_written=host_written)
        self._variables[name] = _Variable(t, source, on_loaded=on_loaded)
        return t

    def constant(self, name: str, values: Array) -> Tensor:
        """Define a constant with the numbers of an array: i32, or f32."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return self.define(name, values.shape, dtype_of(values), lambda: raw, constant=True)

    def define_piece(self, name: str, piece: str, start: int, stop: int) -> Tensor:
        """Define a piece of a variable: rows of a constant, else a block of the second axis."""
        v = self._variable(name)
        t, source = v.tensor, None
        if t.attrs["constant"]:
            shape, row = (stop - start, *t.shape[1:]), t.nbytes // t.shape[0]
            source = lambda: v.source_bytes()[start * row : stop * row]  # noqa: E731
        else:
            shape = (t.shape[0], stop - start, *t.shape[2:])
        return self.define(piece, shape, t.dtype, source, constant=bool(source), on_loaded=v.on_loaded)

    def define_pool(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Define a constant whose bytes come later, part by part."""
        t = variable(name, shape, dtype, constant=True)
        self._variables[name] = _Variable(t, None)
        return t

    @property
    def states(self) -> list[Tensor]:
        """The mutable variables."""
        return [v.tensor for v in self._variables.values() if not v.tensor.attrs["constant"]]

    def source_of(self, t: Tensor) -> Callable[[], Bytes]:
        """A function that gives a constant's bytes."""
        return self._variable(t.name).source_bytes

    def cache_experts(self, layers: Sequence[LayerExperts], memory: CacheMemory) -> None:
        """Cache the experts of these layers, and of no others (expert_cache.py).

        ValueError: the experts of one layer need more than `memory.nbytes`."""
        if self.expert_cache is not None:
            self.delete(self.expert_cache.pool_names)
        self.expert_cache = ExpertCache(self, layers, memory) if layers else None

    def pieces_of(self, t: Tensor) -> Sequence[Tensor]:
        """The variables that have the bytes of a cache: itself, or its pieces."""
        parts = self.division.of_variable(t) if self.division is not None else None
        return (t,) if parts is None else parts.pieces

    def delete(self, names: Iterable[str], arena: str = "") -> None:
        """Delete variables, the kept plans that use one of them, and the arenas of this name.

        KeyError for an unknown name."""
        deleted = set(names)
        for name in deleted:
            self._variable(name)
        deleted.update([name for name in self._variables if name.partition(SEPARATOR)[0] in deleted])
        for key, plan in list(self._plans.items()):
            if plan.variables & deleted:
                del self._plans[key]
        for name in deleted:
            del self._variables[name]
            self._index_parts.pop(name, None)
            self._variable_backend.pop(name, None)
            self._host_views.pop(name, None)
        for place in [place for place in self._arenas if arena and place[0] == arena]:
            del self._arenas[place]

    def _variable(self, name: str) -> _Variable:
        self.life.require()
        if name not in self._variables:
            raise KeyError(f"no variable is named {name!r}")
        return self._variables[name]

    def buffer(self, t: Tensor, b: int) -> Buffer:
        """The memory of a variable on a backend, allocated and filled at first use."""
        v = self._variable(t.name)
        if (t.shape, t.dtype, t.attrs) != (v.tensor.shape, v.tensor.dtype, v.tensor.attrs):
            raise ValueError(f"{t!r} is not the variable that this session defined: {v.tensor!r}")
        if b not in v.buffers:
            if t.attrs["constant"] and v.source is None:
                v.buffers[b] = self.backends[b].alloc(self.backends[b].constant_nbytes(t))
            elif t.attrs["constant"]:
                load = self.backends[b].load_to_file if t.name in self.in_file else self.backends[b].load
                v.buffers[b] = load(t, v.source_bytes())
                if v.on_loaded is not None:
                    v.on_loaded()
            else:
                for _ in self._upload_pieces(v, b):
                    pass
        return v.buffers[b]

    def _upload_pieces(self, v: _Variable, b: int) -> Iterator[None]:
        """Allocate a mutable variable and upload its initial bytes, one piece a step."""
        nbytes = v.tensor.nbytes
        v.buffers[b] = buffer = self.backends[b].alloc(nbytes)
        if v.source is None and v.initial is None:
            return
        data = v.initial_bytes()
        for start in range(0, nbytes, UPLOAD_NBYTES):
            self.backends[b].upload(Location(buffer, start), data[start : start + UPLOAD_NBYTES])
            yield
        if not v.tensor.attrs.get("host_written"):
            v.initial = v.source = None  # the device's are the only bytes from now on
            if v.on_loaded is not None:
                v.on_loaded()

    def upload(self, variable_backend: Mapping[str, int], names: Iterable[str]) -> Iterator[None]:
        """Upload mutable variables to their devices, one piece a step.

        `variable_backend`: index of each variable's backend."""
        for v in (self._variable(name) for name in names):
            b = self._variable_backend.setdefault(v.tensor.name, variable_backend[v.tensor.name])
            if b not in v.buffers:
                yield from self._upload_pieces(v, b)

    def colocate(self, name: str, other: str) -> None:
        """Upload a mutable variable now to the device of another, if that has one."""
        if other in self._variable_backend:
            for _ in self.upload({name: self._variable_backend[other]}, [name]):
                pass

    def write(self, name: str, data: Array, offset: int = 0) -> None:
        """Overwrite bytes of a mutable variable from a byte offset.

        ValueError for a constant, another dtype, bytes beyond its end, or an index out of bounds.
        """
        v = self._variable(name)
        t, raw = v.tensor, np.ascontiguousarray(data).reshape(-1)
        if t.attrs["constant"]:
            raise ValueError(f"variable {name!r} is constant")
        if raw.dtype != np.uint8 and raw.dtype != DTYPES[t.dtype].numpy:
            raise ValueError(f"variable {name!r} is {t.dtype}, got {raw.dtype}")
        if offset < 0 or offset + raw.nbytes > t.nbytes:
            raise ValueError(f"variable {name!r} has {t.nbytes} bytes, got {raw.nbytes} at {offset}")
        if name in self._index_parts:
            self._check_write(name, offset, raw.view(np.uint8))
        if name in self._variable_backend:
            b = self._variable_backend[name]
            self.backends[b].upload(Location(self.buffer(t, b), offset), raw.view(np.uint8))
        else:
            v.initial_bytes()[offset : offset + raw.nbytes] = raw.view(np.uint8)
            for b, buffer in v.buffers.items():
                self.backends[b].upload(Location(buffer, offset), raw.view(np.uint8))

    def _check_write(self, name: str, offset: int, data: Bytes) -> None:
        """ValueError where bytes of a variable would be indices that a plan may not take."""
        if offset % 4 or len(data) % 4:
            raise ValueError(f"variable {name!r} has indices of 4 bytes, got {len(data)} bytes at {offset}")
        values, first = data.view(np.int32), offset // 4
        for part in self._index_parts[name]:
            start, stop = max(part.start - first, 0), min(part.stop - first, len(values))
            if start < stop:
                replace(part, start=start, stop=stop).check(f"variable {name!r}", values)

    def _add_checks(self, checks: IndexChecks) -> None:
        """Check variables that a plan takes indices from, now and at each later write."""
        for name, parts in checks.parts.items():
            v = self._variables.get(name)
            new = set(parts) - self._index_parts.get(name, set()) if v is not None else set()
            if v is None or not new:
                continue
            if v.source is not None and v.tensor.attrs["constant"]:
                values = v.source_bytes().view(np.int32)
            else:
                values = self.read(name)
            for part in new:
                part.check(f"variable {name!r}", values)
            self._index_parts.setdefault(name, set()).update(new)

    def load_initial(self, name: str) -> None:
        """Read a variable's initial bytes into host memory, unless a device has them.

        Any thread may call."""
        if name not in self._variable_backend:
            self._variable(name).initial_bytes()

    def read(self, name: str) -> Array:
        """A copy of a variable's values, in its shape (flat bytes for block types)."""
        v, b = self._variable(name), self._variable_backend.get(name)
        t = v.tensor
        if b is None:
            return values_of(v.initial_bytes(), t.dtype, t.shape)
        return values_of(self.backends[b].download(Location(self.buffer(t, b)), t.nbytes), t.dtype, t.shape)

    def read_bytes(self, name: str, offset: int, nbytes: int, into: Bytes | None = None) -> Bytes:
        """A copy of `nbytes` bytes of a mutable variable; `into`: an array of that size to copy to.

        ValueError for a constant, or bytes outside of it."""
        v, b = self._variable(name), self._variable_backend.get(name)
        t = v.tensor
        if t.attrs["constant"] or offset < 0 or nbytes < 0 or offset + nbytes > t.nbytes:
            raise ValueError(f"variable {name!r} has {t.nbytes} bytes that may be read, not {nbytes} at {offset}")
        if b is None:
            data = v.initial_bytes()[offset : offset + nbytes]
        else:
            data = self.backends[b].download(Location(v.buffers.get(b) or self.buffer(t, b), offset), nbytes)
        if into is None:
            return np.array(data)
        into.data[:] = data.data  # numpy's own copy lets go of the GIL, and waits for it afterwards
        return into

    def host_view(self, name: str) -> memoryview | None:
        """The bytes of a mutable variable in place, to copy many pieces between two runs.

        None where its device's memory is not the host's, or it has no memory yet."""
        view = self._host_views.get(name)
        if view is None and name in self._variable_backend:
            v, b = self._variable(name), self._variable_backend[name]
            if (buffer := v.buffers.get(b)) is not None:
                data = self.backends[b].host_view(Location(buffer), v.tensor.nbytes)
                if data is not None:
                    view = self._host_views[name] = data.data
        return view

    def prefault(self, name: str, offset: int, nbytes: int) -> None:
        """Write each page of some bytes of a mutable variable as it is, so that memory backs it.

        Nothing for a variable without memory, or in memory that is not the host's."""
        v = self._variables.get(name)
        for b, buffer in v.buffers.items() if v is not None else ():
            view = self.backends[b].host_view(Location(buffer, offset), nbytes)
            if view is not None:
                pages = view[:: mmap.PAGESIZE]
                np.bitwise_or(pages, 0, out=pages)

    # --- measuring: nothing is allocated ----------------------------------------------------------

    def place(self, fetches: Iterable[Tensor]) -> Placement:
        """Partition a graph as if no variable had a device yet."""
        return self._partitioned(fetches, {})[0]

    def _partitioned(
        self, fetches: Iterable[Tensor], variable_backend: Mapping[str, int]
    ) -> tuple[Placement, Sequence[Tensor]]:
        """The placement of a graph, divided where the session divides, and the roots of its order."""
        first: tuple[Tensor, ...] = ()
        fetches = tensors("fetches", fetches)
        if self.division is not None:
            fetches, first = self.division.divide(fetches)
        placement = partition((*first, *fetches), self.backends, variable_backend, self.hint_of)
        if self.expert_cache is not None:
            placement = self.expert_cache.with_lookups(placement)
        return replace(placement, fetches=placement.fetches[len(first) :]), placement.fetches

    def prepare_kernels(self, fetches: Iterable[Tensor]) -> None:
        """Load the kernels of a graph, compiled where they are not cached. Any thread may call."""
        placement = self.place(fetches)
        for b, backend in enumerate(self.backends):
            backend.prepare(placement.nodes_of(b))

    def measure(
        self,
        build: Build,
        *,
        eval_order: str = "",
        arena: str | None = None,
        variable_backend: Mapping[str, int] | None = None,
    ) -> Measurement:
        """Placement of a graph and the layout of its results in memory.

        `eval_order`: visit sources "left" to right, "right" to left, or ("auto") in the order that
        needs less memory; "": the session's.
        `arena`: name of an arena that may be there already: within its size memory costs nothing.
        `variable_backend`: devices of mutable variables, if not their present ones."""
        self.life.require()
        if not callable(build):
            raise ValueError(f"build must be a function that returns the fetches, not {build!r}")
        present = self._variable_backend if variable_backend is None else variable_backend
        placement, roots = self._partitioned(build(), present)
        alignments = [b.alignment for b in self.backends]

        def laid_out(order: tuple[Tensor, ...]) -> Measurement:
            layout = lay_out_arenas(order, placement.arena_of, alignments, placement.fetches)
            return replace(placement, order=order), layout

        eval_order = eval_order or self.eval_order
        choices = [laid_out(placement.order)] if eval_order != "right" else []
        if (
            choices
            and arena is not None
            and all(self._arena_nbytes(arena, b) >= n for b, n in choices[0][1].sizes.items())
        ):
            return choices[0]
        if eval_order != "left":
            choices.append(laid_out(tuple(toposort(roots, reverse=True))))
        return min(choices, key=lambda choice: sum(choice[1].sizes.values()))

    def measure_all(self, builds: Iterable[Build]) -> Iterator[Measurement]:
        """Measure graphs whose plans will be made in this order. Any thread may call."""
        variable_backend = dict(self._variable_backend)
        for build in builds:
            placement, layout = self.measure(build, variable_backend=variable_backend)
            variable_backend.update(placement.variable_backend)
            yield placement, layout

    def _arena_nbytes(self, name: str, b: int) -> int:
        arena = self._arenas.get((name, b))
        return arena.nbytes if arena is not None else 0

    def device_bytes(self, shared: Iterable[Measurement], separate: Iterable[Measurement] = ()) -> list[DeviceBytes]:
        """Bytes on each device of plans made in this order, in a shared or a separate arena."""
        n = len(self.backends)
        weights: list[dict[str, int]] = [{} for _ in range(n)]
        variables: list[dict[str, int]] = [{} for _ in range(n)]
        arenas, feeds = [0] * n, [0] * n
        for group in (shared, separate):
            largest = [0] * n
            for placement, layout in group:
                uses = leaf_uses(placement, layout)
                _, sizes = input_layout(uses, [b.alignment for b in self.backends])
                for leaf, b in uses:
                    if leaf.op == "variable" and leaf.attrs["constant"]:
                        weights[b][leaf.name] = self.backends[b].constant_nbytes(leaf)
                    elif leaf.op == "variable":
                        variables[b][leaf.name] = leaf.nbytes
                for b in range(n):
                    feeds[b] += sizes[b]
                    size = layout.sizes.get(b, 0)
                    if size > largest[b]:  # the earlier plans keep their smaller one
                        arenas[b], largest[b] = arenas[b] + size, size
        return [
            DeviceBytes(b.name, sum(weights[i].values()), sum(variables[i].values()), arenas[i], feeds[i], variables[i])
            for i, b in enumerate(self.backends)
        ]

    def planned_bytes(
        self, shared: Iterable[Build], separate: Iterable[Build] = ()
    ) -> tuple[list[DeviceBytes], list[Program]]:
        """Bytes of plans made in this order, in the shared arena or in a separate one.

        Also their programs, which cannot run: as long as they live, so does what they take of the
        process (kernels, tables). As with plans, a graph lives only until its programs are made."""
        programs: list[Program] = []

        def compiled(measurement: Measurement) -> Measurement:
            for segment in measurement[0].segments:
                if segment.nodes[0].op not in BY_HOST:
                    backend = self.backends[segment.backend]
                    anywhere = Location(backend.alloc(1))
                    programs.append(backend.compile(segment.nodes, lambda _, at=anywhere: at))  # type: ignore[misc]
            return measurement

        sizes = self.device_bytes(map(compiled, self.measure_all(shared)), map(compiled, self.measure_all(separate)))
        return sizes, programs

    # --- plans ------------------------------------------------------------------------------------

    def arena(self, b: int, size: int, name: str = "") -> Buffer | None:
        """A backend's memory for results within a run, shared by all plans of this arena.

        A plan that needs more gets a larger one, and earlier plans keep theirs: plan (or `reserve`)
        the largest first."""
        buffer = self._arenas.get((name, b))
        if size and (buffer is None or buffer.nbytes < size):
            self._arenas[name, b] = buffer = self.backends[b].alloc(size)
        return buffer

    def reserve(self, build: Build) -> None:
        """Allocate arenas for this graph and smaller ones, and fix the devices of its variables."""
        placement, layout = self.measure(build)
        self._variable_backend.update(placement.variable_backend)
        for b, size in layout.sizes.items():
            self.arena(b, size)

    def plan(self, build: Build, arena: str = "", measurement: Measurement | None = None) -> Plan:
        """Make a plan, which the session does not keep.

        `arena`: name of an arena of its own. The plan is then preemptible: between its parts, plans
        in another arena may run. `measurement`: that of this graph, if it was measured already."""
        self.life.require()
        placement, layout = measurement or self.measure(build, arena=arena)
        self._add_checks(placement.checks)
        self._variable_backend.update(placement.variable_backend)
        self.n_plans_built += 1
        if arena:
            return PreemptiblePlan(self, placement, layout, arena)
        if self.observer is not None:
            return ProfiledPlan(self, placement, layout, self.observer)
        return Plan(self, placement, layout)

    def cached_plan(self, key: Hashable, build: Build, arena: str = "", measurement: Measurement | None = None) -> Plan:
        """The plan kept under this key, made at first use.

        At `max_plans` the least recently used one is dropped. ValueError for a key without a hash.
        """
        try:
            plan = self._plans.pop(key, None)
        except TypeError:
            raise ValueError(f"the key of a plan must be hashable, not {type(key).__name__}") from None
        if plan is None:
            if len(self._plans) >= self._max_plans:
                del self._plans[next(iter(self._plans))]
            plan = self.plan(build, arena, measurement)
        self._plans[key] = plan
        return plan

    def run(
        self,
        key: Hashable,
        build: Build,
        feeds: Mapping[str, Array],
        rows: Sequence[int | None] | None = None,
        deferred: DeferredFeeds | None = None,
    ) -> list[Array]:
        """Run the plan kept under this key: see Plan.run."""
        return self.cached_plan(key, build).run(feeds, rows, deferred)

    def compute(self, fetches: Sequence[Tensor], feeds: Mapping[str, Array] | None = None) -> list[Array]:
        """Run a graph once, without keeping a plan: the value of each fetch, in its tensor's shape.

        `feeds`: an array for every feed of the graph, by name. ValueError names a feed that is
        missing or has a wrong shape, or a node that no device runs."""
        return self.plan(lambda: fetches).run(feeds or {})

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when all devices have ended all work that was started."""
        for backend in self.backends:
            backend.wait()

    def release(self) -> None:
        """Free variables, plans and arenas; a plan of before refuses to run. The backends stay open."""
        self.life.end("the session has released its memory")
        self.life = Life(self.backends)
        self._plans.clear()
        self._host_views.clear()
        self._variables.clear()
        self._arenas.clear()
        self.expert_cache = None

    def close(self) -> None:
        """Free all memory and close the backends. May be called twice."""
        before = self.life
        self.release()
        for life in (before, self.life):
            life.end("the session is closed")
        if not self._closed:
            self._closed = True
            for backend in self.backends:
                backend.close()

"""Expert cache: host memory has all experts of a model, slots of a device's memory those that steps use most.

A product with a cached weight (n · N, K) reads a pool (S · N, K) in its place, and for its order
`expert_slots`: that order (graph/ops/moe.py), its third row the slot of each place. The host makes
it between the router and the products: it reads which experts the rows have and uploads those that
no slot has. So one device computes every product, and the bits of a row do not depend on what is
cached. A layer costs a copy to the host, which waits for the device, and one back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from logitless.graph.backend import Backend, Bytes, Location
from logitless.graph.execution.partition import LOOKUP, Placement
from logitless.graph.order import rebuild, toposort
from logitless.graph.tensor import Tensor, variable

DISTANCE_LOSS = 0.8  # share of an expert's worth that it loses where its layer has just passed
POOL_NBYTES = 1 << 30  # of a tensor: every Vulkan driver allocates a buffer of this size
MAX_WORTH = 1e100  # of a use, before all are scaled down
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True)
class LayerExperts:
    """Weights of a layer's n experts, each (n · N, K); the device of index `backend` multiplies with them."""

    weights: tuple[Tensor, ...]
    n: int
    backend: int


class ExpertHost(Protocol):
    """The session's backends and the bytes of its constants."""

    backends: list[Backend]

    def source_of(self, t: Tensor) -> Callable[[], Bytes]:
        """A function that gives a constant's bytes."""

    def define_pool(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A constant without bytes."""


@dataclass
class CacheUse:
    """Counts of the experts that steps have needed."""

    hits: int = 0  # experts that were in a slot
    misses: int = 0  # experts that were uploaded
    nbytes: int = 0  # of the uploads


@dataclass(frozen=True)
class CacheMemory:
    """Limits of memory for an expert cache, and the counts of its use."""

    nbytes: int  # of the devices; 0: there is no cache
    host_nbytes: int | None = None  # of the host, for the experts of all layers; None: no limit
    use: CacheUse = field(default_factory=CacheUse)


class SlotTable:
    """Slots of the experts of some layers; the expert of least worth loses its slot first.

    The worth is the number of its uses, of which each counts half of one in the next step. It is the less,
    the more layers come before the expert's own."""

    def __init__(self, n_layers: int, n: int, n_slots: int) -> None:
        self._n, self._n_layers = n, n_layers
        self._slot_of = np.full(n_layers * n, -1, np.int32)
        self._expert_in = np.full(n_slots, -1, np.int64)
        self._uses, self._use, self._layer = np.zeros(n_layers * n), 1.0, -1  # weighted uses; weight of a use now

    def claim(self, layer: int, experts: Ids) -> tuple[Ids, Ids]:
        """Give each of a layer's experts a slot, for at least as long as no others are claimed.

        Returns the slots of all experts of the layer (-1: none), and the experts that have one only now."""
        if layer <= self._layer:  # the next step
            self._use *= 2
            if self._use > MAX_WORTH:
                self._uses /= self._use
                self._use = 1.0
        self._layer, start = layer, layer * self._n
        ids = start + experts
        self._uses[ids] += self._use
        missing = ids[self._slot_of[ids] < 0]
        if len(missing):
            distance = (self._expert_in // self._n - layer - 1) % self._n_layers / self._n_layers
            worth = np.where(self._expert_in < 0, -1.0, self._uses[self._expert_in] * (1 - DISTANCE_LOSS * distance))
            present = self._slot_of[ids]
            worth[present[present >= 0]] = np.inf
            slots = np.argpartition(worth, len(missing) - 1)[: len(missing)]
            evicted = self._expert_in[slots]
            self._slot_of[evicted[evicted >= 0]] = -1
            self._expert_in[slots], self._slot_of[missing] = missing, slots
        return self._slot_of[start : start + self._n], missing - start


class _Pool:
    """S slots for layers whose experts have the same types and shapes: one tensor a weight, (S · N, K)."""

    def __init__(self, layers: Sequence[LayerExperts], n_slots: int, backend: Backend) -> None:
        self.layers, self.n_slots, self.backend = layers, n_slots, backend
        self.table = SlotTable(len(layers), layers[0].n, n_slots)
        self.tensors: tuple[Tensor, ...] = ()
        self.n_lookups = 0


class ExpertCache:
    """Pools of slots for the experts of some layers."""

    def __init__(self, session: ExpertHost, layers: Sequence[LayerExperts], memory: CacheMemory) -> None:
        """ValueError: the experts of one layer need more than `memory.nbytes`."""
        kinds: dict[object, list[LayerExperts]] = defaultdict(list)
        for layer in layers:
            kinds[layer.backend, layer.n, tuple([(w.dtype, w.shape) for w in layer.weights])].append(layer)
        sizes = [_slot_nbytes(alike[0], session.backends) for alike in kinds.values()]
        counts = [(alike[0].n, alike[0].n * len(alike)) for alike in kinds.values()]
        least = sum(n * size for (n, _), size in zip(counts, sizes, strict=True))
        self.all_nbytes = sum(n * size for (_, n), size in zip(counts, sizes, strict=True))
        if memory.nbytes < least:
            raise ValueError(f"--moe-cache-mib {memory.nbytes >> 20}: the experts of one layer need {-(-least >> 20)}")
        spare = (min(memory.nbytes, self.all_nbytes) - least) / max(self.all_nbytes - least, 1)
        self.use, self.n_experts, self.n_layers = memory.use, sum(n for _, n in counts), len(layers)
        self.packs = memory.host_nbytes is None or self.all_nbytes <= memory.host_nbytes  # host memory has room for all
        self._pools = [
            pool
            for alike, (n, n_all) in zip(kinds.values(), counts, strict=True)
            for pool in _pools(alike, n + int(spare * (n_all - n)), session.backends[alike[0].backend])
        ]
        self._sources = {w: session.source_of(w) for layer in layers for w in layer.weights}
        self._packed: dict[Tensor, Bytes] = {}
        self._places: dict[str, tuple[_Pool, int, Tensor]] = {}  # by weight: its pool, layer there, tensor there
        for i, pool in enumerate(self._pools):
            parts = pool.layers[0].weights
            pool.tensors = tuple(
                session.define_pool(
                    f"expert_cache.{i}.{j}.{pool.n_slots}",
                    (w.shape[0] // pool.layers[0].n * pool.n_slots, w.shape[1]),
                    w.dtype,
                )
                for j, w in enumerate(parts)
            )
            for j, layer in enumerate(pool.layers):
                self._places |= {w.name: (pool, j, t) for w, t in zip(layer.weights, pool.tensors, strict=True)}

    @property
    def pool_names(self) -> list[str]:
        return [t.name for pool in self._pools for t in pool.tensors]

    @property
    def n_slots(self) -> int:
        return sum(pool.n_slots for pool in self._pools)

    def load(self) -> None:
        """Pack all experts in host memory, if it has room; else each is read and packed for each upload."""
        for t, source in self._sources.items() if self.packs else ():
            self._packed[t] = self._places[t.name][0].backend.pack(t, source())

    def with_lookups(self, placement: Placement) -> Placement:
        """The placement whose products on the devices of pools read these, by the slots that lookups write."""
        backend_of = dict(placement.backend_of)
        lookups: dict[tuple[Tensor, int, int], Tensor] = {}

        def read_pool(t: Tensor, node: Tensor) -> Tensor:
            b = backend_of.get(t)
            places = [self._places.get(s.name) if s.op == "variable" else None for s in t.src]
            place = next((p for p in places if p is not None), None)
            if place is not None and b is not None and place[0].layers[place[1]].backend == b:
                pool, layer, _ = place
                at = next(i for i, s in enumerate(t.src) if s.dtype == "i32")
                order, key = node.src[at], (t.src[at], id(pool), layer)
                if key not in lookups:
                    attrs = {"pool": self._pools.index(pool), "layer": layer}
                    lookups[key] = Tensor(LOOKUP, (order,), order.shape, "i32", attrs)
                    backend_of[lookups[key]] = b
                src = [s if p is None else p[2] for s, p in zip(node.src, places, strict=True)]
                src[at] = lookups[key]
                node = Tensor(t.op, tuple(src), t.shape, t.dtype, {**t.attrs, "n": pool.n_slots}, t.name)
            if b is not None:
                backend_of[node] = b
            return node

        new = rebuild(placement.order, read_pool)
        fetches = tuple([new[t] for t in placement.fetches])
        order = toposort(fetches)
        backend_of = {t: backend_of[t] for t in order if t in backend_of}
        return replace(placement, order=tuple(order), backend_of=backend_of, fetches=fetches)

    def lookup(self, t: Tensor, locate: Callable[[Tensor], Location]) -> Lookup:
        """The program of a lookup that `with_lookups` made."""
        pool = self._pools[t.attrs["pool"]]
        buffers = [locate(tensor).buffer for tensor in pool.tensors]
        return Lookup(self, pool, t.attrs["layer"], buffers, locate(t.src[0]), locate(t), t.shape[1])

    def upload_missing(self, pool: _Pool, layer: int, buffers: Sequence[object], experts: Ids) -> Ids:
        """Upload those of a layer's experts that have no slot; returns the slots of all its experts (-1: none)."""
        slots, missing = pool.table.claim(layer, experts)
        pool.n_lookups += 1
        self.use.hits += len(experts) - len(missing)
        self.use.misses += len(missing)
        for w, t, buffer in zip(pool.layers[layer].weights, pool.tensors, buffers, strict=True):
            rows = w.shape[0] // pool.layers[layer].n
            one = variable(w.name, (rows, w.shape[1]), w.dtype, constant=True)
            packed = self._packed.get(w)
            raw = self._sources[w]() if packed is None and len(missing) else None
            for expert in missing.tolist():
                to = int(slots[expert]) * rows
                if packed is not None:
                    pool.backend.upload_rows(t, buffer, to, packed, w, expert * rows, rows)
                elif raw is not None:
                    part = pool.backend.pack(one, raw[expert * one.nbytes : (expert + 1) * one.nbytes])
                    pool.backend.upload_rows(t, buffer, to, part, one, 0, rows)
            self.use.nbytes += len(missing) * one.nbytes
        return slots


class Lookup:
    """A program that uploads the missing experts of an order, and writes the order with their slots."""

    def __init__(
        self,
        cache: ExpertCache,
        pool: _Pool,
        layer: int,
        buffers: Sequence[object],
        order: Location,
        slots: Location,
        n_rows: int,
    ) -> None:
        self._cache, self._pool, self._layer, self._buffers = cache, pool, layer, buffers
        self._order, self._slots, self._nbytes = order, slots, 12 * n_rows
        self._latest, self._n_lookups = np.zeros((3, n_rows), np.int32), 0

    @property
    def backend(self) -> Backend:
        return self._pool.backend

    def run(self) -> None:
        raw = np.array(self._pool.backend.download(self._order, self._nbytes))
        self._latest = raw.view(np.int32).reshape(3, -1)
        self._upload()

    def _upload(self) -> None:
        order = self._latest.copy()
        slots = self._cache.upload_missing(self._pool, self._layer, self._buffers, np.unique(order[2]))
        order[2] = slots[order[2]]
        self._pool.backend.upload(self._slots, order.reshape(-1).view(np.uint8))
        self._n_lookups = self._pool.n_lookups

    def refresh(self) -> None:
        """Upload the experts of the latest run again, if other lookups may have taken their slots."""
        if self._n_lookups != self._pool.n_lookups:
            self._upload()


class Refresh:
    """A program that refreshes a lookup, in a plan where another one comes between it and a reader."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup, self.run = lookup, lookup.refresh


class Lookups:
    """The latest lookup of each device in a run that other plans' runs interrupt."""

    def __init__(self) -> None:
        self._latest: dict[Backend, Lookup] = {}

    def refresh(self) -> None:
        for lookup in self._latest.values():
            lookup.refresh()

    def record(self, program: object) -> None:
        """Record a program that has run, if it is a lookup."""
        if isinstance(program, Lookup | Refresh):
            lookup = program.lookup if isinstance(program, Refresh) else program
            self._latest[lookup.backend] = lookup


def _pools(layers: Sequence[LayerExperts], n_slots: int, backend: Backend) -> list[_Pool]:
    """Pools with n slots in all, divided so that tensors have at most POOL_NBYTES, or the experts of one layer."""
    n, n_layers = layers[0].n, len(layers)
    nbytes = max(backend.constant_nbytes(w) for w in layers[0].weights) * n_slots // n
    most = min(-(-nbytes // POOL_NBYTES), n_layers)
    count = next(count for count in range(most, 0, -1) if n_layers // count * n_slots >= n_layers * n)
    parts = [layers[i::count] for i in range(count)]
    return [_Pool(part, len(part) * n_slots // n_layers, backend) for part in parts]


def _slot_nbytes(layer: LayerExperts, backends: Sequence[Backend]) -> int:
    """Bytes of one expert on its device."""
    return sum(-(-backends[layer.backend].constant_nbytes(w) // layer.n) for w in layer.weights)

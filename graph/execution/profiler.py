"""Profiled plans: the duration of every node of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from logitless.graph.backend import Backend, ProfiledProgram, Program
from logitless.graph.execution.memory import ArenaLayout
from logitless.graph.execution.partition import Placement
from logitless.graph.execution.plan import Array, DeferredFeeds, Plan, Storage
from logitless.graph.tensor import Tensor

# Called after each run with its nodes, the seconds of each, and the feeds.
Observer = Callable[[Sequence[Tensor], Sequence[float], Mapping[str, Array]], None]


class ProfiledPlan(Plan):
    """A plan that times its nodes, one after the other: the same bits, a little later. It keeps its graph."""

    def __init__(self, storage: Storage, placement: Placement, layout: ArenaLayout, observer: Observer) -> None:
        super().__init__(storage, placement, layout)
        self._observer = observer
        # one program each
        self._nodes = [t for segment in placement.segments for t in segment.nodes]
        self._profiled: list[ProfiledProgram] = []
        steps: list[tuple[int, Program] | None] = []
        for b, group in groupby(self._steps, lambda step: None if step is None else step[0]):
            if b is None:
                steps.append(None)
                continue
            programs = [step[1] for step in group if step is not None]
            backend = storage.backends[b] if b >= 0 else None
            profiled = (backend.profile(programs) if backend is not None else None) or _HostTimer(programs, backend)
            self._profiled.append(profiled)
            steps.append((b, profiled))
        self._steps = steps

    def _divide(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [[t] for t in nodes]

    def run(
        self,
        feeds: Mapping[str, Array] | None,
        rows: Sequence[int | None] | None = None,
        deferred: DeferredFeeds | None = None,
    ) -> list[Array]:
        results = super().run(feeds, rows, deferred)
        feeds = feeds or {name: array.copy() for name, array in self.input_buffers.items()}
        self._observer(self._nodes, [s for profiled in self._profiled for s in profiled.seconds], feeds)
        return results


class _HostTimer:
    """Times programs of a backend that cannot: the host's clock, once the device has ended each."""

    def __init__(self, programs: Sequence[Program], backend: Backend | None) -> None:
        self._programs, self._backend = programs, backend
        self.seconds: Sequence[float] = ()

    def run(self) -> None:
        seconds = []
        for program in self._programs:
            began = time.perf_counter()
            program.run()
            if self._backend is not None:
                self._backend.wait()
            seconds.append(time.perf_counter() - began)
        self.seconds = seconds

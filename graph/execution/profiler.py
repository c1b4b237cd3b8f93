"""A plan with a clock between its nodes: which of them a step's time goes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from logitless.graph.backend import Backend, ProfiledProgram, Program
from logitless.graph.execution.memory import Layout
from logitless.graph.execution.partition import Placement
from logitless.graph.execution.plan import Array, Late, Plan, Storage
from logitless.graph.tensor import Tensor

# Told of each run: its nodes, the seconds of each, and the feeds.
Observer = Callable[[Sequence[Tensor], Sequence[float], Mapping[str, Array]], None]


class Timed(Plan):
    """The same bits, a little later: each node has ended before the next one begins. It keeps its graph."""

    def __init__(self, storage: Storage, placement: Placement, arenas: Layout, observer: Observer) -> None:
        super().__init__(storage, placement, arenas)
        self._observer = observer
        self._nodes = [t for segment in placement.segments for t in segment.nodes]  # of one program each
        self._clocks: list[ProfiledProgram] = []
        steps: list[tuple[int, Program] | None] = []
        for b, group in groupby(self._steps, lambda step: None if step is None else step[0]):
            if b is None:
                steps.append(None)
                continue
            programs = [step[1] for step in group if step is not None]
            backend = storage.backends[b] if b >= 0 else None
            clock = (backend.profile(programs) if backend is not None else None) or _Clock(programs, backend)
            self._clocks.append(clock)
            steps.append((b, clock))
        self._steps = steps

    def _cut(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [[t] for t in nodes]

    def run(
        self, feeds: Mapping[str, Array] | None, rows: Sequence[int | None] | None = None, late: Late | None = None
    ) -> list[Array]:
        results = super().run(feeds, rows, late)
        feeds = feeds or {name: array.copy() for name, array in self.room.items()}
        self._observer(self._nodes, [s for clock in self._clocks for s in clock.seconds], feeds)
        return results


class _Clock:
    """For backends without a clock of their own: the host looks at its own when a node has ended."""

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

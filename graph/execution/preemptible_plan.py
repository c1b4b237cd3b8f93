"""Preemptible plans: runs that can stop between parts of about equal duration.

Parts are cut by the durations of earlier runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from logitless.graph.backend import Backend, Location, Program
from logitless.graph.execution.cost import cost_without_feeds
from logitless.graph.execution.expert_cache import Lookups
from logitless.graph.execution.plan import Array, Fetch, Plan
from logitless.graph.tensor import Tensor

NODES_PER_PART = 8  # where the duration of nodes is not known yet
MAX_PART_SECONDS = 0.001  # a single node can take a hundred times as long (all logits of a batch)
CUT_AFTER_RUNS = (2, 4, 6)  # the first cut finds long parts, the next ones where in them
# in warm-up runs: the less disturbed of two counts
CUT_AFTER_WARMUP_RUNS = (2, 4)
CUTS_PER_PART = 16  # programs that are cut anew before the run yields again
# for nodes whose duration is unknown: slower than any node
ASSUMED_BYTES_PER_SECOND = 1e9
ASSUMED_MACS_PER_SECOND = 1e10
LONG_NODE_SECONDS = 0.1  # of such a guess; a longer node is a part of its own, which is split before its first run
GUESSED_PART_SECONDS = 0.02  # for such splits: the guess is several times too long


def _assumed_seconds(t: Tensor) -> float:
    cost = cost_without_feeds(t)
    return (
        cost.nbytes / ASSUMED_BYTES_PER_SECOND
        + (cost.f32_macs + cost.int8_macs + cost.bf16_macs) / ASSUMED_MACS_PER_SECOND
    )


class _Uncompiled:
    """Stands for programs that are compiled where they first run."""

    def __init__(self, compile: Callable[[], Sequence[Program]]) -> None:
        self.compile = compile

    def run(self) -> None:
        raise AssertionError("it is compiled first")


class PreemptiblePlan(Plan):
    """A plan whose runs can stop between parts; plans in another arena may run there.

    Each part is compiled when it first runs, because all at once would take as long as many decode
    steps. A run that is abandoned in the middle does not count."""

    max_part_seconds = 0.0  # 0: MAX_PART_SECONDS
    spare_core = False  # leave one CPU core free
    cut_after: tuple[int, ...] = CUT_AFTER_RUNS
    _n_runs = 0  # complete runs
    _n_runs_at_cut = 0  # runs before parts were last cut
    _best: Sequence[float] = ()  # seconds of each part, the least of all runs: undisturbed
    # seconds of each part in the last run: attention gets longer from run to run
    _last: Sequence[float] = ()
    _locate_later: Callable[[], list[Fetch]] | None = None

    def _divide(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        parts: list[list[Tensor]] = []
        closed = True  # the last part gets no further node
        for t in nodes:
            long = _assumed_seconds(t) > LONG_NODE_SECONDS
            if long or closed or len(parts[-1]) == NODES_PER_PART:
                parts.append([])
            parts[-1].append(t)
            closed = long
        return list(parts)

    def _program(self, backend: Backend, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Program:
        return _Uncompiled(partial(self._compile, backend, nodes, locate))

    def _compile(
        self, backend: Backend, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]
    ) -> Sequence[Program]:
        seconds = sum(map(_assumed_seconds, nodes))
        program = backend.compile(nodes, locate)
        if seconds <= LONG_NODE_SECONDS or len(nodes) > 1:
            return self._split(backend, [program], [seconds])
        parts = backend.split([program], [seconds], GUESSED_PART_SECONDS, self.spare_core)
        each = seconds / len(parts)
        if each <= GUESSED_PART_SECONDS:
            return parts
        # phases of the node: each is split when it first runs, for a split takes time, too
        split = backend.split
        return [_Uncompiled(partial(split, [part], [each], GUESSED_PART_SECONDS, self.spare_core)) for part in parts]

    def _split(self, backend: Backend, programs: Sequence[Program], seconds: Sequence[float]) -> Sequence[Program]:
        return backend.split(programs, seconds, self.max_part_seconds or MAX_PART_SECONDS, self.spare_core)

    def _set_fetches(self, fetches: Callable[[], list[Fetch]]) -> None:
        self._locate_later = fetches

    @property
    def is_fully_cut(self) -> bool:
        """True when parts stay as they are."""
        return self._n_runs_at_cut == self.cut_after[-1]

    @property
    def longest_part_seconds(self) -> float:
        """Duration of the longest part in the last run; 0: no run since parts were cut."""
        return max(self._last, default=0.0)

    def parts(self, feeds: Mapping[str, Array] | None) -> Iterator[float]:
        """A run that yields before each part the seconds that it will take, 0 where they are not
        known.

        `feeds`: see Plan.run."""
        if self._n_runs in self.cut_after and self._n_runs != self._n_runs_at_cut:
            yield from self._cut()
            self._n_runs_at_cut = self._n_runs
        best = self._best = list(self._best) or [math.inf] * len(self._steps)
        last = self._last = list(self._last) or [0.0] * len(self._steps)
        self._feed(feeds)
        i, lookups = 0, Lookups()
        while i < len(self._steps):
            yield last[i]
            while self._is_uncompiled(i):
                self._compile_step(i)
                yield 0.0
            step = self._steps[i]
            began = time.perf_counter()
            if step is None:
                self._feed_deferred({})
            else:
                lookups.refresh()
                step[1].run()
                lookups.record(step[1])
                if step[0] >= 0 and self._backends[step[0]].preemptible:
                    self._backends[step[0]].wait()
            last[i] = time.perf_counter() - began
            best[i] = min(best[i], last[i])
            i += 1
        self._n_runs += 1

    def compile_ahead(self) -> bool:
        """Compile the next part that has not run; False: there is none."""
        i = next(filter(self._is_uncompiled, range(len(self._steps))), -1)
        if i >= 0:
            self._compile_step(i)
        return i >= 0

    def _is_uncompiled(self, i: int) -> bool:
        step = self._steps[i]
        return step is not None and isinstance(step[1], _Uncompiled)

    def _compile_step(self, i: int) -> None:
        step = self._steps[i]
        assert step is not None
        assert isinstance(step[1], _Uncompiled)
        programs = step[1].compile()
        self._steps[i : i + 1] = [(step[0], program) for program in programs]
        for seconds, unknown in ((self._best, math.inf), (self._last, 0.0)):
            if isinstance(seconds, list):  # a run has begun
                seconds[i : i + 1] = [unknown] * len(programs)

    def results(self, rows: Sequence[int | None] | None = None) -> list[Array]:
        if self._locate_later is not None:
            self._fetches, self._locate_later = self._locate_later(), None
        return super().results(rows)

    def _cut(self) -> Iterator[float]:
        """Cut and join programs of preemptible backends anew; yields 0 between groups."""
        steps: list[tuple[int, Program] | None] = []
        timed = zip(self._steps, self._best, strict=True)
        for b, group in groupby(timed, lambda pair: -1 if pair[0] is None else pair[0][0]):
            pairs = list(group)
            backend = self._backends[b] if b >= 0 else None
            if backend is None or not backend.preemptible:
                steps += [step for step, _ in pairs]
                continue
            for some in (pairs[start : start + CUTS_PER_PART] for start in range(0, len(pairs), CUTS_PER_PART)):
                programs = [step[1] for step, _ in some if step is not None]
                steps += [(b, p) for p in self._split(backend, programs, [seconds for _, seconds in some])]
                yield 0.0
        self._steps, self._best, self._last = steps, (), ()

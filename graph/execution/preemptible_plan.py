"""A plan whose runs can be left in the middle, cut into parts of about equal time by what they took before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from logitless.graph.backend import Backend, Place, Program
from logitless.graph.execution.plan import Array, Fetch, Plan
from logitless.graph.tensor import Tensor

NODES = 8  # of a program whose time is not known yet
MOST = 0.001  # seconds of a part; a single node can take a hundred times as long (all logits of a batch)
CUTS = (2, 4, 6)  # numbers of runs after which parts are cut anew; the first shows which, the next where in them
SOON = (2, 4)  # the same where runs are made for nothing else; of two the less disturbed one counts
AT_ONCE = 16  # programs that are cut anew in one part
SLOW = 1e9  # bytes a second: less than any node gets through, whose time is not known yet


class _Later:
    """What is made where it is first wanted."""

    def __init__(self, make: Callable[[], Sequence[Program]]) -> None:
        self.make = make

    def run(self) -> None:
        raise AssertionError("it is made first")


class Divided(Plan):
    """Plans that have another arena may run between its parts. Each is made when it runs for the first time: all of
    them at once take as long as many steps of requests.

    A run that is left for good does not count.
    """

    most = 0.0  # seconds that a part should take; 0: MOST
    spare = False  # whether its parts leave a processor to others
    cuts: tuple[int, ...] = CUTS
    _n_runs = 0  # that came to their end
    _n_cut = 0  # of these, when parts were last cut anew
    _best: Sequence[float] = ()  # seconds of each part, the least that it took: what it takes without being disturbed
    _last: Sequence[float] = ()  # what it took last: attention takes longer from run to run
    _still_to_find: Callable[[], list[Fetch]] | None = None

    def _cut(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [nodes[start : start + NODES] for start in range(0, len(nodes), NODES)]

    def _program(self, backend: Backend, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> Program:
        return _Later(partial(self._make, backend, nodes, place))

    def _make(self, backend: Backend, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> Sequence[Program]:
        program = backend.compile(nodes, place)
        seconds = sum(t.nbytes + sum(s.nbytes for s in t.src) for t in nodes) / SLOW
        return self._divided(backend, [program], [seconds])

    def _divided(self, backend: Backend, programs: Sequence[Program], seconds: Sequence[float]) -> Sequence[Program]:
        return backend.split(programs, seconds, self.most or MOST, self.spare)

    def _find(self, fetches: Callable[[], list[Fetch]]) -> None:
        self._still_to_find = fetches

    @property
    def cut(self) -> bool:
        """Whether parts are what they will stay."""
        return self._n_cut == self.cuts[-1]

    @property
    def longest(self) -> float:
        """Seconds that the longest part took in the last run; 0: there was none since parts were cut."""
        return max(self._last, default=0.0)

    def parts(self, feeds: Mapping[str, Array] | None) -> Iterator[float]:
        """A run that stops before each part, and tells how many seconds it will take; 0: that is not known.
        `feeds`: see `run`."""
        if self._n_runs in self.cuts and self._n_runs != self._n_cut:
            yield from self._divide()
            self._n_cut = self._n_runs
        best = self._best = list(self._best) or [math.inf] * len(self._steps)
        last = self._last = list(self._last) or [0.0] * len(self._steps)
        self._feed(feeds)
        i = 0
        while i < len(self._steps):
            yield last[i]
            step = self._steps[i]
            if step is not None and isinstance(step[1], _Later):
                made = step[1].make()
                self._steps[i : i + 1] = [(step[0], program) for program in made]
                best[i : i + 1] = [math.inf] * len(made)
                last[i : i + 1] = [0.0] * len(made)
                step = self._steps[i]
            began = time.perf_counter()
            if step is None:
                self._feed_late({})
            else:
                step[1].run()
            last[i] = time.perf_counter() - began
            best[i] = min(best[i], last[i])
            i += 1
        self._n_runs += 1

    def results(self, rows: Sequence[int | None] | None = None) -> list[Array]:
        if self._still_to_find is not None:
            self._fetches, self._still_to_find = self._still_to_find(), None
        return super().results(rows)

    def _divide(self) -> Iterator[float]:
        steps: list[tuple[int, Program] | None] = []
        timed = zip(self._steps, self._best, strict=True)
        for b, group in groupby(timed, lambda pair: -1 if pair[0] is None else pair[0][0]):
            held = list(group)
            backend = self._backends[b] if b >= 0 else None
            if backend is None or not backend.preemptible:
                steps += [step for step, _ in held]
                continue
            for some in (held[start : start + AT_ONCE] for start in range(0, len(held), AT_ONCE)):
                programs = [step[1] for step, _ in some if step is not None]
                steps += [(b, p) for p in self._divided(backend, programs, [seconds for _, seconds in some])]
                yield 0.0
        self._steps, self._best, self._last = steps, (), ()

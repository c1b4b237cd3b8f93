"""A plan whose runs can be left in the middle, cut into parts of about equal time by what they took before."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from graph.backend import Divides, Program
from graph.plan import Array, Plan
from graph.tensor import Tensor

NODES = 8  # of a program whose time is not known yet
MOST = 0.001  # seconds of a part; a single node can take a hundred times as long (all logits of a batch)
CUTS = (2, 4, 6)  # numbers of runs after which parts are cut anew; the first shows which, the next where in them


class Divided(Plan):
    """Plans that have another arena may run between its parts."""

    _n_runs = 0
    _best: Sequence[float] = ()  # seconds of each part, the least that it took: what it takes without being disturbed

    def _cut(self, nodes: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [nodes[start : start + NODES] for start in range(0, len(nodes), NODES)]

    def parts(self, feeds: Mapping[str, Array]) -> Iterator[float]:
        """A run that stops after each part, and tells how many seconds the next one will take; 0: that is not known."""
        if self._n_runs in CUTS:
            self._divide()
        self._n_runs += 1
        best = self._best = list(self._best) or [math.inf] * len(self._steps)
        self._feed(feeds)
        for i, step in enumerate(self._steps):
            began = time.perf_counter()
            if step is not None:
                step[1].run()
            else:
                self._feed_late({})
            best[i] = min(best[i], time.perf_counter() - began)
            following = best[i + 1] if i + 1 < len(best) else 0.0
            yield following if following < math.inf else 0.0

    def _divide(self) -> None:
        steps: list[tuple[int, Program] | None] = []
        timed = zip(self._steps, self._best, strict=True)
        for b, group in groupby(timed, lambda pair: -1 if pair[0] is None else pair[0][0]):
            held = list(group)
            backend = self._backends[b] if b >= 0 else None
            if isinstance(backend, Divides):
                programs = [step[1] for step, _ in held if step is not None]
                steps += [(b, p) for p in backend.divide(programs, [seconds for _, seconds in held], MOST)]
            else:
                steps += [step for step, _ in held]
        self._steps, self._best = steps, ()
        self.programs = [step[1] for step in steps if step is not None and step[0] >= 0]

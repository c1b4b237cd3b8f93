"""Programs one after the other, with a clock between their stages: the step reads it (kernels/step.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from logitless.backends.cpu.program import CPUProgram
from logitless.backends.cpu.threads.pool import Pool, Table


class Clock:
    """What the programs do; `seconds` are those of each in the last run. Their small instructions are not joined to
    serial stages with the next program's; a stage's time is until all threads are done with it."""

    def __init__(self, pool: Pool, programs: Sequence[CPUProgram]) -> None:
        self._pool, self._programs = pool, programs  # they keep what their instructions point into
        self.seconds = [0.0] * len(programs)
        parts = [(i, part) for i, program in enumerate(programs) for part in program.parts]
        self._runs: list[tuple[Table | Callable[[], None], list[int]]] = []  # and whose each stage is
        for in_table, group in groupby(parts, lambda part: isinstance(part[1], Table)):
            if not in_table:
                self._runs += [(part, [i]) for i, part in group]
                continue
            tables = [(i, part) for i, part in group if isinstance(part, Table)]
            owners = [i for i, table in tables for _ in range(table.n_stages)]
            self._runs.append((Table.joined([table for _, table in tables]), owners))

    def run(self) -> None:
        seconds = np.zeros(len(self._programs))
        for part, owners in self._runs:
            if isinstance(part, Table):
                np.add.at(seconds, owners, self._pool.run_timed(part))
                continue
            began = time.perf_counter()
            part()
            seconds[owners] += time.perf_counter() - began
        self.seconds = seconds.tolist()

"""Profiler of programs: the step loop reads the clock after each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from logitless.backends.cpu.program import CPUProgram
from logitless.backends.cpu.threads.pool import Pool, Table


class Clock:
    """Runs programs in order and times each; `seconds` holds the times of the last run.

    Serial phases of two programs stay separate. A phase ends when all threads are done with it.
    """

    def __init__(self, pool: Pool, programs: Sequence[CPUProgram]) -> None:
        # the programs keep alive what their tasks point into
        self._pool, self._programs = pool, programs
        self.seconds = [0.0] * len(programs)
        parts = [(i, part) for i, program in enumerate(programs) for part in program.parts]
        # a task list or call, and the owner of each phase
        self._runs: list[tuple[Table | Callable[[], None], list[int]]] = []
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

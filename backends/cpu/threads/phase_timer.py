"""Profiler of programs: the step loop reads the clock after each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from logitless.backends.cpu.program import CPUProgram
from logitless.backends.cpu.threads.pool import TaskList, WorkerPool


class PhaseTimer:
    """Runs programs in order and times each; `seconds` holds the times of the last run.

    Serial phases of two programs stay separate. A phase ends when all threads are done with it.
    """

    def __init__(self, pool: WorkerPool, programs: Sequence[CPUProgram]) -> None:
        # the programs keep alive what their tasks point into
        self._pool, self._programs = pool, programs
        self.seconds = [0.0] * len(programs)
        parts = [(i, part) for i, program in enumerate(programs) for part in program.parts]
        # a task list or call, and the owner of each phase
        self._runs: list[tuple[TaskList | Callable[[], None], list[int]]] = []
        for in_list, group in groupby(parts, lambda part: isinstance(part[1], TaskList)):
            if not in_list:
                self._runs += [(part, [i]) for i, part in group]
                continue
            lists = [(i, part) for i, part in group if isinstance(part, TaskList)]
            owners = [i for i, tasks in lists for _ in range(tasks.n_phases)]
            self._runs.append((TaskList.concat([tasks for _, tasks in lists]), owners))

    def run(self) -> None:
        seconds = np.zeros(len(self._programs))
        for part, owners in self._runs:
            if isinstance(part, TaskList):
                np.add.at(seconds, owners, self._pool.run_timed(part))
                continue
            start = time.perf_counter()
            part()
            seconds[owners] += time.perf_counter() - start
        self.seconds = seconds.tolist()

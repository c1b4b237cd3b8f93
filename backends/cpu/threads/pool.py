"""Thread pool of the CPU backend, and the native call that runs a task list.

Workers are Python threads inside native code, with the GIL released. Between steps they spin for a
moment, then sleep on a pipe. `kernels/runtime/step_loop.py` holds the protocol."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import operator
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitless.backends.cpu.compiler import jit
from logitless.backends.cpu.kernels.runtime import control_block as cb
from logitless.backends.cpu.threads import affinity
from logitless.backends.cpu.threads.affinity import WorkerAffinity
from logitless.backends.host import IdleThreads, cache_nbytes

MAX_THREADS = 256
MAX_RETAINED = 64  # task lists that the pool keeps alive on its own
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4)


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel call over units 0 to n_units, handed out in chunks of `grain` units.

    `args` are the int64 words of the kernel's argument block."""

    kernel: str
    args: tuple[int, ...]
    n_units: int
    grain: int = 1
    scratch: int = 0  # bytes of scratch memory per thread
    prefetch: tuple[int, int] = (0, 0)  # weights that units read in order: address, bytes of a unit
    # true: starts without a barrier; it touches nothing that the task before it writes
    no_barrier: bool = False
    shared: int = 0  # bytes of memory that all threads share, in this task and the next


def bits(value: float) -> int:
    """A float attribute as an argument word; kernels read it with `ir.registry.bits_f32`."""
    return int(np.float32(value).view(np.int32))


Phase = tuple[npt.NDArray[np.int64], int]  # rows of its tasks, number of chunks (0: a serial phase)


class TaskList:
    """Tasks in the binary form that the step loop reads. Keep it alive while it may run.

    A phase is a run of tasks between two barriers. Tasks of one chunk each form a serial phase,
    which one thread runs."""

    def __init__(self, tasks: list[Task]) -> None:
        tasks = [i for i in tasks if i.n_units > 0]
        jit.load(i.kernel for i in tasks)
        starts = list(itertools.accumulate((len(i.args) for i in tasks), initial=0))
        blocks = np.array([a for i in tasks for a in i.args] or [0], np.int64)
        self.blocks: object = blocks  # argument blocks that the words point into
        self.scratch = max((i.scratch for i in tasks), default=0)
        self.shared = max((i.shared for i in tasks), default=0)
        words: list[tuple[int, ...]] = []
        phases: list[tuple[int, int, int]] = []  # first task, number of tasks, chunks
        block = blocks.ctypes.data
        for i, task in enumerate(tasks):
            grain = max(1, task.grain, task.n_units >> 22)  # the chunk counter has 24 bits
            n_chunks = -(-task.n_units // grain)
            start, nbytes = task.prefetch
            at = block + 8 * starts[i]
            words.append((jit.address(task.kernel), at, task.n_units, grain, n_chunks, start, nbytes * grain, 0))
            next_joins = i + 1 < len(tasks) and tasks[i + 1].no_barrier
            if task.no_barrier and phases:
                first, count, chunks = phases[-1]
                phases[-1] = first, count + 1, chunks + n_chunks
            elif n_chunks > 1 or next_joins:
                phases.append((i, 1, n_chunks))
            elif phases and phases[-1][2] == 0:
                phases[-1] = phases[-1][0], phases[-1][1] + 1, 0
            else:
                phases.append((i, 1, 0))
        self._build(phases, np.array(words, np.int64).reshape(-1, 8))

    def _build(self, phases: Sequence[tuple[int, int, int]], rows: npt.NDArray[np.int64]) -> None:
        self.n, self.n_phases = len(rows), len(phases)
        self.words = np.zeros((self.n_phases + self.n, 8), np.int64)
        if self.n:
            self.words[self.n_phases :] = rows
            self.words[: self.n_phases, :3] = phases
            self.words[: self.n_phases, 0] *= 64
            self.words[: self.n_phases, 0] += self.words.ctypes.data + 64 * self.n_phases
        self.address = self.words.ctypes.data

    @classmethod
    def _of(cls, phases: Sequence[Phase], blocks: object, scratch: int, shared: int) -> TaskList:
        result = cls.__new__(cls)
        result.blocks, result.scratch, result.shared = blocks, scratch, shared
        starts = itertools.accumulate((len(rows) for rows, _ in phases), initial=0)
        records = [(start, len(rows), chunks) for start, (rows, chunks) in zip(starts, phases, strict=False)]
        result._build(records, np.concatenate([rows for rows, _ in phases]))
        return result

    def _phases(self) -> list[Phase]:
        rows, phases, at = self.words[self.n_phases :], [], 0
        for _, count, chunks in self.words[: self.n_phases, :3].tolist():
            phases.append((rows[at : at + count], chunks))
            at += count
        return phases

    def split(self, n: int, n_threads: int) -> list[TaskList]:
        """The same work in several task lists.

        Several phases become one list each, a phase of several tasks one list a task, and a single
        task at most `n` ranges of units, each with work for every thread. A list with shared memory
        stays whole: a task reads the results of the one before it there."""
        if self.shared:
            return [self]
        phases = self._phases()
        if len(phases) == 1:
            rows, chunks = phases[0]
            if len(rows) > 1:
                phases = [(rows[i : i + 1], chunks and int(rows[i, 4])) for i in range(len(rows))]
            elif chunks > 1:
                phases = [(part, int(part[0, 4])) for part in _split_units(rows, n, n_threads)]
        return [TaskList._of([phase], self.blocks, self.scratch, self.shared) for phase in phases]

    @classmethod
    def concat(cls, lists: Sequence[TaskList]) -> TaskList:
        """One task list that runs the given ones in order."""
        phases = [phase for tasks in lists for phase in tasks._phases()]
        scratch, shared = max(tasks.scratch for tasks in lists), max(tasks.shared for tasks in lists)
        return cls._of(phases, [tasks.blocks for tasks in lists], scratch, shared)


def _split_units(row: npt.NDArray[np.int64], n: int, n_threads: int) -> list[npt.NDArray[np.int64]]:
    _, _, end, grain, chunks, first_line, nbytes, first = row[0].tolist()
    parts = []
    for at, stop in itertools.pairwise([*range(0, chunks, -(-chunks // (n * n_threads)) * n_threads), chunks]):
        part = row.copy()
        part[0, 2], part[0, 4] = min(end, first + stop * grain), stop - at
        part[0, 5], part[0, 7] = first_line and first_line + at * nbytes, first + at * grain
        parts.append(part)
    return parts


class WorkerPool:
    """`n_threads` threads, the caller's included, that run one task list at a time.

    `run` is not re-entrant."""

    def __init__(self, n_threads: int) -> None:
        if not 1 <= n_threads <= MAX_THREADS:
            raise ValueError(f"threads: {n_threads} is not between 1 and {MAX_THREADS}")
        self.n_threads = n_threads
        jit.load(["step", "worker"])
        self._step = ENTRY(jit.address("step"))
        self._worker = ENTRY(jit.address("worker"))
        self._ctl = _aligned_words(cb.N_WORDS + cb.LINE * MAX_THREADS)
        self._counters = _aligned_words(8)
        self._scratch = self._shared = _aligned_words(8)
        self._pipes = [os.pipe() for _ in range(n_threads - 1)]
        self._retained: list[TaskList | None] = [None]
        self._write_ends = np.array([0] + [w for _, w in self._pipes], np.int64)
        self._max_phases = self._max_scratch = self._max_shared = self._caller = 0
        self._ctl[cb.N_THREADS], self._ctl[cb.IDLE_PREFETCH_NBYTES] = n_threads, cache_nbytes(2) // 2
        self._masks = _aligned_words(4 * cb.MASK_NBYTES // 8)
        self._ctl[cb.MASKS] = self._masks.ctypes.data
        self._out = np.zeros(8, np.int64)
        out, ctl, ends = (array.ctypes.data for array in (self._out, self._ctl, self._write_ends))
        # by number of participating threads
        self._arguments = [(out, out, ctl, n, ends, 0) for n in range(n_threads + 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(t + 1, r), name=f"cpu-{t + 1}", daemon=True)
            for t, (r, _) in enumerate(self._pipes)
        ]
        for t, thread in enumerate(self._threads):
            thread.start()
            self._ctl[cb.THREADS + cb.LINE * (t + 1) + cb.NATIVE_ID] = thread.native_id
        self._affinity = WorkerAffinity([thread.native_id for thread in self._threads if thread.native_id is not None])
        _open_pools.add(self)

    def _serve(self, thread: int, pipe: int) -> None:
        affinity.request_long_slice()
        out = np.zeros(8, np.int64)
        self._worker(out.ctypes.data, out.ctypes.data, self._ctl.ctypes.data, thread, pipe, IdleThreads.polls)

    def run(self, tasks: TaskList, n_threads: int = 0) -> None:
        """Run every task, without the GIL, on the first `n_threads` threads (0: all)."""
        n_threads = n_threads or self.n_threads
        if tasks.n:
            self._publish(tasks, n_threads)
            self._step(*self._arguments[n_threads])

    def run_timed(self, tasks: TaskList) -> npt.NDArray[np.float64]:
        """Run every task and return the seconds of each phase."""
        if tasks.n == 0:
            return np.zeros(0)
        jit.load(["step:timed"])
        self._publish(tasks, self.n_threads)
        start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        ENTRY(jit.address("step:timed"))(*self._arguments[-1])
        ends = tasks.words[: tasks.n_phases, 6:] @ (10**9, 1)
        seconds: npt.NDArray[np.float64] = np.diff(ends, prepend=start) / 1e9
        return seconds

    def _publish(self, tasks: TaskList, n_threads: int) -> None:
        if self._caller != threading.get_ident():
            self._caller = threading.get_ident()
            self._ctl[cb.THREADS + cb.NATIVE_ID] = threading.get_native_id()
            affinity.request_long_slice()
        if n_threads > 1:
            self._affinity.avoid_caller()
        most = self._max_phases, self._max_scratch, self._max_shared
        if any(map(operator.gt, (tasks.n_phases, tasks.scratch, tasks.shared), most)):
            self._grow(tasks)
        if tasks is not self._retained[-1]:
            self._retain(tasks)
        self._ctl[cb.NEXT_PHASES], self._ctl[cb.NEXT_N_PHASES] = tasks.address, tasks.n_phases

    def _grow(self, tasks: TaskList) -> None:
        self.quiesce()
        self._max_phases = max(tasks.n_phases, self._max_phases)
        self._max_scratch = -(-max(tasks.scratch, self._max_scratch) // 64) * 64
        self._counters = _aligned_words(8 * (self.n_threads + 1) * self._max_phases)
        # a cache line in front for the kernels' inputs, and one behind the last
        each = self._max_scratch + 64
        self._scratch = _aligned_words(each // 8 * self.n_threads + 8)
        if tasks.shared > self._max_shared:
            self._max_shared = tasks.shared
            self._shared = _aligned_words(-(-tasks.shared // 8))
        self._scratch[8 - cb.SHARED_MEMORY // 8 :: each // 8] = self._shared.ctypes.data
        self._ctl[cb.COUNTERS] = self._counters.ctypes.data
        self._ctl[cb.SCRATCH], self._ctl[cb.SCRATCH_NBYTES] = self._scratch.ctypes.data + 64, each

    def _retain(self, tasks: TaskList) -> None:
        """Keep a task list alive for a while: a preempted worker may read it after the step."""
        if len(self._retained) == MAX_RETAINED:
            self.quiesce()
            self._retained.clear()
        self._retained.append(tasks)

    def quiesce(self) -> None:
        """Return when no worker is inside a step. Call it between two steps."""
        while self._ctl[cb.INSIDE] != 0:
            time.sleep(0)

    def close(self) -> None:
        """Stop the workers. The pool cannot run afterwards."""
        if self._pipes:
            self._ctl[cb.STOP] = 1
            for _, w in self._pipes:
                os.write(w, b"x")
            for thread in self._threads:
                thread.join()
            for pair in self._pipes:
                for fd in pair:
                    os.close(fd)
            self._pipes = []
        _open_pools.discard(self)


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def _aligned_words(n: int) -> np.ndarray:
    raw = np.zeros(n + 8, np.int64)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + n]

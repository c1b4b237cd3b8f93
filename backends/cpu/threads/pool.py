"""Worker pool of the CPU backend, and the native call that runs a task list.

Workers are Python threads inside native code, with the GIL released. Between steps they spin for a
moment, then sleep on a pipe. `kernels/runtime/step_loop.py` holds the protocol.
"""

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
from logitless.backends.cpu.isa import cache_nbytes
from logitless.backends.cpu.kernels.matmul.layout import SHARED
from logitless.backends.cpu.threads import affinity
from logitless.backends.cpu.threads.affinity import Apart

MAX_THREADS = 256
MOST_RECENT = 64  # task lists that the pool keeps alive on its own
SPINS = 4000  # polls before a worker sleeps, about 150 µs
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4)


@dataclass(frozen=True, slots=True)
class Instruction:
    """A kernel call over units 0 to n_units, handed out in chunks of `grain` units.

    `args` are the int64 words of the kernel's argument block.
    """

    kernel: str
    args: tuple[int, ...]
    n_units: int
    grain: int = 1
    scratch: int = 0  # bytes of scratch memory per thread
    streams: tuple[int, int] = (0, 0)  # weights that units read in order: address, bytes of a unit
    # true: starts without a barrier; it touches nothing that the task before it writes
    beside: bool = False
    shared: int = 0  # bytes of memory that all threads share, in this task and the next


def bits(value: float) -> int:
    """A float attribute as an argument word; kernels read it with `ir.registry.bits_f32`."""
    return int(np.float32(value).view(np.int32))


Stage = tuple[npt.NDArray[np.int64], int]  # rows of its tasks, number of chunks (0: a serial phase)


class Table:
    """Tasks in the binary form that the step loop reads. Keep it alive while it may run.

    A phase is a run of tasks between two barriers. Tasks of one chunk each form a serial phase,
    which one thread runs.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        instructions = [i for i in instructions if i.n_units > 0]
        jit.load(i.kernel for i in instructions)
        starts = list(itertools.accumulate((len(i.args) for i in instructions), initial=0))
        blocks = np.array([a for i in instructions for a in i.args] or [0], np.int64)
        self.blocks: object = blocks  # argument blocks that the words point into
        self.scratch = max((i.scratch for i in instructions), default=0)
        self.shared = max((i.shared for i in instructions), default=0)
        words: list[tuple[int, ...]] = []
        stages: list[tuple[int, int, int]] = []  # first task, number of tasks, chunks
        block = blocks.ctypes.data
        for i, ins in enumerate(instructions):
            grain = max(1, ins.grain, ins.n_units >> 22)  # the chunk counter has 24 bits
            n_chunks = -(-ins.n_units // grain)
            start, nbytes = ins.streams
            at = block + 8 * starts[i]
            words.append((jit.address(ins.kernel), at, ins.n_units, grain, n_chunks, start, nbytes * grain, 0))
            following = i + 1 < len(instructions) and instructions[i + 1].beside
            if ins.beside and stages:
                first, count, chunks = stages[-1]
                stages[-1] = first, count + 1, chunks + n_chunks
            elif n_chunks > 1 or following:
                stages.append((i, 1, n_chunks))
            elif stages and stages[-1][2] == 0:
                stages[-1] = stages[-1][0], stages[-1][1] + 1, 0
            else:
                stages.append((i, 1, 0))
        self._lay(stages, np.array(words, np.int64).reshape(-1, 8))

    def _lay(self, stages: Sequence[tuple[int, int, int]], rows: npt.NDArray[np.int64]) -> None:
        self.n, self.n_stages = len(rows), len(stages)
        self.words = np.zeros((self.n_stages + self.n, 8), np.int64)
        if self.n:
            self.words[self.n_stages :] = rows
            self.words[: self.n_stages, :3] = stages
            self.words[: self.n_stages, 0] *= 64
            self.words[: self.n_stages, 0] += self.words.ctypes.data + 64 * self.n_stages
        self.address = self.words.ctypes.data

    @classmethod
    def _of(cls, stages: Sequence[Stage], blocks: object, scratch: int, shared: int) -> Table:
        table = cls.__new__(cls)
        table.blocks, table.scratch, table.shared = blocks, scratch, shared
        starts = itertools.accumulate((len(rows) for rows, _ in stages), initial=0)
        laid = [(start, len(rows), chunks) for start, (rows, chunks) in zip(starts, stages, strict=False)]
        table._lay(laid, np.concatenate([rows for rows, _ in stages]))
        return table

    def _stages(self) -> list[Stage]:
        rows, found, at = self.words[self.n_stages :], [], 0
        for _, count, chunks in self.words[: self.n_stages, :3].tolist():
            found.append((rows[at : at + count], chunks))
            at += count
        return found

    def split(self, n: int, n_threads: int) -> list[Table]:
        """The same work in several task lists.

        Several phases become one list each, a phase of several tasks one list a task, and a single
        task at most `n` ranges of units, each with work for every thread. A list with shared memory
        stays whole: a task reads there what the one before it wrote.
        """
        if self.shared:
            return [self]
        stages = self._stages()
        if len(stages) == 1:
            rows, chunks = stages[0]
            if len(rows) > 1:
                stages = [(rows[i : i + 1], chunks and int(rows[i, 4])) for i in range(len(rows))]
            elif chunks > 1:
                stages = [(part, int(part[0, 4])) for part in _split_units(rows, n, n_threads)]
        return [Table._of([stage], self.blocks, self.scratch, self.shared) for stage in stages]

    @classmethod
    def joined(cls, tables: Sequence[Table]) -> Table:
        """One task list that runs the given ones in order."""
        stages = [stage for table in tables for stage in table._stages()]
        scratch, shared = max(table.scratch for table in tables), max(table.shared for table in tables)
        return cls._of(stages, [table.blocks for table in tables], scratch, shared)


def _split_units(row: npt.NDArray[np.int64], n: int, n_threads: int) -> list[npt.NDArray[np.int64]]:
    _, _, end, grain, chunks, streamed, nbytes, first = row[0].tolist()
    parts = []
    for at, stop in itertools.pairwise([*range(0, chunks, -(-chunks // (n * n_threads)) * n_threads), chunks]):
        part = row.copy()
        part[0, 2], part[0, 4] = min(end, first + stop * grain), stop - at
        part[0, 5], part[0, 7] = streamed and streamed + at * nbytes, first + at * grain
        parts.append(part)
    return parts


class Pool:
    """`n_threads` threads, the caller's included, that run one task list at a time.

    `run` is not re-entrant.
    """

    def __init__(self, n_threads: int) -> None:
        if not 1 <= n_threads <= MAX_THREADS:
            raise ValueError(f"threads: {n_threads} is not between 1 and {MAX_THREADS}")
        self.n_threads = n_threads
        jit.load(["step", "worker"])
        self._step = ENTRY(jit.address("step"))
        self._worker = ENTRY(jit.address("worker"))
        self._ctl = _aligned_words(64 + 8 * MAX_THREADS)
        self._counters = _aligned_words(8)
        self._scratch = self._shared = _aligned_words(8)
        self._pipes = [os.pipe() for _ in range(n_threads - 1)]
        self._recent: list[Table | None] = [None]
        self._write_ends = np.array([0] + [w for _, w in self._pipes], np.int64)
        self._most_stages = self._most_scratch = self._most_shared = self._caller = 0
        self._ctl[41], self._ctl[42] = n_threads, cache_nbytes(2) // 2
        self._masks = _aligned_words(4 * 16)
        self._ctl[44] = self._masks.ctypes.data
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
            self._ctl[64 + 8 * (t + 1) + 3] = thread.native_id
        self._apart = Apart([thread.native_id for thread in self._threads if thread.native_id is not None])
        _open_pools.add(self)

    def _serve(self, thread: int, pipe: int) -> None:
        affinity.lengthen()
        out = np.zeros(8, np.int64)
        self._worker(out.ctypes.data, out.ctypes.data, self._ctl.ctypes.data, thread, pipe, SPINS)

    def run(self, table: Table, n_threads: int = 0) -> None:
        """Run every task on the first `n_threads` threads (0: all). The GIL is released meanwhile."""
        n_threads = n_threads or self.n_threads
        if table.n:
            self._ready(table, n_threads)
            self._step(*self._arguments[n_threads])

    def run_timed(self, table: Table) -> npt.NDArray[np.float64]:
        """Run every task and return the seconds of each phase."""
        if table.n == 0:
            return np.zeros(0)
        jit.load(["step:timed"])
        self._ready(table, self.n_threads)
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        ENTRY(jit.address("step:timed"))(*self._arguments[-1])
        ends = table.words[: table.n_stages, 6:] @ (10**9, 1)
        seconds: npt.NDArray[np.float64] = np.diff(ends, prepend=began) / 1e9
        return seconds

    def _ready(self, table: Table, n_threads: int) -> None:
        if self._caller != threading.get_ident():
            self._caller = threading.get_ident()
            self._ctl[64 + 3] = threading.get_native_id()
            affinity.lengthen()
        if n_threads > 1:
            self._apart()
        most = self._most_stages, self._most_scratch, self._most_shared
        if any(map(operator.gt, (table.n_stages, table.scratch, table.shared), most)):
            self._grow(table)
        if table is not self._recent[-1]:
            self._remember(table)
        self._ctl[9], self._ctl[17] = table.address, table.n_stages

    def _grow(self, table: Table) -> None:
        self.quiesce()
        self._most_stages = max(table.n_stages, self._most_stages)
        self._most_scratch = -(-max(table.scratch, self._most_scratch) // 64) * 64
        self._counters = _aligned_words(8 * (self.n_threads + 1) * self._most_stages)
        # a cache line in front for the kernels' inputs, and one behind the last
        each = self._most_scratch + 64
        self._scratch = _aligned_words(each // 8 * self.n_threads + 8)
        if table.shared > self._most_shared:
            self._most_shared = table.shared
            self._shared = _aligned_words(-(-table.shared // 8))
        self._scratch[8 - SHARED // 8 :: each // 8] = self._shared.ctypes.data
        self._ctl[40], self._ctl[24], self._ctl[32] = self._counters.ctypes.data, self._scratch.ctypes.data + 64, each

    def _remember(self, table: Table) -> None:
        """Keep a task list alive for a while, for workers that lost their core in the middle of a
        step.
        """
        if len(self._recent) == MOST_RECENT:
            self.quiesce()
            self._recent.clear()
        self._recent.append(table)

    def quiesce(self) -> None:
        """Return when no worker is inside a step. Call it between two steps."""
        while self._ctl[56] != 0:
            time.sleep(0)

    def close(self) -> None:
        """Stop the workers. The pool cannot run afterwards."""
        if self._pipes:
            self._ctl[48] = 1
            for _, w in self._pipes:
                os.write(w, b"x")
            for thread in self._threads:
                thread.join()
            for pair in self._pipes:
                for fd in pair:
                    os.close(fd)
            self._pipes = []
        _open_pools.discard(self)


_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def _aligned_words(n: int) -> np.ndarray:
    raw = np.zeros(n + 8, np.int64)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + n]

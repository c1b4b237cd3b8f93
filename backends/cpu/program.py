"""Program of the CPU backend: task lists, and numpy calls where an op has no kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.backends.cpu.fusion.packing import packed, unpack_task
from logitless.backends.cpu.lowering.cache_bypass import exceed_l3, with_nontemporal
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from logitless.backends.host_memory import HostBuffer
from logitless.graph.backend import Bytes, Location
from logitless.graph.dtype import DTYPES
from logitless.graph.op import OPS, destination
from logitless.graph.tensor import Tensor

Part = TaskList | Callable[[], None]


class CPUProgram:
    """Task lists that run in order, and numpy calls between them for ops without a kernel."""

    def __init__(self, pool: WorkerPool, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> None:
        self.fallbacks: list[str] = []
        self._pool = pool
        self._n_threads = pool.n_threads
        self._keep: set[HostBuffer] = set()  # buffers that the tasks point into
        self._nontemporal = exceed_l3(nodes)
        self.parts: list[Part] = []
        pending: list[Task] = []

        def address(t: Tensor) -> int:
            at = locate(t)
            self._keep.add(at.buffer)
            return int(at.buffer.address) + at.offset

        for t in nodes:
            rule = LOWERINGS.get(t.op)
            tasks = rule(t, address) if rule else None
            if tasks is not None:
                pending += tasks
                continue
            self._flush(pending)
            pending = []
            self.fallbacks.append(t.op)
            self.parts.append(partial(_reference, pool, t, locate))
        self._flush(pending)

    def _flush(self, tasks: list[Task]) -> None:
        if tasks:
            self.parts.append(TaskList(with_nontemporal(tasks) if self._nontemporal else tasks))

    @classmethod
    def of(cls, pool: WorkerPool, parts: Sequence[tuple[Part, CPUProgram]], n_threads: int) -> CPUProgram:
        """A program that runs these parts of other programs on `n_threads` threads."""
        result = cls(pool, (), lambda t: Location(None))
        result._n_threads = n_threads
        result._keep = set().union(*(program._keep for _, program in parts))
        lists: list[TaskList] = []
        for part, _ in parts:
            if isinstance(part, TaskList):
                lists.append(part)
                continue
            result.parts += [*_concat(lists), part]
            lists = []
        result.parts += _concat(lists)
        return result

    def split(self, n: int, n_threads: int) -> list[Part]:
        """The program's parts, split into phases, tasks or at most `n` ranges of units each."""
        parts: list[Part] = []
        for part in self.parts:
            parts += part.split(n, n_threads) if isinstance(part, TaskList) else [part]
        return parts

    def run(self) -> None:
        for part in self.parts:
            if isinstance(part, TaskList):
                self._pool.run(part, self._n_threads)
            else:
                part()


def _concat(lists: Sequence[TaskList]) -> list[Part]:
    return [TaskList.concat(lists)] if lists else []


def _reference(pool: WorkerPool, t: Tensor, locate: Callable[[Tensor], Location]) -> None:
    """Run a node by its numpy reference."""
    result = OPS[t.op].reference(*(_view(pool, s, locate(s)) for s in t.src), **t.attrs)
    if destination(t) is None:
        _view(pool, t, locate(t))[...] = result


def _view(pool: WorkerPool, t: Tensor, at: Location) -> npt.NDArray[Any]:
    kind = DTYPES[t.dtype].numpy
    if packed(t):
        return _unpacked(pool, t, at)
    raw = at.buffer.array[at.offset : at.offset + t.nbytes]
    if kind is None:
        return _dequantised(t, raw)
    values: npt.NDArray[Any] = raw.view(kind).reshape(t.shape)
    return values


def _unpacked(pool: WorkerPool, t: Tensor, at: Location) -> npt.NDArray[Any]:
    """Values of a packed weight as f32."""
    values = np.empty(t.shape, np.float32)
    address = at.buffer.address + at.offset
    pool.run(TaskList([unpack_task(t.dtype, address, values.ctypes.data, *t.shape)]))
    return values


def _dequantised(t: Tensor, raw: Bytes) -> npt.NDArray[Any]:
    """Values of a constant as f32, decoded from its GGUF blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if not (t.op == "variable" and t.attrs["constant"]):
        raise TypeError(f"{t!r}: numpy has no such type")
    rows = raw.reshape(*t.shape[:-1], -1)
    values: npt.NDArray[Any] = dequantize(rows, GGMLQuantizationType[t.dtype.upper()]).reshape(t.shape)
    return values


class PhaseTimer:
    """Runs programs in order and times each; `seconds` holds the times of the last run.

    Serial phases of two programs stay separate. A phase ends when all threads are done with it."""

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

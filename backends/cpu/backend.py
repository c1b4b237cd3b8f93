"""CPU backend: memory, lowering and programs. It supports every op.

An op without a native kernel runs as its numpy reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from logitless.backends.cores import cores
from logitless.backends.cpu.compiler import warmup
from logitless.backends.cpu.fusion.fuse import fuse
from logitless.backends.cpu.fusion.packing import pack_tasks, packed, packed_nbytes, unpack_sources
from logitless.backends.cpu.lowering.registry import REWRITES
from logitless.backends.cpu.program import CPUProgram, Part, PhaseTimer
from logitless.backends.cpu.threads.pool import TaskList, WorkerPool
from logitless.backends.host import casts_to_bf16, isa, target_host
from logitless.backends.host_memory import ALIGNMENT, STATES_SLAB, WEIGHTS_SLAB, FileMemory, HostBuffer, Slabs, aligned
from logitless.graph.backend import Backend, Bytes, Location
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor


class CPUBackend(Backend):
    """Backend of the host processor. `n_threads` 0 uses every core the process may use."""

    name = "cpu"
    alignment = ALIGNMENT
    memory_bytes = 0
    preemptible = True

    def __init__(self, n_threads: int = 0) -> None:
        casts = casts_to_bf16()  # raises if the flag asks for instructions that the processor lacks
        self.identity = f"{target_host().name} {target_host().attributes} {isa()}{' casts to BF16' * casts}"
        self.pool = WorkerPool(n_threads or cores())
        # Separate slabs: a slab stays allocated until its last piece is freed, and weights and
        # states have different lifetimes.
        self._weights, self._states, self._file = Slabs(WEIGHTS_SLAB), Slabs(STATES_SLAB), FileMemory()

    def supports(self, t: Tensor) -> bool:
        return t.op in OPS

    def rewrite(self, t: Tensor) -> Tensor:
        t = unpack_sources(t)
        rule = REWRITES.get(t.op)
        return rule(t) if rule else t

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fuse(fetches, mine)

    def alloc(self, nbytes: int, *, feeds: bool = False) -> HostBuffer:
        return HostBuffer(aligned(nbytes) if feeds else self._states.take(nbytes))

    def constant_nbytes(self, t: Tensor) -> int:
        return packed_nbytes(t.dtype, *t.shape) if packed(t) else t.nbytes

    def load(self, t: Tensor, raw: Bytes) -> HostBuffer:
        return self._load(t, raw, self._weights)

    def load_to_file(self, t: Tensor, raw: Bytes) -> HostBuffer:
        return self._load(t, raw, self._file)

    def _load(self, t: Tensor, raw: Bytes, memory_of: Slabs | FileMemory) -> HostBuffer:
        if len(raw) != t.nbytes:
            raise ValueError(f"state {t.name!r}: {t.nbytes} bytes expected, {len(raw)} given")
        memory = HostBuffer(memory_of.take(self.constant_nbytes(t)))
        if packed(t):
            self.pool.run(TaskList(pack_tasks(t.dtype, raw.ctypes.data, memory.address, *t.shape)))
        else:
            memory.array[:] = raw
        return memory

    def upload(self, location: Location, data: Bytes) -> None:
        location.buffer.array[location.offset : location.offset + len(data)] = data

    def host_view(self, location: Location, nbytes: int) -> Bytes:
        view: Bytes = location.buffer.array[location.offset : location.offset + nbytes]
        return view

    download = host_view

    def wait(self) -> None:
        """No-op: programs have ended when `run` returns."""

    def prepare(self, nodes: Iterable[Tensor]) -> None:
        warmup.prepare(nodes)

    def prefetch_training(self, weight_types: Iterable[str]) -> None:
        warmup.begin_training(weight_types)

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> CPUProgram:
        return CPUProgram(self.pool, nodes, locate)

    def split(
        self, programs: Sequence[CPUProgram], seconds: Sequence[float], max_seconds: float, spare_core: bool = False
    ) -> list[CPUProgram]:
        """Programs of about `max_seconds` each, out of programs that took `seconds`.

        A longer program is split into phases, tasks or ranges of units. Neighbours that together
        take less than a quarter of `max_seconds` are joined."""
        n_threads = max(1, min(self.pool.n_threads, cores() - 1)) if spare_core else self.pool.n_threads
        groups: list[list[tuple[Part, CPUProgram]]] = [[]]
        joined = 0.0
        for program, took in zip(programs, seconds, strict=True):
            parts = program.split(math.ceil(2 * took / max_seconds), n_threads) if took > max_seconds else program.parts
            for part in parts:
                joined += took / len(parts)
                if joined > max_seconds / 4 and groups[-1]:
                    groups.append([])
                    joined = took / len(parts)
                groups[-1].append((part, program))
        return [CPUProgram.of(self.pool, group, n_threads) for group in groups]

    def profile(self, programs: Sequence[CPUProgram]) -> PhaseTimer:
        return PhaseTimer(self.pool, programs)

    def close(self) -> None:
        self.closed = True
        self.pool.close()

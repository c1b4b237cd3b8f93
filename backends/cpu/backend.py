"""The CPU backend: complete, because an op without a kernel runs as its numpy reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from logitless.backends.cpu.fusion import packed_weights
from logitless.backends.cpu.fusion.fuse_linear import fuse
from logitless.backends.cpu.fusion.fuse_quantize import fuse_rounding
from logitless.backends.cpu.fusion.packing import packed
from logitless.backends.cpu.isa import cores, rounds_bf16
from logitless.backends.cpu.lowering import (  # noqa: F401  (each registers the rules of its ops)
    elementwise_attention,
    encoder,
    experts,
    linear,
    recurrent,
    sampling,
    slicing,
    training,
)
from logitless.backends.cpu.lowering.registry import REWRITES
from logitless.backends.cpu.memory import ALIGNMENT, STATES_SLAB, WEIGHTS_SLAB, Memory, Slabs, aligned
from logitless.backends.cpu.program import CPUProgram, Part
from logitless.backends.cpu.threads.pool import Pool, Table
from logitless.backends.cpu.threads.stage_timer import Clock
from logitless.graph.backend import Bytes, Place
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor


class CPUBackend:
    """`n_threads` 0 means every core of the process."""

    name = "cpu"
    alignment = ALIGNMENT
    memory_bytes = 0

    def __init__(self, n_threads: int = 0) -> None:
        rounds_bf16()  # what is asked for and not there is told now
        self.pool = Pool(n_threads or cores())
        # Apart, because a slab stays until its last piece goes: weights and states come and go at different times.
        self._weights, self._states = Slabs(WEIGHTS_SLAB), Slabs(STATES_SLAB)

    def supports(self, t: Tensor) -> bool:
        return t.op in OPS

    def rewrite(self, t: Tensor) -> Tensor:
        rule = REWRITES.get(t.op)
        return rule(t) if rule else t

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fuse(*fuse_rounding(fetches, mine))

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Memory:
        return Memory(aligned(nbytes) if feeds else self._states.take(nbytes))

    def constant_nbytes(self, t: Tensor) -> int:
        return packed_weights.packed_nbytes(t.dtype, *t.shape) if packed(t) else t.nbytes

    def load(self, t: Tensor, raw: Bytes) -> Memory:
        if len(raw) != t.nbytes:
            raise ValueError(f"state {t.name!r}: {t.nbytes} bytes expected, {len(raw)} given")
        memory = Memory(self._weights.take(self.constant_nbytes(t)))
        if packed(t):
            self.pool.run(Table(packed_weights.pack_instructions(t.dtype, raw.ctypes.data, memory.address, *t.shape)))
        else:
            memory.array[:] = raw
        return memory

    def upload(self, place: Place, data: Bytes) -> None:
        place.buffer.array[place.offset : place.offset + len(data)] = data

    def seen(self, place: Place, nbytes: int) -> Bytes:
        view: Bytes = place.buffer.array[place.offset : place.offset + nbytes]
        return view

    download = seen

    def wait(self) -> None:
        """Programs have ended when `run` returns."""

    def compile(self, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> CPUProgram:
        return CPUProgram(self.pool, nodes, place)

    def divide(
        self, programs: Sequence[CPUProgram], seconds: Sequence[float], most: float, spare: bool = False
    ) -> list[CPUProgram]:
        """Programs that take longer become one a stage, instruction or range of units; those that take less than a
        quarter are joined."""
        n_threads = max(1, min(self.pool.n_threads, cores() - 1)) if spare else self.pool.n_threads
        groups: list[list[tuple[Part, CPUProgram]]] = [[]]
        joined = 0.0
        for program, took in zip(programs, seconds, strict=True):
            parts = program.split(math.ceil(2 * took / most), n_threads) if took > most else program.parts
            for part in parts:
                joined += took / len(parts)
                if joined > most / 4 and groups[-1]:
                    groups.append([])
                    joined = took / len(parts)
                groups[-1].append((part, program))
        return [CPUProgram.of(self.pool, group, n_threads) for group in groups]

    def timed(self, programs: Sequence[CPUProgram]) -> Clock:
        return Clock(self.pool, programs)

    def close(self) -> None:
        self.pool.close()

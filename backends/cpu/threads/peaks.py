"""The limits that kernels are measured against, on this machine and with the pool's threads."""

from __future__ import annotations

import time

import numpy as np

from logitless.backends.cpu.isa import isa, rounds_bf16
from logitless.backends.cpu.kernels.matmul.layout import peak_chains
from logitless.backends.cpu.threads.pool import Instruction, Pool, Table

READ_BYTES = 512 << 20
UNIT_BYTES = 1 << 20
ITERATIONS = 100_000  # of a unit of arithmetic: a fraction of a millisecond
UNITS = 24  # a thread


class Peaks:
    """Measures with some threads, over and over: what they read is written once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._memory = np.ones(READ_BYTES, np.uint8)  # written, or every page would be the same page of zeros

    def measure(self) -> dict[str, float]:
        """Billions of bytes read and of multiply-adds done in a second: the best of three, in a tenth of a second
        altogether. Those of bf16 where they are used."""
        chains = peak_chains(isa())
        units = UNITS * self._pool.n_threads
        work = ITERATIONS * units * chains
        read = self._best("peak_read", (self._memory.ctypes.data, UNIT_BYTES), READ_BYTES // UNIT_BYTES)
        found = {
            "read_gb_s": READ_BYTES / read,
            "int8_gmac_s": work * 64 / self._best("peak_int8", (ITERATIONS,), units),
            "f32_gmac_s": work * 16 / self._best("peak_f32", (ITERATIONS,), units),
        }
        if rounds_bf16():
            found["bf16_gmac_s"] = work * 32 / self._best("peak_bf16", (ITERATIONS,), units)
        return found

    def _best(self, kernel: str, args: tuple[int, ...], n_units: int) -> float:
        """Nanoseconds of the fastest of three runs."""
        table = Table([Instruction(kernel, args, n_units, 1, scratch=64)])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self._pool.run(table)
            times.append(time.perf_counter() - start)
        return min(times) * 1e9

"""Roofline limits of this machine: memory bandwidth and multiply-adds per second of the pool."""

from __future__ import annotations

import time

import numpy as np

from logitless.backends.cpu.kernels.matmul.layout import peak_chains
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from logitless.backends.host import casts_to_bf16, isa

READ_BYTES = 512 << 20
UNIT_BYTES = 1 << 20
ITERATIONS = 100_000  # iterations of an arithmetic unit, a fraction of a millisecond
UNITS = 24  # units of arithmetic per thread


class Peaks:
    """Measures the limits with a given pool, as often as wanted. The buffer is written once."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        # written, because unwritten pages all map to one page of zeros
        self._memory = np.ones(READ_BYTES, np.uint8)

    def measure(self) -> dict[str, float]:
        """Bytes read and multiply-adds done, both in 1e9 per second; bf16 only where it is in use.

        Each is the best of three runs. All runs together take a tenth of a second."""
        chains = peak_chains(isa())
        units = UNITS * self._pool.n_threads
        work = ITERATIONS * units * chains
        read = self._best("peak_read", (self._memory.ctypes.data, UNIT_BYTES), READ_BYTES // UNIT_BYTES)
        limits = {
            "read_gb_s": READ_BYTES / read,
            "int8_gmac_s": work * 64 / self._best("peak_int8", (ITERATIONS,), units),
            "f32_gmac_s": work * 16 / self._best("peak_f32", (ITERATIONS,), units),
        }
        if casts_to_bf16():
            limits["bf16_gmac_s"] = work * 32 / self._best("peak_bf16", (ITERATIONS,), units)
        return limits

    def _best(self, kernel: str, args: tuple[int, ...], n_units: int) -> float:
        """Nanoseconds of the fastest of three runs."""
        tasks = TaskList([Task(kernel, args, n_units, 1, scratch=64)])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self._pool.run(tasks)
            times.append(time.perf_counter() - start)
        return min(times) * 1e9

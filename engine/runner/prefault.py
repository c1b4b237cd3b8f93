"""Prefault: takes the KV cache's memory from the operating system before a step writes to it.

The system maps memory at the first write, in huge pages where it has them: some 0.25 ms for 2 MiB,
and twenty times as much in a virtual machine whose host must find that memory first. All layers
reach the end of a huge page at about the same token, whose step would wait for all of them. So
memory is prefaulted while the engine is idle, a fixed distance ahead of the blocks in use.
"""

from __future__ import annotations

from collections.abc import Callable

from logitless.graph.execution.session import Session
from logitless.models.kv_pool import PagePool

LEAD = 256 << 20  # bytes beyond the last block that was used
PIECE = 2 << 20  # bytes that are prefaulted between two checks for waiting requests


class Prefault:
    """Prefaults a pool's blocks, up to `LEAD` bytes ahead of the last used one.

    The block pool hands out low block numbers first. Device memory is skipped. Belongs to the
    engine thread.
    """

    def __init__(self, session: Session, pool: PagePool) -> None:
        self._session, self._caches = session, pool.caches
        self._n_blocks = pool.n
        largest = max((cache.nbytes for cache in self._caches), default=1)
        self._lead = LEAD // max(1, pool.nbytes)
        self._step = max(1, PIECE * self._n_blocks // largest)  # blocks of a piece
        self._used = self._done = 0  # blocks used so far; pieces prefaulted, round-robin over the caches

    def used(self, block: int) -> None:
        """Note that a step uses this block."""
        self._used = max(self._used, block + 1)

    def run(self, request_waits: Callable[[], bool]) -> None:
        """Prefault until `request_waits()` is True (a request waits) or the lead is reached."""
        end, n = min(self._n_blocks, self._used + self._lead), len(self._caches)
        while n and (first := self._done // n * self._step) < end and not request_waits():
            cache = self._caches[self._done % n]
            size = cache.nbytes // self._n_blocks
            self._session.prefault(cache.name, first * size, min(self._step, self._n_blocks - first) * size)
            self._done += 1

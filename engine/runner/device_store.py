"""Device store: the host reads and writes KV blocks, states and block tables between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.execution.session import Session
from logitless.models.kv_pool import PagePool, Pool

LEAD = 256 << 20  # bytes beyond the last block that was used
PIECE = 2 << 20  # bytes that are prefaulted between two checks for waiting requests


class DeviceStore:
    """The `n` entries of a device pool. Call `open` before anything else."""

    def __init__(self, n: int) -> None:
        self.n = n

    def open(self, session: Session, pool: Pool) -> None:
        """Attach the store to a pool of a session."""
        self._session, self._pool = session, pool

    @property
    def nbytes(self) -> int:
        """Bytes of one entry, all layers."""
        return self._pool.nbytes

    def read(self, i: int) -> Bytes:
        """Copy of entry `i`, all layers."""
        return self._pool.read(self._session, i)

    def write(self, i: int, data: Bytes) -> None:
        """Overwrite entry `i` with bytes that `read` returned."""
        self._pool.write(self._session, i, data)


class DeviceBlocks(DeviceStore):
    """KV blocks of the device, and one spare block number `n` for padding tokens.

    `window`: positions that its layers attend to; 0: all."""

    def __init__(self, n: int, window: int = 0) -> None:
        super().__init__(n)
        self.window = window

    def open_blocks(self, session: Session, pool: PagePool) -> None:
        """Attach the blocks to a pool of a session."""
        self.open(session, pool)
        self._tables, self._prefault = pool.tables, Prefault(session, pool)

    def write_table(self, slot: int, blocks: Sequence[int]) -> None:
        """Write a slot's block table, from the first block on."""
        table = np.asarray(blocks, np.int32)
        self._session.write(self._tables.name, table, slot * self._tables.shape[1] * 4)
        self._prefault.used(int(np.where(table < self.n, table, 0).max(initial=0)))

    def prefault(self, request_waits: Callable[[], bool]) -> None:
        """Prefault memory of the blocks that are used next, until `request_waits()`: a request waits."""
        self._prefault.run(request_waits)


class Prefault:
    """Prefaults a pool's blocks, up to `LEAD` bytes ahead of the last used one: takes their memory
    from the operating system before a step writes to it.

    The system maps memory at the first write, in huge pages where it has them: some 0.25 ms for 2
    MiB, and twenty times as much in a virtual machine whose host must find that memory first. All
    layers reach the end of a huge page at about the same token, whose step would wait for all of
    them. So memory is prefaulted while the engine is idle. The block pool hands out low block
    numbers first. Device memory is skipped. Belongs to the engine thread."""

    def __init__(self, session: Session, pool: PagePool) -> None:
        self._session, self._caches = session, pool.caches
        self._n_blocks = pool.n
        largest = max((cache.nbytes for cache in self._caches), default=1)
        self._lead = LEAD // max(1, pool.nbytes)
        self._step = max(1, PIECE * self._n_blocks // largest)  # blocks of a piece
        # blocks used so far; pieces prefaulted, round-robin over the caches
        self._used = self._done = 0

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

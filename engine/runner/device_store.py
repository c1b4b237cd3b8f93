"""Device store: the host reads and writes KV blocks, states and block tables between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from logitless.engine.runner.prefault import Prefault
from logitless.graph.backend import Bytes
from logitless.graph.execution.session import Session
from logitless.models.kv_pool import PagePool, Pool


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

    `window`: positions that its layers attend to; 0: all.
    """

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

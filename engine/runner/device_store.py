"""What the host does with a pool of the device, between two steps: it takes things out and in, and writes tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from logitless.engine.runner.prefault import Prefault
from logitless.graph.backend import Bytes
from logitless.graph.execution.session import Session
from logitless.models.kv_pool import PagePool, Pool


class DeviceStore:
    """`n` numbers of a pool. Nothing may be asked before `open`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def open(self, session: Session, pool: Pool) -> None:
        """Where they are from now on."""
        self._session, self._pool = session, pool

    @property
    def nbytes(self) -> int:
        """Of one, all layers."""
        return self._pool.nbytes

    def read(self, i: int) -> Bytes:
        """A copy of number i, all layers."""
        return self._pool.read(self._session, i)

    def write(self, i: int, data: Bytes) -> None:
        """Overwrite number i with what `read` gave."""
        self._pool.write(self._session, i, data)


class DevicePages(DeviceStore):
    """Pages of a cache, and one more than sequences may have, with the number n, for rows that fill a batch up. Of
    layers that see `window` positions; 0: all."""

    def __init__(self, n: int, window: int = 0) -> None:
        super().__init__(n)
        self.window = window

    def open_pages(self, session: Session, pool: PagePool) -> None:
        """Where they are from now on."""
        self.open(session, pool)
        self._tables, self._prefault = pool.tables, Prefault(session, pool)

    def write_table(self, slot: int, pages: Sequence[int]) -> None:
        """The pages of a slot's sequence, from the first on."""
        table = np.asarray(pages, np.int32)
        self._session.write(self._tables.name, table, slot * self._tables.shape[1] * 4)
        self._prefault.used(int(np.where(table < self.n, table, 0).max(initial=0)))

    def prefault(self, wanted: Callable[[], bool]) -> None:
        """Have memory at hand for pages that will be used next, until somebody waits (`wanted`)."""
        self._prefault.run(wanted)

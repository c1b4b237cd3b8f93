"""What the host does with the pages of a pool, between two steps: it writes tables, and takes pages out and in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graph.backend import Bytes
from graph.session import Session
from models.page_pool import PagePool
from server.prefault import Prefault


class DevicePages:
    """`n` pages that sequences may have, and one more, with the number n, for rows that fill a batch up. Of layers that
    see `window` positions; 0: all. Nothing may be asked before `open`."""

    def __init__(self, n: int, window: int = 0) -> None:
        self.n, self.window = n, window

    def open(self, session: Session, pool: PagePool) -> None:
        """Where they are from now on."""
        self._session, self._pool = session, pool
        self._prefault = Prefault(session, pool)

    @property
    def page_nbytes(self) -> int:
        return self._pool.page_nbytes

    def write_table(self, slot: int, pages: Sequence[int]) -> None:
        """The pages of a slot's sequence, from the first on."""
        tables, table = self._pool.tables, np.asarray(pages, np.int32)
        self._session.write(tables.name, table, slot * tables.shape[1] * 4)
        self._prefault.used(int(np.where(table < self.n, table, 0).max(initial=0)))

    def prefault(self, wanted: Callable[[], bool]) -> None:
        """Have memory at hand for pages that will be used next, until somebody waits (`wanted`)."""
        self._prefault.run(wanted)

    def read_page(self, page: int, into: Bytes | None = None) -> Bytes:
        """A copy of one page, all layers; on request `into` memory for `page_nbytes`."""
        return self._pool.read_page(self._session, page, into)

    def write_page(self, page: int, data: Bytes) -> None:
        """Overwrite a page with what `read_page` gave."""
        self._pool.write_page(self._session, page, data)

"""The memory of the KV cache, taken from the system before a step needs it.

The system gives memory when it is first written, in large pages where it has them: some 0.25 ms for 2 MiB,
twenty times as much in a virtual machine whose host has to find that memory first. All layers' keys and values come to
the end of such a page at about the same token, whose step would wait for all of it. So it is taken ahead of what is
used while nobody waits, and not all at once: what no request will reach costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from logitless.graph.execution.session import Session
from logitless.models.kv_pool import PagePool

LEAD = 256 << 20  # bytes beyond the furthest page that was used
PIECE = 2 << 20  # bytes that are taken between two looks at whether somebody waits


class Prefault:
    """Goes through a pool's pages, `LEAD` bytes ahead of those that were used. Free pages are used from the first on.

    A device's own memory is not looked at. Belongs to the engine's thread.
    """

    def __init__(self, session: Session, pool: PagePool) -> None:
        self._session, self._caches = session, pool.caches
        self._n_pages = pool.n
        largest = max((cache.nbytes for cache in self._caches), default=1)
        self._lead = LEAD // max(1, pool.nbytes)
        self._step = max(1, PIECE * self._n_pages // largest)  # pages of a piece
        self._used = self._done = 0  # pages that steps have come to; pieces, one of every cache after the other

    def used(self, page: int) -> None:
        """Steps have come to this page."""
        self._used = max(self._used, page + 1)

    def run(self, wanted: Callable[[], bool]) -> None:
        """Go on until somebody wants something else, or until all is taken that may be used soon."""
        end, n = min(self._n_pages, self._used + self._lead), len(self._caches)
        while n and (first := self._done // n * self._step) < end and not wanted():
            cache = self._caches[self._done % n]
            size = cache.nbytes // self._n_pages
            self._session.prefault(cache.name, first * size, min(self._step, self._n_pages - first) * size)
            self._done += 1

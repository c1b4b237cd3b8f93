"""Pages of the KV cache in host memory: what the device had to give up, until somebody asks for it again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    """What the device keeps by number (pages, states), as bytes. Between two steps only. MemoryError and OSError: the
    device could not."""

    @property
    def n(self) -> int:
        """Numbers are below it."""

    @property
    def nbytes(self) -> int:
        """Of one."""

    def read(self, i: int, /) -> Bytes: ...

    def write(self, i: int, data: Bytes, /) -> None: ...


def chain_key(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The name of a page's content: its tokens after those of the pages before it."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


class HostCache:
    """Bytes of pages by the name of their content, up to a limit; what was not used for longest goes first.

    K and V depend on nothing but the tokens up to their own, so a page that comes back has the bits that it had.
    """

    __slots__ = ("_pages", "limit", "n_restored", "n_saved", "nbytes")

    def __init__(self, limit: int | None) -> None:
        """`limit` in bytes; None: as much as there is."""
        self.limit = limit
        self.nbytes = 0
        self.n_saved = 0
        self.n_restored = 0
        self._pages: OrderedDict[bytes, tuple[int, Bytes]] = OrderedDict()  # (a bit for each slot that had it, bytes)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def add_owners(self, key: bytes, owners: int) -> bool:
        """Whether the page is here; then these slots have had it too, and it was used just now."""
        known = self._pages.get(key)
        if known is None:
            return False
        self._pages[key] = known[0] | owners, known[1]
        self._pages.move_to_end(key)
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more is within the limit, so that nothing has to go."""
        return self.limit is None or self.nbytes + nbytes <= self.limit

    def put(self, key: bytes, owners: int, data: Bytes) -> None:
        """Keep a page's bytes, if they are within the limit."""
        if self.limit is not None and data.nbytes > self.limit:
            return
        self._pages[key] = owners, data
        self.nbytes += data.nbytes
        self.n_saved += 1
        while self.limit is not None and self.nbytes > self.limit:
            _, (_, oldest) = self._pages.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def get(self, key: bytes, owners: int) -> Bytes | None:
        """A page's bytes. They stay here: the device may have to give the page up again."""
        return self._pages[key][1] if self.add_owners(key, owners) else None

    def clear(self) -> None:
        """Forget everything: another device would have computed other bits."""
        self._pages.clear()
        self.nbytes = 0

    def forget(self, owner: int) -> None:
        """Drop what only this slot's sequences have had."""
        for key, (owners, data) in list(self._pages.items()):
            if owners & ~owner:
                self._pages[key] = owners & ~owner, data
            else:
                del self._pages[key]
                self.nbytes -= data.nbytes

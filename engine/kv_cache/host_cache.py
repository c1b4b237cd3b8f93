"""Host cache: evicted KV blocks in host memory, then on disk, by content, until a request needs them again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from logitless.engine.kv_disk.disk_cache import DiskCache

Bytes = npt.NDArray[np.uint8]


class HostStore(Protocol):
    """Numbered device memory (KV blocks or recurrent states), read and written as bytes between
    steps.

    Both raise MemoryError or OSError if the device cannot.
    """

    @property
    def n(self) -> int:
        """Number of entries."""

    @property
    def nbytes(self) -> int:
        """Bytes of one entry."""

    def read(self, i: int, /) -> Bytes: ...

    def write(self, i: int, data: Bytes, /) -> None: ...


def chain_key(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Hash key of a block's content: its tokens and the key of the block before it."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


class HostCache:
    """LRU cache of block contents by hash key, limited in bytes. What leaves it goes to the disk, if there is one.

    Keys and values depend only on the tokens up to their own position, so a restored block has the
    same bits as a recomputed one.
    """

    __slots__ = ("_blocks", "disk", "limit", "n_restored", "n_saved", "nbytes", "on_drop")

    def __init__(self, limit: int | None, disk: DiskCache | None = None) -> None:
        """`limit`: bytes; None: unlimited."""
        self.limit = limit
        self.disk = disk
        self.nbytes = 0
        self.n_saved = 0
        self.n_restored = 0
        self.on_drop: Callable[[bytes], None] | None = None  # called when a block has left
        # (bit mask of slots, bytes, whether they may go to the disk)
        self._blocks: OrderedDict[bytes, tuple[int, Bytes, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks or (self.disk is not None and key in self.disk)

    @property
    def may_have(self) -> bool:
        """False if nothing can be found."""
        return bool(self._blocks) or self.disk is not None

    def add_owners(self, key: bytes, owners: int) -> bool:
        """Mark a block as used by these slots (bit mask); False if it is not in memory."""
        entry = self._blocks.get(key)
        if entry is None:
            return False
        self._blocks[key] = entry[0] | owners, *entry[1:]
        self._blocks.move_to_end(key)
        return True

    def has_room(self, nbytes: int) -> bool:
        """True if `nbytes` more fit without an eviction."""
        return self.limit is None or self.nbytes + nbytes <= self.limit

    def put(self, key: bytes, owners: int, data: Bytes, *, lasts: bool = True) -> bool:
        """Store a block; True if it is in memory now. `lasts`: it may go to the disk, at once if it is
        larger than the limit."""
        is_large = self.limit is not None and data.nbytes > self.limit
        if self.disk is not None and lasts and (is_large or not data.nbytes):  # without bytes it would never leave
            self.disk.put(key, data)
        if is_large:
            return False
        self._blocks[key] = owners, data, lasts
        self.nbytes += data.nbytes
        self.n_saved += 1
        while self.limit is not None and self.nbytes > self.limit:
            oldest, (_, old, old_lasts) = self._blocks.popitem(last=False)
            self.nbytes -= old.nbytes
            if self.disk is not None and old_lasts:
                self.disk.put(oldest, old)
            self._dropped(oldest)
        return True

    def get(self, key: bytes, owners: int) -> Bytes | None:
        """Bytes of a block, or None. They stay cached, for the device may evict the block again."""
        if self.add_owners(key, owners):
            return self._blocks[key][1]
        return self.disk.get(key) if self.disk is not None else None

    def clear(self) -> None:
        """Drop everything: another device computes other bits."""
        if self.disk is not None:
            self.disk.switch_off()
        keys = list(self._blocks)
        self._blocks.clear()
        self.nbytes = 0
        for key in keys:
            self._dropped(key)

    def forget(self, owner: int) -> None:
        """Drop blocks that only this slot's sequences have used."""
        for key, (owners, data, lasts) in list(self._blocks.items()):
            if owners & ~owner:
                self._blocks[key] = owners & ~owner, data, lasts
            else:
                del self._blocks[key]
                self.nbytes -= data.nbytes
                self._dropped(key)

    def newest_first(self) -> list[tuple[bytes, Bytes]]:
        """Blocks for the disk by key, the one used last first."""
        return [(key, data) for key, (_, data, lasts) in reversed(self._blocks.items()) if lasts]

    def _dropped(self, key: bytes) -> None:
        if self.on_drop is not None:
            self.on_drop(key)

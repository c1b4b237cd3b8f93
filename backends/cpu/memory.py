"""Memory of the process for tensors: 64-byte aligned, in pages of 2 MiB where the system has them.

numpy asks for large pages for what takes 4 MiB or more, whose ends are small ones. Weights share slabs, and so do
smaller states, because reading page by page is a 16th slower: a model of many small weights, or a long sequence's keys
and values, which lie 2 KiB here and 2 KiB there.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from logitless.graph.backend import Bytes

ALIGNMENT = 64
STATES_SLAB = 32 << 20  # bytes of a slab: states come and go, and with them what is left of others beside them
WEIGHTS_SLAB = 256 << 20 if hasattr(mmap, "MADV_HUGEPAGE") else STATES_SLAB
MOST_OPEN = 8  # slabs whose ends are still filled with what is small enough
LARGE_PAGE = 2 << 20


class Memory:
    """Bytes in the process."""

    __slots__ = ("address", "array")

    def __init__(self, array: Bytes) -> None:
        self.array, self.address = array, array.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def aligned(nbytes: int) -> Bytes:
    """Zeroed memory (the system's fresh pages) at a multiple of 64."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Slabs:
    """Hands out memory. A slab is given back when nothing that lies in it is used any more.

    What is larger than a quarter of one has pages of its own.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._most_shared = nbytes, nbytes // 4
        self._open: list[tuple[weakref.ref[Bytes], int]] = []  # the latest slabs, and how much of each is taken

    def take(self, nbytes: int) -> Bytes:
        """Zeroed, at a multiple of 64. MemoryError when there is not enough."""
        if nbytes > self._most_shared:
            return aligned(nbytes)
        in_use = [(slab, at) for known, at in self._open if (slab := known()) is not None]
        with_room = ((slab, at) for slab, at in in_use if at + nbytes <= self._nbytes)
        slab, at = next(with_room, None) or (_slab(self._nbytes), 0)
        rest = [(weakref.ref(other), end) for other, end in in_use if other is not slab][-MOST_OPEN:]
        self._open = [*rest, (weakref.ref(slab), -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT)]
        return slab[at : at + nbytes]


def _slab(nbytes: int) -> Bytes:
    """Memory whose pages are taken when they are first written. A slice of it holds it: it is no slice itself."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(aligned(nbytes).data, np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for tensors: {error.strerror}") from error
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(pages, np.uint8).ctypes.data % LARGE_PAGE
    return np.frombuffer(pages, np.uint8, nbytes, start)

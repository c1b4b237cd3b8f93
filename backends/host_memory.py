"""Host memory for tensors: 64-byte aligned, in 2 MiB huge pages where the system has them.

numpy requests huge pages from 4 MiB on, but the ends of such a block are small pages. So weights
share slabs, and so do small states. Small pages cost a sixteenth of the read speed for a model of
many small weights, and for a long KV cache whose reads are 2 KiB pieces."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from logitless.backends import disk_cache
from logitless.backends.system_files import group_folders, is_number, read
from logitless.graph.backend import Bytes

ALIGNMENT = 64
STATES_SLAB = 32 << 20  # bytes of a slab; states of one slab are freed at different times
WEIGHTS_SLAB = 256 << 20 if hasattr(mmap, "MADV_HUGEPAGE") else STATES_SLAB
FILE_SLAB = 1 << 30  # bytes of a file, of which the disk has only those in use
MAX_OPEN = 8  # slabs that still take small pieces
LARGE_PAGE = 2 << 20


class HostBuffer:
    """A range of host memory."""

    __slots__ = ("address", "array")

    def __init__(self, array: Bytes) -> None:
        self.array, self.address = array, array.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def aligned(nbytes: int) -> Bytes:
    """Zeroed memory (fresh pages of the system) at a multiple of 64."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Slabs:
    """Slab allocator. A slab is freed when no piece of it is in use.

    Pieces above a quarter of a slab get pages of their own."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._max_shared = nbytes, nbytes // 4
        # latest slabs, and the bytes taken of each
        self._open: list[tuple[weakref.ref[Bytes], int]] = []

    def take(self, nbytes: int) -> Bytes:
        """Zeroed memory at a multiple of 64. MemoryError when there is not enough."""
        if nbytes > self._max_shared:
            return aligned(nbytes)
        in_use = [(slab, at) for ref, at in self._open if (slab := ref()) is not None]
        with_room = ((slab, at) for slab, at in in_use if at + nbytes <= self._nbytes)
        slab, at = next(with_room, None) or (_slab(self._nbytes), 0)
        rest = [(weakref.ref(other), end) for other, end in in_use if other is not slab][-MAX_OPEN:]
        self._open = [*rest, (weakref.ref(slab), -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT)]
        return slab[at : at + nbytes]


def _slab(nbytes: int) -> Bytes:
    """A new slab, whose pages are allocated on first write.

    It is no slice itself, so that every slice keeps it alive."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(aligned(nbytes).data, np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for tensors: {error.strerror}") from error
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(pages, np.uint8).ctypes.data % LARGE_PAGE
    return np.frombuffer(pages, np.uint8, nbytes, start)


class FileMemory:
    """Memory that nameless files of the cache folder back: where memory is short, the system writes its pages to
    them, and reads them again. A file ends with its memory. Weights share one, which takes two file descriptors."""

    def __init__(self) -> None:
        self._pages: Callable[[], Bytes | None] = lambda: None  # of the latest file
        self._end = self._descriptor = 0

    def take(self, nbytes: int) -> Bytes:
        """Zeroed memory at a multiple of 64. MemoryError: the disk has no room."""
        folder = disk_cache.writable_folder()
        try:
            pages = self._pages()
            if pages is None or self._end + nbytes > len(pages):
                pages = self._new_file(folder, max(nbytes, FILE_SLAB))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, self._end, nbytes)
            elif shutil.disk_usage(folder).free < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            line = f"{folder}: {nbytes / 2**30:.2f} GiB of weights: {error.strerror}"
            raise MemoryError(f"{line}; LOGITLESS_CACHE names another folder") from error
        start, self._end = self._end, self._end + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return pages[start : start + nbytes]

    def _new_file(self, folder: Path, nbytes: int) -> Bytes:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        file.truncate(nbytes)
        pages = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        weakref.finalize(pages, file.close)
        self._pages, self._end, self._descriptor = weakref.ref(pages), 0, file.fileno()
        return pages


def total_memory() -> int:
    """Bytes that this process may use: the machine's memory, or less where one of its control groups has a limit."""
    if not hasattr(os, "sysconf"):
        return _windows_memory()
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = (f"{folder}/memory.{('limit_in_bytes', 'max')[version - 1]}" for folder, version in group_folders("memory"))
    return min([pages, *(int(limit) for file in files if is_number(limit := read(file)))])


def _windows_memory() -> int:
    """Bytes of a Windows machine's memory."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: two words of 32 bits, its size the first; then the whole
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined]
    return int(status[1])

"""Threads that compute together on processors of their own.

Linux often wakes a thread on the processor of the one that wakes it, or moves it there, although another is idle; two
threads of one step then take turns until the next tick sees it, some 4 ms later. So a pool's threads may run anywhere
but where its caller runs. The caller itself may run anywhere: whoever else is busy shares a processor with one of them
only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

# A call that keeps Python's lock: to give it up would take longer than the call.
current = ctypes.PyDLL(None).sched_getcpu if sys.platform.startswith("linux") else lambda: -1


class Apart:
    """Keeps `threads` (as the system counts them) off the processor of whoever calls it."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        self._cpu = -1  # from which they are kept

    def __call__(self) -> None:
        """Nothing changes while the caller stays where it was, or where there are more threads than processors that
        the caller may use."""
        cpu = current()
        if cpu == self._cpu:
            return
        others = os.sched_getaffinity(0) - {cpu}
        if len(self._threads) > len(others):
            return
        self._cpu = cpu
        for thread in self._threads:
            try:
                os.sched_setaffinity(thread, others)
            except OSError:  # not allowed in some sandboxes; it is slower then
                return


SLICE = 100_000_000  # nanoseconds, as long as it may be; Linux's own are 0.7 to 3 ms


ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # of sched_setattr(2): size, policy, flags, nice, priority, slice, two more


SET, GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))


ORDINARY = (0, 3)  # policies of threads without a fixed priority: other, batch


NOT_INHERITED = 1  # a flag: threads and processes that this one starts have the system's own


def attributes() -> list[int] | None:
    """How the system schedules the calling thread: the fields of ATTRIBUTES; None where it does not tell."""
    raw = ctypes.create_string_buffer(ATTRIBUTES.size)
    if not sys.platform.startswith("linux") or not GET or ctypes.CDLL(None).syscall(GET, 0, raw, ATTRIBUTES.size, 0):
        return None
    return list(ATTRIBUTES.unpack(raw.raw))


def lengthen() -> None:
    """Ask for long slices for the calling thread. Where the system knows of none, nothing changes."""
    wanted = attributes()
    if wanted is not None and wanted[1] in ORDINARY:
        wanted[2] |= NOT_INHERITED
        wanted[5] = SLICE
        ctypes.CDLL(None).syscall(SET, 0, ATTRIBUTES.pack(*wanted), 0)  # Linux before 6.12 takes no notice

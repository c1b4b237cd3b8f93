"""Threads that compute together on processors of their own.

Linux often wakes a thread on the processor of the one that wakes it, or moves it there, although another is idle; two
threads of one step then take turns until the next tick sees it, some 4 ms later. So a pool's threads may run anywhere
but where its caller runs. The caller itself may run anywhere: whoever else is busy shares a processor with one of them
only.
"""

from __future__ import annotations

import ctypes
import os
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

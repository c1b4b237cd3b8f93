"""CPU affinity and scheduler time slice of the worker threads.

Linux often wakes a thread on the core of the thread that wakes it, although another core is idle.
Two threads of one step then take turns on a core until the next scheduler tick, some 4 ms later. So
the workers may run on every core except the caller's and much slower ones (backends/cores.py). The
caller itself stays unrestricted: any other busy thread then shares a core with at most one of them.

A long time slice lets a thread finish its chunk before another program gets the core."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

from logitless.backends.cores import fast_cpus, siblings, usable_cpus
from logitless.backends.host import current_cpu


class WorkerAffinity:
    """Keeps the workers (native thread ids) off the caller's core."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        self._cpu = -1  # the core that the workers avoid

    def avoid_caller(self) -> None:
        """Update the workers' affinity if the caller has moved to another core.

        Nothing changes where there are more workers than other cores that the caller may use."""
        cpu = current_cpu()
        if cpu == self._cpu:
            return
        usable = usable_cpus()
        others = fast_cpus(usable) - siblings(cpu)
        if len(self._threads) > len(others):
            others = usable - {cpu}
        if len(self._threads) > len(others):
            return
        self._cpu = cpu
        for thread in self._threads:
            try:
                os.sched_setaffinity(thread, others)
            except OSError:  # forbidden in some sandboxes; slower, but correct
                return


TIME_SLICE_NS = 100_000_000  # the longest allowed; the default of Linux is 0.7 to 3 ms
# struct sched_attr: size, policy, flags, nice, priority, slice, two more
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
SCHED_SETATTR, SCHED_GETATTR = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
NORMAL_POLICIES = (0, 3)  # SCHED_OTHER, SCHED_BATCH: policies without a fixed priority
RESET_ON_FORK = 1  # flag: child threads and processes start with the system's defaults


def sched_attributes() -> list[int] | None:
    """Scheduling attributes of the calling thread (fields of ATTRIBUTES); None if unavailable."""
    if not sys.platform.startswith("linux") or not SCHED_GETATTR:
        return None
    raw = ctypes.create_string_buffer(ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(SCHED_GETATTR, 0, raw, ATTRIBUTES.size, 0):
        return None
    return list(ATTRIBUTES.unpack(raw.raw))


def request_long_slice() -> None:
    """Request a long time slice for the calling thread. Systems without such a setting ignore it."""
    fields = sched_attributes()
    if fields is not None and fields[1] in NORMAL_POLICIES:
        fields[2] |= RESET_ON_FORK
        fields[5] = TIME_SLICE_NS
        # ignored before Linux 6.12
        ctypes.CDLL(None).syscall(SCHED_SETATTR, 0, ATTRIBUTES.pack(*fields), 0)

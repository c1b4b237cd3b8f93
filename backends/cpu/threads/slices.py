"""How long a thread that computes may run before the system looks for another one.

Linux gives a thread its processor in slices. One that has just become ready and has a shorter slice than the running
one gets the processor at once if it has had less than its share; otherwise it waits until that slice has ended, which
is seen at the next tick: some 4 ms. Here both processors compute all the time, and who waits is the event loop, with a
token to send. So threads that compute ask for long slices. Their share of the processors stays the same.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

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

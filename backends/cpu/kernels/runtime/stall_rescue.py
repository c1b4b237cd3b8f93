"""A thread that has lost its core in the middle of a chunk, and those who wait for it.

Another program wants a core, and the system takes it from a thread that holds a chunk. Others have done the rest and
wait, with cores of their own: until the next tick or the end of a slice, some 2 to 8 ms, which is more than a step of a
small model takes. So who waits looks after the others: a thread whose processor time stands still while it holds a
chunk runs nowhere, and is brought to the core of the one that waits. Thread 0 looks after the workers, and the first
worker after thread 0.

A worker is a guest of thread 0, which lets it run: when its chunk is done it waits to be sent home, where it goes on as
soon as there is a core. Thread 0 stays where it was brought, and sends all workers elsewhere when its chunk is done.
So it is thread 0 alone who says where workers may run (as in apart.py).

A thread's line of the control block (step.py; word index): 2 it holds a chunk · 3 its number in the system · 4, 5 its
processor time when it was last looked at · 6 the step in which it was brought to another core.
"""

from __future__ import annotations

import sys

import numpy as np
from numba import njit, types

from logitless.backends.cpu.kernels.ir.registry import i64p

LINES = 64  # word index of thread 0's line
HOLDS, NUMBER, SEEN, BROUGHT = 2, 3, 4, 6
MASKS, MASK_NBYTES = 44, 128  # word index of their address: two for thread 0 and two for the first worker
ALL = 41  # word index of the number of threads
TIME_OF = 6  # clock_getcpuclockid(3): of one thread, what it has run
NOBODY = -1
MOMENT = 20  # microseconds, to which the system adds some 50

read_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_sleep = types.ExternalFunction("usleep", types.int32(types.int32))
get_cpu = types.ExternalFunction("sched_getcpu", types.int32())
get_mask = types.ExternalFunction("sched_getaffinity", types.int32(types.int32, types.int64, types.int64))
set_mask = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.int64, types.int64))


@njit(forceinline=True)
def line_of(ctl, thread):
    return ctl + (LINES + 8 * thread) * 8


@njit(forceinline=True)
def number_of(ctl, thread):
    return np.int32(i64p(line_of(ctl, thread))[NUMBER])


@njit(forceinline=True)
def was_brought(line, generation):
    return i64p(line)[BROUGHT] == generation


@njit
def doze():
    """Leave the core to another thread for a moment. One that yields instead gives up what it may run of its whole
    slice, and a long one (slices.py) is missed when a third thread comes."""
    _sleep(np.int32(MOMENT))


@njit
def stands_still(line):
    """Whether a thread holds a chunk and has not run since it was last looked at."""
    words = i64p(line)
    if words[HOLDS] == 0:
        return False
    seconds, nanoseconds = words[SEEN], words[SEEN + 1]
    read_clock(np.int32((~words[NUMBER] << 3) | TIME_OF), line + SEEN * 8)
    return words[SEEN] == seconds and words[SEEN + 1] == nanoseconds


@njit
def _bring(ctl, thread, generation, masks):
    """Have a thread run on the caller's core, and nowhere else; the first of `masks` keeps where it might run before.
    Whether the system did so."""
    cpu = np.int64(get_cpu())
    here = i64p(masks + MASK_NBYTES)
    for i in range(MASK_NBYTES // 8):
        here[i] = np.int64(1) << (cpu % 64) if i == cpu // 64 else 0
    if get_mask(number_of(ctl, thread), MASK_NBYTES, masks) != 0:
        return False
    i64p(line_of(ctl, thread))[BROUGHT] = generation
    if set_mask(number_of(ctl, thread), MASK_NBYTES, masks + MASK_NBYTES) != 0:  # not allowed in some sandboxes
        i64p(line_of(ctl, thread))[BROUGHT] = 0
        return False
    return True


def _help_out(ctl, thread, n_threads, generation):
    masks = i64p(ctl)[MASKS] + thread * 2 * MASK_NBYTES
    if thread == 0:
        for worker in range(1, n_threads):
            if stands_still(line_of(ctl, worker)) and _bring(ctl, worker, generation, masks):
                return worker
    elif thread == 1 and stands_still(line_of(ctl, 0)) and _bring(ctl, 0, generation, masks):
        set_mask(number_of(ctl, 0), MASK_NBYTES, masks)  # again anywhere: the system leaves it where it is
        return 0
    return NOBODY


def _send_home(ctl, worker):
    set_mask(number_of(ctl, worker), MASK_NBYTES, i64p(ctl)[MASKS])
    i64p(line_of(ctl, worker))[BROUGHT] = 0


@njit
def _cores_of(mask):
    n = 0
    for i in range(MASK_NBYTES // 8):
        word = i64p(mask)[i]
        while word != 0:
            word &= word - 1
            n += 1
    return n


def _settle(ctl, thread, generation):
    line = line_of(ctl, thread)
    if thread != 0:
        while was_brought(line, generation):
            doze()
        return
    masks, cpu, n_threads = i64p(ctl)[MASKS], np.int64(get_cpu()), i64p(ctl)[ALL]
    before = masks + 2 * MASK_NBYTES  # as the first worker has seen it, who may wait for this core
    set_mask(0, MASK_NBYTES, before)
    for i in range(MASK_NBYTES // 8):
        i64p(masks)[i] = i64p(before)[i] & ~(np.int64(1) << (cpu % 64) if i == cpu // 64 else 0)
    if n_threads - 1 <= _cores_of(masks):  # of more threads than cores each may run anywhere
        for worker in range(1, n_threads):
            set_mask(number_of(ctl, worker), MASK_NBYTES, masks)
    i64p(line)[BROUGHT] = 0


def _elsewhere_help_out(ctl, thread, n_threads, generation):
    return NOBODY


def _elsewhere_send_home(ctl, worker):
    pass


def _elsewhere_settle(ctl, thread, generation):
    pass


_linux = sys.platform.startswith("linux")
help_out = njit(_help_out if _linux else _elsewhere_help_out)  # of one that waits: whom it has brought, or NOBODY
send_home = njit(_send_home if _linux else _elsewhere_send_home)  # of thread 0, when a guest's chunk is done
settle = njit(_settle if _linux else _elsewhere_settle)  # of one that was brought, when its chunk is done

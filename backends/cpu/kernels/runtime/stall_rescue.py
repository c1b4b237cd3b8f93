"""Preempted-worker rescue: migrates a descheduled thread to the core of one that waits for it.

Another program gets the core of a thread that holds a chunk. The other threads have done the rest
and wait, on cores of their own. Without help they wait until the next scheduler tick or the end of
the time slice, some 2 to 8 ms, longer than a whole step of a small model. So a waiting thread
checks the others: a thread that holds a chunk while its CPU clock stands still is not running, and
is migrated, by affinity, to the waiting thread's core. Thread 0 checks the workers, and the first
worker checks thread 0.

A migrated worker waits after its chunk until thread 0 restores its affinity, then continues on any
free core. Thread 0 itself stays on the new core, and moves all workers elsewhere when its chunk is
done. So only thread 0 decides where workers may run (as in threads/affinity.py)."""

from __future__ import annotations

import sys

import numpy as np
from numba import njit, types

from logitless.backends.cpu.kernels.ir.registry import i64p
from logitless.backends.cpu.kernels.runtime.control_block import (
    CPU_TIME,
    HOLDS_CHUNK,
    LINE,
    MASK_NBYTES,
    MASKS,
    MIGRATED,
    N_THREADS,
    NATIVE_ID,
    THREADS,
)

CPU_CLOCK = 6  # clockid_t of a thread's CPU clock: clock_getcpuclockid(3)
NOBODY = -1
SLEEP_US = 20  # microseconds; the system adds some 50

read_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_sleep = types.ExternalFunction("usleep", types.int32(types.int32))
get_cpu = types.ExternalFunction("sched_getcpu", types.int32())
get_mask = types.ExternalFunction("sched_getaffinity", types.int32(types.int32, types.int64, types.int64))
set_mask = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.int64, types.int64))


@njit(forceinline=True)
def line_of(ctl, thread):
    return ctl + (THREADS + LINE * thread) * 8


@njit(forceinline=True)
def native_id_of(ctl, thread):
    return np.int32(i64p(line_of(ctl, thread))[NATIVE_ID])


@njit(forceinline=True)
def was_migrated(line, generation):
    return i64p(line)[MIGRATED] == generation


@njit
def sleep_briefly():
    """Sleep for a moment, so that another thread gets the core.

    sched_yield would give up the rest of the time slice, and a long slice (threads/affinity.py) is
    missed when a third thread comes."""
    _sleep(np.int32(SLEEP_US))


@njit
def is_preempted(line):
    """True if a thread holds a chunk and has not run since the last check."""
    words = i64p(line)
    if words[HOLDS_CHUNK] == 0:
        return False
    seconds, nanoseconds = words[CPU_TIME], words[CPU_TIME + 1]
    read_clock(np.int32((~words[NATIVE_ID] << 3) | CPU_CLOCK), line + CPU_TIME * 8)
    return words[CPU_TIME] == seconds and words[CPU_TIME + 1] == nanoseconds


@njit
def _migrate(ctl, thread, generation, masks):
    """Migrate a thread to the caller's core. True on success.

    The first of `masks` receives its former affinity."""
    cpu = np.int64(get_cpu())
    own_mask = i64p(masks + MASK_NBYTES)
    for i in range(MASK_NBYTES // 8):
        own_mask[i] = np.int64(1) << (cpu % 64) if i == cpu // 64 else 0
    if get_mask(native_id_of(ctl, thread), MASK_NBYTES, masks) != 0:
        return False
    i64p(line_of(ctl, thread))[MIGRATED] = generation
    # forbidden in some sandboxes
    if set_mask(native_id_of(ctl, thread), MASK_NBYTES, masks + MASK_NBYTES) != 0:
        i64p(line_of(ctl, thread))[MIGRATED] = 0
        return False
    return True


def _rescue_preempted(ctl, thread, n_threads, generation):
    masks = i64p(ctl)[MASKS] + thread * 2 * MASK_NBYTES
    if thread == 0:
        for worker in range(1, n_threads):
            if is_preempted(line_of(ctl, worker)) and _migrate(ctl, worker, generation, masks):
                return worker
    elif thread == 1 and is_preempted(line_of(ctl, 0)) and _migrate(ctl, 0, generation, masks):
        # unrestricted again: the system leaves it where it is
        set_mask(native_id_of(ctl, 0), MASK_NBYTES, masks)
        return 0
    return NOBODY


def _restore_affinity(ctl, worker):
    set_mask(native_id_of(ctl, worker), MASK_NBYTES, i64p(ctl)[MASKS])
    i64p(line_of(ctl, worker))[MIGRATED] = 0


@njit
def _count_cores(mask):
    n = 0
    for i in range(MASK_NBYTES // 8):
        word = i64p(mask)[i]
        while word != 0:
            word &= word - 1
            n += 1
    return n


def _finish_migration(ctl, thread, generation):
    line = line_of(ctl, thread)
    if thread != 0:
        while was_migrated(line, generation):
            sleep_briefly()
        return
    masks, cpu, n_threads = i64p(ctl)[MASKS], np.int64(get_cpu()), i64p(ctl)[N_THREADS]
    former = masks + 2 * MASK_NBYTES  # as the first worker saw it, which may wait for this core
    set_mask(0, MASK_NBYTES, former)
    for i in range(MASK_NBYTES // 8):
        i64p(masks)[i] = i64p(former)[i] & ~(np.int64(1) << (cpu % 64) if i == cpu // 64 else 0)
    if n_threads - 1 <= _count_cores(masks):  # more threads than cores stay unrestricted
        for worker in range(1, n_threads):
            set_mask(native_id_of(ctl, worker), MASK_NBYTES, masks)
    i64p(line)[MIGRATED] = 0


def _no_rescue(ctl, thread, n_threads, generation):
    return NOBODY


def _no_restore(ctl, worker):
    pass


def _no_finish(ctl, thread, generation):
    pass


_linux = sys.platform.startswith("linux")
# called by a waiting thread: the thread it migrated, or NOBODY
rescue_preempted = njit(_rescue_preempted if _linux else _no_rescue)
# called by thread 0 when a migrated worker's chunk is done
restore_affinity = njit(_restore_affinity if _linux else _no_restore)
# called by a migrated thread when its chunk is done
finish_migration = njit(_finish_migration if _linux else _no_finish)

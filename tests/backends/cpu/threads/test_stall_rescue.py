"""Preempted-worker rescue: a thread preempted inside a chunk migrates to a waiting thread's core."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from logitless.backends.cpu.compiler import jit
from logitless.backends.cpu.kernels.ir.registry import i64p
from logitless.backends.cpu.kernels.runtime.stall_rescue import (
    HOLDS_CHUNK,
    MIGRATED,
    NATIVE_ID,
    THREADS,
    get_cpu,
    is_preempted,
)
from logitless.backends.cpu.kernels.runtime.step_loop import atomic_add, atomic_load, read_fd, yield_cpu
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from tests.helpers.linked_kernel import linked

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux that is told"),
    pytest.mark.skipif(sys.platform.startswith("linux") and len(os.sched_getaffinity(0)) < 2, reason="one processor"),
]
PATIENCE = 20  # seconds after which a test gives up


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def two_chunks(a, begin, end, scratch):  # type: ignore[no-untyped-def]
    """Each thread runs one; thread a[3] blocks on pipe a[2] in it, then records its core."""
    patience = 100_000_000
    atomic_add(a[0], 1)
    while atomic_load(a[0]) < 2 and patience:  # so that each thread has one
        yield_cpu()
        patience -= 1
    if (scratch - a[4]) // a[5] == a[3]:
        read_fd(a[2], a[1], 1)
        i64p(a[1])[1] = get_cpu()


class Stall:
    """A step of two threads, one of which blocks until it was migrated to the other's core."""

    def __init__(self, pool: WorkerPool, sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(jit._addresses, "probe", linked(two_chunks))
        self.pool, self.sleeper = pool, sleeper
        self.x = np.ones(64, np.float32)
        args = (self.x.ctypes.data, self.x.ctypes.data, 1, int(np.float32(2).view(np.int32)))
        self.double = Task("map:scale", args, 64)
        self.line = THREADS + 8 * sleeper + MIGRATED
        self.places: list[int] = []  # cores it was migrated to
        self.recorded = np.full(2, -1, np.int64)

    def run(self) -> None:
        pool = self.pool
        pool.run(TaskList([self.double, self.double]), 2)  # allocates memory and starts the threads
        self.generation = int(pool._ctl[0]) + 1
        here, (out, self.wake) = np.zeros(1, np.int64), os.pipe()
        scratch = int(pool._ctl[24]), int(pool._ctl[32])
        args = (here.ctypes.data, self.recorded.ctypes.data, out, self.sleeper, *scratch)
        other = threading.Thread(target=self._wake_it_up)
        other.start()
        pool.run(TaskList([Task("probe", args, 2), self.double]), 2)
        other.join()
        for fd in (out, self.wake):
            os.close(fd)

    def _wake_it_up(self) -> None:
        """Unblock it once it was migrated."""
        deadline, worker = time.monotonic() + PATIENCE, self.pool._threads[0].native_id
        here = self.pool._masks[(3 - 2 * self.sleeper) * 16 :][:16]
        while not self.places and time.monotonic() < deadline:
            time.sleep(0)
            if self.pool._ctl[self.line] == self.generation:
                (word,) = np.flatnonzero(here)
                place = 64 * int(word) + int(here[word]).bit_length() - 1
                if self.sleeper == 0 or (worker is not None and os.sched_getaffinity(worker) == {place}):
                    self.places.append(place)
        os.write(self.wake, b"x")


@pytest.mark.parametrize("sleeper", [0, 1], ids=["the caller", "a worker"])
def test_preempted_thread_is_migrated_to_the_waiting_core(
    pool: WorkerPool, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_mask, worker = os.sched_getaffinity(0), pool._threads[0].native_id
    assert worker is not None
    stall = Stall(pool, sleeper, monkeypatch)
    stall.run()
    assert len(stall.places) == 1
    assert sleeper == 0 or stall.recorded[1] == stall.places[0]  # thread 0 may have moved meanwhile
    assert (stall.x == 8).all()
    assert pool._ctl[stall.line] == 0
    deadline = time.monotonic() + PATIENCE
    while os.sched_getaffinity(0) != own_mask and time.monotonic() < deadline:
        time.sleep(0)  # the worker may not have reached it
    assert os.sched_getaffinity(0) == own_mask
    pool.run(TaskList([stall.double]))
    assert (stall.x == 16).all()
    assert len(own_mask - os.sched_getaffinity(worker)) == 1


def test_more_threads_than_cores_run_anywhere_after_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after thread 0 was migrated."""
    own_mask = os.sched_getaffinity(0)
    pool = WorkerPool(len(own_mask) + 1)
    stall = Stall(pool, 0, monkeypatch)
    stall.run()
    masks = [os.sched_getaffinity(thread.native_id) for thread in pool._threads if thread.native_id is not None]
    pool.close()
    assert len(stall.places) == 1
    assert masks == [own_mask] * len(own_mask)


def test_is_preempted_only_while_holding_a_chunk_and_asleep(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
        for look in range(2):
            i64p(a[0])[look] = is_preempted(a[1])

    monkeypatch.setitem(jit._addresses, "probe", linked(run))

    def looks(number: int, *, holds: bool) -> list[int]:
        line, recorded = np.zeros(8, np.int64), np.full(2, -1, np.int64)
        line[HOLDS_CHUNK], line[NATIVE_ID] = holds, number
        pool.run(TaskList([Task("probe", (recorded.ctypes.data, line.ctypes.data), 1)]), 1)
        return recorded.tolist()

    sleeping = pool._threads[0].native_id
    assert sleeping is not None
    deadline = time.monotonic() + PATIENCE
    while not pool._ctl[THREADS + 8] and time.monotonic() < deadline:
        time.sleep(0)  # until it is parked, and then a moment more
    while looks(sleeping, holds=True) != [False, True] and time.monotonic() < deadline:
        time.sleep(0)
    assert looks(sleeping, holds=True) == [False, True]
    assert looks(sleeping, holds=False) == [False, False]
    assert looks(threading.get_native_id(), holds=True) == [False, False]

"""A thread that stands still in the middle of a chunk gets the core of the one that waits for it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from backends.cpu import compile as compiler
from backends.cpu import image, jit
from backends.cpu.frontend import ir_of
from backends.cpu.kernels.registry import i64p
from backends.cpu.kernels.stalled import BROUGHT, HOLDS, LINES, NUMBER, get_cpu, stands_still
from backends.cpu.kernels.step import atomic_add, atomic_load, read_fd, yield_cpu
from backends.cpu.pool import Instruction, Pool, Table

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux that is told"),
    pytest.mark.skipif(sys.platform.startswith("linux") and len(os.sched_getaffinity(0)) < 2, reason="one processor"),
]
PATIENCE = 20  # seconds after which a test gives up


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def linked(run: Callable[[Any, int, int, Any], None]) -> int:
    """The address of a kernel."""
    source, entry = ir_of(run)
    (address,) = image.load([image.link(compiler.object_code(source, entry, "test_stalled"), "test_stalled")])
    return address


def two_chunks(a, begin, end, scratch):  # type: ignore[no-untyped-def]
    """Each thread begins one; the thread a[3] reads from the pipe a[2] in it, and tells where it runs then."""
    patience = 100_000_000
    atomic_add(a[0], 1)
    while atomic_load(a[0]) < 2 and patience:  # so each thread has one
        yield_cpu()
        patience -= 1
    if (scratch - a[4]) // a[5] == a[3]:
        read_fd(a[2], a[1], 1)
        i64p(a[1])[1] = get_cpu()


@pytest.mark.parametrize("sleeper", [0, 1], ids=["the caller", "a worker"])
def test_who_stands_still_is_brought_to_the_core_of_who_waits(
    pool: Pool, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(jit._addresses, "probe", linked(two_chunks))
    mine, worker = os.sched_getaffinity(0), pool._threads[0].native_id
    assert worker is not None
    x = np.ones(64, np.float32)
    double = Instruction("scale", (x.ctypes.data, x.ctypes.data, 1, int(np.float32(2).view(np.int32))), 64)
    pool.run(Table([double, double]))  # memory and threads are there
    line, generation = LINES + 8 * sleeper + BROUGHT, int(pool._ctl[0]) + 1
    out, wake = os.pipe()
    here, told = np.zeros(1, np.int64), np.full(2, -1, np.int64)
    places: list[int] = []

    def wake_it_up() -> None:
        """When it was brought."""
        deadline = time.monotonic() + PATIENCE
        while not places and time.monotonic() < deadline:
            time.sleep(0)
            if pool._ctl[line] == generation:
                (word,) = np.flatnonzero(pool._masks[(3 - 2 * sleeper) * 16 :][:16])
                place = 64 * int(word) + int(pool._masks[(3 - 2 * sleeper) * 16 + word]).bit_length() - 1
                if sleeper == 0 or os.sched_getaffinity(worker) == {place}:
                    places.append(place)
        os.write(wake, b"x")

    args = (here.ctypes.data, told.ctypes.data, out, sleeper, int(pool._ctl[24]), int(pool._ctl[32]))
    other = threading.Thread(target=wake_it_up)
    other.start()
    pool.run(Table([Instruction("probe", args, 2), double]))
    other.join()
    assert len(places) == 1
    assert sleeper == 0 or told[1] == places[0]  # thread 0 may have gone elsewhere meanwhile
    assert (x == 8).all()
    assert pool._ctl[line] == 0
    assert os.sched_getaffinity(0) == mine
    pool.run(Table([double]))
    assert (x == 16).all()
    assert len(mine - os.sched_getaffinity(worker)) == 1
    for fd in (out, wake):
        os.close(fd)


def test_time_stands_still_of_who_holds_a_chunk_and_sleeps(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
        for look in range(2):
            i64p(a[0])[look] = stands_still(a[1])

    monkeypatch.setitem(jit._addresses, "probe", linked(run))

    def looks(number: int, *, holds: bool) -> list[int]:
        line, told = np.zeros(8, np.int64), np.full(2, -1, np.int64)
        line[HOLDS], line[NUMBER] = holds, number
        pool.run(Table([Instruction("probe", (told.ctypes.data, line.ctypes.data), 1)]), 1)
        return told.tolist()

    sleeping = pool._threads[0].native_id
    assert sleeping is not None
    deadline = time.monotonic() + PATIENCE
    while not pool._ctl[LINES + 8] and time.monotonic() < deadline:
        time.sleep(0)  # until it is parked, and then a moment more
    while looks(sleeping, holds=True) != [False, True] and time.monotonic() < deadline:
        time.sleep(0)
    assert looks(sleeping, holds=True) == [False, True]
    assert looks(sleeping, holds=False) == [False, False]
    assert looks(threading.get_native_id(), holds=True) == [False, False]

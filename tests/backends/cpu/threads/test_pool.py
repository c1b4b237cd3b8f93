"""Worker pool and step loop: task lists on several threads, in order, for any timing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from logitless.backends.cpu.compiler import jit
from logitless.backends.cpu.kernels.ir.registry import i64p
from logitless.backends.cpu.kernels.runtime.control_block import NEXT_WEIGHTS
from logitless.backends.cpu.kernels.runtime.step_loop import atomic_add, atomic_load, yield_cpu
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from logitless.backends.host import IdleThreads
from tests.helpers.linked_kernel import linked


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    pool = WorkerPool(request.param)
    yield pool
    pool.close()


def fibonacci(rng: np.random.Generator, rows: list[np.ndarray], n: int) -> tuple[list[Task], list[np.ndarray]]:
    """Tasks that each add two of three buffers into the third, and the buffers' final values."""
    want = [r.astype(np.float64) for r in rows]
    tasks = []
    for i in range(n):
        a, b, y = ((i + j) % 3 for j in range(3))
        length, width = rows[0].shape
        grain = int(rng.choice([1, 2, 5, length, 3 * length]))  # the last two: a single chunk
        args = (rows[a].ctypes.data, rows[b].ctypes.data, rows[y].ctypes.data, width, 4 * width)
        tasks.append(Task("binary:add", args, length, grain))
        tasks.append(Task("map:scale", (rows[y].ctypes.data, rows[y].ctypes.data, width, HALF), length, grain))
        want[y] = (want[a] + want[b]) * 0.5
    return tasks, want


HALF = int(np.float32(0.5).view(np.int32))


def test_workers_that_never_look_for_work_still_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """--poll 0."""
    monkeypatch.setattr(IdleThreads, "polls", 0)
    pool, rng = WorkerPool(3), np.random.default_rng(1)
    for _ in range(20):
        rows = [rng.integers(-8, 8, (40, 33)).astype(np.float32) for _ in range(3)]
        tasks, want = fibonacci(rng, rows, 12)
        pool.run(TaskList(tasks))
        assert all(np.array_equal(row, each) for row, each in zip(rows, want, strict=True))
    pool.close()


def test_tasks_see_earlier_results(pool: WorkerPool) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 7, 40):
        start = [rng.integers(-8, 8, (size, 33)).astype(np.float32) for _ in range(3)]
        rows = [r.copy() for r in start]
        tasks, want = fibonacci(rng, rows, 12)  # 12 halvings of small integers stay exact in f32
        table = TaskList(tasks)
        for _ in range(200):
            for row, first in zip(rows, start, strict=True):
                row[:] = first
            pool.run(table)
            for got, expected in zip(rows, want, strict=True):
                assert np.array_equal(got, expected)


def test_split_and_concatenated_task_list_computes_the_same(pool: WorkerPool) -> None:
    rng = np.random.default_rng(1)
    start = [rng.integers(-8, 8, (40, 33)).astype(np.float32) for _ in range(3)]
    rows = [r.copy() for r in start]
    tasks, want = fibonacci(rng, rows, 12)
    # the same rows once more: a phase of two tasks
    tasks[5:5] = [replace(tasks[4], no_barrier=True)]
    whole = TaskList(tasks)
    phases = whole.split(1, 1)
    assert len(phases) == whole.n_phases < whole.n
    single = [one for phase in phases for one in phase.split(1, 1)]
    units = [part for one in single for part in one.split(7, 2)]
    assert len(single) == whole.n
    assert len(units) > 2 * len(single)
    del whole, phases, single
    again = TaskList.concat([TaskList.concat(units[:9]), *units[9:]])
    assert again.n == len(units)
    for tables in (units, [again], again.split(3, pool.n_threads)):
        for row, first in zip(rows, start, strict=True):
            row[:] = first
        for table in tables:
            pool.run(table)
        for got, expected in zip(rows, want, strict=True):
            assert np.array_equal(got, expected)


def test_task_lists_of_any_length_in_turn(pool: WorkerPool) -> None:
    x = np.ones(4, np.float32)
    double = (x.ctypes.data, x.ctypes.data, 4, int(np.float32(2).view(np.int32)))
    tables = [TaskList([Task("map:scale", double, 1)] * n) for n in (0, 1, 20, 3, 90)]
    for _ in range(50):
        for table in tables:
            x[:] = 2.0**-60
            pool.run(table)
            assert (x == 2.0 ** (table.n - 60)).all()


def test_task_without_units_is_skipped(pool: WorkerPool) -> None:
    x = np.ones(4, np.float32)
    args = (x.ctypes.data, x.ctypes.data, 4, int(np.float32(2).view(np.int32)))
    pool.run(TaskList([Task("map:scale", args, 0), Task("map:scale", args, 1), Task("map:scale", args, 0)]))
    assert (x == 2).all()


def test_pool_wakes_from_sleep(pool: WorkerPool) -> None:
    """Workers sleep after a moment without work; `close` and the next task list must wake them."""
    x = np.zeros((64, 8), np.float32)
    one = np.ones(8, np.float32)
    table = TaskList([Task("binary:add", (x.ctypes.data, one.ctypes.data, x.ctypes.data, 8, 0), 64, 1)])
    for i in range(20):
        sum(range(200_000))  # long enough for them to fall asleep
        pool.run(table)
        assert (x == i + 1).all()


@pytest.mark.parametrize("n_threads", [0, -1, 1000])
def test_invalid_number_of_threads_raises(n_threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        WorkerPool(n_threads)


def test_prefetch_address_may_be_invalid(pool: WorkerPool) -> None:
    """A waiting thread prefetches a task's weights early; with few chunks some threads have none."""
    x = np.ones(64, np.float32)
    double = (x.ctypes.data, x.ctypes.data, 1, int(np.float32(2).view(np.int32)))
    halve = (x.ctypes.data, x.ctypes.data, 1, HALF)
    nowhere = (1 << 46, 1 << 12)
    table = TaskList([Task("map:scale", args, 64, prefetch=nowhere) for args in (double, halve, double)])
    for i in range(20):
        pool.run(table)
        assert (x == 2.0 ** (i + 1)).all()


def test_kernel_receives_its_next_weights(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next weights follow the chunk (0), or belong to the next task or the next phase.

    The next phase's begin where the thread's own part of it begins. A stolen chunk gets the
    thief's.
    """

    def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
        i64p(a[0])[begin] = i64p(scratch - NEXT_WEIGHTS)[0]

    monkeypatch.setitem(jit._addresses, "probe", linked(run))
    recorded = np.full((4, 20), -1, np.int64)
    both = [
        Task("probe", (recorded[0].ctypes.data,), 20, prefetch=(10_000, 10)),
        Task("probe", (recorded[1].ctypes.data,), 20, prefetch=(20_000, 10), no_barrier=True),
    ]
    serial = Task("probe", (recorded[2].ctypes.data,), 1)
    table = TaskList([*both, serial, Task("probe", (recorded[3].ctypes.data,), 20, prefetch=(30_000, 10))])
    assert table.n_phases == 3
    starts = {30_000 + 10 * (20 * t // pool.n_threads) for t in range(pool.n_threads)}
    for _ in range(50):
        recorded[:] = -1
        pool.run(table)
        if pool.n_threads == 1:
            assert set(recorded[recorded >= 0]) == {0}
            continue
        # of parts of 40 chunks
        ends = {40 * (t + 1) // pool.n_threads - 1 for t in range(pool.n_threads)}
        for chunk, next_ in enumerate(recorded[:2].reshape(-1).tolist()):
            assert next_ in (starts if chunk in ends else {20_000} if chunk == 19 else {0})
        assert recorded[2, 0] == 0
        assert (recorded[3] == 0).all()  # nothing follows


def test_run_uses_the_requested_number_of_threads(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other threads sleep or spin, and take part in the next task list."""

    def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
        i64p(a[0])[begin] = scratch
        atomic_add(a[1], 1)
        patience = 10_000_000
        # each thread has one chunk, until all are here
        while atomic_load(a[1]) < a[2] and patience:
            yield_cpu()
            patience -= 1

    monkeypatch.setitem(jit._addresses, "probe", linked(run))
    for n_threads in [*range(1, pool.n_threads + 1), *range(pool.n_threads, 0, -1)] * 3:
        where, here = np.zeros(n_threads, np.int64), np.zeros(1, np.int64)
        pool.run(TaskList([Task("probe", (where.ctypes.data, here.ctypes.data, n_threads), n_threads)]), n_threads)
        threads = (where - int(pool._ctl[24])) // int(pool._ctl[32])
        assert sorted(threads) == list(range(n_threads))


@pytest.mark.parametrize("grain", [1, 3, 20, 50])
def test_kernel_gets_one_chunk_at_a_time(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, grain: int) -> None:
    """Its scratch may be sized for the units of one chunk."""

    def run(a, begin, end, scratch):  # type: ignore[no-untyped-def]
        i64p(a[0])[begin] = end - begin

    monkeypatch.setitem(jit._addresses, "probe", linked(run))
    recorded = np.zeros(20, np.int64)
    pool.run(TaskList([Task("probe", (recorded.ctypes.data,), 20, grain)]))
    assert recorded[::grain].tolist() == [min(grain, 20 - begin) for begin in range(0, 20, grain)]
    assert recorded.sum() == 20


@pytest.mark.parametrize("grains", [(1, 1, 1), (64, 64, 64), (64, 5, 64), (7, 64, 1)], ids=str)
def test_tasks_without_barrier_share_a_phase(pool: WorkerPool, grains: tuple[int, ...]) -> None:
    """They share a phase, for any number of chunks. It starts after the phase before, and ends
    before the next.
    """
    x, parts = np.zeros((64, 1), np.float32), np.zeros((3, 64, 1), np.float32)
    one = np.ones(1, np.float32)
    add = Task("binary:add", (x.ctypes.data, one.ctypes.data, x.ctypes.data, 1, 0), 64, 64)
    factors = [int(np.float32(f).view(np.int32)) for f in (1, 2, 3)]
    scales = [
        Task("map:scale", (x.ctypes.data, part.ctypes.data, 1, f), 64, grain, no_barrier=i > 0)
        for i, (part, f, grain) in enumerate(zip(parts, factors, grains, strict=True))
    ]
    total = Task("binary:add", (parts[1].ctypes.data, parts[2].ctypes.data, x.ctypes.data, 1, 4), 64, 3)
    table = TaskList([add, *scales, total])
    assert table.n_phases == 3
    want = np.float32(0)
    for _ in range(9):
        pool.run(table)
        assert (parts[:, :, 0] == (want + 1) * np.array([[1], [2], [3]])).all()
        want = (want + 1) * 5
        assert (x == want).all()

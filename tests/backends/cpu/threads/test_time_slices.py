"""Scheduler time slices of the worker threads (Linux)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from logitless.backends.cpu.threads import affinity
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool, bits

T = TypeVar("T")
tells = pytest.mark.skipif(affinity.sched_attributes() is None, reason="the system does not tell")


def elsewhere(function: Callable[[], T]) -> T:
    """Result of a function on a thread of its own."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@tells
def test_long_slice_is_not_inherited() -> None:
    before, another = affinity.sched_attributes(), elsewhere(affinity.sched_attributes)

    def request() -> list[list[int] | None]:
        affinity.request_long_slice()
        return [affinity.sched_attributes(), elsewhere(affinity.sched_attributes)]

    its, its_child = elsewhere(request)
    assert its is not None
    assert another is not None
    assert its[1:2] + its[3:5] == another[1:2] + another[3:5]  # policy, nice and priority
    assert affinity.sched_attributes() == before
    assert its_child == another
    assert its[5] in (affinity.TIME_SLICE_NS, 0)  # 0 before Linux 6.12


def test_workers_and_callers_request_long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    requesters: list[str] = []
    monkeypatch.setattr(affinity, "request_long_slice", lambda: requesters.append(threading.current_thread().name))
    pool = WorkerPool(3)
    row = np.ones(4, np.float32)
    table = TaskList([Task("map:scale", (row.ctypes.data, row.ctypes.data, 4, bits(0.5)), 1)])
    for _ in range(5):
        pool.run(table)
    here = threading.current_thread().name
    other = elsewhere(lambda: (pool.run(table), threading.current_thread().name)[1])
    pool.close()
    assert sorted(requesters) == sorted(["cpu-1", "cpu-2", here, other])


@pytest.mark.parametrize("missing", ["platform", "call", "priority"])
def test_unsupported_slice_changes_nothing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif missing == "call":
        monkeypatch.setattr(affinity, "SCHED_GETATTR", 0)
    else:
        monkeypatch.setattr(affinity, "NORMAL_POLICIES", ())
    before = affinity.sched_attributes()
    affinity.request_long_slice()
    assert affinity.sched_attributes() == before

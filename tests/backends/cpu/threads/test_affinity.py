"""CPU affinity: workers avoid the caller's core."""

from __future__ import annotations

import os
import sys

import pytest

from logitless.backends.cpu.threads import affinity
from logitless.backends.cpu.threads.affinity import WorkerAffinity
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is Linux that is told")
Masks = list[tuple[int, set[int]]]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Masks:
    """Affinity calls on a machine of four cores, of which the caller may use three."""
    calls: Masks = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: calls.append((thread, set(cpus))))
    return calls


def test_affinity_follows_the_caller(masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = WorkerAffinity([70, 71])
    for cpu in (1, 1, 1, 3, 3, 1):
        monkeypatch.setattr(affinity, "current_cpu", lambda cpu=cpu: cpu)
        keep.avoid_caller()
    assert masks == [
        *((thread, {0, 3}) for thread in (70, 71)),
        *((thread, {0, 1}) for thread in (70, 71)),
        *((thread, {0, 3}) for thread in (70, 71)),
    ]


def test_more_threads_than_cores_stay_unrestricted(masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "current_cpu", lambda: 1)
    WorkerAffinity([70, 71, 72]).avoid_caller()
    assert not masks


def test_workers_avoid_slow_cores_and_the_sibling_of_the_caller(masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "current_cpu", lambda: 1)
    monkeypatch.setattr(affinity, "fast_cpus", lambda usable: usable - {0})
    keep = WorkerAffinity([70])
    keep.avoid_caller()
    assert masks == [(70, {3})]
    monkeypatch.setattr(affinity, "siblings", lambda cpu: {1, 3})
    WorkerAffinity([70]).avoid_caller()
    assert masks[1:] == [(70, {0, 3})]  # no other core is fast


def test_forbidden_affinity_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    WorkerAffinity([70]).avoid_caller()


@pytest.mark.skipif(sys.platform.startswith("linux") and len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_pool_restricts_workers_not_the_caller() -> None:
    own_mask = os.sched_getaffinity(0)
    pool = WorkerPool(2)
    worker = pool._threads[0].native_id
    assert worker is not None
    assert os.sched_getaffinity(worker) == own_mask
    table = TaskList([Task("peak_f32", (10,), 4, 1, scratch=64)])
    pool.run(table, 1)
    assert os.sched_getaffinity(worker) == own_mask  # not an active worker
    pool.run(table)
    assert len(own_mask - os.sched_getaffinity(worker)) == 1
    assert os.sched_getaffinity(0) == own_mask
    pool.close()

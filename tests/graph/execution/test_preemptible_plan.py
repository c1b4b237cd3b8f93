"""Preemptible plans: runs that stop between parts and continue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.kernels.matmul.layout import ENCODER_ROWS
from logitless.backends.cpu.threads.pool import Task, TaskList, WorkerPool
from logitless.graph.backend import Backend
from logitless.graph.execution.preemptible_plan import CUT_AFTER_WARMUP_RUNS, PreemptiblePlan
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import add, scale, silu
from logitless.graph.ops.linear import matmul
from logitless.graph.tensor import Tensor, feed
from tests.helpers.numpy_backend import NumpyBackend


@pytest.mark.parametrize("make", [NumpyBackend, lambda: CPUBackend(1)], ids=["numpy", "cpu"])
def test_preemptible_plan_can_stop_at_every_part(make: Callable[[], Backend]) -> None:
    """Whatever else runs in between; their memory goes with their states."""
    session = Session([make()])
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    session.define("w", (8, 8), source=lambda: np.ones(256, np.uint8))
    w = session._variables["w"].tensor

    def chain(n: int) -> list[Tensor]:
        t = feed("x", (8, 8))
        for _ in range(n):
            t = add(silu(t), add(t, w))
        return [t]

    (expected,) = session.plan(lambda: chain(20)).run({"x": x})
    plan = session.plan(lambda: chain(20), "apart")
    other = session.plan(lambda: chain(3))
    n_parts = 0
    for _ in plan.parts({"x": x}):
        n_parts += 1
        other.run({"x": 7 * x})
    assert n_parts > 5
    np.testing.assert_array_equal(plan.results()[0], expected)
    session.delete(["w"], "apart")
    assert {name for name, _ in session._arenas} == {""}
    session.close()


@pytest.mark.parametrize(("most", "n_parts"), [(1e-7, (45, 2000)), (60.0, (1, 1))])
def test_parts_are_cut_by_their_duration(
    monkeypatch: pytest.MonkeyPatch, most: float, n_parts: tuple[int, int]
) -> None:
    """Long nodes are cut in the middle, short ones are joined; the bits stay."""
    monkeypatch.setattr("logitless.graph.execution.preemptible_plan.MAX_PART_SECONDS", most)
    backend = CPUBackend(2)
    session = Session([backend])
    x = np.linspace(-1, 1, 64 * 256, dtype=np.float32).reshape(64, 256)
    feeds = {"x": x, "w": np.random.default_rng(0).normal(0, 0.1, (64, 64)).astype(np.float32)}

    def chain() -> list[Tensor]:
        t, w = feed("x", (64, 256)), feed("w", (64, 64))
        for _ in range(9):
            t = add(silu(t), matmul(w, t))
        return [t]

    (expected,) = session.plan(chain).run(feeds)
    plan = session.plan(chain, "apart")
    assert isinstance(plan, PreemptiblePlan)
    for _ in range(9):
        told = list(plan.parts(feeds))
        np.testing.assert_array_equal(plan.results()[0], expected)
    assert n_parts[0] <= len(told) <= n_parts[1]
    assert all(0 < seconds < 1 for seconds in told)
    session.close()
    backend.close()


def test_a_long_node_is_split_before_its_first_run() -> None:
    """Attention of many rows: the first run already yields within it."""
    backend = CPUBackend(2)
    session = Session([backend])
    q = np.random.default_rng(0).normal(size=(3000, 2, 64)).astype(np.float32)

    def build() -> list[Tensor]:
        t, count = feed("q", q.shape), feed("count", (1,), "i32")
        for _ in range(2):
            t = full_attention(t, t, t, count, length=3000, scale=0.1)
        return [t]

    feeds = {"q": q, "count": np.array([3000], np.int32)}
    (expected,) = session.plan(build).run(feeds)
    plan = session.plan(build, "apart")
    assert isinstance(plan, PreemptiblePlan)
    assert len(list(plan.parts(feeds))) >= 2 * 3000 // ENCODER_ROWS
    np.testing.assert_array_equal(plan.results()[0], expected)
    session.close()
    backend.close()


def test_plan_compiled_ahead_is_not_compiled_by_run() -> None:
    """Also in the middle of a run."""
    backend = CPUBackend(1)
    session = Session([backend])
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)

    def chain() -> list[Tensor]:
        t = feed("x", (8, 8))
        for _ in range(40):
            t = silu(t)
        return [t]

    (expected,) = session.plan(chain).run({"x": x})
    for n_before in (0, 2):
        plan = session.plan(chain, "apart")
        assert isinstance(plan, PreemptiblePlan)
        with mock.patch.object(CPUBackend, "compile", autospec=True, side_effect=CPUBackend.compile) as compile:
            run = plan.parts({"x": x})
            for _ in range(n_before):
                next(run)
            while plan.compile_ahead():
                pass
            n_compiled = compile.call_count
            assert n_compiled == 5  # of eight nodes each
            assert len(list(run)) >= 5 - n_before
            assert compile.call_count == n_compiled
        np.testing.assert_array_equal(plan.results()[0], expected)
    session.close()
    backend.close()


def test_spare_core_leaves_one_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core is spared unless the pool leaves one anyway; the bits stay."""
    x = np.linspace(-1, 1, 64 * 256, dtype=np.float32).reshape(64, 256)

    def chain() -> list[Tensor]:
        t = feed("x", (64, 256))
        for _ in range(9):
            t = silu(t)
        return [t]

    for n_cores, n_threads, rest in ((3, 3, 2), (8, 3, 3), (1, 1, 1)):
        backend = CPUBackend(n_threads)
        monkeypatch.setattr("logitless.backends.cpu.backend.cores", lambda n=n_cores: n)
        session = Session([backend])
        (expected,) = session.plan(chain).run({"x": x})
        for spare, allowed in ((False, n_threads), (True, rest)):
            plan = session.plan(chain, f"apart {spare}")
            assert isinstance(plan, PreemptiblePlan)
            plan.cut_after, plan.spare_core = CUT_AFTER_WARMUP_RUNS, spare
            with mock.patch.object(WorkerPool, "run", autospec=True, side_effect=WorkerPool.run) as run:
                for _ in range(6):
                    list(plan.parts({"x": x}))
            np.testing.assert_array_equal(plan.results()[0], expected)
            assert {call.args[2] for call in run.call_args_list} == {allowed}
        session.close()
        backend.close()


def test_abandoned_runs_do_not_count() -> None:
    """Neither what they found out nor what they left undone disturbs the next one, however often
    that happens.
    """
    backend = CPUBackend(2)
    session = Session([backend])
    x = np.linspace(-1, 1, 64 * 256, dtype=np.float32).reshape(64, 256)

    def chain() -> list[Tensor]:
        t = first = feed("x", (64, 256))
        for _ in range(25):
            t = add(silu(t), scale(first, factor=0.5))
        return [t]

    (expected,) = session.plan(chain).run({"x": x})
    plan = session.plan(chain, "apart")
    assert isinstance(plan, PreemptiblePlan)
    plan.cut_after, plan.max_part_seconds = CUT_AFTER_WARMUP_RUNS, 1e-5
    cut = []
    for _ in range(7):
        for n in (1, 3, 2):
            for _ in itertools.islice(plan.parts({"x": 3 * x}), n):
                pass
        list(plan.parts({"x": x}))
        np.testing.assert_array_equal(plan.results()[0], expected)
        cut.append(plan.is_fully_cut)
    assert cut == [False] * 4 + [True] * 3  # anew with the third run that ends, and the fifth
    assert 0 < plan.longest_part_seconds < 1
    session.close()
    backend.close()


def test_tasks_with_shared_memory_are_not_cut() -> None:
    """Attention of few tokens puts down what it made of each span, and the next instruction joins
    it.
    """
    x = np.zeros((64, 32), np.float32)
    address = x.ctypes.data

    def table(shared: int) -> TaskList:
        return TaskList([Task("map:silu", (address, address, 32), 64, 1, shared=shared)] * 3)

    assert len(table(0).split(4, 2)) == 3
    whole = table(640)
    assert whole.split(4, 2) == [whole]

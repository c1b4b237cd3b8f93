"""Deferred slot tasks: actions wait for busy slots, unless their client leaves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.kv_cache.slot_actions import erase, fork, snapshot
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.helpers.http_fakes import FakeTokenizer, running
from tests.helpers.scheduler_fakes import Bench, FakeEngine, FakeSampler, oracle


def test_a_claim_on_a_free_slot_is_served_at_once() -> None:
    bench, done = Bench(n_slots=2), []
    bench.scheduler.claims.add([1], lambda: done.append(1))
    assert done == [1]


def test_claims_come_before_requests_that_wait() -> None:
    bench, saved = Bench(n_slots=1), []
    first = bench.submit([1, 2, 3], n_predict=5, ignore_eos=True)
    bench.step()
    second = bench.submit([4, 5, 6], n_predict=5, ignore_eos=True)
    bench.scheduler.claims.add([0], lambda: saved.append(snapshot(bench.scheduler, 0).tokens))
    bench.scheduler.claims.add([0], lambda: saved.append(erase(bench.scheduler, 0)))
    bench.step()
    assert not saved
    bench.drain()
    assert saved == [[1, 2, 3, *bench.answers[first].ids[:4]], 7]
    assert bench.answers[second].outcome() == oracle(second.request, 1024)


def test_a_cancelled_request_lets_a_claim_go_on() -> None:
    bench, saved = Bench(n_slots=1), []
    seq = bench.submit([1, 2, 3], ignore_eos=True)
    bench.step()
    bench.scheduler.claims.add([0], lambda: saved.append(erase(bench.scheduler, 0)))
    bench.scheduler.cancel(seq)
    assert saved == [3]


def test_a_claim_on_two_slots_holds_both_and_keeps_its_turn() -> None:
    bench, done = Bench(n_slots=3), []
    claims = bench.scheduler.claims
    busy = bench.submit([1, 2, 3], id_slot=0, ignore_eos=True)
    bench.step()
    both = claims.add([0, 1], lambda: done.append(fork(bench.scheduler, 0, 1)))
    claims.add([1], lambda: done.append("later"))
    claims.add([2], lambda: done.append("free"))
    elsewhere = bench.submit([4], n_predict=2, ignore_eos=True)
    pinned = bench.submit([5], n_predict=2, ignore_eos=True, id_slot=1)
    bench.step()
    assert (elsewhere.slot, pinned.slot, done) == (bench.scheduler.slots[2], None, ["free"])
    claims.withdraw(both)
    assert done == ["free", "later"]
    bench.step()
    assert pinned.slot is bench.scheduler.slots[1]
    bench.scheduler.cancel(busy)
    claims.withdraw(both)
    bench.drain()
    assert done == ["free", "later"]


class Gated(FakeEngine):
    """A step waits until the test lets it go."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__(n_blocks)
        self.gate = threading.Semaphore(0)

    def step(self, batch: UBatch) -> StepResult:
        self.gate.acquire()
        return super().step(batch)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    engine = Gated(16)
    yield Scheduler(engine, FakeTokenizer(), SchedulerConfig(n_slots=2, n_ctx=256), make_sampler=FakeSampler)  # type: ignore[arg-type]
    engine.gate.release(1000)


BODY = {"prompt": "hello there, how are you", "n_predict": 4, "id_slot": 0, "ignore_eos": True}


async def posted(server: Any, n: int) -> None:
    """Until the engine's thread, which is held in a step, has so much to do after it."""
    async with asyncio.timeout(20):
        while len(server.service._inbox) < n:
            await asyncio.sleep(0)


async def held(server: Any) -> asyncio.Task[Any]:
    """A request whose first step does not end."""
    task = asyncio.create_task(server.post("/completion", BODY))
    async with asyncio.timeout(20):
        while not server.scheduler.running or server.service._inbox:
            await asyncio.sleep(0)
    return task


async def test_a_busy_slot_is_saved_when_its_request_has_ended(scheduler: Any, tmp_path: Path) -> None:
    async with running(scheduler=scheduler, n_parallel=2, slot_save_path=str(tmp_path)) as server:
        first = await held(server)
        second = asyncio.create_task(server.post("/completion", {**BODY, "prompt": "what is next"}))
        await posted(server, 1)
        save = asyncio.create_task(server.post("/slots/0?action=save", {"filename": "x"}))
        await posted(server, 2)
        scheduler.engine.gate.release(100)
        (_, answer), (status, saved), (code, _) = await first, await save, await second
        assert (status, code) == (200, 200)
        assert saved["n_saved"] == answer["tokens_cached"]  # the first one's, though the second one came before it
        assert os.listdir(tmp_path) == ["x"]


async def test_claim_of_client_that_left_is_dropped(scheduler: Any, tmp_path: Path) -> None:
    async with running(scheduler=scheduler, n_parallel=2, slot_save_path=str(tmp_path)) as server:
        first = await held(server)
        erase = asyncio.create_task(server.post("/slots/0?action=erase", {}))
        await posted(server, 1)
        erase.cancel()
        await posted(server, 2)
        scheduler.engine.gate.release(100)
        _, answer = await first
        assert len(scheduler.slots[0].cached) == answer["tokens_cached"]
        assert not scheduler.claims.hold(scheduler.slots[0])


async def test_claim_of_busy_slot_times_out(scheduler: Any) -> None:
    async with running(scheduler=scheduler, n_parallel=2, timeout=0.1) as server:
        first = await held(server)
        status, answer = await server.post("/slots/0?action=erase", {})
        assert (status, answer["error"]["type"]) == (503, "unavailable_error")
        assert answer["error"]["message"] == "slot 0 is processing a request; try again later"
        scheduler.engine.gate.release(100)
        assert (await first)[0] == 200

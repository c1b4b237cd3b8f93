"""Sleep mode: an idle model is unloaded, a request wakes it, and failed wake-ups are errors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from logitless.engine.errors import ServerFault
from logitless.engine.sleep import Sleep
from tests.helpers.http_fakes import FakeScheduler, Running, running


class Part:
    """Remembers what was asked of it; `broken` says why it cannot wake."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.broken = name, log, ""

    def sleep(self) -> None:
        self.log.append(f"{self.name} sleeps")

    def wake(self) -> None:
        if self.broken:
            raise OSError(self.broken)
        self.log.append(f"{self.name} wakes")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_counts_from_the_last_use():
    clock, log = Clock(), []
    sleep = Sleep(10, [Part("engine", log), Part("draft", log)], clock)
    clock.now += 4
    assert sleep.left() == 6
    assert not sleep.use()
    assert sleep.left() == 10
    clock.now += 11
    assert sleep.left() == 0
    sleep.begin()
    assert sleep.asleep
    assert sleep.left() is None  # nothing to wait for
    assert sleep.use()
    assert not sleep.asleep
    assert log == ["draft sleeps", "engine sleeps", "engine wakes", "draft wakes"]


def test_engine_that_cannot_wake_sleeps_on_and_next_use_tries_again():
    log: list[str] = []
    engine, draft = Part("engine", log), Part("draft", log)
    sleep = Sleep(10, [engine, draft], Clock())
    sleep.begin()
    draft.broken = "no\nmemory"
    with pytest.raises(ServerFault, match="could not be loaded again: no memory"):
        sleep.use()
    assert sleep.asleep
    draft.broken = ""
    log.clear()
    assert sleep.use()
    assert log == ["engine wakes", "draft wakes"]


class Nap:
    """A server whose model sleeps as soon as it may, when the test lets the time pass."""

    def __init__(self) -> None:
        self.clock, self.log = Clock(), []
        self.slept = threading.Semaphore(0)
        scheduler = FakeScheduler()
        self.part = Part("engine", self.log)
        self.part.sleep = self._sleep  # type: ignore[method-assign]
        self.scheduler = scheduler
        self.sleep = Sleep(3600, [self.part], self.clock)

    def _sleep(self) -> None:
        self.log.append("sleeps")
        self.slept.release()

    async def pass_time(self, server: Running) -> None:
        """An hour, which the engine's thread notices when it looks at the clock next."""
        self.clock.now += 3601
        await server.service.ask(lambda _: None, wakes=False)
        assert await asyncio.to_thread(self.slept.acquire, timeout=10)
        await server.service.ask(lambda _: None, wakes=False)  # it has fallen asleep altogether


LOOKING = ("/health", "/props", "/v1/models", "/slots", "/metrics", "/lora-adapters")


async def test_looking_does_not_wake_and_a_completion_does():
    nap = Nap()
    async with running(scheduler=nap.scheduler, sleep=nap.sleep, metrics=True) as server:
        assert (await server.get("/props"))[1]["is_sleeping"] is False
        await nap.pass_time(server)
        for path in LOOKING:
            async with server.http.get(server.url + path) as reply:
                assert reply.status == 200, path
        assert (await server.get("/props"))[1]["is_sleeping"] is True
        assert nap.log == ["sleeps"]
        status, body = await server.post("/completion", {"prompt": "say:yes"})
        assert (status, body["content"]) == (200, "yes")
        assert nap.log == ["sleeps", "engine wakes"]
        assert (await server.get("/props"))[1]["is_sleeping"] is False
        await nap.pass_time(server)
        assert nap.log == ["sleeps", "engine wakes", "sleeps"]


async def test_a_model_that_cannot_be_loaded_again_is_told_to_the_request_that_needs_it():
    nap = Nap()
    async with running(scheduler=nap.scheduler, sleep=nap.sleep) as server:
        await nap.pass_time(server)
        nap.part.broken = "the file is gone"
        status, body = await server.post("/completion", {"prompt": "say:yes"})
        assert status == 500
        assert "could not be loaded again: the file is gone" in body["error"]["message"]
        assert (await server.get("/health"))[0] == 200
        nap.part.broken = ""
        status, body = await server.post("/completion", {"prompt": "say:yes"})
        assert (status, body["content"]) == (200, "yes")


async def test_work_that_runs_keeps_the_model_awake():
    nap = Nap()
    gate = threading.Semaphore(0)
    nap.scheduler.gate = gate
    async with running(scheduler=nap.scheduler, sleep=nap.sleep) as server:
        reply = asyncio.create_task(server.post("/completion", {"prompt": "say:yes"}))
        while not nap.scheduler.running:
            await asyncio.wait([reply], timeout=0.01)
        nap.clock.now += 10_000  # longer than any pause may be, but it is none
        gate.release(100)
        body: Any = (await reply)[1]
        assert body["content"] == "yes"
        assert nap.log == []

"""Plans compiled ahead, while the engine is idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.commands.benchmark.bench import greedy
from logitless.engine import async_engine as service_module
from logitless.engine.async_engine import AsyncEngine, LoadedModel, ModelInfo
from logitless.engine.batch import UBatch
from logitless.engine.requests import CompletionRequest, Finished
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.grammar import vocabulary
from logitless.models.synthetic.model import synthesize
from tests.helpers.http_fakes import N_CTX, FakeScheduler, FakeTemplate, FakeTokenizer


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.gguf"
    synthesize(path, "tiny", "F32")
    monkeypatch.setattr("logitless.engine.runner.model_runner.open_backends", lambda *_: [CPUBackend(1)])
    engine = ModelRunner(path, RunnerOptions(n_ctx=256, n_slots=3, n_ubatch=32))
    engine.load()
    yield engine
    engine.close()


def test_usual_steps_find_their_plan(engine: ModelRunner) -> None:
    while engine.prepare_ahead():
        pass
    built = engine.session.n_plans_built
    for n in (1, 2, 3):  # streams
        batch = UBatch([5] * n, [0] * n, list(range(n)), [16 * i for i in range(n)], list(range(n)))
        batch.rows, batch.targets = [greedy()] * n, [-1] * n
        batch.tables = {i: [i] for i in range(n)}
        engine.step(batch)
    for n in range(2, 33):  # a prompt, filled up to the size of a plan
        engine.step(
            UBatch([5] * n, list(range(n)), [0] * n, list(range(n)), [n - 1], [greedy()], [-1], tables={0: [0, 1]})
        )
    for n, n_out in ((7, 1), (3, 2), (15, 1), (1, 2)):  # a prompt beside two streams, its last part, a copied page
        batch = UBatch([5] * (n + 2), [0, 0, *range(n)], [0, 1] + [2] * n, [0, 16, *range(32, 32 + n)], [0, 1])
        batch.out += [n + 1] * (n_out - 1)
        batch.rows, batch.targets = [greedy()] * len(batch.out), [-1] * len(batch.out)
        batch.n_streams, batch.copies = 2, [(2, 3)]
        engine.step(batch)
    assert engine.session.n_plans_built == built
    assert not engine.prepare_ahead()


def test_after_sleep_they_are_made_again(engine: ModelRunner) -> None:
    while engine.prepare_ahead():
        pass
    engine.sleep()
    assert not engine.prepare_ahead()
    engine.wake()
    assert engine.prepare_ahead()


def test_plan_that_fails_ahead_is_left_to_the_step(engine: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(engine.session, "cached_plan", full)
    assert engine.prepare_ahead()
    assert not engine.prepare_ahead()


class Ahead:
    """An engine that has so many plans to make."""

    def __init__(self, n: int) -> None:
        self.left, self.done, self.lost_remotes = n, threading.Event(), ()

    def prepare_ahead(self, wanted: Callable[[], bool]) -> bool:
        if not self.left:
            self.done.set()
            return False
        self.left -= 1
        return True


async def test_an_idle_server_makes_them_all_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first request without a pause."""
    monkeypatch.setattr(service_module, "PAUSE", threading.TIMEOUT_MAX)
    monkeypatch.setattr(vocabulary, "LARGE", FakeTokenizer.n_vocab)
    engine, service, tokenizer = Ahead(5), AsyncEngine(), FakeTokenizer()
    served = LoadedModel(FakeScheduler(), tokenizer, FakeTemplate(), ModelInfo(N_CTX), engine=engine)  # type: ignore[arg-type]
    service.start(lambda: served)
    await service.loaded()
    assert await asyncio.to_thread(engine.done.wait, 60)
    assert not engine.left
    events = [event async for _, event in await service.submit([CompletionRequest((97,))])]
    assert isinstance(events[-1], Finished)
    assert not vocabulary.prepare_ahead(tokenizer)  # type: ignore[arg-type]  # the view of a large one is made too
    await service.stop()


async def test_after_a_request_it_goes_on_when_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PAUSE", 0.0)
    engine, service = Ahead(0), AsyncEngine()
    served = LoadedModel(FakeScheduler(), FakeTokenizer(), FakeTemplate(), ModelInfo(N_CTX), engine=engine)  # type: ignore[arg-type]
    service.start(lambda: served)
    await service.loaded()
    assert await asyncio.to_thread(engine.done.wait, 60)
    engine.done.clear()
    engine.left = 5
    events = [event async for _, event in await service.submit([CompletionRequest((97,))])]
    assert isinstance(events[-1], Finished)
    assert await asyncio.to_thread(engine.done.wait, 60)
    assert not engine.left
    await service.stop()

"""Preemptible prefill on real models: KV cache contents, and when it may run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.errors import DeviceLost
from logitless.engine.batch import DeviceFailed, UBatch
from logitless.engine.requests import CompletionRequest, Finished, Token, TokenProb
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.preemptible_prefill import RUNS
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.sequence import Sequence
from logitless.graph.backend import Backend
from logitless.models import tokenizer
from logitless.models.synthetic.model import synthesize
from tests.helpers.op_cases import ONE_GPU

STREAMS = (7, 20)  # tokens of their prompts
GREEDY = SamplingParams(temperature=0.0, n_probs=3)


SIZES: dict[str, Any] = {"n_ctx": 2048, "n_slots": 3, "n_ubatch": 128}
Answer = list[tuple[int, TokenProb | None]]


def opened(path: Path, monkeypatch: pytest.MonkeyPatch, threads: int = 1, **options: Any) -> ModelRunner:
    monkeypatch.setattr("logitless.engine.runner.model_runner.open_backends", lambda *_: [CPUBackend(threads)])
    return loaded(path, **options)


def loaded(path: Path, **options: Any) -> ModelRunner:
    engine = ModelRunner(path, RunnerOptions(**{**SIZES, **options}))
    engine.load()
    return engine


def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of 1 ms and parts of 0.02 and 0.5 ms, joined or split to 0.2 ms, on a machine of any speed: else
    a slow one cuts so many parts that the streams end before three chunks do."""
    rng = random.Random(1)
    parts = itertools.accumulate(0.0005 if rng.random() < 0.1 else 0.00002 for _ in itertools.count())
    steps = itertools.count(0.0, 0.001)
    for module, times in (("graph.execution.preemptible_plan", parts), ("engine.runner.preemptible_prefill", steps)):
        monkeypatch.setattr(f"logitless.{module}.time", SimpleNamespace(perf_counter=partial(next, times)))


def prepared(engine: ModelRunner) -> ModelRunner:
    while engine.prepare_ahead():
        pass
    return engine


def ids(n: int, salt: int, n_vocab: int) -> tuple[int, ...]:
    rng = random.Random(salt)
    return tuple(rng.randrange(5, n_vocab) for _ in range(n))


def answers(
    engine: ModelRunner, crowded: bool, n_predict: int = 240
) -> tuple[list[list[tuple[int, TokenProb | None]]], int]:
    """Of two streams and a long prompt that arrives; and the steps that ran between theirs."""
    words = tokenizer.from_metadata(engine.gguf.metadata, path=engine.gguf.path)
    ticks = itertools.count()
    clock = lambda: float(next(ticks))  # noqa: E731
    config = SchedulerConfig(n_slots=3, n_ctx=engine.n_ctx, n_ubatch=engine.options.n_ubatch)
    scheduler = Scheduler(engine, words, config, clock=clock)
    runs: list[UBatch] = []
    run = engine.run_in_parts
    engine.run_in_parts = lambda batch: runs.append(batch) or run(batch)  # type: ignore[method-assign, func-returns-value]
    found: dict[Sequence, Answer] = {}

    def submit(n: int, salt: int, n_predict: int) -> None:
        prompt = ids(n, salt, engine.hparams.n_vocab)
        found[scheduler.submit(CompletionRequest(prompt, GREEDY, n_predict=n_predict, ignore_eos=True))] = []

    def step() -> None:
        scheduler.prefill_budget.crowded = crowded
        for seq, event in scheduler.step():
            if isinstance(event, Token):
                found[seq].append((event.id, event.prob))
            assert isinstance(event, Token | Finished), event

    for salt, n in enumerate(STREAMS):
        submit(n, salt, n_predict)
    for _ in range(5):
        step()
    submit(333, 9, 12)
    while not scheduler.idle:
        step()
    engine.run_in_parts = run  # type: ignore[method-assign]
    return list(found.values()), len(runs)


@pytest.mark.parametrize(
    ("model", "options", "threads"),
    [
        ("tiny", {}, 1),
        ("tiny", {}, 3),
        ("mini", {"type_k": "q8_0", "type_v": "q4_0"}, 3),
        ("tiny-moe", {}, 3),
        ("arch-gemma3-F32.gguf", {"swa_full": False}, 1),
        ("stories260K-conv-Q4_0.gguf", {}, 3),
    ],
    ids=["tiny", "tiny, threads", "q8_0", "experts", "windows", "q4_0"],
)
def test_prompts_between_streams_have_the_same_bits(
    model: str,
    options: dict[str, Any],
    threads: int,
    tmp_path: Path,
    shared_data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = shared_data / "models" / model
    if "." not in model:
        path = tmp_path / "m.gguf"
        synthesize(path, model, "Q8_0")
    steady_clock(monkeypatch)
    engine = prepared(opened(path, monkeypatch, threads, **options))
    assert (engine.window_kv is not None) == ("swa_full" in options)
    plain, none = answers(engine, False)
    between, n_runs = answers(engine, True)
    assert none == 0
    assert n_runs >= 3  # of 64 tokens each, while the streams last
    assert between == plain
    assert [len(tokens) for tokens in plain] == [240, 240, 12]
    engine.close()


@pytest.mark.parametrize("device", ONE_GPU)
def test_prompts_between_streams_of_a_gpu_have_the_same_bits(
    device: str, tmp_path: Path, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps overtake a prompt between two submissions."""
    open_device(device)
    monkeypatch.setattr("logitless.backends.self_test.self_test_session", lambda *_: ({}, []))
    synthesize(tmp_path / "m.gguf", "tiny", "Q8_0")
    engine = loaded(tmp_path / "m.gguf", devices=(device,), n_ctx=1024, n_ubatch=16)
    engine._ahead.clear()  # plans of usual steps take long here
    prepared(engine)
    plain, none = answers(engine, False, 60)
    between, n_runs = answers(engine, True, 60)
    assert (none, n_runs >= 3) == (0, True)
    assert between == plain
    assert [len(tokens) for tokens in plain] == [60, 60, 12]
    engine.close()


def test_device_lost_in_a_part_of_a_prompt_fails_over(
    tiny: Path, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_device("vulkan:0")
    monkeypatch.setattr("logitless.backends.self_test.self_test_session", lambda *_: ({}, []))
    engine = loaded(tiny, devices=("vulkan:0",), n_ctx=512, n_ubatch=16)
    engine._ahead.clear()
    prepared(engine)
    run(engine, 12)
    vulkan: Any = engine.session.backends[0]

    def lost(*_: object, **__: object) -> int:
        raise DeviceLost("Vulkan: the device was lost (a submission)")

    parts = engine.run_in_parts(UBatch([5] * 12, list(range(12)), [0] * 12, list(range(12)), tables={0: [0]}))
    next(parts)
    monkeypatch.setattr(vulkan.device, "submit", lost)
    with pytest.raises(DeviceFailed, match=r"^Vulkan: the device was lost \(a submission\)$"):
        list(parts)
    assert [backend.name for backend in engine.session.backends] == ["cpu"]
    engine.run_alone()
    engine.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    synthesize(path, "tiny", "F32")
    return path


def test_they_are_made_while_nobody_waits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny, monkeypatch)
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        return asked % 50 == 0  # somebody comes in the middle of the first plan, and in that of others

    assert not engine.part_sizes
    for _ in range(1000):
        if not engine.prepare_ahead(wanted):
            break
    assert asked > 50
    assert engine.part_sizes == {64: 0.0, 16: 0.0}  # how long their parts are tells the first that runs
    engine.sleep()
    assert not engine.part_sizes
    assert not engine.prepare_ahead()
    engine.wake()
    assert not engine.part_sizes
    assert list(prepared(engine).part_sizes) == [64, 16]
    engine.close()


def run(engine: ModelRunner, n: int) -> None:
    list(engine.run_in_parts(UBatch([5] * n, list(range(n)), [0] * n, list(range(n)), tables={0: list(range(16))})))


def test_a_size_that_was_held_up_is_tried_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = prepared(opened(tiny, monkeypatch))
    for n in (64, 16):
        run(engine, n)
    assert all(0 < seconds < 1 for seconds in engine.part_sizes.values())
    engine.preemptible._longest[64] = 9.0  # its thread had no core for as long
    for _ in range(20):
        run(engine, 12)
    assert engine.part_sizes[64] < 1e-4
    run(engine, 17)
    assert 0 < engine.part_sizes[64] < 1
    engine.close()


def test_measuring_ahead_stops_when_a_request_waits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny, monkeypatch)
    while engine._ahead:
        engine.prepare_ahead()
    ran: list[int] = []
    monkeypatch.setattr(engine, "run_alone", lambda: ran.append(1))
    assert engine.prepare_ahead(lambda: True)
    assert not ran
    assert engine.prepare_ahead(lambda: len(ran) == 1)
    assert len(ran) == 1
    while engine.prepare_ahead():
        pass
    assert len(ran) == RUNS  # once for both sizes
    engine.close()


@pytest.mark.parametrize(("n_ubatch", "sizes"), [(8, []), (16, [16]), (63, [16]), (64, [64, 16])])
def test_they_are_no_larger_than_any_step(
    n_ubatch: int, sizes: list[int], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prepared(opened(tiny, monkeypatch, n_ubatch=n_ubatch))
    assert list(engine.part_sizes) == sizes
    engine.close()


def test_where_memory_is_short_there_are_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny, monkeypatch)

    def full(*_: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(engine.session, "plan", full)
    while engine.prepare_ahead():
        pass
    assert not engine.part_sizes
    engine.close()


def test_a_plan_of_serving_counts_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny, monkeypatch)
    (planned,), _ = engine.dry_run()
    prepared(engine)
    apart = [buffer.nbytes for (name, _), buffer in engine.session._arenas.items() if name]
    usual = [buffer.nbytes for (name, _), buffer in engine.session._arenas.items() if not name]
    assert len(apart) == 1
    assert planned.arena == pytest.approx(sum(apart + usual), rel=0.02)
    engine.close()

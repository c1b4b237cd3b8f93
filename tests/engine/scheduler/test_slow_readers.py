"""Sequences that wait for their clients give up slots and KV blocks to others, and go on with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitless.engine.errors import TooManyRequests
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.requests import CompletionRequest, Failed, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.engine.sequence import Sequence
from tests.helpers.scheduler_fakes import Bench, oracle, prompt

SAMPLERS: list[dict[str, Any]] = [
    {"mirostat": 1, "mirostat_tau": 4.0},
    {"mirostat": 2, "mirostat_eta": 0.3},
    {"adaptive_target": 0.4, "samplers": ("adaptive_p",)},
    {"repeat_penalty": 1.3, "dry_multiplier": 0.8, "xtc_probability": 0.5, "min_tokens": 3},
]


def begun(bench: Bench, n: int, **fields: Any) -> list[Sequence]:
    """So many sequences that wait for their clients."""
    seqs = [bench.submit(prompt(20, salt), n_predict=40, ignore_eos=True, **fields) for salt in range(n)]
    while not all(seq.n_generated > 3 for seq in seqs):
        bench.step()
    for seq in seqs:
        seq.hold(is_held=True)
    return seqs


def drained(bench: Bench, paused: list[Sequence]) -> None:
    """Let the clients read; every answer is the one alone."""
    for seq in paused:
        seq.hold(is_held=False)
    bench.drain()
    for seq, answer in bench.answers.items():
        assert answer.outcome() == oracle(seq.request, bench.scheduler.slots[0].n_ctx)


@pytest.mark.parametrize("options", [{}, {"n_states": 20}, {"window": (17, 1)}, {"cache_ram": None}])
def test_slots_of_slow_readers_serve_others_at_once(options: dict[str, Any]) -> None:
    bench = Bench(n_slots=2, **options)
    paused = begun(bench, 2)
    others = [bench.submit(prompt(9, salt), n_predict=5, ignore_eos=True) for salt in range(5, 8)]
    bench.step(20)
    assert all(seq.done for seq in others)
    assert sum(seq.slot is None for seq in paused) == 2
    assert not bench.scheduler.idle
    drained(bench, paused)


def test_only_as_many_slots_are_given_up_as_are_missing() -> None:
    bench = Bench(n_slots=4)
    paused = begun(bench, 3)
    bench.submit(prompt(9, 5), n_predict=5)
    bench.step()
    assert all(seq.slot for seq in paused)  # one slot was free
    bench.submit(prompt(9, 6), n_predict=5)
    bench.step()
    assert [seq.slot is None for seq in paused] == [False, False, True]  # the latest
    drained(bench, paused)


def test_a_request_that_names_the_slot_of_a_slow_reader_gets_it() -> None:
    bench = Bench(n_slots=2)
    paused = begun(bench, 1)
    assert paused[0].slot is not None
    other = bench.submit(prompt(9, 5), n_predict=5, ignore_eos=True, id_slot=paused[0].slot.id)
    bench.step(10)
    assert other.done
    drained(bench, paused)


def test_a_sequence_whose_client_reads_keeps_its_slot() -> None:
    bench = Bench(n_slots=1)
    running = bench.submit(prompt(20), n_predict=30, ignore_eos=True)
    bench.step(3)
    other = bench.submit(prompt(9, 5), n_predict=5)
    while not running.done:
        assert other.slot is None
        bench.step()
    bench.drain()


def test_kv_blocks_of_slow_readers_serve_others_at_once() -> None:
    bench = Bench(n_slots=4, n_ctx=96)
    paused = begun(bench, 2)
    n_used = sum(len(seq.kv.blocks) for seq in paused)
    other = bench.submit(prompt(80, 5), n_predict=8, ignore_eos=True)
    assert n_used + 6 > bench.scheduler.cache.pool.n_blocks
    bench.step(30)
    assert other.done
    assert all(seq.slot for seq in paused)
    drained(bench, paused)


def test_a_running_sequence_grows_into_the_blocks_of_an_older_slow_reader() -> None:
    bench = Bench(n_slots=2, n_ctx=96)
    paused = begun(bench, 1)
    other = bench.submit(prompt(20, 5), n_predict=70, ignore_eos=True)
    bench.step(80)
    assert other.done
    drained(bench, paused)


@pytest.mark.parametrize("parked", [False, True])
def test_a_slow_reader_that_leaves_frees_everything(parked: bool) -> None:
    bench = Bench(n_slots=1)
    paused = begun(bench, 1)
    if parked:
        bench.submit(prompt(9, 5), n_predict=5)
        bench.step()
    bench.scheduler.cancel(paused[0])
    bench.drain()
    assert bench.scheduler.idle
    assert not paused[0].kv.blocks


def test_slots_of_slow_readers_count_as_free() -> None:
    bench = Bench(n_slots=1, queue_requests=0)
    begun(bench, 1)
    bench.submit(prompt(9, 5), n_predict=5)
    with pytest.raises(TooManyRequests):
        bench.submit(prompt(9, 6), n_predict=5)


def test_a_lost_device_ends_slow_readers_wherever_they_are() -> None:
    bench = Bench(n_slots=1)
    paused = begun(bench, 1)
    bench.submit(prompt(9, 5), n_predict=50, ignore_eos=True)
    bench.step()
    assert paused[0].slot is None
    bench.engine.lost = True
    bench.step()
    assert paused[0].done
    assert all(isinstance(answer.events[-1], Failed) for answer in bench.answers.values())
    assert bench.scheduler.idle


def test_without_continuous_batching_slow_readers_hold_up_nobody() -> None:
    bench = Bench(n_slots=2, continuous=False)
    paused = begun(bench, 1)
    other = bench.submit(prompt(9, 5), n_predict=5, ignore_eos=True)
    bench.step(6)
    assert other.done
    drained(bench, paused)


@pytest.fixture(scope="module")
def scheduler(shared_data: Path) -> Any:
    opened = open_model(shared_data / "models" / "stories260K.gguf", ModelOptions(parallel=1, ctx_size=128))
    engine = opened.engine()
    engine.load()
    yield opened.scheduler(engine)
    engine.close()


def generate(scheduler: Scheduler, request: CompletionRequest, at: Callable[[Sequence, int], None]) -> list[Any]:
    """Tokens and probabilities; `at` is called after each."""
    sequence, tokens = scheduler.submit(request), list[Any]()
    while not sequence.done:
        for seq, event in scheduler.step():
            if seq is sequence and isinstance(event, Token):
                assert event.prob is not None
                tokens.append((event.id, event.prob.value))
                at(seq, len(tokens))
    return tokens


@pytest.mark.parametrize("sampling", SAMPLERS[:3])
def test_a_sampler_that_loses_two_slots_between_two_tokens_goes_on_with_the_same_bits(
    scheduler: Scheduler, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(seed=3, temperature=1.0, n_probs=2, **sampling)
    request = CompletionRequest(tuple(range(1, 20)), params, n_predict=16, ignore_eos=True)

    def interrupt(seq: Sequence, n: int) -> None:
        if n == 5:
            seq.hold(is_held=True)
            for first in (60, 90):
                other = CompletionRequest(tuple(range(first, first + 20)), params, n_predict=6, ignore_eos=True)
                # it reads for one step, in which it can only return to the queue
                generate(scheduler, other, lambda _, k: seq.hold(is_held=k != 2))
            assert seq.slot is None
            seq.hold(is_held=False)

    alone = generate(scheduler, request, lambda *_: None)
    assert generate(scheduler, request, interrupt) == alone


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_samplers_go_on_with_the_same_bits_in_another_turn(scheduler: Scheduler, sampling: dict[str, Any]) -> None:
    params = SamplingParams(seed=3, temperature=1.0, n_probs=2, **sampling)
    request = CompletionRequest(tuple(range(1, 20)), params, n_predict=24, ignore_eos=True)

    def interrupt(seq: Sequence, n: int) -> None:
        if n % 7 == 5:
            seq.hold(is_held=True)
            other = CompletionRequest(tuple(range(30 + n, 50 + n)), params, n_predict=6, ignore_eos=True)
            assert len(generate(scheduler, other, lambda *_: None)) == 6
            assert seq.slot is None
            seq.hold(is_held=False)

    alone = generate(scheduler, request, lambda *_: None)
    assert len(alone) == 24
    assert generate(scheduler, request, interrupt) == alone

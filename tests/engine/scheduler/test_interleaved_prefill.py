"""Interleaved prefill between decode steps, on a fake device with given costs of steps and parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.requests import Failed
from logitless.engine.scheduler.scheduler import Events
from logitless.engine.sequence import Sequence
from tests.helpers.scheduler_fakes import POISON, Bench, FakeSampler, oracle, prompt

STEP = 1.0
PART = 0.15  # five tokens


class Slow(Bench):
    """Each row of a prompt adds half a second to a step; five of them take less than that in a part."""

    def __init__(self, *, n_slots: int = 4, n_ctx: int = 2048) -> None:
        super().__init__(n_slots=n_slots, n_ctx=n_ctx)
        self.took: list[float] = []  # of each call of the scheduler
        self.joint: list[int] = []  # rows of steps with streams and prompts
        self.ready = True  # whether masks come in time
        ready = property(lambda _: self.ready)
        sampler = type("Masked", (FakeSampler,), {"ready": ready})
        self.scheduler.make_sampler = sampler
        self.apart: list[tuple[int, int]] = []  # slot and tokens of the steps that may be interrupted
        self.engine.part_sizes, self.engine.part_seconds = {64: PART, 16: PART}, PART
        step, parts = self.engine.step, self.engine.run_in_parts

        def timed(batch: UBatch) -> StepResult:
            n_prompt = len(batch.tokens) - batch.n_streams
            self.time += STEP + 0.5 * n_prompt if batch.n_streams else 0.5 * n_prompt
            if batch.n_streams and n_prompt:
                self.joint.append(len(batch.tokens))
            return step(batch)

        def timed_parts(batch: UBatch) -> Iterator[float]:
            self.apart.append((batch.slot[0], len(batch.tokens)))
            for following in parts(batch):
                yield following
                self.time += PART

        self.engine.step, self.engine.run_in_parts = timed, timed_parts  # type: ignore[method-assign]

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            began = self.time
            super().step()
            self.took.append(self.time - began)

    def crowd(self) -> None:
        """From now on even the smallest step with streams and prompts is taken to be too long."""
        turn = self.scheduler.interleaved.turn

        def crowded(events: Events) -> bool:
            self.scheduler.prefill_budget.crowded = True
            return turn(events)

        self.scheduler.interleaved.turn = crowded  # type: ignore[method-assign]

    def streams(self, n: int, n_predict: int = 120) -> list[int]:
        """n streams that flow."""
        seqs = [self.submit(prompt(9, salt), n_predict=n_predict, ignore_eos=True) for salt in range(n)]
        self.step(20)
        self.took.clear()
        return [seq.slot.id for seq in seqs if seq.slot is not None]


def crowded(n_streams: int = 1, n_predict: int = 120) -> Slow:
    """With so many streams that flow, beside which prompts have steps of their own."""
    bench = Slow()
    bench.streams(n_streams, n_predict)
    bench.crowd()
    return bench


def test_a_long_prompt_stops_in_time_and_loses_nothing() -> None:
    bench = Slow()
    bench.streams(2)
    flowing = list(bench.scheduler.running)
    before = [seq.n_generated for seq in flowing]
    long = bench.submit(prompt(500, 7), n_predict=5, ignore_eos=True)
    while not long.n_generated:
        bench.step()
    assert bench.joint == [8]  # tried once: six tokens more are too many
    assert [n for _, n in bench.apart[:-1]] == [64] * (len(bench.apart) - 1)
    assert sum(n for _, n in bench.apart) == 500 - 6 - 1  # the last one is a row like those of streams
    assert [seq.n_generated - n for seq, n in zip(flowing, before, strict=True)] == [len(bench.took)] * 2
    between = bench.took[1:-1]
    assert max(between) <= 2.0 * STEP + 0.05
    assert sorted(between)[len(between) // 2] > 1.7 * STEP  # and uses the time that it may
    bench.drain()
    assert bench.answers[long].outcome() == oracle(long.request, 2048)


def test_a_part_of_unknown_length_is_tried() -> None:
    """No step goes by without one, however long they are."""
    bench = Slow()
    bench.engine.part_seconds = 0.0
    bench.streams(1)
    long = bench.submit(prompt(100, 7), n_predict=1)
    bench.crowd()
    bench.step(2)
    assert bench.took[-1] >= STEP + PART
    bench.engine.part_seconds = 50.0
    n_steps = len(bench.took)
    while not long.done:
        bench.step()
    assert len(bench.took) - n_steps <= 100 / 5 + 2


def test_time_before_first_part_counts_in_the_turn() -> None:
    """Pages and feeds of a step take time, too, and how much of a turn is left says nothing about a step's size."""
    bench = crowded()
    scheduler = bench.scheduler
    parts = scheduler.engine.run_in_parts

    def late(batch: UBatch) -> Iterator[float]:
        bench.time += 0.4 * STEP
        yield from parts(batch)

    scheduler.engine.run_in_parts = late  # type: ignore[method-assign]
    long = bench.submit(prompt(500, 7), n_predict=1)
    while not long.done:
        bench.step()
    assert len(bench.apart) >= 8
    assert {n for _, n in bench.apart[:-1]} == {64}
    assert max(bench.took[1:-1]) <= 2.0 * STEP + 0.05


def test_prompts_take_turns() -> None:
    bench = crowded()
    first = bench.submit(prompt(300, 7), n_predict=1)
    second = bench.submit(prompt(130, 8), n_predict=1)
    third = bench.submit(prompt(12, 9), n_predict=1)
    while not (first.done and second.done and third.done):
        bench.step()
    slots = [slot for slot, _ in bench.apart]
    assert slots == [1, 2, 3, 1, 2, 1, 2, 1, 1]
    assert [n for _, n in bench.apart] == [64, 64, 11, 64, 64, 64, 1, 64, 43]
    assert not bench.joint


def test_short_prompts_that_came_with_the_streams_are_not_parted() -> None:
    """Where steps with both are too long, they have whole ones with the others, as long as nobody is used to a pace."""
    bench = Slow()
    bench.crowd()
    bench.submit(prompt(20, 1), n_predict=60, ignore_eos=True)
    bench.step(3)
    others = [bench.submit(prompt(20, salt), n_predict=60, ignore_eos=True) for salt in (2, 3, 4)]
    bench.step()
    assert [seq.n_generated for seq in others] == [1, 1, 1]
    assert not bench.apart


def test_a_prompt_is_not_overtaken_by_all_that_come_later() -> None:
    bench = crowded(n_predict=400)
    long = bench.submit(prompt(300, 7), n_predict=1)
    bench.step(2)
    short: list[Sequence] = []
    while not long.done:
        if not short or short[-1].done:
            short.append(bench.submit(prompt(60, 10 + len(short)), n_predict=1))
        bench.step()
    slots = [slot for slot, _ in bench.apart]
    assert slots.count(1) == 5
    assert len(slots) <= 2 * 5 + 1


def test_streams_that_wait_for_masks_hold_up_no_prompt() -> None:
    bench = crowded()
    (stream,) = bench.scheduler.running
    long = bench.submit(prompt(200, 7), n_predict=1)
    bench.step(2)
    n_steps, n_before = len(bench.engine.batches), stream.n_generated
    stream.late = True
    bench.ready = False
    while not long.done:
        bench.step()
    assert stream.slot is not None
    assert not [batch for batch in bench.engine.batches[n_steps:] if stream.slot.id in batch.slot]
    assert stream.n_generated == n_before
    bench.ready = True
    bench.step(2)
    assert stream.n_generated > n_before


def test_a_stream_that_owes_more_than_a_token_is_no_prompt() -> None:
    """Tokens that end a reasoning come without having been sampled."""
    bench = crowded(2)
    one, _ = bench.scheduler.running
    bench.submit(prompt(200, 7), n_predict=1)
    bench.step(2)
    one.tokens += [3, 4, 5]
    n = one.n_computed
    bench.step()
    assert one.n_computed >= n + 4


def test_where_streams_end_a_prompt_goes_on_at_once() -> None:
    bench = Slow()
    stream = bench.submit(prompt(9), n_predict=24, ignore_eos=True)
    bench.step(20)
    bench.crowd()
    long = bench.submit(prompt(400, 7), n_predict=1)
    while not stream.done:
        bench.step()
    assert bench.scheduler.interleaved.seq is long
    n_apart, n_owed = len(bench.apart), long.n_uncomputed
    assert n_owed > 64
    bench.step()
    assert long.done
    assert len(bench.apart) == n_apart
    assert bench.answers[long].outcome() == oracle(long.request, 2048)


def test_a_small_step_is_tried_again_with_a_later_prompt() -> None:
    bench = Slow()
    bench.streams(1)
    first = bench.submit(prompt(400, 7), n_predict=1)
    bench.step(5)
    assert bench.joint == [8]
    assert bench.scheduler.interleaved.seq is first
    second = bench.submit(prompt(60, 8), n_predict=1)
    bench.step(28)
    assert bench.joint == [8]  # so soon nothing has changed
    third = bench.submit(prompt(60, 9), n_predict=1)
    bench.step(2)
    assert bench.joint == [8, 5]
    bench.drain()
    assert bench.joint == [8, 5]
    for seq in (first, second, third):
        assert bench.answers[seq].outcome() == oracle(seq.request, 2048)


def test_large_parts_are_those_of_smaller_steps() -> None:
    """A deep context makes parts long: then a step with fewer tokens has shorter ones."""
    bench = crowded()
    bench.engine.part_sizes = {64: 1.1, 16: 0.3}
    long = bench.submit(prompt(60, 7), n_predict=1)
    while not long.done:
        bench.step()
    assert [n for _, n in bench.apart] == [16, 16, 16, 11]


def test_prompt_with_logprobs_is_not_interleaved() -> None:
    bench = crowded()
    asking = bench.submit(prompt(30, 7), n_predict=1, prompt_logprobs=1)
    bench.drain()
    assert not bench.apart
    assert bench.joint
    assert len(bench.answers[asking].finished.prompt_probs) == 30


def test_one_that_leaves_in_the_middle_holds_nothing() -> None:
    bench = crowded()
    gone = bench.submit(prompt(200, 7), n_predict=1)
    bench.step(2)
    assert bench.scheduler.interleaved.seq is gone
    bench.scheduler.cancel(gone)
    assert bench.scheduler.interleaved.seq is None
    other = bench.submit(prompt(200, 8), n_predict=20, ignore_eos=True)  # gets its seat and its pages
    bench.drain()
    assert bench.answers[other].outcome() == oracle(other.request, 2048)
    assert bench.scheduler.cache.pool.n_used == len(bench.scheduler.cache.prefixes.idle)


def test_a_step_that_fails_is_run_as_ever_and_fails_alone() -> None:
    bench = crowded()
    bad = bench.submit([*prompt(30, 7), POISON, *prompt(30, 6)], n_predict=3, ignore_eos=True)
    good = bench.submit(prompt(90, 8), n_predict=3, ignore_eos=True)
    bench.drain()
    assert [n for slot, n in bench.apart if slot == bench.apart[0][0]] == [60]  # tried once
    assert isinstance(bench.answers[bad].events[-1], Failed)
    assert bench.answers[good].outcome() == oracle(good.request, 2048)
    for seq in (seq for seq in bench.answers if seq not in (bad, good)):
        assert bench.answers[seq].outcome() == oracle(seq.request, 2048)


def test_a_lost_device_takes_the_step_with_it() -> None:
    bench = crowded()
    long = bench.submit(prompt(200, 7), n_predict=3)
    bench.step(2)
    bench.engine.lost = True
    bench.step()
    assert bench.scheduler.interleaved.seq is None
    assert isinstance(bench.answers[long].events[-1], Failed)
    again = bench.run(prompt(200, 7), n_predict=3, ignore_eos=True)
    assert len(again.ids) == 3


@pytest.mark.parametrize("n_ctx", [272, 400])
def test_with_too_few_pages_the_earlier_one_goes_on(n_ctx: int) -> None:
    bench = Slow(n_slots=2, n_ctx=n_ctx)
    bench.crowd()
    stream = bench.submit(prompt(9), n_predict=180, ignore_eos=True)
    bench.step(20)
    long = bench.submit(prompt(150, 7), n_predict=60, ignore_eos=True)
    bench.drain()
    for seq in (stream, long):
        assert bench.answers[seq].outcome() == oracle(seq.request, n_ctx)

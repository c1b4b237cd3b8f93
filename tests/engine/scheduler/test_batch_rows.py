"""Rows of batches beside streams, on a fake device whose steps take a given time for each row."""

from __future__ import annotations

import statistics

import pytest

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.requests import BATCH_PRIORITY
from logitless.engine.scheduler.step_budget import BatchRows
from logitless.engine.sequence import Sequence
from tests.helpers.scheduler_fakes import Bench, oracle, prompt

N_CTX = 1 << 14


class Timed(Bench):
    """A step takes one second for up to `free` rows, and `row` more for each further one."""

    def __init__(self, *, row: float, free: int = 1) -> None:
        super().__init__(n_slots=16, n_ctx=N_CTX, n_ubatch=512)
        self.took: list[float] = []
        self.batches: list[UBatch] = []
        self.row, self.free, self.slower = row, free, 1.0
        run = self.engine.step

        def timed(batch: UBatch) -> StepResult:
            self.took.append(self.slower * (1.0 + self.row * max(0, len(batch.tokens) - self.free)))
            self.batches.append(batch)
            self.time += self.took[-1]
            return run(batch)

        self.engine.step = timed  # type: ignore[method-assign]

    def step(self, n: int = 1) -> None:
        """Without the checks of all cells, which are other tests'."""
        for _ in range(n):
            for seq, event in self.scheduler.step():
                self.answers[seq].events.append(event)
            if self.engine.broken is not None:
                raise self.engine.broken

    def streams(self, n: int, n_predict: int = 400) -> list[Sequence]:
        return [self.submit(prompt(9, salt), n_predict=n_predict, ignore_eos=True) for salt in range(n)]

    def lines(self, n: int, *, n_prompt: int = 20, n_predict: int = 300) -> list[Sequence]:
        return [
            self.submit(prompt(n_prompt, 20 + i), n_predict=n_predict, ignore_eos=True, priority=BATCH_PRIORITY)
            for i in range(n)
        ]

    def settle(self) -> None:
        """Steps that measure, whose times do not count."""
        self.step(40)
        self.took.clear()
        self.batches.clear()

    def check(self, *seqs: Sequence) -> None:
        self.drain()
        for seq in seqs:
            assert self.answers[seq].outcome() == oracle(seq.request, N_CTX)


@pytest.mark.parametrize("n_streams", [1, 4])
@pytest.mark.parametrize(("row", "free"), [(0.02, 1), (0.1, 8), (0.0, 1)])
def test_streams_keep_their_pace_beside_a_batch(row: float, free: int, n_streams: int) -> None:
    bench = Timed(row=row, free=free)
    lines = bench.lines(16 - n_streams)
    bench.step(5)
    streams = bench.streams(n_streams)
    bench.settle()
    before = [len(seq.tokens) for seq in lines]
    n = [len(seq.tokens) for seq in streams]
    bench.step(100)
    alone = 1.0 + row * max(0, n_streams - free)
    assert [len(seq.tokens) - old for seq, old in zip(streams, n, strict=True)] == [100] * n_streams
    assert max(bench.took) <= 1.2 * alone + 1e-9
    gained = [len(seq.tokens) - old for seq, old in zip(lines, before, strict=True)]
    most = next((k for k in range(len(lines), 0, -1) if row * max(0, n_streams + k - free) <= 1.2 * alone - 1), 0)
    assert sum(gained) >= 0.75 * 100 * most  # the time that it may have is used
    assert max(gained) - min(gained) <= 1  # by turns
    bench.check(*streams, *lines)


def test_rows_that_take_too_long_join_seldom() -> None:
    bench = Timed(row=0.5)
    lines = bench.lines(8, n_predict=40)
    bench.step(5)
    (stream,) = bench.streams(1, n_predict=900)
    bench.settle()
    bench.step(300)
    assert statistics.fmean(bench.took) <= 1.21
    assert max(bench.took) <= 1.5
    assert 100 <= sum(len(batch.tokens) > 1 for batch in bench.batches) <= 130
    bench.check(stream, *lines)


def test_without_streams_a_batch_has_all() -> None:
    """Nobody waits for a token of it: its prompts are computed as fast as they can be."""
    bench = Timed(row=0.1)
    lines = bench.lines(4, n_prompt=20, n_predict=30)
    bench.step(15)
    lines += bench.lines(12, n_prompt=40, n_predict=30)
    bench.step(2)
    prefill, decode = (len(batch.tokens) for batch in bench.batches[-2:])
    assert prefill > 12 * 30  # they have some tokens in common
    assert decode == 16
    bench.check(*lines)


@pytest.mark.parametrize("row", [0.01, 0.5])
def test_prompts_of_a_batch_are_bounded_too(row: float) -> None:
    bench = Timed(row=row)
    (stream,) = bench.streams(1, n_predict=1500)
    bench.settle()
    lines = bench.lines(3, n_prompt=100, n_predict=5)
    n_steps = len(bench.took)
    while not all(seq.done for seq in lines):
        bench.step()
        assert len(bench.took) - n_steps < 1200
    assert statistics.fmean(bench.took) <= 1.21
    assert max(bench.took) <= max(1.25, 1 + 7 * row)  # eight rows at least, where there is a prompt
    bench.check(stream, *lines)


def test_a_batch_goes_on_while_prompts_come_and_come() -> None:
    bench = Timed(row=0.05)
    (stream,) = bench.streams(1, n_predict=2000)
    bench.settle()
    (line,) = bench.lines(1, n_prompt=60, n_predict=10)
    n = 0
    while not line.done:
        if not any(seq.n_generated == 0 and not seq.request.is_batch for seq in bench.scheduler.running):
            n += 1
            bench.submit(prompt(900, 40 + n), n_predict=1)
        bench.step()
        assert len(bench.took) < 2000
    assert n > 3
    bench.check(stream, line)


def test_a_prompt_does_not_wait_for_those_of_a_batch() -> None:
    bench = Timed(row=0.01)
    lines = bench.lines(12, n_prompt=400, n_predict=5)
    bench.step()
    own = bench.submit(prompt(1400, 3), n_predict=5, ignore_eos=True)
    while not own.n_generated:
        bench.step()
    assert len(bench.took) == 4  # three of 512 tokens are all that it needs
    bench.check(own, *lines)


def test_time_of_streams_alone_is_measured_anew() -> None:
    """One that was slow for a while must not let rows of batches make it slow for ever."""
    bench = Timed(row=0.05)
    lines = bench.lines(15)
    bench.slower = 3.0
    (stream,) = bench.streams(1, n_predict=800)
    bench.step(30)
    bench.slower = 1.0
    bench.step(400)
    bench.took.clear()
    bench.step(60)
    assert statistics.median(bench.took) <= 1.2
    assert min(bench.took) == 1.0
    bench.check(stream, *lines)


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    bench = Timed(row=0.001)
    lines = bench.lines(15, n_predict=400)
    (stream,) = bench.streams(1, n_predict=800)
    bench.step(5)
    bench.row = 1.0
    bench.step(40)
    bench.row = 0.001
    bench.step(600)
    bench.batches.clear()
    bench.step(20)
    assert max(len(batch.tokens) for batch in bench.batches) == 16
    bench.check(stream, *lines)


def test_time_of_unmeasured_size_lies_between_its_neighbours() -> None:
    """One row takes a second and sixteen take three: two would take 1.13 s, four 1.4."""
    rows = BatchRows()
    for _ in range(3):
        rows.observe(1, 1.0)
    rows.observe(16, 3.0)
    assert rows.rows(1, 15, mixed=False, busy=False) == 1


def test_every_seventeenth_step_is_of_streams_alone() -> None:
    """Rows that cost nothing join sixteen steps; then the streams alone are measured."""
    rows = BatchRows()
    for size in (1, 1, 1, 2):
        rows.observe(size, 1.0)
    joined = [rows.rows(1, 1, mixed=False, busy=False) for _ in range(35)]
    assert joined == [*[1] * 16, 0, *[1] * 16, 0, 1]

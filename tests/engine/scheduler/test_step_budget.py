"""Prefill budget: prompt tokens per mixed batch, on a fake device with given step costs."""

from __future__ import annotations

import pytest

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.scheduler.step_budget import PrefillBudget
from tests.helpers.scheduler_fakes import Bench, prompt


def costly(bench: Bench, *, step: float, token: float) -> list[float]:
    """Have a step take `step` seconds, and `token` more for each row beyond eight; returns what the steps took."""
    took: list[float] = []
    run = bench.engine.step

    def timed(batch: UBatch) -> StepResult:
        took.append(step + token * max(0, len(batch.tokens) - 8))
        bench.time += took[-1]
        return run(batch)

    bench.engine.step = timed  # type: ignore[method-assign]
    return took


@pytest.mark.parametrize("token", [0.004, 0.016, 0.05], ids="{} s a token".format)
def test_a_long_prompt_stretches_no_stream_beyond_three_steps(token: float) -> None:
    bench = Bench(n_slots=4, n_ctx=8192)
    took = costly(bench, step=1.0, token=token)
    streams = [bench.submit(prompt(64, salt), n_predict=400, ignore_eos=True) for salt in range(3)]
    bench.step(20)
    began = len(took)
    long = bench.submit(prompt(1000, 9), n_predict=1)
    before = [len(seq.tokens) for seq in streams]
    while not long.done:
        bench.step()
    assert max(took[began:]) < 3.0
    assert [len(seq.tokens) - n for seq, n in zip(streams, before, strict=True)] == [len(took) - began] * 3
    assert sum(took[began:]) < 3 * 1000 * token + 3 * 1000 / 128  # and the prompt is not starved


def test_a_stream_with_one_token_has_no_pace_yet() -> None:
    """Prompts that arrive together are all evaluated in full steps, although some of them finish first."""
    bench = Bench(n_slots=16, n_ctx=8192, n_ubatch=512)
    took = costly(bench, step=1.0, token=0.1)
    for salt in range(16):
        bench.submit(prompt(64, salt), n_predict=20, ignore_eos=True)
    bench.step(2)
    assert len(took) == 2
    assert [seq.n_generated > 0 for seq in bench.scheduler.running] == [True] * 16


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_short_prompts_that_came_together_do_not_wait_for_each_others_streams(tokens: int) -> None:
    """The first one has a stream before the others are there: that is no pace to keep yet."""
    bench = Bench(n_slots=16, n_ctx=8192, n_ubatch=512)
    took = costly(bench, step=1.0, token=0.1)
    bench.run(prompt(8, 99), n_predict=60, ignore_eos=True)  # what a single stream takes is known
    began = len(took)
    first = bench.submit(prompt(64, 0), n_predict=60, ignore_eos=True)
    bench.step(tokens)
    others = [bench.submit(prompt(64, salt), n_predict=60, ignore_eos=True) for salt in range(1, 16)]
    while not all(seq.n_generated for seq in others):
        bench.step()
    assert len(took) - began - tokens <= 3  # 15 × 64 tokens are two full steps
    bench.scheduler.cancel(first)
    bench.step(8)
    usual, began = took[-1], len(took)
    late = bench.submit(prompt(500, 17), n_predict=1)
    while not late.done:
        bench.step()
    assert max(took[began:]) < 3 * usual  # streams flow now: who comes later, however short, keeps their pace


def test_a_long_prompt_keeps_the_pace_of_streams_that_came_with_it() -> None:
    bench = Bench(n_slots=4, n_ctx=8192, n_ubatch=512)
    took = costly(bench, step=1.0, token=0.02)
    bench.run(prompt(8, 99), n_predict=60, ignore_eos=True)
    short = bench.submit(prompt(8, 1), n_predict=400, ignore_eos=True)
    long = bench.submit(prompt(2000, 2), n_predict=1)
    while short.n_generated < 4:
        bench.step()
    began = len(took)
    while not long.done:
        bench.step()
    assert max(took[began:]) < 3.0


def test_unmeasured_step_is_bounded_by_the_option() -> None:
    pace = PrefillBudget(61)
    assert pace.tokens(3) == 64
    pace.observe(0, 3, 0.5)
    assert pace.tokens(3) == 64
    pace.observe(40, 40, 1.6)
    assert pace.tokens(3) == 16  # 0.6 s are spare, for 15 tokens
    for _ in range(9):
        pace.observe(0, 3, 0.0)
    assert pace.tokens(3) == 8
    pace.observe(61, 64, 0.0)  # a clock that stands still
    assert pace.tokens(3) == 64
    assert PrefillBudget(1).tokens(3) == 4


@pytest.mark.parametrize("streams", [1, 4, 5, 12, 13])
def test_prompts_go_on_however_slow_they_are(streams: int) -> None:
    """A step has room for four tokens of prompts beside any number of streams."""
    pace = PrefillBudget(128)
    pace.observe(0, streams, 1.0)
    for size in (64, 32, 16, 8):
        pace.observe(size - streams, size, 1000.0)
        assert pace.tokens(streams) >= streams + 4
    assert pace.tokens(streams) == streams + 4


def test_the_smallest_step_is_not_filled_when_it_takes_too_long() -> None:
    pace = PrefillBudget(128)
    pace.observe(0, 1, 1.0)
    pace.observe(7, 8, 2.4)
    assert pace.tokens(1) == 7
    pace.observe(6, 7, 2.2)  # as long as it may
    assert pace.tokens(1) == 7
    pace.observe(6, 7, 1.9)
    assert pace.tokens(1) == 8
    pace.observe(7, 8, 5.0)
    assert pace.tokens(1) == 5
    pace.observe(4, 5, 1.2)  # 0.35 for a full step
    assert pace.tokens(1) == 16


def test_usual_step_time_depends_on_number_of_streams() -> None:
    """The last steps without prompts may be those of a stream that outlived fifteen others."""
    pace = PrefillBudget(128)
    for streams, seconds in ((16, 4.0), (1, 1.0)):
        for _ in range(7):
            pace.observe(0, streams, seconds)
    pace.observe(17, 32, 8.0)
    assert pace.tokens(15) == 32  # 4 s are added, 4.8 may be
    pace.observe(31, 32, 8.0)
    assert pace.tokens(1) == 5  # beside the one, 7 s are
    pace.observe(5, 8, 1.0)
    assert pace.tokens(3) == 16  # of three nothing is known but what one takes, to which nothing was added
    pace.observe(60, 64, 9.0)
    assert pace.tokens(32) == 32 + 12  # of 32 what 16 take: 4.8 of 6 s, for 16 tokens


def test_from_one_slow_step_it_recovers_at_once() -> None:
    pace = PrefillBudget(128)
    for _ in range(7):
        pace.observe(0, 1, 0.1)
    pace.observe(31, 32, 0.2)
    assert pace.tokens(1) == 32
    pace.observe(31, 32, 30.0)
    assert pace.tokens(1) == 5
    pace.observe(4, 5, 0.1 + 4 * 0.1 / 31)
    assert pace.tokens(1) == 16
    pace.observe(15, 16, 0.1 + 15 * 0.1 / 31)
    pace.observe(0, 1, 30.0)
    assert pace.tokens(1) == 24
    pace.observe(23, 24, 0.1 + 23 * 0.1 / 31)
    assert pace.tokens(1) == 32


def test_a_size_that_takes_as_long_as_half_of_it_is_kept() -> None:
    """Eight rows may take nearly as long as sixteen, and by what eight take sixteen would be too many."""
    pace = PrefillBudget(128)
    pace.observe(0, 1, 1.0)
    pace.observe(15, 16, 2.1)
    assert pace.tokens(1) == 16
    pace.observe(15, 16, 3.0)  # one slow step
    assert pace.tokens(1) == 8
    pace.observe(7, 8, 1.9)
    assert pace.tokens(1) == 8
    pace.observe(7, 8, 1.5)
    assert pace.tokens(1) == 16
    pace.observe(15, 16, 1.6)  # 1.2 times as much as 8 have added
    pace.observe(7, 8, 1.9)
    assert pace.tokens(1) == 16


def test_steps_keep_the_largest_size_that_fits() -> None:
    """Not a smaller one and one that is too large by turns."""
    pace = PrefillBudget(128)
    pace.observe(0, 1, 1.0)
    pace.observe(0, 1, 1.0)
    pace.observe(15, 16, 1.45)
    sizes = []
    for _ in range(40):
        sizes.append(pace.tokens(1))
        pace.observe(sizes[-1] - 1, sizes[-1], 1.0 + 0.06 * (sizes[-1] - 8))  # 16: 1.48, 24: 1.96, 32: 2.44
    assert sizes == [24] * 40


def test_the_late_steps_of_a_prompt_that_arrives_are_not_what_streams_are_used_to() -> None:
    pace = PrefillBudget(128)
    for _ in range(100):
        pace.observe(0, 1, 1.0)
    for seconds in (2.9, 1.9, 3.8, 1.4, 2.2, 1.8, 3.0, 1.7, 1.3, 2.4) * 4:  # its ids are being read
        pace.observe(0, 1, seconds)
    pace.observe(31, 32, 2.3)
    assert pace.tokens(1) == 24


def test_streams_are_crowded_when_the_smallest_step_is_too_long() -> None:
    pace = PrefillBudget(128)
    pace.observe(0, 1, 1.0)
    pace.observe(15, 16, 9.0)
    assert not pace.crowded  # eight may be fine
    pace.observe(4, 5, 1.8)  # 1.4 times, had it been full
    assert pace.crowded
    pace.observe(4, 5, 1.6)
    assert not pace.crowded


def test_room_between_streams_is_what_their_own_steps_leave() -> None:
    pace = PrefillBudget(128)
    assert pace.room(1) == 0.0  # nothing is known of streams
    for _ in range(5):
        pace.observe(0, 1, 1.0)
    assert pace.room(1) == 1.0
    for seconds in (1.25, 1.25, 7.0, 1.25, 0.5):  # parts of prompts have been through the caches
        pace.observe(0, 1, seconds, between=True)
    assert pace.room(1) == 0.75
    for _ in range(9):
        pace.observe(0, 1, 3.0, between=True)
    assert pace.room(1) == 1.5  # prompts go on with half of what the streams take now
    pace.observe(0, 1, 1.0)
    assert pace.tokens(1) == 128  # nothing is known of prompts
    assert pace.room(4) == 1.5


def test_a_size_that_is_too_large_is_seldom_tried_again() -> None:
    """Eight rows of a large model are hidden behind its weights, and sixteen are not."""
    pace = PrefillBudget(128)
    pace.observe(0, 1, 1.0)
    pace.observe(15, 16, 2.7)
    took = {8: 1.5, 16: 2.7, 24: 4.0}
    sizes = []
    for _ in range(300):
        sizes.append(pace.tokens(1))
        pace.observe(sizes[-1] - 1, sizes[-1], took[sizes[-1]])
    assert set(sizes) == {8, 16}
    assert sizes.count(16) <= 12
    assert not pace.crowded
    took = {8: 1.3, 16: 1.9, 24: 4.0}  # another prompt's context is shorter
    for _ in range(100):
        sizes.append(pace.tokens(1))
        pace.observe(sizes[-1] - 1, sizes[-1], took[sizes[-1]])
    assert sizes[-50:].count(16) > 40

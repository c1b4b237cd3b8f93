"""MTP drafts (draft-mtp): tokens, KV cells and hidden rows that the scheduler passes, checked by a fake device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.requests import Failed
from logitless.engine.runner.hidden_rows import HiddenRows
from logitless.engine.speculation.settings import SpeculationParams
from tests.helpers.mtp_fakes import GuessingEngine, let_guess
from tests.helpers.scheduler_fakes import Bench, plain

GUESSES = SpeculationParams(("draft-mtp",), n_max=3)
NGRAMS_TOO = SpeculationParams(("ngram-simple", "draft-mtp"), n_max=3)


def guessing(wrong: int = 0, **options: Any) -> tuple[Bench, GuessingEngine]:
    bench = Bench(engine=GuessingEngine, **options)
    return bench, let_guess(bench, wrong)


def test_states_of_a_head_that_drafts_are_two_rows_of_the_slot() -> None:
    """It begins with the model's, and writes the other each time."""
    seq: Any = SimpleNamespace(slot=SimpleNamespace(id=1), kv=SimpleNamespace(state_row=7))
    hidden = HiddenRows(8, 2, n_states=10)
    assert [hidden.states(seq, n) for n in range(3)] == [([7], [12]), ([12], [13]), ([13], [12])]
    assert HiddenRows(8, 2).states(seq, 0) == ([], [])


def test_drafts_of_a_model_with_sliding_windows_have_cells_in_their_pages() -> None:
    bench, engine = guessing(window=(20, 2), n_ubatch=32)
    answer = bench.run((1, 2, 3), n_predict=60, ignore_eos=True, speculation=GUESSES)
    assert answer.ids == plain((1, 2, 3), 60)
    assert len(engine.guessed) > 20
    assert all(batch.window_slot_mapping for batch in engine.guessed)
    assert engine.n_blind == 0


@pytest.mark.parametrize("wrong", [0, 2, 5])
def test_it_guesses_for_several_at_once(wrong: int) -> None:
    bench, engine = guessing(wrong)
    prompts = [(1, 2, 3), (5, 6), (7, 8) * 20, (4,)]
    seqs = [bench.submit(p, n_predict=40, ignore_eos=True, speculation=GUESSES) for p in prompts]
    bench.drain()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert bench.answers[seq].ids == plain(prompt, 40)
    stats = bench.scheduler.stats
    assert (stats.draft_tokens_accepted == stats.draft_tokens) == (wrong == 0)
    assert stats.draft_tokens_accepted > 20
    assert max(len(batch.tokens) for batch in engine.guessed) == 4  # one for each
    assert engine.n_blind == 0
    if not wrong:
        assert len(engine.batches) <= 2 + 40 / 4


def test_a_prompt_in_pieces_beside_a_stream_is_followed() -> None:
    bench, engine = guessing(n_ubatch=32, prompt_chunk=5)
    stream = bench.submit((1, 2, 3), n_predict=60, ignore_eos=True, speculation=GUESSES)
    bench.step(4)
    prompt = tuple(9 - i % 9 for i in range(100))
    other = bench.submit(prompt, n_predict=20, ignore_eos=True, speculation=GUESSES)
    bench.drain()
    assert bench.answers[stream].ids == plain((1, 2, 3), 60)
    assert bench.answers[other].ids == plain(prompt, 20)
    assert engine.n_blind == 0
    assert bench.scheduler.stats.draft_tokens_accepted == bench.scheduler.stats.draft_tokens > 30


def test_known_pages_cost_one_blind_token() -> None:
    bench, engine = guessing(n_slots=1)
    prompt = tuple(1 + i % 7 for i in range(3 * BLOCK_SIZE + 5))
    bench.run(prompt, n_predict=4, ignore_eos=True, speculation=GUESSES)
    assert engine.n_blind == 0
    answer = bench.run((*prompt[:40], 9, 9), n_predict=20, ignore_eos=True, speculation=GUESSES)
    assert answer.ids == plain((*prompt[:40], 9, 9), 20)
    assert answer.finished.n_cached == 40
    assert engine.n_blind == 1
    assert answer.finished.timings.draft_n_accepted == answer.finished.timings.draft_n > 10


def test_sequence_without_drafts_is_followed_too() -> None:
    """Another request may go on from its pages and ask."""
    bench, engine = guessing(n_slots=1)
    first = bench.run((1, 2, 3), n_predict=30, ignore_eos=True)
    assert first.finished.timings.draft_n == 0
    assert engine.guessed == []
    prompt = (1, 2, 3, *first.ids, 5)
    answer = bench.run(prompt, n_predict=20, ignore_eos=True, speculation=GUESSES)
    assert answer.ids == plain(prompt, 20)
    assert answer.finished.n_cached > 30
    assert answer.finished.timings.draft_n_accepted == answer.finished.timings.draft_n > 10


def test_drafts_end_where_a_slot_or_a_request_does() -> None:
    bench, engine = guessing(n_ctx=64, n_slots=1)
    answer = bench.run((1, 2, 3), n_predict=-1, ignore_eos=True, speculation=GUESSES)
    assert len(answer.ids) == 61
    assert max(pos for batch in engine.guessed for pos in batch.pos) < 63
    few = bench.run((1, 2, 4), n_predict=2, ignore_eos=True, speculation=GUESSES)
    assert few.ids == plain((1, 2, 4), 2)
    assert few.finished.timings.draft_n == 0  # the second token is the last


def test_no_free_pages_mean_short_drafts_and_nothing_worse() -> None:
    bench, _ = guessing(n_ctx=4 * BLOCK_SIZE, n_slots=4)
    prompts = [(i, i + 1, 2) for i in (1, 2, 3, 4)]
    seqs = [bench.submit(p, n_predict=25, ignore_eos=True, speculation=GUESSES) for p in prompts]
    bench.drain()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert bench.answers[seq].ids == plain(prompt, 25)


def test_an_unsure_draft_is_short() -> None:
    bench, engine = guessing()
    params = SpeculationParams(("draft-mtp",), n_max=9, p_min=0.5)
    answer = bench.run((1, 2, 3), n_predict=30, ignore_eos=True, speculation=params)
    assert answer.ids == plain((1, 2, 3), 30)
    assert 0 < answer.finished.timings.draft_n < 25
    assert max(len(batch.out) for batch in engine.batches) == 3  # every third position is unsure


def test_a_device_that_fails_to_guess_leaves_the_request_alone() -> None:
    bench, engine = guessing()
    engine.no_guesses = True
    answer = bench.run((1, 2, 3), n_predict=20, ignore_eos=True, speculation=GUESSES)
    assert answer.ids == plain((1, 2, 3), 20)
    assert answer.finished.timings.draft_n == 0
    engine.no_guesses = False
    assert bench.run((1, 2, 3), n_predict=20, ignore_eos=True, speculation=GUESSES).finished.timings.draft_n > 0


def test_a_step_that_failed_is_guessed_after_again() -> None:
    bench, engine = guessing()
    seq = bench.submit((1, 2, 3), n_predict=40, ignore_eos=True, speculation=GUESSES)
    bench.step(3)
    n = len(engine.batches)
    fails: Callable[[Any], bool] = lambda batch: len(batch.tokens) > 1  # noqa: E731
    engine.fails = fails
    bench.step(2)
    assert len(engine.batches) > n
    engine.fails = lambda batch: False
    bench.drain()
    assert bench.answers[seq].ids == plain((1, 2, 3), 40)
    assert bench.answers[seq].finished.timings.draft_n_accepted > 20


def test_a_draft_of_another_kind_comes_first() -> None:
    bench, engine = guessing()
    prompt = (1, 2, 3, 4) * 6
    answer = bench.run(prompt, n_predict=30, ignore_eos=True, speculation=NGRAMS_TOO)
    assert answer.ids == plain(prompt, 30)
    assert engine.guessed
    assert engine.n_blind == 0


def test_a_lost_device_loses_what_was_said() -> None:
    bench, engine = guessing()
    seq = bench.submit((1, 2, 3), n_predict=40, ignore_eos=True, speculation=GUESSES)
    bench.step(3)
    engine.lost = True
    bench.step(1)
    engine.rows = [0] * len(engine.rows)
    again = bench.run((1, 2, 3), n_predict=40, ignore_eos=True, speculation=GUESSES)
    assert seq.done
    assert again.ids == plain((1, 2, 3), 40)
    assert again.finished.timings.draft_n_accepted == again.finished.timings.draft_n > 20


def test_a_device_lost_in_a_guess_is_lost() -> None:
    """All that was computed is gone: who goes on without noticing writes nonsense, and others take it for known."""
    bench, engine = guessing()
    seqs = [bench.submit((1, 2, i), n_predict=40, ignore_eos=True, speculation=GUESSES) for i in (3, 4)]
    bench.step(3)
    engine.lost_at_guess = True
    bench.drain()
    assert bench.scheduler.stats.devices_lost == 1
    for seq in seqs:
        failed = bench.answers[seq].events[-1]
        assert isinstance(failed, Failed)
        assert "the device was lost" in failed.message
    again = bench.run((1, 2, 3), n_predict=40, ignore_eos=True, speculation=GUESSES)
    assert again.finished.n_cached == 0
    assert again.ids == plain((1, 2, 3), 40)
    assert again.finished.timings.draft_n_accepted > 20


def test_after_a_guess_that_failed_there_is_a_rest() -> None:
    bench, engine = guessing()
    engine.no_guesses, tried = True, []
    builder = engine._guess
    engine._guess = lambda batch: tried.append(batch) or builder(batch)  # type: ignore[method-assign,func-returns-value]
    bench.run((1, 2, 3), n_predict=100, ignore_eos=True, speculation=GUESSES)
    assert 2 <= len(tried) < 10


def test_layers_with_states_guess_as_well() -> None:
    bench, engine = guessing(n_slots=2, n_states=1 + 2 * 5)
    seqs = [bench.submit(p, n_predict=30, ignore_eos=True, speculation=GUESSES) for p in ((1, 2, 3), (4, 5))]
    bench.drain()
    for seq in seqs:
        assert bench.answers[seq].ids == plain(seq.request.prompt, 30)
    assert engine.n_blind == 0
    assert bench.scheduler.stats.draft_tokens_accepted == bench.scheduler.stats.draft_tokens > 10


@pytest.mark.parametrize("room", [1, 5, 8])
def test_no_more_is_guessed_than_a_step_has_room_for(room: int) -> None:
    bench, engine = guessing(n_slots=4, n_ubatch=4 + room)
    seqs = [bench.submit((1, 2, i), n_predict=30, ignore_eos=True, speculation=GUESSES) for i in (1, 2, 3, 4)]
    bench.drain()
    for seq in seqs:
        assert bench.answers[seq].ids == plain(seq.request.prompt, 30)
    n_guessed, n_tried = sum(len(batch.tokens) for batch in engine.guessed), bench.scheduler.stats.draft_tokens
    assert 0 < n_tried <= n_guessed <= n_tried + 3 * len(engine.batches)  # equal shares, rounded up


def test_a_draft_that_would_be_too_short_is_not_begun() -> None:
    bench, engine = guessing(n_slots=4, n_ubatch=8)
    params = SpeculationParams(("draft-mtp",), n_max=3, n_min=2)
    seqs = [bench.submit((1, 2, i), n_predict=20, ignore_eos=True, speculation=params) for i in (1, 2, 3, 4)]
    while not all(seq.started and seq.n_generated for seq in seqs):
        bench.step()
    n = len(engine.guessed)
    bench.step(3)  # all four run: there is room for one token each
    assert len(engine.guessed) == n
    bench.drain()
    for seq in seqs:
        assert bench.answers[seq].ids == plain(seq.request.prompt, 20)

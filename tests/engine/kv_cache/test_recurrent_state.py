"""Recurrent state: checkpoints of sequences, and prefix reuse from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.prefix_cache import PrefixCache
from logitless.engine.kv_cache.slot_actions import erase, fork, install, snapshot
from logitless.engine.kv_cache.slot_files import load, save
from logitless.engine.requests import CompletionRequest
from logitless.engine.speculation.settings import SpeculationParams
from tests.helpers.scheduler_fakes import N_VOCAB, POISON, Bench, asked, oracle, prompt


def bench(n_checkpoints: int = 2, n_slots: int = 4, **options: Any) -> Bench:
    return Bench(n_slots=n_slots, n_states=1 + n_slots * (2 + n_checkpoints), **options)


def test_a_chat_goes_on_from_its_last_token() -> None:
    b = bench()
    answer = b.run(prompt(70), n_predict=5, ignore_eos=True).ids
    assert asked(b, [*prompt(70), *answer, 3, 4]) == 70 + 4  # the last token was not computed


def test_another_turn_goes_on_from_the_last_token_before_it() -> None:
    b = bench()
    answer = b.run(prompt(70), n_predict=5, ignore_eos=True).ids
    for other in range(1, 4):
        assert asked(b, [*prompt(70), *answer, other, 4, *prompt(other)], 20) == 70 + 4


@pytest.mark.parametrize(("n", "known"), [(70, 48), (72, 64), (87, 64), (16 + 7, 0), (16 + 8, 16)])
def test_another_end_of_a_prompt_goes_on_from_a_page_before_it(n: int, known: int) -> None:
    b = bench()
    asked(b, prompt(n))
    assert asked(b, [*prompt(n - 8), 3, 2, 1, 5]) == known


def test_where_prompts_part_is_known_to_the_third() -> None:
    b = bench()
    asked(b, prompt(100))
    assert [asked(b, [*prompt(45), i, 2, 1, *prompt(30)]) for i in (3, 4, 5)] == [0, 32, 32]


def test_common_prefix_that_arrives_together_is_computed_once() -> None:
    b = bench(n_ubatch=16)
    both = [b.submit([*prompt(70), i, 2, 1], n_predict=2, ignore_eos=True) for i in (3, 4)]
    b.drain()
    assert [b.answers[seq].finished.n_cached for seq in both] == [0, 64]


def test_rows_are_given_to_who_needs_them() -> None:
    """Without room for anything to keep, nothing is known and nothing is wrong."""
    b = bench(n_checkpoints=0, n_slots=1)
    assert [asked(b, prompt(70)), asked(b, prompt(70))] == [0, 0]
    b = bench(n_checkpoints=1, n_slots=1)
    asked(b, prompt(70))
    for salt in range(5):
        asked(b, prompt(40, salt))
    assert asked(b, prompt(70)) == 0


@pytest.mark.parametrize("right", [0, 2, 7])
def test_a_guess_goes_on_from_what_was_right_of_it(right: int) -> None:
    b = bench(n_checkpoints=4)
    ids, *_ = oracle(b.submit(prompt(20), n_predict=12, ignore_eos=True).request, 1024)
    draft = [*ids[:right], 1 + ids[right] % (N_VOCAB - 1), *ids[right + 1 :]]
    asked(b, prompt(20), 12, speculation=SpeculationParams(draft=tuple(draft)))
    assert b.scheduler.stats.draft_tokens > 0
    assert b.scheduler.stats.draft_tokens_accepted >= right


def test_guesses_are_as_many_as_there_are_rows() -> None:
    b = bench(n_checkpoints=1, n_slots=2)
    draft, *_ = oracle(b.submit(prompt(20), n_predict=12, ignore_eos=True).request, 1024)
    b.drain()
    asked(b, prompt(20), 12, speculation=SpeculationParams(draft=tuple(draft)))
    written = [sum(row > 0 for row in batch.end) for batch in b.engine.batches]
    assert max(written) == 1 + 3 + 1  # what is sure, the guesses, and where the first of them parted


def test_guesses_leave_what_was_kept_last() -> None:
    """In company and alone, each prompt with another end is known up to the place that was kept of it."""
    for n_slots in (1, 4):
        b = bench(n_slots=n_slots)
        known = []
        for drafts in (False, True):
            seqs = []
            for i in range(n_slots):
                ids, *_ = oracle(
                    CompletionRequest(tuple(prompt(100, i + 9 * drafts)), n_predict=12, ignore_eos=True), 1024
                )
                draft = SpeculationParams(draft=tuple(ids) if drafts else ())
                seqs.append(b.submit(prompt(100, i + 9 * drafts), n_predict=12, ignore_eos=True, speculation=draft))
            b.drain()
            known.append([asked(b, [*prompt(92, i + 9 * drafts), 3, 2, 1]) for i in range(n_slots)])
        assert known[0] == known[1] == [80] * n_slots


def test_a_step_that_fails_has_changed_nothing() -> None:
    b = bench(n_ubatch=32)
    seqs = [b.submit(prompt(40, i), n_predict=4, ignore_eos=True) for i in range(3)]
    b.step(2)
    b.submit([1, 2, POISON, 3])
    b.drain()
    for seq in seqs:
        assert b.answers[seq].outcome() == oracle(seq.request, 1024)


def test_states_of_failed_step_are_free_again() -> None:
    b = bench(n_checkpoints=0, n_slots=3, n_ubatch=128)
    states = b.scheduler.cache.states
    assert states is not None
    first, other = (b.submit(prompt(100, i)) for i in range(2))
    b.scheduler.step()
    other.tokens += [1] * 90
    other.kv.marks = {other.n_computed + n - other.n_computed % BLOCK_SIZE for n in (16, 32, 48, 64, 80)}
    states.prepare([(other, other.n_uncomputed)])
    assert states.n_spare == 0
    states.undo([(other, other.n_uncomputed)])
    states.prepare([(first, 1)])
    assert len(first.kv.state_writes) == 1


def test_sequence_that_waits_for_mask_computes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(n_ubatch=64)
    stream = b.submit(prompt(5), n_predict=12, ignore_eos=True)
    b.step(2)
    late = b.submit(prompt(40, 3), n_predict=3, ignore_eos=True)
    step, told = b.engine.step, []

    def without_mask(batch: Any) -> Any:
        result = step(batch)
        if late.slot and 1 < batch.slot.count(late.slot.id) == late.n_uncomputed and not told:
            told.append(len(batch.out) - 1)
            late.sampler.ready = False
            result.unsampled[told[0]] = ""
        return result

    monkeypatch.setattr(b.engine, "step", without_mask)
    b.step(4)
    assert told
    n = late.n_computed
    b.step(3)
    assert late.n_computed == n < 40 - 1
    assert [len(batch.tokens) for batch in b.engine.batches[-3:]] == [1, 1, 1]
    late.sampler.ready = True
    b.drain()
    for seq in (stream, late):
        assert b.answers[seq].outcome() == oracle(seq.request, 1024)


def test_without_a_page_to_go_on_in_it_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(n_slots=2, n_ctx=4 * BLOCK_SIZE)
    answer = b.run(prompt(10), n_predict=2, ignore_eos=True).ids
    seq = b.submit([*prompt(10), *answer, 3], n_predict=2, ignore_eos=True)
    with monkeypatch.context() as patched:
        patched.setattr(PrefixCache, "claim", lambda self, block: False)
        patched.setattr(PrefixCache, "n_available", property(lambda self: 0))
        slot, cache = b.scheduler.slots[0], b.scheduler.cache
        cache.match_prefix(seq, slot, 12, ())
    assert (seq.n_computed, seq.kv.state_row, seq.kv.blocks) == (0, 0, [])
    b.drain()
    assert b.answers[seq].outcome() == oracle(seq.request, b.scheduler.slots[0].n_ctx)


def test_host_memory_has_what_gave_way() -> None:
    tokens = [[i, *prompt(100)] for i in range(1, 8)]
    for cache_ram, known in (0, 0), (None, 80):
        b = bench(n_checkpoints=1, n_slots=1, cache_ram=cache_ram)
        for each in tokens:
            asked(b, each)
        assert asked(b, [*tokens[0][:90], 3, 4]) == known
        host = b.scheduler.cache.host
        assert host is None or host.n_restored == 0  # pages were there all the time, what lies beside was not


def test_the_device_has_no_room_for_a_prefix_that_host_memory_has() -> None:
    b = bench(n_slots=1, n_ctx=256, cache_ram=None)
    for i in (1, 2):
        asked(b, [i, *prompt(200)])
    host = b.scheduler.cache.host
    assert host is not None
    assert asked(b, [1, *prompt(192), 4]) == 192
    assert host.n_restored > 0


def test_a_chat_goes_on_from_its_last_token_when_others_have_been_there() -> None:
    b = bench(n_checkpoints=0, n_slots=1, n_ctx=256, cache_ram=None)
    answer = b.run(prompt(70), n_predict=30, ignore_eos=True).ids
    for i in range(3):
        asked(b, [9, i + 1, *prompt(200)])
    assert asked(b, [*prompt(70), *answer, 3]) == 70 + 29


@pytest.mark.parametrize("keep_idle", [True, False])
def test_preempted_sequence_computes_nothing_again(keep_idle: bool) -> None:
    b = bench(n_slots=2, n_ctx=96, unified=True, cache_ram=None, cache_idle_slots=keep_idle)
    seqs = [b.submit(prompt(20, i), n_predict=60, ignore_eos=True) for i in range(2)]
    b.drain()
    assert b.scheduler.stats.preemptions > 0
    for seq in seqs:
        assert b.answers[seq].outcome() == oracle(seq.request, 96)
    assert sum(len(batch.tokens) for batch in b.engine.batches) == 2 * (20 + 60 - 1)


def test_a_long_prompt_is_known_up_to_places_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.engine.kv_cache.manager.MARK_EVERY", 64)
    for cache_ram, known in (0, 0), (None, 128):
        b = bench(n_checkpoints=1, n_slots=1, n_ubatch=48, cache_ram=cache_ram)
        asked(b, prompt(500))
        assert asked(b, [*prompt(190), 3, 1, 2]) == known


def test_a_state_that_cannot_be_read_or_written_is_computed_again() -> None:
    def fails(*_: object) -> None:
        raise OSError("device lost")

    tokens = [[i, *prompt(100)] for i in (1, 2, 3)]
    for what in ("read", "write"):
        b = bench(n_checkpoints=1, n_slots=1, cache_ram=None)
        for each in tokens[: 1 if what == "read" else 3]:
            asked(b, each)
        setattr(b.engine.states, what, fails)
        for each in tokens:
            assert asked(b, [*each[:90], 3, 4]) in (0, 80)
        assert asked(b, [*tokens[0][:90], 3, 4]) == 0


def test_slots_are_saved_and_restored(tmp_path: Path) -> None:
    b = bench()
    answer = b.run(prompt(70), n_predict=5, ignore_eos=True, id_slot=0).ids
    state = snapshot(b.scheduler, 0)
    assert (len(state.tokens), len(state.blocks), len(state.auxiliary)) == (74, 5, 1)
    save(tmp_path, "a", b.engine.cache_kind, state)
    again, _ = load(tmp_path, "a", b.engine.cache_kind, 1000)
    assert again.tokens == state.tokens
    other = bench()
    install(other.scheduler, 1, again)
    other.step()
    assert asked(other, [*prompt(70), *answer, 3, 4]) == 74


def test_a_fork_has_the_states_that_are_in_host_memory() -> None:
    """While their pages are still on the device: both slots have had them."""
    b = bench(n_checkpoints=1, n_slots=2, cache_ram=None)
    b.run(prompt(70), n_predict=5, ignore_eos=True, id_slot=0)
    states, offload = b.scheduler.cache.states, b.scheduler.cache.offload
    assert states is not None
    for node in list(states._checkpoints):  # as if others had needed the rows
        offload.save_auxiliary(node)
        states.forget(node)
    fork(b.scheduler, 0, 1)
    erase(b.scheduler, 0)
    assert len(snapshot(b.scheduler, 1).tokens) == 74


def test_a_snapshot_ends_where_one_can_go_on() -> None:
    b = bench(n_checkpoints=1, n_slots=1)
    asked(b, prompt(70))
    states = b.scheduler.cache.states
    assert states is not None
    # as if another had needed the row
    states.forget(next(node for node in states._checkpoints if node.n_tokens < BLOCK_SIZE))
    state = snapshot(b.scheduler, 0)
    assert (len(state.tokens), len(state.blocks), len(state.auxiliary)) == (48, 3, 1)
    states.forget(next(iter(states._checkpoints)))
    state = snapshot(b.scheduler, 0)
    assert (state.tokens, state.blocks, state.auxiliary) == ([], [], [])

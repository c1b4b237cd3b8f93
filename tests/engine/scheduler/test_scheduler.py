"""Scheduler: each of its guarantees, on a device that checks every KV cell."""

from __future__ import annotations

import math

import pytest

from logitless.engine.batch import BLOCK_SIZE, bucket
from logitless.engine.errors import ExceedsContext, InvalidRequest, Unavailable
from logitless.engine.kv_cache.block_pool import pool_size
from logitless.engine.kv_cache.slot_actions import erase
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest, Failed, Progress, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.batch_builder import bucket_floor
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.helpers.scheduler_fakes import EOG, PIECES, POISON, Bench, oracle, prompt


def test_a_request_alone() -> None:
    bench = Bench()
    answer = bench.run(prompt(21), n_predict=9, ignore_eos=True, sampling=SamplingParams(seed=5))
    assert answer.outcome() == oracle(CompletionRequest(tuple(prompt(21)), n_predict=9, ignore_eos=True), 1024)
    end = answer.finished
    assert (end.stop_type, end.n_prompt, end.n_cached, end.n_predicted, end.n_in_cache) == ("limit", 21, 0, 9, 29)
    assert (end.id_slot, end.seed, end.truncated, end.prompt_probs) == (0, 5, False, ())
    assert {token.id_slot for token in answer.tokens} == {0}
    assert end.timings.prompt_n == 21
    assert end.timings.predicted_n == 9
    assert end.timings.prompt_ms > 0
    assert end.timings.predicted_ms > 0
    assert [token.timings.predicted_n for token in answer.tokens if token.timings] == list(range(1, 10))
    assert bench.scheduler.idle
    assert bench.scheduler.step() == []
    assert [len(batch.tokens) for batch in bench.engine.batches] == [21] + [1] * 8


def test_every_kind_of_end() -> None:
    bench = Bench(n_ctx=64)
    kinds = set()
    for salt in range(60):
        request = {"n_predict": (-1, 30)[salt % 2], "stop": ("fgh", "é") * (salt % 3 == 0)}
        answer = bench.run(prompt(1 + salt % 7, salt), **request)
        assert answer.outcome() == oracle(CompletionRequest(tuple(prompt(1 + salt % 7, salt)), **request), 64)
        end = answer.finished
        kinds.add((end.stop_type, end.truncated))
        assert end.has_new_line == ("\n" in answer.text)
        assert (answer.ids[-1] == EOG) == (end.stop_type == "eos")
        assert end.truncated == (end.n_prompt + end.n_predicted == 64 and end.stop_type == "limit")
    assert kinds == {("eos", False), ("word", False), ("limit", False), ("limit", True)}


def test_a_text_that_ends_a_turn_is_an_end() -> None:
    """As an end token is, and not a stop string of the request's."""
    bench = Bench(n_ctx=64)
    plain = bench.run(prompt(3), n_predict=20, ignore_eos=True).text
    answer = bench.run(prompt(3), n_predict=20, ignore_eos=True, turn_end=plain[4:7])
    at = plain.index(plain[4:7])
    assert (answer.text, answer.finished.stop_type, answer.finished.stopping_word) == (plain[:at], "eos", "")


def test_ignored_end_tokens_go_on() -> None:
    bench = Bench(n_ctx=64)
    ended = next(salt for salt in range(99) if bench.run(prompt(3, salt), n_predict=50).finished.stop_type == "eos")
    answer = bench.run(prompt(3, ended), n_predict=50, ignore_eos=True)
    assert EOG in answer.ids[:-1]
    assert answer.finished.stop_type == "limit"


def test_special_tokens_are_shown_to_who_wants_them() -> None:
    bench = Bench(n_ctx=64)
    ended = next(salt for salt in range(99) if bench.run(prompt(3, salt), n_predict=50).finished.stop_type == "eos")
    plain, special = (bench.run(prompt(3, ended), n_predict=50, special=special) for special in (False, True))
    assert (special.ids, special.text, special.finished.stop_type) == (plain.ids, plain.text + "</s>", "eos")


def test_no_token_wanted() -> None:
    bench = Bench()
    end = bench.run(prompt(40), n_predict=0).finished
    assert (end.stop_type, end.n_predicted, end.n_in_cache) == ("limit", 0, 40)
    assert not any(batch.out for batch in bench.engine.batches)
    assert bench.run(prompt(40), n_predict=1).finished.n_cached == 39


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33, 47])
def test_a_full_hit_still_evaluates_one_token(n: int) -> None:
    bench = Bench()
    first, second = (bench.run(prompt(n), n_predict=4) for _ in range(2))
    assert first.ids == second.ids
    assert (first.finished.n_cached, second.finished.n_cached) == (0, n - 1)
    assert second.finished.timings.prompt_n == 1


def test_a_conversation_goes_on_where_it_ended() -> None:
    bench = Bench()
    first = bench.run(prompt(21), n_predict=10)
    history = prompt(21) + first.ids
    again = bench.run([*history, 3, 4, 5], n_predict=2).finished
    assert again.n_cached == len(history) - 1  # the last token had not been computed
    assert bench.run([*prompt(21)[:18], 9, 9, 9], n_predict=2).finished.n_cached == 18


def test_sharing_with_one_that_still_runs() -> None:
    bench = Bench()
    first = bench.submit(prompt(25), n_predict=20)
    bench.step(6)
    second = bench.submit([*prompt(25), 1, 2, 3], n_predict=20)
    bench.drain()
    assert bench.answers[second].finished.n_cached >= 25
    assert bench.answers[first].outcome() == oracle(first.request, 1024)
    assert bench.answers[second].outcome() == oracle(second.request, 1024)


def test_cache_prompt_false() -> None:
    bench = Bench()
    bench.run(prompt(40), n_predict=1)
    assert bench.run(prompt(40), n_predict=1, cache_prompt=False).finished.n_cached == 0
    assert bench.run(prompt(40), n_predict=1).finished.n_cached == 39


def test_pinned_requests_reuse_their_own_slot_only() -> None:
    bench = Bench(n_slots=2)
    bench.run(prompt(40), n_predict=1, id_slot=1)
    assert bench.run(prompt(40), n_predict=1, id_slot=0).finished.n_cached == 0
    again = bench.run(prompt(30) + [2] * 5, n_predict=1, id_slot=1).finished
    assert (again.n_cached, again.id_slot) == (30, 1)
    for id in (-2, 2):
        with pytest.raises(InvalidRequest, match="id_slot"):
            bench.submit([1], id_slot=id)


def test_a_pinned_request_waits_and_lets_others_pass() -> None:
    bench = Bench(n_slots=2)
    first = bench.submit(prompt(5), n_predict=30, ignore_eos=True, id_slot=0)
    pinned = bench.submit(prompt(6), n_predict=2, id_slot=0)
    other = bench.submit(prompt(7), n_predict=2)
    bench.step(4)
    assert (first.done, pinned.slot, other.done) == (False, None, True)
    assert bench.scheduler.stats.requests_deferred == 1
    bench.drain()
    assert bench.answers[pinned].finished.id_slot == 0


def test_erasing_a_slot_forgets_it() -> None:
    bench = Bench(n_slots=2)
    bench.run(prompt(40), n_predict=3, id_slot=1)
    assert erase(bench.scheduler, 1) == 42
    assert erase(bench.scheduler, 1) == 0
    assert bench.run(prompt(40), n_predict=1).finished.n_cached == 0
    busy = bench.submit(prompt(4), id_slot=1)
    bench.step()
    with pytest.raises(Unavailable):
        erase(bench.scheduler, 1)
    bench.scheduler.cancel(busy)
    with pytest.raises(InvalidRequest):
        erase(bench.scheduler, 2)


def test_choice_of_slots() -> None:
    bench = Bench(n_slots=3)
    texts = [prompt(40, salt) for salt in (1, 2, 3)]
    assert [bench.run(text, n_predict=1).finished.id_slot for text in texts] == [0, 1, 2]
    assert bench.run([*texts[1][:35], 1], n_predict=1).finished.id_slot == 1  # the most similar
    assert bench.run(prompt(40, 9), n_predict=1).finished.id_slot == 0  # used longest ago


def test_refused_at_the_door() -> None:
    bench = Bench(n_slots=2, n_ctx=64, unified=False)
    with pytest.raises(ExceedsContext, match="exceeds the available context size") as caught:
        bench.submit(prompt(32))
    assert caught.value.extra == {"n_prompt_tokens": 32, "n_ctx": 32}
    with pytest.raises(InvalidRequest, match="prompt"):
        bench.submit([])
    assert bench.run(prompt(31)).finished.truncated
    assert Bench(n_slots=2, n_ctx=64).run(prompt(63)).finished.truncated
    short = Bench(n_slots=2, n_ctx=64, n_ctx_slot=48)
    assert short.run(prompt(47)).finished.truncated
    with pytest.raises(ExceedsContext):
        short.submit(prompt(48))


def test_a_long_prompt_does_not_stop_streams() -> None:
    bench = Bench(n_ctx=4096, prompt_chunk=61)
    streams = [bench.submit(prompt(5, salt), n_predict=100, ignore_eos=True) for salt in range(3)]
    bench.step(2)
    long = bench.submit(prompt(1000))
    for _ in range(12):
        before = [len(seq.tokens) for seq in streams]
        bench.step()
        assert [len(seq.tokens) for seq in streams] == [n + 1 for n in before]
        assert bucket(len(bench.engine.batches[-1].tokens)) == len(bench.engine.batches[-1].tokens) <= 64
    assert long.n_computed > 500


def test_prompts_in_order_of_arrival_fill_a_bucket() -> None:
    bench = Bench(n_ctx=4096, n_ubatch=130)
    first, second = bench.submit(prompt(150, 1), n_predict=1), bench.submit(prompt(150, 2), n_predict=1)
    bench.step()
    assert (first.n_computed, second.n_computed) == (128, 0)
    bench.step()
    assert (first.done, second.n_computed) == (True, 106)


def test_cancel_disturbs_nobody() -> None:
    bench = Bench(n_slots=2)
    seqs = [bench.submit(prompt(20, salt), n_predict=20, ignore_eos=True) for salt in range(4)]
    bench.step(3)
    for seq in (seqs[0], seqs[3], seqs[3]):
        bench.scheduler.cancel(seq)
    assert not bench.scheduler.slots[0].is_processing
    bench.step()
    assert seqs[2].slot is bench.scheduler.slots[0]
    bench.drain()
    assert [len(bench.answers[seq].ids) for seq in seqs] == [3, 20, 20, 0]
    bench.scheduler.cancel(seqs[1])


def test_preemption_loses_nothing() -> None:
    bench = Bench(n_slots=3, n_ctx=96)
    seqs = [bench.submit(prompt(20, salt), n_predict=60, ignore_eos=True, return_progress=True) for salt in range(3)]
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    for seq in seqs:
        assert bench.answers[seq].outcome() == oracle(seq.request, 96)
        assert bench.answers[seq].finished.n_cached == 0
    ends = [bench.answers[seq].finished.timings.predicted_ms for seq in seqs]
    assert ends[0] < ends[2]
    assert stats.tokens_predicted == 180
    assert stats.prompt_tokens == 60


def test_cached_prefixes_go_before_sequences_do() -> None:
    bench = Bench(n_slots=2, n_ctx=96)
    for salt in range(5):
        bench.run(prompt(40, salt), n_predict=2)
    bench.run(prompt(90), n_predict=3)
    assert bench.scheduler.stats.preemptions == 0
    assert bench.scheduler.stats.kv_pages_used == bench.scheduler.stats.kv_pages_cached == 6


def test_the_whole_context_with_its_own_prefix() -> None:
    """The pool is full of the prefix that is to be continued: the last page is taken over, not copied."""
    bench = Bench(n_slots=1, n_ctx=64)
    first = bench.run(prompt(60), n_predict=4, ignore_eos=True)
    again = bench.run(prompt(60), n_predict=4, ignore_eos=True)
    assert first.ids == again.ids
    assert again.finished.n_cached == 59


@pytest.mark.parametrize("too_large", [1, 2, 3, 7])
def test_batches_that_fail_are_halved(too_large: int) -> None:
    bench = Bench()
    bench.engine.fails = lambda batch: len(batch.tokens) > too_large
    seqs = [bench.submit(prompt(9, salt), n_predict=5) for salt in range(4)]
    bench.step(4)
    assert bench.scheduler.stats.n_failed_steps > 0
    bench.engine.fails = lambda batch: False
    bench.drain()
    assert len(bench.engine.batches[-1].tokens) >= 1
    for seq in seqs:
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_one_that_cannot_be_computed_fails_alone() -> None:
    bench = Bench()
    good = [bench.submit(prompt(12, salt), n_predict=8) for salt in range(2)]
    bad = bench.submit([*prompt(12), POISON], n_predict=8)
    late = bench.submit(prompt(5, 7), n_predict=8)
    bench.drain()
    failed = bench.answers[bad].events[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.type) == (500, "server_error")
    for seq in (*good, late):
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_a_lost_device_fails_what_ran_and_nothing_else() -> None:
    bench = Bench(n_slots=2)
    done = bench.run(prompt(40), n_predict=4)
    running = [bench.submit(prompt(40, salt), n_predict=50, ignore_eos=True) for salt in range(2)]
    waiting = bench.submit(prompt(20, 5), n_predict=8)
    bench.step(3)
    bench.engine.lost = True
    bench.drain()
    for seq in running:
        failed = bench.answers[seq].events[-1]
        assert isinstance(failed, Failed)
        assert (failed.code, failed.type) == (500, "server_error")
        assert "it fell off the bus" in failed.message
    assert bench.answers[waiting].outcome() == oracle(waiting.request, 1024)
    assert bench.scheduler.stats.devices_lost == 1
    again = bench.run(prompt(40), n_predict=4)  # nothing that was cached is taken for valid
    assert again.ids == done.ids
    assert again.finished.n_cached == 0


def test_progress() -> None:
    bench = Bench(n_ubatch=16)
    bench.run(prompt(10), n_predict=1)
    events = bench.run(prompt(50), n_predict=1, return_progress=True).events
    progress = [event for event in events if isinstance(event, Progress)]
    assert [(p.total, p.cache, p.processed) for p in progress] == [(50, 10, n) for n in (10, 26, 42, 50)]
    assert progress[0].time_ms == 0 < progress[1].time_ms < progress[2].time_ms
    assert isinstance(events[len(progress)], Token)


def test_probabilities() -> None:
    bench = Bench()
    pre = SamplingParams(seed=1, n_probs=3)
    post = SamplingParams(seed=1, n_probs=4, post_sampling_probs=True)
    seqs = [bench.submit(prompt(5, salt), n_predict=2, sampling=params) for salt, params in ((1, pre), (2, post))]
    plain = bench.submit(prompt(5, 3), n_predict=2)
    bench.drain()
    before, after = (bench.answers[seq].tokens[0].prob for seq in seqs)
    assert before is not None
    assert after is not None
    assert (before.id, before.value, [id for id, _ in before.top]) == (
        bench.answers[seqs[0]].ids[0],
        -before.id,
        [1, 2, 3],
    )
    assert (after.value, after.top) == (0.5, ((0, 0.5), (1, 0.5)))
    assert bench.answers[plain].tokens[0].prob is None
    assert (bench.engine.batches[0].n_top, bench.engine.batches[0].n_probs) == (4, 4)


def test_prompt_probabilities() -> None:
    bench = Bench(n_ubatch=16)
    bench.run(prompt(40), n_predict=1)
    end = bench.run(prompt(40), n_predict=0, prompt_logprobs=2).finished
    assert end.n_cached == 0
    assert end.prompt_probs[0] is None
    assert [(p.id, p.value, len(p.top)) for p in end.prompt_probs[1:] if p] == [(t, -t, 2) for t in prompt(40)[1:]]
    assert bench.run(prompt(1), n_predict=1, prompt_logprobs=0).finished.prompt_probs == (None,)


def test_a_time_limit_waits_for_a_line() -> None:
    bench = Bench()
    bench.run(prompt(5))
    answer = bench.run(prompt(5), ignore_eos=True, n_predict=200, t_max_predict_ms=0.5)
    assert answer.finished.stop_type == "limit"
    assert "\n" in answer.tokens[-1].text
    assert "\n" not in "".join(token.text for token in answer.tokens[1:-1])


def test_slots_show_what_runs() -> None:
    bench = Bench(n_slots=2)
    assert bench.scheduler.slots[0].params is None
    seq = bench.submit(prompt(20), n_predict=10, ignore_eos=True)
    bench.step(3)
    slot = bench.scheduler.slots[0]
    assert (slot.is_processing, slot.id_task, slot.n_ctx, slot.n_decoded, slot.n_remain) == (True, seq.id, 1024, 3, 7)
    assert (slot.n_prompt_tokens, slot.n_prompt_tokens_cache, slot.n_prompt_tokens_processed) == (20, 0, 20)
    assert (bench.scheduler.stats.requests_processing, bench.scheduler.slots[1].is_processing) == (1, False)
    bench.drain()
    assert (slot.is_processing, slot.has_next_token, slot.params) == (False, False, SamplingParams())
    assert (slot.n_remain, slot.n_decoded) == (-1, 0)
    assert (slot.n_prompt_tokens, slot.n_prompt_tokens_cache, slot.n_prompt_tokens_processed) == (20, 0, 20)
    bench.run(prompt(20), n_predict=1)
    assert (slot.n_prompt_tokens, slot.n_prompt_tokens_cache, slot.n_prompt_tokens_processed) == (20, 19, 1)


def test_waiting_costs_no_sampler() -> None:
    bench = Bench(n_slots=2)
    made = []
    make = bench.scheduler.make_sampler
    bench.scheduler.make_sampler = lambda params, n_ctx: made.append(params) or make(params, n_ctx)  # type: ignore[func-returns-value]
    for _ in range(50):
        bench.submit(prompt(3), n_predict=1)
    assert not made
    bench.step()
    assert len(made) == 2
    bench.drain()
    assert len(made) == 50


def test_tables_are_sent_when_they_change() -> None:
    bench = Bench()
    bench.run(prompt(10), n_predict=30, ignore_eos=True)
    sent = [bool(batch.tables) for batch in bench.engine.batches]
    assert sum(sent) == math.ceil(39 / BLOCK_SIZE)
    assert not sent[1]


def test_sizes() -> None:
    assert [n for n in range(1, 50) if bucket_floor(n) == n] == [
        *range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48,
    ]  # fmt: skip
    for n in range(1, 600):
        assert bucket_floor(n) <= n <= bucket(n)
        assert bucket(bucket_floor(n)) == bucket_floor(n)
    assert pool_size(100, 4, unified=True) == 7
    assert pool_size(100, 4, unified=False) == 8


def test_with_the_real_sampler() -> None:
    """The default sampler fits: nothing but the device's word decides."""
    bench = Bench()
    bench.scheduler.make_sampler = Scheduler(
        bench.engine, bench.scheduler.vocab, SchedulerConfig(n_slots=1, n_ctx=64)
    ).make_sampler
    answer = bench.run(prompt(5), n_predict=6, sampling=SamplingParams(seed=42, temperature=0.5))
    assert answer.finished.seed == 42
    assert answer.outcome() == oracle(CompletionRequest(tuple(prompt(5)), n_predict=6), 1024)
    assert all(id < len(PIECES) for id in answer.ids)


def test_prefixes_come_back_from_host_memory() -> None:
    """Ten prompts of five pages in a pool of twelve: with host memory none is computed twice."""
    for limit, n_kept in ((0, 0), (None, 10), (20 * 256, 4), (100, 0)):
        bench = Bench(n_slots=1, n_ctx=192, cache_ram=limit)
        for salt in range(10):
            bench.run(prompt(80, salt), n_predict=1)
        cached = [bench.run(prompt(80, salt), n_predict=1).finished.n_cached for salt in reversed(range(10))]
        assert cached[:2] == [79, 79]  # these are on the device
        assert sum(n >= 64 for n in cached[2:]) == max(0, n_kept - 2)
        stats = bench.scheduler.stats
        assert (stats.host_pages_restored > 0) == (n_kept > 0)
        assert stats.host_bytes <= (1 << 30 if limit is None else limit)


def test_an_erased_slot_is_forgotten_in_host_memory_too() -> None:
    bench = Bench(n_slots=2, n_ctx=192, cache_ram=None)
    for salt in range(10):
        bench.run(prompt(80, salt), n_predict=1, id_slot=salt % 2)
    erase(bench.scheduler, 0)
    assert bench.run(prompt(80, 0), n_predict=1).finished.n_cached == 0
    assert bench.run(prompt(80, 1), n_predict=1).finished.n_cached >= 64


@pytest.mark.parametrize("idle", [True, False])
def test_paused_sequences_come_back_from_host_memory(idle: bool) -> None:
    bench = Bench(n_slots=8, n_ctx=256, cache_ram=None, cache_idle_slots=idle)
    seqs = [bench.submit(prompt(20, salt), n_predict=100, ignore_eos=True) for salt in range(8)]
    bench.drain()
    stats = bench.scheduler.stats
    assert stats.preemptions > 0
    assert stats.recomputed_tokens < 2 * BLOCK_SIZE * stats.preemptions
    for seq in seqs:
        assert bench.answers[seq].outcome() == oracle(seq.request, 256)


def test_without_idle_slots_in_host_memory() -> None:
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=None, cache_idle_slots=False)
    for salt in range(10):
        bench.run(prompt(80, salt), n_predict=1)
    assert bench.scheduler.stats.host_bytes == 0


def test_a_device_that_cannot_give_pages() -> None:
    """Then nothing comes back, and the texts are the same."""
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=None)

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    bench.engine.full_kv.write = fails  # type: ignore[method-assign]
    for salt in (0, 1, 2, 3, 0):
        answer = bench.run(prompt(80, salt), n_predict=5, ignore_eos=True)
        assert answer.finished.n_cached == 0
        assert answer.ids == oracle(CompletionRequest(tuple(prompt(80, salt)), n_predict=5, ignore_eos=True), 192)[0]
    bench.engine.full_kv.read = fails  # type: ignore[method-assign]
    assert bench.run(prompt(80, 9), n_predict=1).finished.n_cached == 0


def test_without_continuous_batching_requests_wait_for_those_that_generate() -> None:
    bench = Bench(continuous=False)
    first = [bench.submit(prompt(5, salt), n_predict=8, ignore_eos=True) for salt in range(2)]
    bench.step(2)
    late = bench.submit(prompt(6), n_predict=2, ignore_eos=True)
    while not all(seq.done for seq in first):
        assert late.slot is None
        bench.step()
    bench.drain()
    assert [len(bench.answers[seq].ids) for seq in (*first, late)] == [8, 8, 2]


def test_without_continuous_batching_training_holds_up_nobody() -> None:
    bench = Bench(continuous=False)
    bench.submit(prompt(5), n_predict=50, ignore_eos=True, priority=BATCH_PRIORITY)
    bench.step(3)
    user = bench.submit(prompt(6), n_predict=2, ignore_eos=True)
    bench.step(4)
    assert user.done
    bench.drain()

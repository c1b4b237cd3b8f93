"""Cache reuse: llama-server's search for chunks, and moved KV entries on a checking device."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitless.engine.errors import InvalidRequest
from logitless.engine.kv_cache.cache_reuse import chunks
from logitless.engine.kv_cache.slot_actions import erase, snapshot
from logitless.engine.requests import CompletionRequest
from tests.helpers.scheduler_checks import chain, check_cells, check_pages
from tests.helpers.scheduler_fakes import N_VOCAB, Bench, moved, next_id, oracle

TOKENS = st.lists(st.integers(0, 3), max_size=30)


def text(n: int, salt: int = 0) -> list[int]:
    return random.Random(salt).choices(range(1, N_VOCAB), k=n)


def as_llama_server(old: list[int], new: list[int], at: int, n_least: int) -> list[tuple[int, int]]:
    """The two heads of update_slots in tools/server/server.cpp, as it describes them."""
    result = []
    head_old = head_new = at
    while head_old < len(old) and head_new < len(new):
        n = 0
        while head_old + n < len(old) and head_new + n < len(new) and old[head_old + n] == new[head_new + n]:
            n += 1
        if n >= n_least:
            result.append((head_old, n))
            head_old += n
            head_new += n
        else:
            head_old += 1
    return result


@given(old=TOKENS, new=TOKENS, at=st.integers(0, 5), n_least=st.integers(1, 6))
@settings(max_examples=300)
@example(old=[1, 1, 2, 3], new=[1, 2, 3], at=0, n_least=2)  # a chunk right behind a token that begins none
def test_chunks_are_those_of_llama_server(old: list[int], new: list[int], at: int, n_least: int) -> None:
    assert list(chunks(old, new, at, at, n_least)) == as_llama_server(old, new, at, n_least)


def continued(cells: list[int], tokens: list[int], n: int) -> list[int]:
    """What follows, if the first cells hold this and the rest of the tokens are computed."""
    content = cells[-1]
    for token in tokens[len(cells) :]:
        content = chain(content, token)
    ids = []
    for _ in range(n):
        ids.append(next_id(content))
        content = chain(content, ids[-1])
    return ids


def contents(tokens: list[int]) -> list[int]:
    cells = [0]
    for token in tokens:
        cells.append(chain(cells[-1], token))
    return cells[1:]


@pytest.mark.parametrize("n_ctx", [1024, 176], ids=["room", "little room"])
@pytest.mark.parametrize("n_keep", [0, 7, 16, 20])
def test_a_prompt_without_its_middle_moves_the_rest(n_keep: int, n_ctx: int) -> None:
    bench = Bench(n_slots=2, n_ctx=n_ctx)
    old = text(100)
    bench.run(old, n_predict=1, id_slot=1)
    new = [*old[:n_keep], *old[51:], 3, 1, 4]
    assert old[n_keep] != old[51]
    n_steps = bench.scheduler.stats.prompt_tokens
    seq = bench.submit(new, n_predict=6, ignore_eos=True, n_cache_reuse=8, id_slot=1)
    bench.step()
    check_pages(bench.scheduler)
    check_cells(bench.scheduler, bench.engine)
    bench.drain()
    answer = bench.answers[seq]
    assert seq.kv.shifted
    assert answer.finished.n_cached == n_keep + 49
    assert bench.scheduler.stats.prompt_tokens - n_steps == 3
    cells = contents(old)
    assert answer.ids == continued([*cells[:n_keep], *map(moved, cells[51:])], new, 6)
    check_pages(bench.scheduler)
    check_cells(bench.scheduler, bench.engine)


def test_two_gaps_two_chunks() -> None:
    bench = Bench(n_slots=1)
    old = text(120)
    bench.run(old, n_predict=1)
    new = [*old[:10], *old[30:60], *old[80:115], 9]
    seq = bench.submit(new, n_predict=3, ignore_eos=True, n_cache_reuse=20)
    bench.drain()
    cells = contents(old)
    assert bench.answers[seq].finished.n_cached == len(new) - 1
    assert bench.answers[seq].ids == continued([*cells[:10], *map(moved, [*cells[30:60], *cells[80:115]])], new, 3)


def test_shorter_chunks_are_computed() -> None:
    bench = Bench(n_slots=1)
    old = text(60)
    bench.run(old, n_predict=1)
    seq = bench.submit([*old[:5], *old[40:]], n_predict=5, n_cache_reuse=21)
    bench.drain()
    assert not seq.kv.shifted
    assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_the_last_token_is_always_computed() -> None:
    bench = Bench(n_slots=1)
    old = text(60)
    bench.run(old, n_predict=1)
    seq = bench.submit(old[20:], n_predict=1, n_cache_reuse=10)
    bench.drain()
    assert bench.answers[seq].finished.n_cached == 39


def test_request_without_reuse_gets_exact_bits() -> None:
    bench = Bench(n_slots=2)
    old = text(100)
    bench.run(old, n_predict=1, id_slot=0)
    new = [*old[:20], *old[40:]]
    first = bench.submit(new, n_predict=20, ignore_eos=True, n_cache_reuse=16, id_slot=0)
    bench.drain()
    exact = oracle(CompletionRequest(tuple(new), n_predict=20, ignore_eos=True), 1024)
    assert bench.answers[first].outcome() != exact
    for fields in ({}, {"id_slot": 0}, {"cache_prompt": False, "n_cache_reuse": 16}):
        seq = bench.submit(new, n_predict=20, ignore_eos=True, **fields)
        bench.drain()
        assert bench.answers[seq].outcome() == exact
        assert not seq.kv.shifted
    assert snapshot(bench.scheduler, 0).tokens[: len(new)] == new  # the last one's exact cells


def test_moved_chunk_is_prefix_of_next_request() -> None:
    """As in an editor: every prompt is the last one without its oldest part, and some more."""
    bench = Bench(n_slots=1, cache_ram=None)
    window = text(200)
    seq = bench.submit(window[:100], n_predict=1, n_cache_reuse=16)
    bench.drain()
    for start in (20, 50, 75):
        n_before = bench.scheduler.stats.prompt_tokens
        seq = bench.submit([*window[:10], *window[start : start + 90], start % 9 + 1], n_predict=2, n_cache_reuse=16)
        bench.drain()
        assert seq.kv.shifted
        assert bench.scheduler.stats.prompt_tokens - n_before <= 40
        check_pages(bench.scheduler)
        check_cells(bench.scheduler, bench.engine)
    again = bench.run(seq.request.prompt, n_predict=2, n_cache_reuse=16)
    assert again.finished.n_cached == seq.n_prompt - 1
    assert again.ids == bench.answers[seq].ids
    assert len(snapshot(bench.scheduler, 0).tokens) <= 26  # a slot file has what is exact only
    erase(bench.scheduler, 0)
    assert bench.scheduler.cache.pool.n_used == 0


def test_a_paused_one_comes_back_with_its_own_cells() -> None:
    old = text(100)
    new = [*old[:20], *old[50:]]
    alone = Bench(n_slots=1)
    alone.run(old, n_predict=1)
    expected = alone.run(new, n_predict=60, ignore_eos=True, n_cache_reuse=16)
    bench = Bench(n_slots=2, n_ctx=176, cache_ram=None)
    bench.run(old, n_predict=1, id_slot=1)
    seq = bench.submit(new, n_predict=60, ignore_eos=True, n_cache_reuse=16, id_slot=1)
    bench.step(3)
    other = bench.submit(text(90, 5), n_predict=60, ignore_eos=True, priority=-1)
    bench.drain()
    assert bench.scheduler.stats.preemptions
    assert bench.answers[seq].outcome() == expected.outcome()
    assert bench.answers[other].outcome() == oracle(other.request, 176)


def test_a_device_that_fails_to_move_costs_nothing_but_time() -> None:
    bench = Bench(n_slots=1)
    old = text(60)
    bench.run(old, n_predict=1)

    def fails(_: object) -> None:
        raise OSError("device busy")

    bench.engine.move_cells = fails  # type: ignore[method-assign]
    seq = bench.submit([*old[:5], *old[20:]], n_predict=5, n_cache_reuse=10)
    bench.drain()
    assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_a_device_that_cannot_move_says_so() -> None:
    bench = Bench(n_slots=1)
    bench.engine.moves_cells = False
    with pytest.raises(InvalidRequest, match="n_cache_reuse: this device cannot move cells"):
        bench.submit([1, 2], n_cache_reuse=1)

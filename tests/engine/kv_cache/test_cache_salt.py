"""Cache salts: requests with different ones share no cached prefix, slot, draft or file."""

from __future__ import annotations

from typing import Any

import pytest

from logitless.engine.kv_cache.slot_actions import erase, fork, install, snapshot, tokens_of
from logitless.engine.kv_cache.slot_files import SlotFileState, load, owner_of, save
from logitless.engine.speculation.ngram import ModDrafter, ModTable
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from tests.helpers.scheduler_checks import check_cells, check_pages
from tests.helpers.scheduler_fakes import Bench, prompt

A, B = "a/", "b/"


@pytest.mark.parametrize("settings", [{}, {"cache_ram": None, "n_ctx": 96}], ids=["device", "host memory"])
def test_a_prefix_is_found_with_its_own_salt_only(settings: dict[str, Any]) -> None:
    bench = Bench(n_slots=2, **settings)
    salts = ("", A, B, "a/x", "b/x", "a", "/")
    answers = {salt: bench.run(prompt(40), n_predict=3, cache_salt=salt) for salt in salts}
    assert {salt: answer.finished.n_cached for salt, answer in answers.items()} == dict.fromkeys(salts, 0)
    assert len({tuple(answer.ids) for answer in answers.values()}) == 1  # the text does not depend on it
    for salt in salts:
        assert bench.run(prompt(40), n_predict=1, cache_salt=salt).finished.n_cached >= 32  # its full blocks
    check_pages(bench.scheduler)
    check_cells(bench.scheduler, bench.engine)


def test_prefixes_of_weights_that_change_take_no_host_memory() -> None:
    """A training run's answers, a salt after each step: nobody will ask for them again."""
    bench = Bench(n_slots=2, cache_ram=None, n_ctx=96)
    prefixes = bench.scheduler.cache.prefixes
    kept = [prefixes.root_of(BASE, A, transient=True), prefixes.root_of(BASE, B)]
    for salt in (A, B, "", "c/", "d/"):
        bench.run(prompt(40), n_predict=3, cache_salt=salt)
    assert [root.transient for root in kept] == [True, False]
    assert [bench.run(prompt(40), n_predict=1, cache_salt=salt).finished.n_cached > 0 for salt in (A, B)] == [
        False,
        True,
    ]


def test_requests_that_run_side_by_side() -> None:
    bench = Bench(n_slots=4)
    seqs = [bench.submit(prompt(60), n_predict=2, cache_salt=salt) for salt in (A, B, A)]
    bench.drain()
    assert [bench.answers[seq].finished.n_cached for seq in seqs] == [0, 0, 59]


def test_a_salt_and_an_adapter_count_both() -> None:
    bench = Bench()
    prefixes = bench.scheduler.cache.prefixes
    tuned = AdapterChoice(0, ((1, 0.5),))
    roots = [prefixes.root_of(choice, salt) for choice in (BASE, tuned) for salt in ("", A, B)]
    assert len({id(root) for root in roots}) == len({root.key for root in roots}) == 6
    assert prefixes.root_of(tuned, A) is roots[4]


@pytest.mark.parametrize("n_cache_reuse", [0, 8])
def test_a_named_slot_of_another_salt_gives_nothing(n_cache_reuse: int) -> None:
    bench = Bench(n_slots=2)
    bench.run(prompt(60), n_predict=1, cache_salt=A, id_slot=1)
    other = [9, 9, *prompt(60)]
    for tokens in (prompt(60), other):
        request: dict[str, Any] = {"n_predict": 1, "id_slot": 1, "n_cache_reuse": n_cache_reuse}
        assert bench.run(tokens, cache_salt=B, **request).finished.n_cached == 0
        bench.run(prompt(60), n_predict=1, cache_salt=A, id_slot=1)


def test_a_similar_prompt_of_another_salt_does_not_choose_the_slot() -> None:
    for salt, id in ((A, 0), (B, 1)):
        bench = Bench(n_slots=2)
        bench.run(prompt(60), n_predict=1, cache_salt=A, id_slot=0)
        assert bench.run([*prompt(60), 5], n_predict=1, cache_salt=salt).finished.id_slot == id  # B: the idle one


def test_slots_of_another_owner_look_empty() -> None:
    bench = Bench(n_slots=3)
    scheduler = bench.scheduler
    answer = bench.run(prompt(40), n_predict=3, cache_salt="a/x", id_slot=0, ignore_eos=True)
    tokens = (*prompt(40), *answer.ids)
    for owner, known in (("a", tokens), (None, tokens), ("b", ()), ("", ()), ("a/x", ())):
        assert tokens_of(scheduler, 0, owner) == known
        assert len(snapshot(scheduler, 0, owner=owner).tokens) == (42 if known else 0)
    assert (erase(scheduler, 0, "b"), fork(scheduler, 0, 1, "b"), tokens_of(scheduler, 1, "b")) == (0, 0, ())
    assert fork(scheduler, 0, 1, "a") == 42
    assert tokens_of(scheduler, 1, "b") == ()
    assert bench.run(prompt(40), n_predict=1, cache_salt="a/x", id_slot=1).finished.n_cached == 39
    assert erase(scheduler, 0, "a") == 42
    bench.run(prompt(20, 7), n_predict=1, cache_salt=B, id_slot=0)  # another owner takes the place
    assert (tokens_of(scheduler, 0, "a"), len(tokens_of(scheduler, 0, "b"))) == ((), 21)


def test_a_request_that_never_began_shows_nothing_of_itself() -> None:
    bench = Bench(n_slots=1)
    bench.run(prompt(20), n_predict=1, cache_salt=A)
    slot = bench.scheduler.slots[0]
    waiting = bench.submit([*prompt(21), 5, 6], cache_salt=B)
    slot.sequence, waiting.done = waiting, True  # as a sequence that fails when it is seated leaves it
    assert (tokens_of(bench.scheduler, 0, "a"), tokens_of(bench.scheduler, 0, "b")) == ((), ())


def test_a_file_is_its_owners(tmp_path: Any) -> None:
    bench = Bench(n_slots=2)
    bench.run(prompt(40), n_predict=1, cache_salt="a/x", id_slot=0)
    state = snapshot(bench.scheduler, 0, owner="a")
    assert state.salt == "x"
    kind = bench.scheduler.engine.cache_kind
    save(tmp_path, "f", kind, SlotFileState(state.tokens, state.blocks, salt=state.salt, owner="a"))
    (tmp_path / "g").write_bytes(b"logitless slot\0\0garbage")
    assert [owner_of(tmp_path, name) for name in ("f", "g", "none")] == ["a", "", None]
    loaded, _ = load(tmp_path, "f", kind, 1024)
    for owner in ("b", "a"):
        install(bench.scheduler, 1, loaded, owner=owner)
        assert bench.run(prompt(40), n_predict=1, cache_salt=f"{owner}/x", id_slot=1).finished.n_cached == 39
        assert tokens_of(bench.scheduler, 1, "c") == ()


def test_ngram_mod_drafts_from_texts_of_its_own_salt() -> None:
    table, text = ModTable(3), list(range(20))
    ModDrafter(table, 1, 5, A).propose(text, 99)
    assert ModDrafter(table, 1, 5, A).propose([7, 3, 4, 5], 99) == [6, 7, 8, 9, 10]
    for salt in (B, ""):
        assert ModDrafter(table, 1, 5, salt).propose([7, 3, 4, 5], 99) == []

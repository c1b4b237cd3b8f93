"""Slot actions (save, restore, fork, erase) on a device that checks every KV cell."""

from __future__ import annotations

import numpy as np
import pytest

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.errors import InvalidRequest, ServerFault, Unavailable
from logitless.engine.kv_cache.slot_actions import erase, fork, install, snapshot
from logitless.engine.kv_cache.slot_files import AdapterNames, SlotFileState
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from tests.helpers.scheduler_checks import check_cells, check_pages
from tests.helpers.scheduler_fakes import N_VOCAB, Bench, oracle, prompt


@pytest.mark.parametrize("n", [1, 15, 16, 40, 80])
def test_a_state_moves_to_another_scheduler(n: int) -> None:
    first, second = Bench(n_slots=2), Bench(n_slots=3)
    answer = first.run(prompt(n), n_predict=5, ignore_eos=True, id_slot=1)
    state = snapshot(first.scheduler, 1)
    tokens = prompt(n) + answer.ids
    assert state.tokens == tokens[:-1]  # the last token has not been computed
    install(second.scheduler, 2, state)
    check_pages(second.scheduler)
    check_cells(second.scheduler, second.engine)
    seq = second.submit(tokens, n_predict=20, id_slot=2)
    second.drain()
    assert second.answers[seq].outcome() == oracle(seq.request, 1024)
    assert second.answers[seq].finished.n_cached == len(tokens) - 1


def test_slot_partly_in_host_memory_is_saved_whole() -> None:
    bench = Bench(n_slots=2, n_ctx=192, cache_ram=None)
    bench.run(prompt(100), n_predict=1, id_slot=0)
    bench.run(prompt(100, 1), n_predict=1, id_slot=1)
    state = snapshot(bench.scheduler, 0)
    assert 96 <= len(state.tokens) <= 100
    other = Bench()
    install(other.scheduler, 0, state)
    check_cells(other.scheduler, other.engine)


def test_evicted_tokens_are_not_saved() -> None:
    bench = Bench(n_slots=2, n_ctx=192)
    bench.run(prompt(100), n_predict=1, id_slot=0)
    bench.run(prompt(130, 1), n_predict=1, id_slot=1)
    assert len(snapshot(bench.scheduler, 0).tokens) == 48
    bench.run(prompt(190, 2), n_predict=1, id_slot=1)
    assert snapshot(bench.scheduler, 0) == SlotFileState([], [])


def test_a_state_that_is_refused_changes_nothing() -> None:
    bench = Bench(n_slots=2, n_ctx=128)
    bench.run(prompt(40), n_predict=1, id_slot=0)
    before = snapshot(bench.scheduler, 0)
    state = SlotFileState(prompt(100, 3), [np.zeros(BLOCK_SIZE * 16, np.uint8)] * 7)
    with pytest.raises(InvalidRequest, match="has 129 tokens, slot 0 has room for 128"):
        install(bench.scheduler, 0, SlotFileState([1] * 129, []))
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        install(bench.scheduler, 0, SlotFileState([N_VOCAB], state.blocks[:1]))
    busy = bench.submit(prompt(20, 1), id_slot=1, ignore_eos=True)
    bench.step(2)
    with pytest.raises(Unavailable, match="too few KV blocks: the state needs 7"):
        install(bench.scheduler, 0, state)
    for action in (lambda: install(bench.scheduler, 1, before), lambda: snapshot(bench.scheduler, 1)):
        with pytest.raises(Unavailable, match="slot 1 is processing"):
            action()

    def fails(*_: object) -> None:
        raise OSError("device lost")

    bench.engine.full_kv.write = fails  # type: ignore[method-assign]
    with pytest.raises(ServerFault, match="slot 0 cannot be restored: device lost"):
        install(bench.scheduler, 0, SlotFileState(state.tokens[:30], state.blocks[:2]))
    check_pages(bench.scheduler)
    assert snapshot(bench.scheduler, 0).tokens == before.tokens
    bench.engine.full_kv.read = fails  # type: ignore[method-assign]
    with pytest.raises(ServerFault, match="slot 0 cannot be saved: device lost"):
        snapshot(bench.scheduler, 0)
    bench.scheduler.cancel(busy)
    for id in (-1, 2):
        with pytest.raises(InvalidRequest, match="id_slot"):
            erase(bench.scheduler, id)


@pytest.mark.parametrize(("n", "n_other", "erased"), [(40, 40, 0), (43, 40, 0), (32, 32, 1)])
def test_erased_prefix_stays_with_other_slot(n: int, n_other: int, erased: int) -> None:
    """The first one's page goes on behind the other's, or not; or all their pages are full."""
    bench = Bench(n_slots=2)
    bench.run(prompt(n), n_predict=1, id_slot=0)
    bench.run(prompt(n_other), n_predict=1, id_slot=1, cache_prompt=False)
    erase(bench.scheduler, erased)
    assert snapshot(bench.scheduler, 1 - erased).tokens == prompt(n_other)


def test_a_fork_shares_its_pages() -> None:
    bench = Bench(n_slots=3)
    bench.run(prompt(40), n_predict=3, id_slot=0)
    n_used = bench.scheduler.cache.pool.n_used
    assert fork(bench.scheduler, 0, 2) == 42
    assert bench.scheduler.cache.pool.n_used == n_used
    erase(bench.scheduler, 0)
    assert bench.run([*prompt(40), 1], n_predict=1, id_slot=2).finished.n_cached == 40
    assert bench.run(prompt(40), n_predict=1, id_slot=0).finished.n_cached == 0
    erase(bench.scheduler, 0)
    erase(bench.scheduler, 2)
    assert bench.scheduler.cache.pool.n_used == 0


def test_a_fork_of_what_is_in_host_memory() -> None:
    bench = Bench(n_slots=2, n_ctx=96, cache_ram=None)
    bench.run(prompt(64), n_predict=1, id_slot=0)
    bench.run(prompt(90, 1), n_predict=1, id_slot=1)
    fork(bench.scheduler, 0, 1)
    erase(bench.scheduler, 0)
    assert bench.run(prompt(64), n_predict=1, id_slot=1).finished.n_cached >= 48


class Named:
    """Stands for logitless.engine.adapters.Adapters: handles are named by their number and more."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def names(self, choice: AdapterChoice) -> AdapterNames:
        return tuple((str(handle + self.shift), scale) for handle, scale in choice.mix)

    def choice_of(self, names: AdapterNames) -> AdapterChoice:
        if any(int(name) < self.shift for name, _ in names):
            raise InvalidRequest("not loaded here")
        return AdapterChoice(mix=tuple((int(name) - self.shift, scale) for name, scale in names))


def test_a_state_of_adapters_goes_where_they_are() -> None:
    first, second = Bench(n_slots=2), Bench(n_slots=2)
    first.scheduler.resolve_lora = lambda lora: AdapterChoice(mix=((7, 0.5),)) if lora else BASE
    second.scheduler.resolve_lora = lambda lora: AdapterChoice(mix=((4, 0.5),)) if lora else BASE
    first.run(prompt(40), n_predict=1, id_slot=0, lora=((0, 0.5),))
    state = snapshot(first.scheduler, 0, Named(0))  # type: ignore[arg-type]
    assert (state.adapters, len(state.tokens)) == ((("7", 0.5),), 40)
    second.run(prompt(30, 5), n_predict=1, id_slot=1)
    for adapters in (None, Named(8)):
        with pytest.raises(InvalidRequest, match=r"adapters, and this server has none|not loaded here"):
            install(second.scheduler, 1, state, adapters)  # type: ignore[arg-type]
    assert snapshot(second.scheduler, 1).tokens == prompt(30, 5)
    install(second.scheduler, 1, state, Named(3))  # type: ignore[arg-type]
    check_pages(second.scheduler)
    again = snapshot(second.scheduler, 1, Named(3))  # type: ignore[arg-type]
    assert (again.tokens, again.adapters) == (state.tokens, state.adapters)
    assert second.run(prompt(40), n_predict=1, id_slot=1, lora=((0, 0.5),)).finished.n_cached == 39
    assert second.run(prompt(40), n_predict=1).finished.n_cached == 0


def test_cells_of_an_adapter_are_not_the_models_own() -> None:
    bench = Bench(n_slots=2, cache_ram=None)
    bench.scheduler.resolve_lora = lambda lora: AdapterChoice(mix=((1, 0.5),)) if lora else BASE
    bench.run(prompt(40), n_predict=1, id_slot=0, lora=((0, 0.5),))
    with pytest.raises(InvalidRequest, match="slot 0 was computed with adapters"):
        snapshot(bench.scheduler, 0)
    assert fork(bench.scheduler, 0, 1) == 40
    assert bench.run(prompt(40), n_predict=1, id_slot=1, lora=((0, 0.5),)).finished.n_cached == 39
    assert bench.run(prompt(40), n_predict=1, id_slot=1).finished.n_cached == 0
    assert len(snapshot(bench.scheduler, 1).tokens) == 40


def test_sequences_of_other_weights_have_device_runs_of_their_own() -> None:
    bench = Bench(n_slots=4)
    bench.scheduler.resolve_lora = lambda lora: AdapterChoice(weights=lora[0][0]) if lora else BASE
    asked = [(prompt(20 + 9 * i), ((i % 2 + 1, 1.0),) if i % 3 else None) for i in range(6)]
    sequences = [bench.submit(tokens, n_predict=12, ignore_eos=True, lora=lora) for tokens, lora in asked]
    used = set()
    while not bench.scheduler.idle:
        before = len(bench.engine.batches)
        bench.step()
        running = {seq.slot.id: seq.choice.weights for seq in bench.scheduler.running if seq.slot is not None}
        for batch in bench.engine.batches[before:]:
            assert {running.get(slot, batch.weights) for slot in batch.slot} == {batch.weights}
            used.add(batch.weights)
        assert len(bench.engine.batches) - before <= 3  # a run for each of the weights, and nobody waits
    assert used == {0, 1, 2}
    for seq in sequences:
        assert bench.answers[seq].ids == oracle(seq.request, 1024)[0]
    longest = {1: 56, 2: 65, 3: 0}  # prompts that were computed by these weights; they all begin alike
    for w, n in longest.items():
        assert bench.run(prompt(n or 38), n_predict=1, lora=((w, 1.0),)).finished.n_cached == max(0, n - 1)

"""Host cache: KV blocks move to host memory before eviction, while the engine is idle."""

from __future__ import annotations

import pytest

from logitless.engine.kv_cache.host_cache import HostCache
from logitless.engine.requests import CompletionRequest
from tests.helpers.scheduler_fakes import Bench, FakePages, oracle, prompt

PAGE_NBYTES = FakePages.nbytes


@pytest.fixture(autouse=True)
def six_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.engine.kv_cache.manager.AHEAD", 6 * PAGE_NBYTES)


def host_of(bench: Bench) -> HostCache:
    host = bench.scheduler.cache.host
    assert host is not None
    return host


def full(cache_ram: int | None = None) -> Bench:
    """Two prompts have left all twelve pages but one known; the oldest are the first's."""
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=cache_ram)
    bench.run(prompt(118, 0), n_predict=2, ignore_eos=True)
    bench.run(prompt(46, 1), n_predict=2, ignore_eos=True)
    assert len(bench.scheduler.cache.pool.free) == 1
    assert not len(host_of(bench))
    return bench


def test_pages_to_evict_are_saved_in_idle_time() -> None:
    """As much as is said of it, less what is free; no step reads it then, and it comes back with what it had."""
    bench = full()
    cache, host = bench.scheduler.cache, host_of(bench)
    bench.scheduler.prepare_ahead(lambda: False)
    assert len(host) == bench.engine.full_kv.n_read == 4  # the oldest five, whose first is not full
    bench.scheduler.prepare_ahead(lambda: False)
    assert bench.engine.full_kv.n_read == 4
    bench.run(prompt(94, 2), n_predict=1)  # six pages: the free one, and those five
    assert bench.engine.full_kv.n_read == 4
    assert len(cache.pool.free) == 0
    answer = bench.run(prompt(118, 0), n_predict=5, ignore_eos=True)
    assert answer.finished.n_cached > 96
    assert answer.ids == oracle(CompletionRequest(tuple(prompt(118, 0)), n_predict=5, ignore_eos=True), 192)[0]


def test_saving_ahead_stops_when_a_request_waits() -> None:
    bench, looks = full(), []
    bench.scheduler.prepare_ahead(lambda: bool(looks.append(1)) or len(looks) > 3)
    assert len(host_of(bench)) == 2  # the third look was for the third of them, and the first is not full


def test_nothing_has_to_go_for_it() -> None:
    bench = full(cache_ram=3 * PAGE_NBYTES)
    bench.scheduler.prepare_ahead(lambda: False)
    assert host_of(bench).nbytes == 3 * PAGE_NBYTES
    bench.scheduler.prepare_ahead(lambda: False)
    assert bench.engine.full_kv.n_read == 3


def test_nothing_is_saved_while_there_are_free_pages() -> None:
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=None)
    bench.run(prompt(70, 0), n_predict=2, ignore_eos=True)
    bench.scheduler.prepare_ahead(lambda: False)
    assert not len(host_of(bench))


def test_pages_that_have_nothing_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose layers all keep states."""
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=10_000, n_states=5)
    monkeypatch.setattr(FakePages, "nbytes", 0)
    for salt in range(3):
        bench.run(prompt(120, salt), n_predict=2, ignore_eos=True)
    saved = len(host_of(bench))
    bench.scheduler.prepare_ahead(lambda: False)
    assert len(host_of(bench)) == saved


def test_nothing_is_saved_where_nothing_is_kept() -> None:
    for options in ({"cache_ram": 0}, {"cache_ram": None, "cache_idle_slots": False}):
        bench = Bench(n_slots=1, n_ctx=192, **options)
        for salt in range(2):
            bench.run(prompt(100, salt), n_predict=2, ignore_eos=True)
        read = bench.engine.full_kv.n_read
        bench.scheduler.prepare_ahead(lambda: False)
        assert bench.engine.full_kv.n_read == read

"""Host memory for pages of the cache, taken from the system before a step needs it."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_fakes import Bench, FakePages, oracle, prompt

from server.host_cache import HostCache
from server.requests import CompletionRequest

PAGE_NBYTES = FakePages.nbytes


def stocked(cache: HostCache) -> set[int]:
    return {page.ctypes.data for page in cache._spare}


def test_the_stock_is_bounded_by_its_size_and_by_the_limit() -> None:
    cache = HostCache(None)
    cache.stock(3, 300, lambda: False)
    cache.stock(3, 300, lambda: False)
    assert len(stocked(cache)) == 3
    small = HostCache(700)
    small.put(b"a", 1, np.zeros(300, np.uint8))
    small.stock(3, 300, lambda: False)
    assert len(stocked(small)) == 1
    small.put(b"b", 1, small.room(300))
    small.stock(3, 300, lambda: False)
    assert not stocked(small)
    assert small.nbytes == 600


def test_who_waits_is_not_kept_waiting() -> None:
    cache, looks = HostCache(None), []
    cache.stock(3, 300, lambda: bool(looks.append(1)) or len(looks) > 2)
    assert len(stocked(cache)) == 2


def test_room_is_what_was_stocked_then_new() -> None:
    cache = HostCache(1000)
    cache.stock(3, 300, lambda: False)
    laid_in = stocked(cache)
    rooms = [cache.room(300) for _ in range(5)]
    assert {room.ctypes.data for room in rooms[:3]} == laid_in
    assert [room.nbytes for room in rooms] == [300] * 5
    assert len({room.ctypes.data for room in rooms}) == 5


def test_prefixes_that_others_take_the_place_of_go_to_the_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come back with what they had."""
    monkeypatch.setattr("server.kv_cache.SPARE", 4 * PAGE_NBYTES)
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=None)
    cache = bench.scheduler.cache
    assert cache.host is not None
    cache.prepare_ahead(lambda: False)
    assert not stocked(cache.host)  # there are free pages for a while
    bench.run(prompt(120, 0), n_predict=2, ignore_eos=True)
    bench.run(prompt(30, 1), n_predict=2, ignore_eos=True)
    cache.prepare_ahead(lambda: False)
    laid_in = stocked(cache.host)
    assert len(laid_in) == 4
    bench.run(prompt(120, 2), n_predict=2, ignore_eos=True)
    assert not stocked(cache.host)
    assert laid_in <= {data.ctypes.data for _, data in cache.host._pages.values()}
    answer = bench.run(prompt(120, 0), n_predict=5, ignore_eos=True)
    assert answer.finished.n_cached > 64
    assert answer.ids == oracle(CompletionRequest(tuple(prompt(120, 0)), n_predict=5, ignore_eos=True), 192)[0]


def test_nothing_is_laid_in_for_pages_that_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose layers all keep states."""
    bench = Bench(n_slots=1, n_ctx=192, cache_ram=10_000, n_states=5)
    for salt in range(3):
        bench.run(prompt(120, salt), n_predict=2, ignore_eos=True)
    cache = bench.scheduler.cache
    assert cache.host is not None
    monkeypatch.setattr(FakePages, "nbytes", 0)
    cache.prepare_ahead(lambda: False)
    assert not stocked(cache.host)


def test_nothing_is_laid_in_where_nothing_is_kept() -> None:
    for options in ({"cache_ram": 0}, {"cache_ram": None, "cache_idle_slots": False}):
        bench = Bench(n_slots=1, n_ctx=192, **options)
        bench.scheduler.cache.prepare_ahead(lambda: False)
        host = bench.scheduler.cache.host
        assert host is None or not stocked(host)

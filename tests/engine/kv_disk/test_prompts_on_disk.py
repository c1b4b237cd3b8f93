"""Prompts on disk: a scheduler goes on from blocks of an earlier one, to the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.recurrent_state import RecurrentStates
from logitless.engine.kv_cache.slot_actions import erase, snapshot
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.engine.sequence import Sequence
from tests.helpers.scheduler_fakes import Bench, FakePages, asked, oracle, prompt

LONG = 30.0
OF_MODELS: dict[str, dict[str, Any]] = {
    "attention": {},
    "recurrent": {"n_states": 9},
    "window": {"window": (40, 2), "n_ubatch": 32},
}


class Disk:
    """Benches on one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.benches = folder, list[Bench]()

    def bench(self, **options: Any) -> Bench:
        cache = DiskCache(self.folder, 1 << 20, lambda _: b"s" * 16)
        cache.settle(LONG)
        self.benches.append(Bench(**{"n_slots": 1, "n_ctx": 256, "cache_ram": 0, "disk": cache, **options}))
        return self.benches[-1]

    def stop(self) -> None:
        """Stop the last bench as a server is stopped."""
        self.benches[-1].scheduler.cache.flush(cache_of(self.benches[-1]), LONG)


def cache_of(bench: Bench) -> DiskCache:
    cache = bench.scheduler.config.disk
    assert cache is not None
    return cache


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    for bench in disk.benches:
        cache_of(bench).close(LONG)


@pytest.mark.parametrize("cache_ram", [0, 3 * FakePages.nbytes, None])
@pytest.mark.parametrize("model", OF_MODELS)
def test_a_restarted_server_knows_as_much_as_one_that_runs_on(disk: Disk, model: str, cache_ram: int | None) -> None:
    runs_on = Bench(n_slots=1, n_ctx=2048, **{**OF_MODELS[model], **({"n_states": 99} if model == "recurrent" else {})})
    first = disk.bench(cache_ram=cache_ram, **OF_MODELS[model])
    for i in range(1, 4):  # the first ones leave the device, the last one is flushed
        assert asked(first, [i, *prompt(150)], 5) == asked(runs_on, [i, *prompt(150)], 5) == 0
    disk.stop()
    second = disk.bench(cache_ram=cache_ram, **OF_MODELS[model])
    for i in (3, 1):
        known = asked(second, [i, *prompt(150), 3, 4])
        assert 128 <= known == asked(runs_on, [i, *prompt(150), 3, 4]) // BLOCK_SIZE * BLOCK_SIZE
    assert cache_of(second).n_restored > 0
    assert asked(second, [4, *prompt(150)]) == 0


def test_salts_share_no_file(disk: Disk) -> None:
    asked(disk.bench(), prompt(100), cache_salt="a/")
    disk.stop()
    second = disk.bench()
    assert [asked(second, prompt(100), cache_salt=salt) for salt in ("", "b/", "a/x", "a/")] == [0, 0, 0, 96]


def test_an_erased_slot_leaves_no_file_of_its_text(disk: Disk) -> None:
    for model in OF_MODELS.values():
        asked(disk.bench(**model), prompt(100), 5)
        disk.stop()
        second = disk.bench(**model)
        assert asked(second, [*prompt(100), 3]) > 0
        assert erase(second.scheduler, 0) > 0
        disk.stop()
        assert asked(disk.bench(**model), [*prompt(100), 3]) == 0


def test_weights_that_change_are_not_written(disk: Disk) -> None:
    """A training run's answers."""
    bench = disk.bench()
    root = bench.scheduler.cache.prefixes.root_of(bench.scheduler.resolve_lora(None), "run", transient=True)
    asked(bench, prompt(100), cache_salt="run")
    assert root.transient
    disk.stop()
    assert cache_of(bench).n_saved == 0


def test_a_lost_device_switches_the_disk_off(disk: Disk) -> None:
    asked(disk.bench(), prompt(100))
    disk.stop()
    second = disk.bench()
    second.engine.lost = True
    second.run(prompt(100), n_predict=3)
    assert asked(second, prompt(100)) in (0, 96, 99)  # of its own
    disk.stop()
    assert (cache_of(second).n_saved, b"x" in cache_of(second)) == (0, False)


def test_a_file_that_goes_while_it_is_needed_is_computed_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(disk.bench(), prompt(100))
    disk.stop()
    second = disk.bench()
    with monkeypatch.context() as patched:
        patched.setattr(DiskCache, "__contains__", lambda self, key: True)
        patched.setattr(DiskCache, "_read", lambda self, key: None)
        assert asked(second, prompt(100)) == 0
        second.scheduler.slots[0].cached = prompt(200)
        with pytest.raises(Exception, match="slot 0 cannot be saved: a file of --cache-disk has gone"):
            snapshot(second.scheduler, 0)


@pytest.mark.parametrize("model", OF_MODELS)
def test_a_long_prefix_is_read_in_pieces_between_the_steps_of_others(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    options = OF_MODELS[model]
    monkeypatch.setattr("logitless.engine.kv_cache.manager.DISK_PIECE", 3 * FakePages.nbytes)
    asked(disk.bench(**options), prompt(200), 5)
    disk.stop()
    second = disk.bench(n_slots=2, **{**options, "n_states": 2 * options.get("n_states", 0)})
    other = second.submit(prompt(20, 7), n_predict=30, ignore_eos=True)
    second.step(3)
    seq = second.submit([*prompt(200), 3], n_predict=4, ignore_eos=True)
    read = [cache_of(second).nbytes_read]
    while not seq.started:
        second.step()
        read.append(cache_of(second).nbytes_read)
    assert len(read) > 4
    assert max(b - a for a, b in itertools.pairwise(read)) <= 7 * FakePages.nbytes
    second.drain()
    assert tokens_are_right(second, seq, other)
    assert second.answers[seq].finished.n_cached >= 192
    assert second.answers[other].finished.n_cached == 0


def test_a_state_that_the_device_cannot_take_is_not_read_again_and_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RecurrentStates, *_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("logitless.engine.kv_cache.manager.DISK_PIECE", 1)
    asked(disk.bench(n_states=9), prompt(64), 5)
    disk.stop()
    second = disk.bench(n_slots=2, n_states=18)
    other = second.submit(prompt(20, 7), n_predict=60, ignore_eos=True)
    second.step(3)
    monkeypatch.setattr(RecurrentStates, "put", full)
    seq = second.submit([*prompt(64), 3], n_predict=4, ignore_eos=True)
    second.step(12)
    assert seq.done
    assert not other.done
    second.drain()
    assert tokens_are_right(second, seq, other)


def tokens_are_right(bench: Bench, *seqs: Sequence) -> bool:
    return all(bench.answers[seq].outcome() == oracle(seq.request, bench.scheduler.slots[0].n_ctx) for seq in seqs)

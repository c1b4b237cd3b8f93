"""Block events: a router that follows them has the cache's content at any time."""

from __future__ import annotations

import random
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.engine.kv_events.block_events import (
    AllBlocksCleared,
    BlockEvents,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    merged,
)
from logitless.engine.requests import CompletionRequest
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from tests.helpers.scheduler_fakes import Answer, Bench, prompt


def hashes(tokens: list[int], root: bytes = b"") -> list[int]:
    """Hashes of the full blocks of a text, from the definition in docs/operations.md."""
    result, key = [], root
    for start in range(0, len(tokens) - 15, 16):
        key = blake2b(key + pack("<16i", *tokens[start : start + 16]), digest_size=16).digest()
        result.append(int.from_bytes(key[8:], "big"))
    return result


class Router:
    """What a subscriber knows: blocks by medium and hash, with the tokens of their prefixes."""

    def __init__(self, bench: Bench, **more: Any) -> None:
        self.events: list[Event] = []
        self.blocks: dict[str, dict[int, tuple[int, ...]]] = {"GPU": {}, "CPU": {}}
        self._n_read = 0
        BlockEvents(self.events.append, **more).attach(bench.scheduler.cache)

    def read(self) -> list[Event]:
        """Follow the events since the last time."""
        raw = msgspec.msgpack.encode(EventBatch(0.0, merged(self.events[self._n_read :]), 0))
        batch: list[Event] = msgspec.msgpack.decode(raw, type=EventBatch).events
        self._n_read = len(self.events)
        for event in batch:
            if isinstance(event, AllBlocksCleared):
                self.blocks = {"GPU": {}, "CPU": {}}
            elif isinstance(event, BlockRemoved):
                for hash in event.block_hashes:
                    del self.blocks[str(event.medium)][hash]
            else:
                self._store(event)
        return batch

    def _store(self, event: BlockStored) -> None:
        before: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            known = self.blocks["GPU"] | self.blocks["CPU"]
            before = known[event.parent_block_hash]
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for i, hash in enumerate(event.block_hashes):
            before += tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            assert hash not in self.blocks[str(event.medium)]
            self.blocks[str(event.medium)][hash] = before


def prefixes(bench: Bench) -> set[tuple[int, ...]]:
    """Texts up to the ends of the full blocks that the device has."""

    def text(node: Node) -> tuple[int, ...]:
        return () if node.parent is None else text(node.parent) + node.tokens

    return {text(node) for node in bench.scheduler.cache.prefixes.nodes if len(node.tokens) == BLOCK_SIZE}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_ram": None},
        {"cache_ram": 5 * BLOCK_SIZE * 16},
        {"cache_ram": None, "cache_idle_slots": False},
        {"disk": True},
        {"cache_ram": 5 * BLOCK_SIZE * 16, "disk": True},
    ],
    ids=["device", "host", "little host", "preempted only", "disk", "little host and disk"],
)
def test_a_router_knows_what_is_cached(options: dict[str, Any], tmp_path: Path) -> None:
    """Also while blocks are evicted, offloaded and restored, sequences preempted, and the device lost.

    What is only on disk is nobody's to know: other processes may delete it."""
    disk = DiskCache(tmp_path, 1 << 20, lambda _: b"s" * 16) if "disk" in options else None
    options = options | {"disk": disk}
    bench, rng = Bench(n_slots=3, n_ctx=160, **options), random.Random(5)
    router = Router(bench)
    for turn in range(60):
        length, salt = rng.randint(1, 90), rng.randint(0, 3)
        bench.submit(prompt(length, salt), n_predict=rng.randint(1, 30), ignore_eos=True)
        bench.step(rng.randint(1, 12))
        if turn == 40:
            bench.engine.lost = True
        if turn == 50:
            bench.drain()
            bench.scheduler.cache.sleep()
        router.read()
        assert set(router.blocks["GPU"].values()) == prefixes(bench)
        for medium in router.blocks.values():
            assert all(hashes(list(text))[-1] == hash for hash, text in medium.items())
        host = bench.scheduler.cache.host
        assert len(router.blocks["CPU"]) == (0 if host is None else len(host))
    assert bench.scheduler.stats.preemptions > 0
    assert sum(isinstance(event, AllBlocksCleared) for event in router.events) == 2  # at the start, and the loss
    if disk is not None:
        disk.close()


def test_a_hash_is_the_same_after_eviction_offload_and_another_request() -> None:
    bench = Bench(n_slots=1, n_ctx=96, cache_ram=None)
    router, first = Router(bench), prompt(64, 0)
    bench.run(first, n_predict=1)
    router.read()
    expected = hashes(first)[:4]
    assert list(router.blocks["GPU"]) == expected
    bench.run(prompt(90, 1), n_predict=1)  # takes its blocks
    router.read()
    assert set(expected) & set(router.blocks["GPU"]) != set(expected)
    assert set(expected) <= set(router.blocks["GPU"]) | set(router.blocks["CPU"])
    bench.run([*first, 1, 2], n_predict=1)
    router.read()
    assert set(expected) <= set(router.blocks["GPU"])


def test_blocks_computed_in_one_step_are_one_event() -> None:
    bench = Bench(n_slots=1)
    router = Router(bench)
    bench.run(tokens := prompt(70), n_predict=1)
    assert router.read() == [AllBlocksCleared(), BlockStored(hashes(tokens), None, tokens[:64], 16, None, "GPU", None)]


def test_adapters_and_salts_have_hashes_of_their_own() -> None:
    """By the adapters' weights, not by handles, which depend on the order of loading."""
    tuned = AdapterChoice(0, ((7, 0.5),))
    bench = Bench(n_slots=1)
    router = Router(bench, label=lambda choice: ((("digest", choice.mix[0][1]),), "poet:0.5"))
    tokens = prompt(17)
    for choice, salt in ((BASE, ""), (tuned, ""), (BASE, "a/secret"), (tuned, "a/secret")):
        request = CompletionRequest(tuple(tokens), n_predict=1, cache_salt=salt)
        bench.answers[bench.scheduler.submit(request, choice=choice)] = Answer()
        bench.drain()
    stored = [event for event in router.read() if isinstance(event, BlockStored)]
    assert [event.lora_name for event in stored] == [None, "poet:0.5", None, "poet:0.5"]
    assert [event.extra_keys is None for event in stored] == [True, True, False, False]
    assert stored[2].extra_keys == stored[3].extra_keys
    assert "secret" not in str(stored)
    root = blake2b(repr(((("digest", 0.5),), "")).encode(), digest_size=16).digest()
    assert stored[0].block_hashes == hashes(tokens)
    assert stored[1].block_hashes == hashes(tokens, root)
    assert len({event.block_hashes[0] for event in stored}) == 4


def test_images_and_moved_blocks_are_not_told() -> None:
    bench = Bench(n_slots=1)
    router, prefixes = Router(bench), bench.scheduler.cache.prefixes
    node = prefixes.root
    for tokens in (prompt(16), [-5] * 16, prompt(16)):
        node = prefixes.insert(node, tuple(tokens), prefixes.allocate(), 1)
    prefixes.insert(prefixes.root, (-1, *prompt(16)), prefixes.allocate(), 1)
    assert [len(event.block_hashes) for event in router.read() if isinstance(event, BlockStored)] == [1]


def test_another_process_has_the_same_hashes() -> None:
    """One that has loaded the adapters in another order, so that their handles differ."""

    def run(handle: int) -> list[Event]:
        bench = Bench(n_slots=1)
        router = Router(bench, label=lambda choice: ((("digest", 1.0),), "poet"))
        request = CompletionRequest(tuple(prompt(40)), n_predict=1, cache_salt="x")
        bench.answers[bench.scheduler.submit(request, choice=AdapterChoice(0, ((handle, 1.0),)))] = Answer()
        bench.drain()
        return router.read()

    assert run(1) == run(2)

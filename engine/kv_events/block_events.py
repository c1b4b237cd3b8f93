"""Block events: messages about cached KV blocks, and the listener that makes them of cache changes.

The messages are vLLM's (vllm/distributed/kv_events.py), as MessagePack arrays. A block's hash is
made of the hash before it and the block's tokens, so it is the same after preemption, offload and
restart, and in every replica."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from msgspec import Struct

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.host_cache import chain_key
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.kv_cache.slot_files import AdapterNames
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice

DEVICE, HOST = "GPU", "CPU"  # vLLM's media: memory of the device, whichever it is, and of the host


class BlockStored(Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """Blocks that follow one another are cached now."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first one
    token_ids: list[int]
    block_size: int
    lora_id: int | None  # vLLM has replaced it by the name
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # of each block: what its hash has beside tokens


class BlockRemoved(Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """Blocks are no longer cached there."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    """Nothing is cached any more."""


Label = Callable[[AdapterChoice], tuple[AdapterNames, str]]  # digests and scales of adapters, and their name
Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Message: the time in seconds since 1970, events in order, and vLLM's rank of a replica."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _Root(NamedTuple):
    """Root of prefixes: hash, name of the adapters, and the key that stands for the cache salt."""

    key: bytes
    lora_name: str | None
    salt: str


_BASE = _Root(b"", None, "")  # of requests without adapters and salt


class _Block(NamedTuple):
    """Block that subscribers know: its key, that of the block before it, and its root."""

    key: bytes
    parent: bytes | None
    root: _Root


def block_hash(key: bytes) -> int:
    """Hash of a block in messages: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


class BlockEvents:
    """Listener of a KV cache on the engine thread.

    It tells full blocks of token ids only: those of images, and moved ones (cache reuse), have no
    hash that a router could compute."""

    def __init__(self, publish: Callable[[Event], None], label: Label | None = None) -> None:
        """`publish`: takes an event, at once."""
        self._publish, self._label = publish, label
        self._roots: WeakKeyDictionary[Node, _Root] = WeakKeyDictionary()
        self._blocks: dict[Node, _Block] = {}  # on the device
        self._host_keys: dict[bytes, bytes] = {}  # of blocks in host memory, by the host cache's key

    def attach(self, cache: KVCacheManager) -> None:
        """Listen to a cache that is empty."""
        cache.prefixes.listener = self
        if cache.host is not None:
            cache.host.on_drop = self.dropped
        self._publish(AllBlocksCleared())  # a replica that starts again has nothing of what it said before

    def rooted(self, root: Node, choice: Hashable, salt: str) -> None:
        """A root of prefixes is new."""
        assert isinstance(choice, AdapterChoice)
        digests, name = self._label(choice) if choice != BASE and self._label is not None else ((), "")
        key = blake2b(repr((digests, salt)).encode(), digest_size=16).digest() if digests or salt else b""
        self._roots[root] = _Root(key, name or None, blake2b(salt.encode(), digest_size=8).hexdigest() if salt else "")

    def stored(self, node: Node) -> None:
        """A block is cached on the device."""
        parent = node.parent
        assert parent is not None
        if len(node.tokens) != BLOCK_SIZE or min(node.tokens) < 0:
            return
        if parent.parent is None:
            root = self._roots.get(parent, _BASE)
            block = _Block(chain_key(root.key, node.tokens), None, root)
        elif (before := self._blocks.get(parent)) is not None:
            block = _Block(chain_key(before.key, node.tokens), before.key, before.root)
        else:
            return
        self._blocks[node] = block
        self._tell(block, node, DEVICE)

    def removed(self, node: Node) -> None:
        """A block leaves the device's cache."""
        block = self._blocks.pop(node, None)
        if block is not None:
            self._publish(BlockRemoved([block_hash(block.key)], DEVICE))

    def saved(self, node: Node) -> None:
        """A block has a copy in host memory."""
        block = self._blocks.get(node)
        if block is not None:
            self._host_keys[node.key] = block.key
            self._tell(block, node, HOST)

    def dropped(self, host_key: bytes) -> None:
        """An entry leaves host memory."""
        key = self._host_keys.pop(host_key, None)
        if key is not None:
            self._publish(BlockRemoved([block_hash(key)], HOST))

    def cleared(self) -> None:
        """The cache has lost everything."""
        self._publish(AllBlocksCleared())

    def _tell(self, block: _Block, node: Node, medium: str) -> None:
        root, parent = block.root, None if block.parent is None else block_hash(block.parent)
        extra: list[tuple[Any, ...] | None] | None = [(root.salt,)] if root.salt else None
        hashes = [block_hash(block.key)]
        self._publish(BlockStored(hashes, parent, list(node.tokens), BLOCK_SIZE, None, medium, root.lora_name, extra))


def merged(events: Iterable[Event]) -> list[Event]:
    """Events with consecutive blocks of one prefix merged into one, as vLLM sends them."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(last, BlockStored) and isinstance(event, BlockStored):
            kind, last_kind = ((e.medium, e.lora_name, (e.extra_keys or [None])[0]) for e in (event, last))
            if event.parent_block_hash == last.block_hashes[-1] and kind == last_kind:
                last.block_hashes.extend(event.block_hashes)
                last.token_ids.extend(event.token_ids)
                if last.extra_keys is not None:
                    last.extra_keys.extend(event.extra_keys or ())
                continue
        elif isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved) and last.medium == event.medium:
            last.block_hashes.extend(event.block_hashes)
            continue
        result.append(event)
    return result

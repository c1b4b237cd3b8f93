"""KV offload: copies cached blocks to host memory before eviction, restores them, exports slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import usable_prefix
from logitless.engine.kv_cache.host_cache import Bytes, HostCache, HostStore, chain_key
from logitless.engine.kv_cache.prefix_cache import INEXACT, Node, PrefixCache
from logitless.engine.sequence import Slot
from logitless.models.adapters.stacked_lora import AdapterChoice


class CachedBlock(NamedTuple):
    """Cached block: on the device (`node`) or in host memory (`key`)."""

    name: tuple[int, ...]
    key: bytes
    node: Node | None


class AuxiliaryState(Protocol):
    """Auxiliary per-block state that resuming from a cached prefix needs.

    Implemented by RecurrentStates and SlidingWindowBlocks.
    """

    @property
    def store(self) -> HostStore: ...

    def of(self, node: Node | None, /) -> int | None:
        """Index of the node's state on the device; None: not there."""

    def is_wanted(self, node: Node, /) -> bool:
        """True if a sequence may resume from the node's state."""

    def visible(self, n: int, /) -> range:
        """Block indices whose state resuming after `n` tokens needs."""

    def put(self, nodes: list[Node], data: Mapping[Node, Bytes], /) -> None:
        """Write missing states to the device. Raises MemoryError or OSError if it cannot."""


def _auxiliary_key(key: bytes) -> bytes:
    """Host cache key of the auxiliary state of the block with this key."""
    return b"auxiliary" + key


def _beside_key(block: CachedBlock) -> bytes:
    return _auxiliary_key(block.node.key if block.node is not None else block.key)


class Offload:
    """Moves cached blocks and their auxiliary state between device, host memory and slot files.

    `host` None: nothing is kept in host memory.
    """

    def __init__(
        self, prefixes: PrefixCache, store: HostStore, auxiliary: AuxiliaryState | None, host: HostCache | None
    ) -> None:
        self.prefixes, self.store, self.auxiliary, self.host = prefixes, store, auxiliary, host

    def save(self, node: Node) -> None:
        """Copy a block and its auxiliary state to host memory."""
        if self._is_offloadable(node):
            self.save_auxiliary(node)
            self._save_block(node)

    def _save_block(self, node: Node) -> None:
        """Copy a block to host memory.

        One that the device cannot read is recomputed when needed.
        """
        assert self.host is not None
        if not self.host.add_owners(node.key, node.owners):
            with suppress(MemoryError, OSError):
                data = self.store.read(node.block)
                is_saved = self.host.put(node.key, node.owners, data, lasts=not node.inexact)
                if is_saved and self.prefixes.listener is not None:
                    self.prefixes.listener.saved(node)

    def save_ahead(self, nodes: Iterable[Node], request_waits: Callable[[], bool]) -> None:
        """Offload blocks before they are evicted.

        Stops when `request_waits()` is True (a request waits) or host memory is full.
        """
        assert self.host is not None
        for node in nodes:
            if request_waits() or not self.host.has_room(self.store.nbytes):
                break
            if node.key not in self.host and self._is_offloadable(node):
                self._save_block(node)

    def _is_offloadable(self, node: Node) -> bool:
        """True for full blocks and, in recurrent models, for partial blocks that end a sequence."""
        assert self.host is not None
        if node.transient:
            return False
        if node.n_tokens == BLOCK_SIZE:
            return True
        return self.prefixes.by_ends and self._has_auxiliary(CachedBlock(node.tokens, b"", node))

    def save_auxiliary(self, node: Node) -> None:
        """Copy a block's auxiliary state to host memory, if a sequence may resume from it."""
        assert self.host is not None
        if self.auxiliary is None or not self._is_offloadable(node) or not self.auxiliary.is_wanted(node):
            return
        key, number = _auxiliary_key(node.key), self.auxiliary.of(node)
        assert number is not None
        if not self.host.add_owners(key, node.owners):
            with suppress(MemoryError, OSError):
                self.host.put(key, node.owners, self.auxiliary.store.read(number), lasts=not node.inexact)

    def restore(
        self, root: Node, tokens: list[int], limit: int, n_found: int, owner: int, *, inexact: bool, most: float = inf
    ) -> bool:
        """Restore blocks of tokens[:limit] from host memory or disk, as far as there are free blocks.

        Returns True if the usable prefix may be longer than `n_found` tokens now, False also where
        `most` bytes of the disk were read and more of it is there.
        """
        prefixes = self.prefixes
        cached = self._known(root, tokens, limit, inexact=inexact)
        end = self._end(root, cached, tokens[:limit]) if prefixes.by_ends else (None, 0)
        cached, n_tokens = self._reached(cached, *end)
        if n_tokens <= n_found:
            return False
        nodes: list[Node] = []  # referenced, so that restoring evicts none of them
        disk = self.host.disk if self.host is not None else None
        n_read = disk.nbytes_read if disk is not None else 0
        is_all = True
        for name, key, node in cached:
            if disk is not None and disk.nbytes_read >= n_read + most:
                is_all = False
                break
            if node is None:
                node = self._restored(nodes[-1] if nodes else root, name, key, owner)
                if node is None:
                    break
            else:
                prefixes.acquire(node.block)
            nodes.append(node)
        if self.auxiliary is not None and is_all:
            self._restore_auxiliary(self.auxiliary, nodes, owner)
        for node in reversed(nodes):
            prefixes.release(node.block)
        if disk is not None and disk.nbytes_read > n_read:
            disk.touch(key for node in nodes for key in (node.key, _auxiliary_key(node.key)))
        return is_all

    def newest_first(self) -> Iterator[tuple[bytes, Callable[[], Bytes]]]:
        """Keys and readers of all that is worth keeping: on the device, then in host memory.

        A block comes before those that follow it in a prefix.
        """
        assert self.host is not None
        for node in reversed(list(self.prefixes.idle)):
            if node.inexact or not self._is_offloadable(node):
                continue
            yield node.key, partial(self.store.read, node.block)
            if self.auxiliary is not None and self.auxiliary.is_wanted(node):
                number = self.auxiliary.of(node)
                assert number is not None
                yield _auxiliary_key(node.key), partial(self.auxiliary.store.read, number)
        for key, data in self.host.newest_first():
            yield key, partial(np.asarray, data)

    def forget_on_disk(self, root: Node, tokens: list[int]) -> None:
        """Delete the files of a prefix."""
        if self.host is None or self.host.disk is None:
            return
        keys, key = [], root.key
        for start in range(0, len(tokens), BLOCK_SIZE):
            part = tuple(tokens[start : start + BLOCK_SIZE])
            ends = [part] if len(part) == BLOCK_SIZE else [part[:n] for n in range(1, len(part) + 1)]
            keys += [chain_key(key, end) for end in ends]
            key = keys[-1]
        self.host.disk.forget(name for key in keys for name in (key, _auxiliary_key(key)))

    def _restored(self, parent: Node, name: tuple[int, ...], key: bytes, owner: int) -> Node | None:
        """Restore one block, with a reference; None: no free block, or evicted from host memory."""
        prefixes, host = self.prefixes, self.host
        assert host is not None
        data = host.get(key, owner)
        if data is None or not prefixes.n_available:
            return None
        block = prefixes.allocate()
        try:
            self.store.write(block, data)
        except (MemoryError, OSError):
            prefixes.release(block)
            return None
        host.n_restored += 1
        return prefixes.insert(parent, name, block, owner)

    def _restore_auxiliary(self, auxiliary: AuxiliaryState, nodes: list[Node], owner: int) -> None:
        """Restore the auxiliary state that resuming after the last of these blocks needs."""
        assert self.host is not None
        visible = [nodes[i] for i in auxiliary.visible(len(nodes) * BLOCK_SIZE)]
        data: dict[Node, Bytes] = {}
        for node in visible:
            if auxiliary.of(node) is None:
                hit = self.host.get(_auxiliary_key(node.key), owner)
                if hit is None:
                    return
                data[node] = hit
        with suppress(MemoryError, OSError):
            auxiliary.put(visible, data)

    def copy_out(
        self, tokens: list[int], slot: Slot, choice: AdapterChoice
    ) -> tuple[list[int], list[Bytes], list[Bytes]]:
        """Export a slot: (longest resumable prefix of `tokens`, blocks, auxiliary state)."""
        root, owner = self.prefixes.root_of(choice, slot.salt), 1 << slot.id
        cached = self._known(root, tokens, len(tokens))
        cached, n_tokens = self._reached(cached, *self._end(root, cached, tokens))
        others: list[Bytes] = []
        if self.auxiliary is not None:
            others = [self._read_auxiliary(cached[i], owner) for i in self.auxiliary.visible(n_tokens)]
        return tokens[:n_tokens], [self._read(block, owner) for block in cached], others

    def _reached(
        self, cached: list[CachedBlock], end: CachedBlock | None, n_more: int
    ) -> tuple[list[CachedBlock], int]:
        """Usable part of cached blocks and the partial block `end` of `n_more` tokens.

        Returns (blocks, number of tokens in them).
        """
        n = len(cached)
        if self.auxiliary is not None:
            here = [self._has_auxiliary(block) for block in cached]
            n, n_more = usable_prefix(
                self.auxiliary.visible, here, n_more, more_here=end is not None and self._has_auxiliary(end)
            )
        last = [end] if end is not None and n_more else []
        return [*cached[:n], *last], n * BLOCK_SIZE + n_more

    def _end(self, root: Node, cached: list[CachedBlock], tokens: list[int]) -> tuple[CachedBlock | None, int]:
        """Partial block after `known` that holds the next tokens, and how many of them it holds.

        In recurrent models its content must end there and have a state; the longest such block
        wins. Otherwise an exact match wins, then the longest common prefix.
        """
        node, key = (cached[-1].node, cached[-1].key) if cached else (root, b"")
        rest = tuple(tokens[len(cached) * BLOCK_SIZE :][: BLOCK_SIZE - 1])
        if self.prefixes.by_ends:
            for n in range(len(rest), 0, -1):
                hit = self._next(node, key, rest[:n], inexact=False)
                if hit is not None and self._has_auxiliary(hit):
                    return hit, n
            return None, 0
        if node is None or not rest:
            return None, 0
        exact = node.children.get(rest)
        if exact is not None:
            return CachedBlock(rest, b"", exact), len(rest)
        match = self.prefixes.match(tokens, len(tokens), root=root)
        last = self.prefixes.node_of(match.block) if match.n_more else None
        return (None, 0) if last is None else (CachedBlock(last.tokens, b"", last), match.n_more)

    def copy_in(
        self,
        tokens: list[int],
        blocks: list[Bytes],
        others: list[Bytes],
        slot: Slot,
        choice: AdapterChoice,
        salt: str = "",
    ) -> bool:
        """Import an export of `copy_out`; False without any change if there are too few free
        blocks.
        """
        prefixes, owner = self.prefixes, 1 << slot.id
        n_full = len(tokens) // BLOCK_SIZE
        node = prefixes.root_of(choice, salt)
        references: list[int] = []  # referenced, so that allocation evicts none of them
        path: list[Node] = []
        try:
            for i in range(n_full):
                child = node.children.get(tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]))
                if child is None:
                    break
                prefixes.acquire(child.block)
                child.owners |= owner
                references.append(child.block)
                path.append(child)
                node = child
            if prefixes.n_available < len(blocks) - len(references):
                return False
            for i in range(len(references), len(blocks)):
                block = prefixes.allocate()
                references.append(block)
                self.store.write(block, blocks[i])
                part = tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
                if len(part) == BLOCK_SIZE:
                    node = prefixes.insert(node, part, block, owner)
                    path.append(node)
                elif (last := prefixes.insert_partial(node, part, block, owner)) is not None:
                    path.append(last)
            if self.auxiliary is not None and len(path) == len(blocks):
                visible = path[len(path) - len(others) :]
                self.auxiliary.put(visible, dict(zip(visible, others, strict=True)))
            return True
        finally:
            for block in reversed(references):
                prefixes.release(block)

    def share(self, source: Slot, slot: Slot) -> None:
        """Add another slot as an owner of a slot's cached blocks."""
        tokens, root, owner = source.cached, self.prefixes.root_of(source.choice, source.salt), 1 << slot.id
        cached = self._known(root, tokens, len(tokens))
        end, _ = self._end(root, cached, tokens)
        for block in cached if end is None else [*cached, end]:
            if block.node is not None:
                block.node.owners |= owner
            elif self.host is not None:
                self.host.add_owners(block.key, owner)
            if self.host is not None:  # the auxiliary state may be offloaded without the block
                self.host.add_owners(_beside_key(block), owner)

    def _known(self, root: Node, tokens: list[int], limit: int, *, inexact: bool = False) -> list[CachedBlock]:
        """Cached full blocks of tokens[:limit], on the device or in host memory.

        `inexact`: accept moved KV where no exact block is cached.
        """
        cached: list[CachedBlock] = []
        node: Node | None = root
        for start in range(0, limit - BLOCK_SIZE + 1, BLOCK_SIZE):
            part = tuple(tokens[start : start + BLOCK_SIZE])
            hit = self._next(node, cached[-1].key if cached and node is None else b"", part, inexact=inexact)
            if hit is None:
                break
            cached.append(hit)
            node = hit.node
        return cached

    def _next(self, node: Node | None, key: bytes, part: tuple[int, ...], *, inexact: bool) -> CachedBlock | None:
        """Cached block after `node`, or after the block `key` of host memory.

        The latter has no child nodes.
        """
        for name in (part, (INEXACT, *part)) if inexact else (part,):
            child = node.children.get(name) if node is not None else None
            if child is not None:
                return CachedBlock(name, b"", child)
            if self.host is not None and self.host.may_have:
                own = chain_key(node.key if node is not None else key, name)
                if own in self.host:
                    return CachedBlock(name, own, None)
        return None

    def _has_auxiliary(self, block: CachedBlock) -> bool:
        """True if the block's auxiliary state is on the device or in host memory."""
        assert self.auxiliary is not None
        if self.auxiliary.of(block.node) is not None:
            return True
        return self.host is not None and _beside_key(block) in self.host

    def _read(self, block: CachedBlock, owner: int) -> Bytes:
        if block.node is not None:
            return self.store.read(block.node.block)
        return self._of_host(block.key, owner)

    def _read_auxiliary(self, block: CachedBlock, owner: int) -> Bytes:
        assert self.auxiliary is not None
        number = self.auxiliary.of(block.node)
        if number is not None:
            return self.auxiliary.store.read(number)
        return self._of_host(_beside_key(block), owner)

    def _of_host(self, key: bytes, owner: int) -> Bytes:
        assert self.host is not None
        data = self.host.get(key, owner)
        if data is None:
            raise OSError("a file of --cache-disk has gone or is damaged; try again")
        return data

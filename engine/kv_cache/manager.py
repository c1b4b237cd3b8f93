"""KV cache manager: match a cached prefix, allocate blocks, cache full blocks, free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import BlockPool, n_blocks_for, usable_prefix
from logitless.engine.kv_cache.host_cache import HostCache, HostStore
from logitless.engine.kv_cache.offload import Offload
from logitless.engine.kv_cache.prefix_cache import Node, PartialBlock, PrefixCache
from logitless.engine.kv_cache.recurrent_state import NOTHING, RecurrentStates
from logitless.engine.kv_cache.sliding_window import SlidingWindowBlocks, WindowStore
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.engine.sequence import Sequence, Slot

# tokens before a prompt's end that the next chat turn may render differently (an opened <think>)
NEAR_END = 8
MARK_EVERY = 4096  # tokens of a prompt between checkpoints of recurrent state
AHEAD = 64 << 20  # bytes of idle blocks that are offloaded before they must be evicted
DISK_PIECE = 8 << 20  # bytes of a prefix that are read from the disk between two steps


class _CachedPrefix(NamedTuple):
    """Cached prefix of a sequence: radix nodes of full blocks, then the first `n_more` tokens of
    `block`.
    """

    path: list[Node]
    n_more: int
    block: int
    inexact: bool  # part of it is moved KV (cache_reuse.py)
    n_cached: int  # tokens of cached full blocks, usable or not
    auxiliary: int  # row of the recurrent state, or sliding-window block of `block`


class KVCacheManager:
    """Allocates KV blocks to sequences and caches the blocks of finished ones."""

    __slots__ = ("auxiliary", "host", "keep_idle", "offload", "pool", "prefixes", "states", "store", "windows")

    def __init__(
        self,
        n_blocks: int,
        store: HostStore,
        host: HostCache | None = None,
        keep_idle: bool = True,
        n_slots: int = 0,
        states: HostStore | None = None,
        window_kv: WindowStore | None = None,
    ) -> None:
        """`host`: host memory for preempted sequences and, with `keep_idle`, for evicted prefixes.

        `states`: rows of recurrent state, for models that have it. `window_kv`: blocks of the
        sliding-window KV group, if it is separate. No model has both.
        """
        self.pool = BlockPool(n_blocks)
        self.prefixes = PrefixCache(self.pool)
        self.prefixes.by_ends = states is not None
        self.store = store
        self.host = host
        self.keep_idle = keep_idle
        self.states = RecurrentStates(states, n_slots) if states is not None else None
        self.windows = SlidingWindowBlocks(window_kv) if window_kv is not None else None
        self.auxiliary: RecurrentStates | SlidingWindowBlocks | None = (
            self.states or self.windows
        )  # auxiliary per-block state
        if self.auxiliary is not None:
            self.prefixes.on_forget = self.auxiliary.forget
        self.offload = Offload(self.prefixes, store, self.auxiliary, host)
        if host is not None and keep_idle:
            self.prefixes.on_evict = self.offload.save
            if self.auxiliary is not None:
                self.auxiliary.on_evict = self.offload.save_auxiliary

    @property
    def n_available(self) -> int:
        """Number of free and evictable blocks."""
        return self.prefixes.n_available

    def match_prefix(self, seq: Sequence, slot: Slot, limit: int, tails: Iterable[PartialBlock]) -> int:
        """Fill an empty block table with the longest cached prefix of the first `limit` tokens.

        `tails`: partial blocks that running sequences still write. Returns the number of cached
        tokens.
        """
        prefixes, tails = self.prefixes, list(tails)
        match = self._match(seq, limit, tails)
        if self.host is not None and self.host.may_have:
            n_matched = len(match.path) * BLOCK_SIZE + match.n_more
            if self.offload.restore(seq.kv.root, seq.tokens, limit, n_matched, 1 << slot.id, inexact=seq.takes_inexact):
                match = self._match(seq, limit, tails)
        path, n_more = match.path, match.n_more
        if self.states is not None:
            self.states.hold(seq, match.auxiliary, len(path) * BLOCK_SIZE + n_more)
        if self.windows is not None:
            self.windows.attach(seq, path, n_more)
        for node in path:
            prefixes.acquire(node.block)
            node.owners |= 1 << slot.id
            seq.kv.blocks.append(node.block)
        seq.kv.node = path[-1] if path else seq.kv.root
        seq.kv.n_committed = len(path) * BLOCK_SIZE
        if n_more and not self._begin_block(seq, match.block, match.auxiliary):
            self._drop_blocks(seq)
            return self.match_prefix(seq, slot, len(path) * BLOCK_SIZE, ())
        n_computed = seq.kv.n_committed + n_more
        seq.kv.shifted = seq.kv.shifted or match.inexact
        seq.kv.uploaded = False
        if self.auxiliary is not None:  # keep state where the match ended and near the prompt's end
            seq.kv.marks.clear()
            seq.kv.mark(match.n_cached, n_computed)
            seq.kv.mark(seq.n_prompt - NEAR_END, n_computed)
        # evicted states are offloaded
        if self.states is not None and self.host is not None and self.keep_idle:
            for position in range(MARK_EVERY, seq.n_prompt, MARK_EVERY):
                seq.kv.mark(position, n_computed)
        return n_computed

    def load_from_disk(self, seq: Sequence, slot: Slot, limit: int) -> bool:
        """Read a piece of the sequence's prefix from the disk to the device; False when that was all."""
        if self.host is None or self.host.disk is None:
            return False
        root, owner = seq.kv.root, 1 << slot.id
        return not self.offload.restore(root, seq.tokens, limit, -1, owner, inexact=seq.takes_inexact, most=DISK_PIECE)

    def _match(self, seq: Sequence, limit: int, tails: list[PartialBlock]) -> _CachedPrefix:
        """Longest cached prefix whose auxiliary state is cached too."""
        path, n_more, block, inexact = self.prefixes.match(seq.tokens, limit, tails, seq.kv.root, seq.takes_inexact)
        n_cached, auxiliary = len(path) * BLOCK_SIZE, NOTHING
        if self.states is not None:
            path, begun, n_more, auxiliary = self.states.match(seq.tokens, limit, path, seq.kv.root)
            block = -1 if begun is None else begun.block
        if self.windows is not None:
            window_block = self._window_block_of(self.windows, block, tails) if n_more else None
            here = [self.windows.of(node) is not None for node in path]
            n_blocks, n_more = usable_prefix(self.windows.visible, here, n_more, more_here=window_block is not None)
            path, auxiliary = path[:n_blocks], NOTHING if window_block is None else window_block
        return _CachedPrefix(path, n_more, block, inexact, n_cached, auxiliary)

    def _window_block_of(self, windows: SlidingWindowBlocks, block: int, tails: list[PartialBlock]) -> int | None:
        """Sliding-window block of a partially matched block, cached or being written."""
        node = self.prefixes.node_of(block)
        return (
            windows.of(node) if node is not None else next(tail.window_block for tail in tails if tail.block == block)
        )

    def _begin_block(self, seq: Sequence, source: int, window_block: int) -> bool:
        """Continue in the partially matched block `source` (sliding window: `window_block`): copy
        on write.

        Without a free block the sequence takes over the block itself if nobody else uses it.
        Returns False if neither is possible.
        """
        prefixes, windows, node = self.prefixes, self.windows, self.prefixes.node_of(source)
        prefixes.acquire(source)
        if windows is not None:
            window_block = windows.acquire(node) if node is not None else windows.share(window_block)
        if prefixes.n_available:
            seq.kv.blocks.append(prefixes.allocate())
            seq.kv.copy = source, seq.kv.blocks[-1]
            if windows is not None:
                seq.kv.window_blocks.append(windows.take())
                seq.kv.window_copy = window_block, seq.kv.window_blocks[-1]
        elif prefixes.claim(source):  # no other sequence uses it: continue where the match ends
            seq.kv.blocks.append(source)
            if windows is not None:
                seq.kv.window_blocks.append(window_block)
        else:
            prefixes.release(source)
            if windows is not None:
                windows.release(window_block)
            return False
        return True

    def allocate_slots(self, seq: Sequence, n: int) -> int:
        """Allocate blocks for the next `n` tokens; returns the number of tokens that have a token
        slot.
        """
        missing = n_blocks_for(seq.n_computed + n) - len(seq.kv.blocks)
        if missing > 0:
            for _ in range(min(missing, self.prefixes.n_available)):
                seq.kv.blocks.append(self.prefixes.allocate())
            seq.kv.uploaded = False
        return min(n, len(seq.kv.blocks) * BLOCK_SIZE - seq.n_computed)

    def allocate_draft(self, seq: Sequence, n: int) -> int:
        """`allocate_slots` of tokens that are drafted before their step, with blocks of sliding windows."""
        n = self.allocate_slots(seq, n)
        if self.windows is not None:
            self.windows.prepare([(seq, n)])
        return n

    def free_rejected(self, seq: Sequence) -> None:
        """Free blocks that only rejected draft tokens used."""
        while len(seq.kv.blocks) > n_blocks_for(len(seq.tokens)):
            self.prefixes.release(seq.kv.blocks.pop())

    def preempt(self, seq: Sequence, slot: Slot) -> None:
        """Free all blocks of a preempted sequence; without `keep_idle`, offload them first."""
        node: Node | None = self.free(seq, slot)
        if self.host is not None and not self.keep_idle:
            while node is not None and node.parent is not None:
                self.offload.save(node)
                node = node.parent

    def forget(self, slot: Slot) -> None:
        """Drop cached blocks that only this slot's sequences have used, and all files of its last one."""
        self.offload.forget_on_disk(self.prefixes.root_of(slot.choice, slot.salt), slot.cached)
        self.prefixes.forget(1 << slot.id)
        if self.host is not None:
            self.host.forget(1 << slot.id)

    def prepare_ahead(self, request_waits: Callable[[], bool]) -> None:
        """Offload idle blocks that will be evicted soon, so that no step waits for it.

        Stops when `request_waits()` is True: a request waits.
        """
        nbytes = self.store.nbytes  # 0: all layers are recurrent
        n = AHEAD // nbytes - len(self.pool.free) if nbytes else 0
        if self.host is not None and self.keep_idle and n > 0:
            self.offload.save_ahead(list(islice(self.prefixes.idle, n)), request_waits)

    def flush(self, disk: DiskCache, seconds: float) -> None:
        """Bring what is cached to the disk, within this time, and close it."""
        began = time.monotonic()
        with suppress(MemoryError, OSError):  # the device cannot be read
            disk.put_all(self.offload.newest_first(), seconds)
        disk.close(max(0.0, began + seconds - time.monotonic()))

    def clear(self) -> None:
        """Drop everything cached: the device has lost its memory, and another computes other bits.

        No sequence may have blocks.
        """
        self.prefixes.clear()
        if self.host is not None:
            self.host.clear()
        if self.prefixes.listener is not None:
            self.prefixes.listener.cleared()

    def sleep(self) -> None:
        """Offload all cached blocks before the device frees its memory.

        No sequence may have blocks.
        """
        if self.prefixes.on_evict is not None:
            for node in list(self.prefixes.idle):
                self.prefixes.on_evict(node)
        self.prefixes.clear()

    def wake(self) -> None:
        """Do nothing: offloaded blocks are restored when a request matches them."""

    def table_uploaded(self, seq: Sequence) -> None:
        """Note that the device has the sequence's block table and has done its copies."""
        seq.kv.uploaded = True
        self.copies_done(seq)

    def copies_done(self, seq: Sequence) -> None:
        """Note that the device has done the sequence's copies."""
        if seq.kv.copy is not None:
            self.prefixes.release(seq.kv.copy[0])
            seq.kv.copy = None
        if seq.kv.window_copy is not None and self.windows is not None:
            self.windows.release(seq.kv.window_copy[0])
            seq.kv.window_copy = None

    def cache_full_blocks(self, seq: Sequence, slot: Slot) -> None:
        """Commit full blocks to the prefix cache."""
        kv = seq.kv
        while kv.n_committed + BLOCK_SIZE <= seq.n_computed and not kv.n_dropped:
            i = kv.n_committed // BLOCK_SIZE
            tokens = kv.content(seq.tokens, kv.n_committed + BLOCK_SIZE)
            if kv.shifted and tokens in kv.node.children:
                break  # cached already, with other bits
            kv.node = self.prefixes.insert_full(kv.node, tokens, kv.blocks[i], 1 << slot.id)
            # another sequence was faster: share its block, the bits are the same
            if kv.node.block != kv.blocks[i]:
                kv.blocks[i] = kv.node.block
                kv.uploaded = False
            if self.windows is not None:
                self.windows.seal(seq, i)
            kv.n_committed += BLOCK_SIZE

    def free(self, seq: Sequence, slot: Slot) -> Node:
        """Free all blocks and return the radix node at which the sequence ends.

        Their content stays cached until the blocks are needed.
        """
        end = seq.kv.node
        end_node: Node | None = seq.kv.node if seq.n_computed == seq.kv.n_committed else None
        if seq.kv.copy is not None:  # the last block has no content yet
            self.copies_done(seq)
        elif seq.kv.n_committed < seq.n_computed < seq.kv.n_committed + BLOCK_SIZE and not seq.kv.n_dropped:
            block = seq.kv.blocks[seq.kv.n_committed // BLOCK_SIZE]
            end_node = self.prefixes.insert_partial(
                seq.kv.node, seq.kv.content(seq.tokens, seq.n_computed), block, 1 << slot.id
            )
        self._drop_blocks(seq, end_node)
        return end_node or end

    def _drop_blocks(self, seq: Sequence, end_node: Node | None = None) -> None:
        """Drop the references to all blocks.

        `end_node`: radix node of their content, if it is cached.
        """
        if self.auxiliary is not None:
            self.auxiliary.leave(seq, end_node)
        for block in reversed(seq.kv.blocks):
            self.prefixes.release(block)
        seq.kv.blocks = []
        seq.kv.node = seq.kv.root
        seq.kv.n_committed = 0

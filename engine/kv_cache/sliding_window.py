"""KV group of a sliding window: allocates the KV blocks of sliding-window layers, a smaller pool.

A sequence holds the blocks of its window and of the tokens that its step writes. Blocks behind the
window stay cached until they are needed. Blocks of a window that others may resume from (at the end
of a sequence, near the end of its prompt, where prompts branch) are evicted last, to host memory. A
cached prefix is usable up to the last position whose whole window is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from typing import Protocol

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import BlockPool, blocks_in_window, n_blocks_for
from logitless.engine.kv_cache.host_cache import Bytes, HostStore
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.sequence import Sequence


class WindowStore(HostStore, Protocol):
    """Device blocks of the sliding-window group.

    Block number `n` is a spare that no sequence owns.
    """

    @property
    def window(self) -> int: ...


class SlidingWindowBlocks:
    """Block pool of the sliding-window group, with cached blocks by radix node.

    A block that only its node references is idle: in `_behind` if the window has passed it, else in
    `_reusable`. Both are in LRU order, and `_behind` is evicted first.
    """

    def __init__(self, store: WindowStore) -> None:
        self.store = store
        self.window = store.window
        # called before a reusable block is evicted
        self.on_evict: Callable[[Node], None] | None = None
        self._pool = BlockPool(store.n)
        self._of: dict[Node, int] = {}
        self._nodes: list[Node | None] = [None] * store.n
        self._reusable: OrderedDict[Node, None] = OrderedDict()
        self._behind: OrderedDict[Node, None] = OrderedDict()

    def of(self, node: Node | None) -> int | None:
        """Block of a radix node; None: not cached."""
        return None if node is None else self._of.get(node)

    def is_wanted(self, node: Node) -> bool:
        """True if a node's block lies in a window, or in one that sequences may resume from."""
        return node in self._of and node not in self._behind

    def visible(self, n: int) -> range:
        """Block indices that the window covers after `n` tokens."""
        return blocks_in_window(n, self.window)

    def attach(self, seq: Sequence, path: list[Node], n_more: int) -> None:
        """Fill a block table with the window of a cached prefix: `path` and `n_more` tokens after
        it.
        """
        first = self.visible(len(path) * BLOCK_SIZE + n_more).start
        seq.kv.window_blocks, seq.kv.n_window_passed = [self.store.n] * first, first
        for node in path[first:]:
            seq.kv.window_blocks.append(self.acquire(node))

    def acquire(self, node: Node) -> int:
        """Add a reference to a node's block and return it."""
        block = self._of[node]
        self._reusable.pop(node, None)
        self._behind.pop(node, None)
        return self.share(block)

    def share(self, block: int) -> int:
        """Add a reference to a sequence's block and return it."""
        self._pool.share(block)
        return block

    def take(self) -> int:
        """Take a free block, or evict the least recently used idle one. It has one reference."""
        if not self._pool.free:
            idle = self._behind or self._reusable
            node = next(iter(idle))
            if idle is self._reusable and self.on_evict is not None:
                self.on_evict(node)
            self.forget(node)
        return self._pool.take()

    def release(self, block: int, *, behind: bool = False) -> None:
        """Drop a reference. `behind`: the window has passed the block, so it is evicted early."""
        if block == self.store.n or self._pool.drop(block) != 1:
            return
        if node := self._nodes[block]:
            (self._behind if behind else self._reusable)[node] = None

    def prepare(self, plan: list[tuple[Sequence, int]]) -> None:
        """Allocate blocks for the next n tokens of each sequence."""
        for seq, n in plan:
            while len(seq.kv.window_blocks) < n_blocks_for(seq.n_computed + n):
                seq.kv.window_blocks.append(self.take())
                seq.kv.uploaded = False

    def undo(self, plan: list[tuple[Sequence, int]]) -> None:
        """Free the blocks of a step that failed."""
        for seq, _ in plan:
            self._trim(seq)

    def seal(self, seq: Sequence, i: int) -> None:
        """Cache the sequence's block `i` under seq.kv.node."""
        cached_block = self._of.get(seq.kv.node)
        if cached_block is None:
            self.learn(seq.kv.node, seq.kv.window_blocks[i])
        elif cached_block != seq.kv.window_blocks[i]:
            # another sequence was faster: the bits are the same
            self.release(seq.kv.window_blocks[i])
            seq.kv.window_blocks[i] = self.acquire(seq.kv.node)
            seq.kv.uploaded = False

    def learn(self, node: Node, block: int) -> None:
        """Add a reference from a node to the caller's block."""
        if node not in self._of:
            self._of[node], self._nodes[block] = block, node
            self._pool.share(block)

    def commit(self, seq: Sequence) -> None:
        """Release the blocks that the window has left.

        The step has succeeded; full blocks are cached.
        """
        self._trim(seq)
        first = self.visible(seq.n_computed).start
        for i in range(seq.kv.n_window_passed, first):
            is_marked = any(i in self.visible(mark) for mark in seq.kv.marks)
            self.release(seq.kv.window_blocks[i], behind=not is_marked)
            seq.kv.window_blocks[i] = self.store.n
        if first > seq.kv.n_window_passed:
            seq.kv.n_window_passed = first
            seq.kv.marks -= {mark for mark in seq.kv.marks if mark <= first * BLOCK_SIZE}

    def _trim(self, seq: Sequence) -> None:
        """Free blocks of rejected or failed tokens."""
        while len(seq.kv.window_blocks) > n_blocks_for(seq.n_computed):
            self.release(seq.kv.window_blocks.pop())

    def leave(self, seq: Sequence, node: Node | None) -> None:
        """Free the blocks of a finished sequence.

        `node`: radix node of its end, if that is cached.
        """
        if node is not None and node.n_tokens and seq.n_computed > seq.kv.n_committed:
            self.learn(node, seq.kv.window_blocks[seq.kv.n_committed // BLOCK_SIZE])
        for block in reversed(seq.kv.window_blocks):
            self.release(block)
        seq.kv.window_blocks, seq.kv.n_window_passed = [], 0

    def forget(self, node: Node) -> None:
        """Drop the cached block of a node."""
        block = self._of.pop(node, None)
        if block is not None:
            self._nodes[block] = None
            self._reusable.pop(node, None)
            self._behind.pop(node, None)
            self._pool.drop(block)

    def put(self, nodes: Listed[Node], data: Mapping[Node, Bytes]) -> None:
        """Write the missing blocks of a window.

        Raises MemoryError or OSError if the device cannot.
        """
        references: list[int] = []  # referenced, so that allocation evicts none of them
        try:
            references += [self.acquire(node) for node in nodes if node in self._of]
            for node in nodes:
                if node not in self._of:
                    references.append(self.take())
                    self.store.write(references[-1], data[node])
                    self.learn(node, references[-1])
        finally:
            for block in references:
                self.release(block)

"""Pages of layers that see a window: who owns which, where such layers have fewer than the others.

A sequence holds those of its window and of what its step writes. What falls behind stays known, as long as nobody needs
the page; what lies before a place where others may go on (the end of a sequence, near the end of its prompt, where
prompts part) goes last, and then to host memory. A prefix is of use up to where its last window is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from typing import Protocol

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import Pages, n_pages_for, window_pages
from logitless.engine.kv_cache.host_cache import Bytes, Store
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.sequence import Sequence


class NearStore(Store, Protocol):
    """The device's pages of layers with a window, and one more that nobody has, with the number n."""

    @property
    def window(self) -> int: ...


class Windows:
    """Nodes of known content may have a page here, too. One that only its node needs is idle: in `_behind`, whose
    windows have passed, or in `_kept`; the one not used for longest first."""

    def __init__(self, store: NearStore) -> None:
        self.store = store
        self.window = store.window
        self.on_evict: Callable[[Node], None] | None = None  # told before a kept page is given to somebody else
        self._pages = Pages(store.n)
        self._of: dict[Node, int] = {}
        self._nodes: list[Node | None] = [None] * store.n
        self._kept: OrderedDict[Node, None] = OrderedDict()
        self._behind: OrderedDict[Node, None] = OrderedDict()

    def of(self, node: Node | None) -> int | None:
        """The page of known content."""
        return None if node is None else self._of.get(node)

    def is_wanted(self, node: Node) -> bool:
        """Whether somebody sees a node's page, or may go on from where it is seen."""
        return node in self._of and node not in self._behind

    def seen(self, n: int) -> range:
        """The pages that it takes to go on after n tokens."""
        return window_pages(n, self.window)

    def attach(self, seq: Sequence, path: list[Node], n_more: int) -> None:
        """Start a sequence's table with a path that can be gone on from, n_more tokens behind it."""
        first = self.seen(len(path) * PAGE + n_more).start
        seq.kv.window_blocks, seq.kv.n_window_passed = [self.store.n] * first, first
        for node in path[first:]:
            seq.kv.window_blocks.append(self.acquire(node))

    def acquire(self, node: Node) -> int:
        """A node's page, with one more owner."""
        page = self._of[node]
        self._kept.pop(node, None)
        self._behind.pop(node, None)
        return self.share(page)

    def share(self, page: int) -> int:
        """One more owner of a page that a sequence has."""
        self._pages.share(page)
        return page

    def take(self) -> int:
        """A page for writing, with one reference."""
        if not self._pages.free:
            idle = self._behind or self._kept
            node = next(iter(idle))
            if idle is self._kept and self.on_evict is not None:
                self.on_evict(node)
            self.forget(node)
        return self._pages.take()

    def release(self, page: int, *, behind: bool = False) -> None:
        """One owner less."""
        if page == self.store.n or self._pages.drop(page) != 1:
            return
        if node := self._nodes[page]:
            (self._behind if behind else self._kept)[node] = None

    def prepare(self, plan: list[tuple[Sequence, int]]) -> None:
        """Pages for the next n tokens of each sequence."""
        for seq, n in plan:
            while len(seq.kv.window_blocks) < n_pages_for(seq.n_computed + n):
                seq.kv.window_blocks.append(self.take())
                seq.kv.uploaded = False

    def undo(self, plan: list[tuple[Sequence, int]]) -> None:
        """The step does not count."""
        for seq, _ in plan:
            self._trim(seq)

    def seal(self, seq: Sequence, i: int) -> None:
        """The sequence's page i has become known as seq.kv.node."""
        known = self._of.get(seq.kv.node)
        if known is None:
            self.learn(seq.kv.node, seq.kv.window_blocks[i])
        elif known != seq.kv.window_blocks[i]:  # another sequence was faster: the bits are the same
            self.release(seq.kv.window_blocks[i])
            seq.kv.window_blocks[i] = self.acquire(seq.kv.node)
            seq.kv.uploaded = False

    def learn(self, node: Node, page: int) -> None:
        """The caller's page is the node's, too."""
        if node not in self._of:
            self._of[node], self._nodes[page] = page, node
            self._pages.share(page)

    def commit(self, seq: Sequence) -> None:
        """The step counts: the sequence is at n_computed, and its full pages are known."""
        self._trim(seq)
        first = self.seen(seq.n_computed).start
        for i in range(seq.kv.n_window_passed, first):
            wanted = any(i in self.seen(mark) for mark in seq.kv.marks)
            self.release(seq.kv.window_blocks[i], behind=not wanted)
            seq.kv.window_blocks[i] = self.store.n
        if first > seq.kv.n_window_passed:
            seq.kv.n_window_passed = first
            seq.kv.marks -= {mark for mark in seq.kv.marks if mark <= first * PAGE}

    def _trim(self, seq: Sequence) -> None:
        """Give back what was for tokens that do not count."""
        while len(seq.kv.window_blocks) > n_pages_for(seq.n_computed):
            self.release(seq.kv.window_blocks.pop())

    def leave(self, seq: Sequence, node: Node | None) -> None:
        """The sequence ends; what it has computed is known under this name, if at all."""
        if node is not None and node.n_tokens and seq.n_computed > seq.kv.n_committed:
            self.learn(node, seq.kv.window_blocks[seq.kv.n_committed // PAGE])
        for page in reversed(seq.kv.window_blocks):
            self.release(page)
        seq.kv.window_blocks, seq.kv.n_window_passed = [], 0

    def forget(self, node: Node) -> None:
        """Nothing is known of this content any more."""
        page = self._of.pop(node, None)
        if page is not None:
            self._nodes[page] = None
            self._kept.pop(node, None)
            self._behind.pop(node, None)
            self._pages.drop(page)

    def put(self, nodes: Listed[Node], data: Mapping[Node, Bytes]) -> None:
        """Bring in what is missing of the window that these pages make. MemoryError, OSError: the device could not."""
        held: list[int] = []  # nothing of it may give way meanwhile
        try:
            held += [self.acquire(node) for node in nodes if node in self._of]
            for node in nodes:
                if node not in self._of:
                    held.append(self.take())
                    self.store.write(held[-1], data[node])
                    self.learn(node, held[-1])
        finally:
            for page in held:
                self.release(page)

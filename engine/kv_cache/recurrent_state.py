"""Rows of the device's memory in which layers keep what a sequence leaves (graph/ops/linear_attention.py): who owns
which.

A step reads a sequence's row and writes other ones: what it started from stays as it was until the step counts, so one
that fails, or guesses wrong, has lost nothing. A row may be kept for whoever goes on from the same tokens: after the
last token of a sequence, near the end of its prompt, and where prompts part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import n_pages_for
from logitless.engine.kv_cache.host_cache import Bytes, Store
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.sequence import Sequence

NOTHING = 0  # the row of a sequence without tokens, which nobody writes


def n_state_rows(n_slots: int, n_checkpoints: int, n_guesses: int = 0) -> int:
    """Rows of states: nothing's, for each slot one before a step, one after it and after each guess, and those that are
    kept."""
    return 1 + n_slots * (2 + n_checkpoints + n_guesses)


class States:
    """Rows of the device, NOTHING's included; `n_slots` of them and as many again are never kept from sequences."""

    def __init__(self, store: Store, n_slots: int) -> None:
        self.store = store
        self.on_evict: Callable[[Node], None] | None = None  # told before a kept row is given to somebody else
        self._n_slots = n_slots
        self._free = list(range(store.n - 1, NOTHING, -1))
        self._refs = [0] * store.n
        self._kept: OrderedDict[Node, int] = OrderedDict()  # after known content; the one not used for longest first

    def of(self, node: Node | None) -> int | None:
        """The row that is kept after known content."""
        return None if node is None else self._kept.get(node)

    def is_wanted(self, node: Node) -> bool:
        """Whether somebody may go on from a node."""
        return node in self._kept

    def seen(self, n: int) -> range:
        """The pages that it takes to go on after n tokens: what the last one's tokens have left."""
        return range(n_pages_for(n))[-1:]

    @property
    def n_spare(self) -> int:
        """Rows that a step may write for guesses, which take none of what is kept for each slot, the last first."""
        return max(0, self._n_available - self._n_slots - min(self._n_slots, self._n_idle))

    @property
    def _n_available(self) -> int:
        return len(self._free) + self._n_idle

    @property
    def _n_idle(self) -> int:
        """Rows that are kept for whoever may go on from there."""
        return sum(self._refs[row] == 1 for row in self._kept.values())

    def match(
        self, tokens: list[int], limit: int, path: list[Node], root: Node
    ) -> tuple[list[Node], Node | None, int, int]:
        """What of a path of known pages can be gone on from: the pages, a page that is known in part and all of whose
        tokens are the next ones, so many tokens in it, and the row."""
        for n in range(len(path), -1, -1):
            node = path[n - 1] if n else root
            rest = tuple(tokens[n * PAGE : limit])
            begun = [c for c in node.children.values() if c in self._kept and rest[: len(c.tokens)] == c.tokens]
            best = max(begun, key=lambda c: len(c.tokens), default=None)
            if best is not None and len(best.tokens) < PAGE:
                return path[:n], best, len(best.tokens), self._use(best)
            if node in self._kept or not n:
                return path[:n], None, 0, self._use(node) if n else NOTHING
        raise AssertionError

    def _use(self, node: Node) -> int:
        self._kept.move_to_end(node)
        return self._kept[node]

    def hold(self, seq: Sequence, row: int, n: int) -> None:
        """The sequence goes on from this row, after its first n tokens."""
        self.release(seq)
        seq.kv.state_row, seq.kv.state_at = self._share(row), n

    def prepare(self, plan: list[tuple[Sequence, int]]) -> None:
        """Rows for what the next n tokens of each sequence leave: after those that it owes, after each that is only a
        guess (of which there are n_spare at most), and as there is room where some are to be kept on the way."""
        for seq, n in plan:
            self._drop_ends(seq)
            n_sure = min(n, seq.owed)
            seq.kv.state_writes = {seq.n_computed + i: self._take() for i in range(n_sure, n + 1)}
        for seq, n in plan:
            for position in sorted(seq.kv.marks):
                if seq.n_computed < position < seq.n_computed + min(n, seq.owed) and self._n_available:
                    seq.kv.state_writes[position] = self._take()

    def undo(self, plan: list[tuple[Sequence, int]]) -> None:
        """The step does not count."""
        for seq, _ in plan:
            self._drop_ends(seq)

    def commit(self, seq: Sequence) -> None:
        """The step counts: the sequence is at n_computed, and its full pages are known."""
        row = seq.kv.state_writes.pop(seq.n_computed, None)
        if row is not None:
            self._drop(seq.kv.state_row)
            seq.kv.state_row, seq.kv.state_at = row, seq.n_computed
        for position in [p for p in seq.kv.marks if p <= seq.n_computed]:
            seq.kv.marks.discard(position)
            marked = seq.kv.state_row if position == seq.kv.state_at else seq.kv.state_writes.get(position)
            if marked is not None and position <= seq.kv.n_committed:
                self._keep(self._node_at(seq, position), marked)
        self._drop_ends(seq)

    @staticmethod
    def _node_at(seq: Sequence, position: int) -> Node:
        node = seq.kv.node
        for _ in range((seq.kv.n_committed - position) // PAGE):
            assert node.parent is not None
            node = node.parent
        return node

    def leave(self, seq: Sequence, node: Node | None) -> None:
        """The sequence ends; what it has computed is known under this name, if at all."""
        if node is not None and node.parent is not None and seq.kv.state_at == seq.n_computed:
            self._keep(node, seq.kv.state_row)
        self.release(seq)

    def release(self, seq: Sequence) -> None:
        """The sequence has no tokens any more."""
        self._drop_ends(seq)
        self._drop(seq.kv.state_row)
        seq.kv.state_row, seq.kv.state_at = NOTHING, 0

    def forget(self, node: Node) -> None:
        """Nothing is known of this content any more."""
        row = self._kept.pop(node, None)
        if row is not None:
            self._drop(row)

    def put(self, nodes: list[Node], data: Mapping[Node, Bytes]) -> None:
        """Bring in what is not kept after these pages. MemoryError, OSError: the device could not."""
        for node in nodes:
            if node not in self._kept and self._n_available:
                row = self._take()
                try:
                    self.store.write(row, data[node])
                    self._keep(node, row)
                finally:
                    self._drop(row)

    def _keep(self, node: Node, row: int) -> None:
        if node in self._kept:
            self._kept.move_to_end(node)
        elif row != NOTHING:
            self._kept[node] = self._share(row)

    def _drop_ends(self, seq: Sequence) -> None:
        for row in seq.kv.state_writes.values():
            self._drop(row)
        seq.kv.state_writes = {}

    def _take(self) -> int:
        """A row, with one reference; the one that was kept for longest gives way."""
        while not self._free:
            node = next(iter(self._kept))
            if self.on_evict is not None:
                self.on_evict(node)
            self.forget(node)
        row = self._free.pop()
        self._refs[row] = 1
        return row

    def _share(self, row: int) -> int:
        if row != NOTHING:
            self._refs[row] += 1
        return row

    def _drop(self, row: int) -> None:
        if row != NOTHING:
            self._refs[row] -= 1
            if not self._refs[row]:
                self._free.append(row)

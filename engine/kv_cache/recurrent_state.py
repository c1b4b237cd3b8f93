"""Recurrent state: allocates state rows to sequences and checkpoints states for prefix reuse.

A row holds the state of all linear-attention layers (graph/ops/linear_attention.py) after some
tokens of a sequence. A step reads one row and writes others, so a failed step or a rejected draft
loses nothing. Checkpoints are states that other sequences may resume from: at the end of a
sequence, near the end of its prompt, and where prompts branch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.host_cache import Bytes, HostStore
from logitless.engine.kv_cache.prefix_cache import Node
from logitless.engine.sequence import Sequence

NOTHING = 0  # row of the zero state, never written


def n_state_rows(n_slots: int, n_checkpoints: int, n_draft_tokens: int = 0) -> int:
    """Number of state rows: the zero state and, for each slot, input, outputs (one and one for each
    draft token) and checkpoints of a step.
    """
    return 1 + n_slots * (2 + n_checkpoints + n_draft_tokens)


class RecurrentStates:
    """State rows of the device, with reference counts, and checkpoints by radix node.

    Checkpoints are evicted for sequences: each of the `n_slots` slots can always have two rows.
    """

    def __init__(self, store: HostStore, n_slots: int) -> None:
        self.store = store
        self.on_evict: Callable[[Node], None] | None = None  # called before a checkpoint is evicted
        self._n_slots = n_slots
        self._free = list(range(store.n - 1, NOTHING, -1))
        self._refs = [0] * store.n
        self._checkpoints: OrderedDict[Node, int] = OrderedDict()  # checkpoints in LRU order

    def of(self, node: Node | None) -> int | None:
        """Row of the checkpoint after a node; None: there is none."""
        return None if node is None else self._checkpoints.get(node)

    def is_wanted(self, node: Node) -> bool:
        """True if a node has a checkpoint."""
        return node in self._checkpoints

    def visible(self, n: int) -> range:
        """Block indices whose state resuming after `n` tokens needs: the last one."""
        return range(n_blocks_for(n))[-1:]

    @property
    def n_spare(self) -> int:
        """Rows for draft tokens that leave each slot its latest checkpoint."""
        return max(0, self._n_available - self._n_slots - min(self._n_slots, self._n_idle))

    @property
    def _n_available(self) -> int:
        return len(self._free) + self._n_idle

    @property
    def _n_idle(self) -> int:
        """Checkpoints that no sequence references."""
        return sum(self._refs[row] == 1 for row in self._checkpoints.values())

    def match(
        self, tokens: list[int], limit: int, path: list[Node], root: Node
    ) -> tuple[list[Node], Node | None, int, int]:
        """Longest prefix of a path of cached blocks that ends in a checkpoint.

        Returns (full blocks, partial block after them or None, its number of tokens, state row).
        """
        for n in range(len(path), -1, -1):
            node = path[n - 1] if n else root
            rest = tuple(tokens[n * BLOCK_SIZE : limit])
            begun = [c for c in node.children.values() if c in self._checkpoints and rest[: len(c.tokens)] == c.tokens]
            best = max(begun, key=lambda c: len(c.tokens), default=None)
            if best is not None and len(best.tokens) < BLOCK_SIZE:
                return path[:n], best, len(best.tokens), self._use(best)
            if node in self._checkpoints or not n:
                return path[:n], None, 0, self._use(node) if n else NOTHING
        raise AssertionError

    def _use(self, node: Node) -> int:
        self._checkpoints.move_to_end(node)
        return self._checkpoints[node]

    def hold(self, seq: Sequence, row: int, n: int) -> None:
        """Let the sequence continue from this row, the state after its first `n` tokens."""
        self.release(seq)
        seq.kv.state_row, seq.kv.state_at = self._share(row), n

    def prepare(self, plan: list[tuple[Sequence, int]]) -> None:
        """Allocate output rows for the next n tokens of each sequence.

        A sequence gets a row after its uncomputed tokens and after each draft token (`n_spare` of
        them at most), and, if there is room, one at each position marked for a checkpoint.
        """
        for seq, n in plan:
            self._drop_ends(seq)
            n_sure = min(n, seq.n_uncomputed)
            seq.kv.state_writes = {seq.n_computed + i: self._take() for i in range(n_sure, n + 1)}
        for seq, n in plan:
            for position in sorted(seq.kv.marks):
                if seq.n_computed < position < seq.n_computed + min(n, seq.n_uncomputed) and self._n_available:
                    seq.kv.state_writes[position] = self._take()

    def undo(self, plan: list[tuple[Sequence, int]]) -> None:
        """Free the output rows of a step that failed."""
        for seq, _ in plan:
            self._drop_ends(seq)

    def commit(self, seq: Sequence) -> None:
        """Adopt the state after n_computed tokens and keep marked states as checkpoints.

        The step has succeeded, and the sequence's full blocks are cached.
        """
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
        for _ in range((seq.kv.n_committed - position) // BLOCK_SIZE):
            assert node.parent is not None
            node = node.parent
        return node

    def leave(self, seq: Sequence, node: Node | None) -> None:
        """Free the rows of a finished sequence.

        Its state becomes the checkpoint of `node`, if given.
        """
        if node is not None and node.parent is not None and seq.kv.state_at == seq.n_computed:
            self._keep(node, seq.kv.state_row)
        self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Free the rows of a sequence."""
        self._drop_ends(seq)
        self._drop(seq.kv.state_row)
        seq.kv.state_row, seq.kv.state_at = NOTHING, 0

    def forget(self, node: Node) -> None:
        """Drop the checkpoint of a node."""
        row = self._checkpoints.pop(node, None)
        if row is not None:
            self._drop(row)

    def put(self, nodes: list[Node], data: Mapping[Node, Bytes]) -> None:
        """Write missing checkpoints of these nodes.

        Raises MemoryError or OSError if the device cannot.
        """
        for node in nodes:
            if node not in self._checkpoints and self._n_available:
                row = self._take()
                try:
                    self.store.write(row, data[node])
                    self._keep(node, row)
                finally:
                    self._drop(row)

    def _keep(self, node: Node, row: int) -> None:
        if node in self._checkpoints:
            self._checkpoints.move_to_end(node)
        elif row != NOTHING:
            self._checkpoints[node] = self._share(row)

    def _drop_ends(self, seq: Sequence) -> None:
        for row in seq.kv.state_writes.values():
            self._drop(row)
        seq.kv.state_writes = {}

    def _take(self) -> int:
        """Take a free row, or evict the least recently used checkpoint. It has one reference."""
        while not self._free:
            node = next(iter(self._checkpoints))
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

"""Block table: the KV blocks of one sequence, its cached prefix, window blocks and state rows.

Only engine/kv_cache writes it. The batch builder and the drafters read it."""

from __future__ import annotations

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.host_cache import Bytes
from logitless.engine.kv_cache.prefix_cache import INEXACT, Node, PartialBlock


class BlockTable:
    """KV blocks of a sequence. It holds a reference to each of them."""

    __slots__ = (
        "blocks",
        "copy",
        "marks",
        "n_committed",
        "n_dropped",
        "n_swapped",
        "n_window_passed",
        "node",
        "root",
        "shifted",
        "state_at",
        "state_row",
        "state_writes",
        "swapped",
        "uploaded",
        "window_blocks",
        "window_copy",
    )

    def __init__(self, root: Node) -> None:
        """`root`: radix node at which prefixes computed with the sequence's weights begin."""
        self.blocks: list[int] = []
        self.uploaded = False  # the device knows the blocks as they are
        self.root = root
        self.node = root  # of the last full block that is cached
        self.n_committed = 0  # tokens in full blocks that are cached
        # pending copy (from, to); holds a reference to `from`
        self.copy: tuple[int, int] | None = None
        # some keys were moved from other positions (engine/kv_cache/cache_reuse.py)
        self.shifted = False
        # Sliding-window KV group (engine/kv_cache/sliding_window.py).
        self.window_blocks: list[int] = []
        self.n_window_passed = 0  # blocks that the window has left
        self.window_copy: tuple[int, int] | None = None  # pending copy beside `copy`
        # Recurrent state (engine/kv_cache/recurrent_state.py).
        self.state_row = 0  # row that the next step reads
        self.state_at = 0  # tokens that this state has seen
        # rows that the step writes, by number of tokens computed
        self.state_writes: dict[int, int] = {}
        self.marks: set[int] = set()  # numbers of tokens after which other sequences may branch off
        # Context shift (engine/kv_cache/context_shift.py).
        self.n_dropped = 0  # tokens discarded; from then on the blocks are this sequence's alone
        self.swapped: list[Bytes] = []  # host copies of the blocks while it is swapped out
        self.n_swapped = 0  # tokens in them

    @property
    def recomputable(self) -> bool:
        """True if the same bits can be computed again from the tokens."""
        return not self.shifted and not self.n_dropped

    def mark(self, position: int, n_computed: int) -> None:
        """Let other sequences branch off after `position` tokens, rounded down to whole blocks.

        Positions that are computed already are ignored.
        """
        position -= position % BLOCK_SIZE
        if position > n_computed:
            self.marks.add(position)

    def content(self, tokens: list[int], end: int) -> tuple[int, ...]:
        """The tokens from the first uncommitted one to `end`, as the prefix cache names them."""
        part = tokens[self.n_committed : end]
        return (INEXACT, *part) if self.shifted else tuple(part)

    def tail(self, tokens: list[int], n_computed: int) -> PartialBlock | None:
        """The partial block at the end, as a prefix that other sequences may copy."""
        if self.n_committed == n_computed or self.copy is not None or self.n_dropped:
            return None  # a block with a pending copy has no content; a shifted context is private
        if n_computed - self.n_committed >= BLOCK_SIZE:
            return None  # its full block is cached with other bits
        i = self.n_committed // BLOCK_SIZE
        window = self.window_blocks[i] if self.window_blocks else None
        return PartialBlock(self.node, self.content(tokens, n_computed), self.blocks[i], window)

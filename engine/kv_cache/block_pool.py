"""Block pool: free list and reference counts of KV blocks. It holds no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logitless.engine.batch import APART, BLOCK_SIZE


def n_blocks_for(n_tokens: int) -> int:
    """Number of KV blocks that hold `n_tokens` tokens of one sequence."""
    return -(-n_tokens // BLOCK_SIZE)


def pool_size(n_ctx: int, n_slots: int, *, unified: bool) -> int:
    """Number of KV blocks for `n_ctx` tokens.

    The model runner allocates one block more. Its id is this number, and padding tokens write to
    it.
    """
    if unified:
        return n_blocks_for(n_ctx)
    return n_slots * n_blocks_for(n_ctx // n_slots)


def blocks_in_window(n: int, window: int) -> range:
    """Block indices that a sliding window of `window` positions covers after `n` tokens."""
    return range(max(0, n - window + 1) // BLOCK_SIZE, n_blocks_for(n))


def usable_prefix(
    visible: Callable[[int], range], here: Sequence[bool], n_more: int = 0, *, more_here: bool
) -> tuple[int, int]:
    """Usable prefix length as (full blocks, tokens after them).

    Resuming after n tokens needs the auxiliary state (window blocks, recurrent state) of the blocks
    in `seen(n)`. `here[i]` is True if block i of the prefix has that state. `more_here` says the
    same of the partial block of `n_more` tokens after the prefix.
    """
    first: list[int] = [0]  # first[i]: start of the run of blocks with state that ends at block i
    for i, is_here in enumerate(here):
        first.append(first[-1] if is_here else i + 1)
    n = len(here)
    if n_more and more_here and first[n] <= visible(n * BLOCK_SIZE + n_more).start:
        return n, n_more
    while first[n] > visible(n * BLOCK_SIZE).start:
        n -= 1
    return n, 0


def window_pool_size(window: int, n_slots: int, n_ubatch: int, n_checkpoints: int) -> int:
    """Number of blocks of the sliding-window KV group, enough for every step.

    It counts the windows of all slots, the tokens of one step and of one preempted prefill chunk,
    and `n_checkpoints` windows of cached prefixes.
    """
    visible = -(-(window - 1) // BLOCK_SIZE) + 1
    written = n_blocks_for(n_ubatch) + n_blocks_for(min(n_ubatch, APART[0]))
    return n_slots * (visible + 2) + written + n_checkpoints * visible  # 2: one block begun, one copied


class BlockPool:
    """Reference-counted pool of KV blocks.

    A block is free, or it has one reference from each block table, radix node and pending copy.
    """

    __slots__ = ("free", "n_blocks", "refs")

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.refs = [0] * n_blocks
        # a stack: deterministic, prefers recently used blocks
        self.free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self.free)

    def take(self) -> int:
        """Take a free block; it has one reference."""
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference."""
        self.refs[block] += 1

    def drop(self, block: int) -> int:
        """Drop a reference and return the number of remaining ones. At 0 the block is free."""
        n_refs = self.refs[block] - 1
        self.refs[block] = n_refs
        if n_refs == 0:
            self.free.append(block)
        return n_refs

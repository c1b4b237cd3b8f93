"""Context shift: drop tokens from the middle of a full context and move the later KV entries up.

The semantics are llama-server's. The first n_keep tokens stay, the next n_discard tokens (half of
the rest by default) are dropped, and the keys after them are rotated back by n_discard positions.
Shifted KV entries depend on dropped tokens, so they belong to this sequence alone: the prefix cache
does not contain them, and preemption swaps them out to host memory as they are.
"""

from __future__ import annotations

from logitless.engine.batch import BLOCK_SIZE, token_slots
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.host_cache import Bytes
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.sequence import Sequence, Slot

Moves = list[tuple[int, int, int]]  # (source token slot, target token slot, change of position)


def is_full(seq: Sequence) -> bool:
    """True if the context of a running sequence has no room for two more tokens."""
    return seq.slot is not None and seq.n_computed + 1 >= seq.slot.n_ctx


def kept_and_discarded(seq: Sequence, *, add_bos: bool) -> tuple[int, int]:
    """Effective (n_keep, n_discard) of a full sequence."""
    assert seq.slot is not None
    request = seq.request
    n_keep = (seq.n_prompt if request.n_keep < 0 else request.n_keep) + add_bos
    n_keep = max(0, min(n_keep, seq.slot.n_ctx - 4, seq.n_computed - 1))
    n_left = seq.n_computed - n_keep
    return n_keep, max(1, min(request.n_discard or n_left // 2, n_left))


class ContextShift:
    """Context shift of one sequence, planned. Nothing changes before `apply`."""

    def __init__(self, cache: KVCacheManager, seq: Sequence, n_keep: int, n_discard: int) -> None:
        self.cache, self.seq, self.n_keep, self.n_discard = cache, seq, n_keep, n_discard
        self.first = n_keep // BLOCK_SIZE  # blocks before this index stay as they are
        self.n_blocks = n_blocks_for(seq.n_computed - n_discard)
        self._own: set[int] = set()

    @property
    def n_missing(self) -> int:
        """Number of new blocks that the shift needs in place of shared ones."""
        self._own = self._own_blocks()
        return sum(block not in self._own for block in self.seq.kv.blocks[self.first : self.n_blocks])

    def forget_others(self) -> bool:
        """Evict idle cached prefixes that continue the sequence's blocks, so that these become its
        own.

        Returns True if any were evicted.
        """
        table = set(self.seq.kv.blocks[self.first :])
        return self.cache.prefixes.forget_after(table)

    def _own_blocks(self) -> set[int]:
        """Blocks that only this sequence uses: uncached ones, and cached ones without cached
        children.
        """
        pool, prefixes = self.cache.pool, self.cache.prefixes
        own: set[int] = set()
        for block in reversed(self.seq.kv.blocks[self.first :]):
            node = prefixes.node_of(block)
            if node is None:
                mine = pool.refs[block] == 1
            else:
                mine = pool.refs[block] == 2 and all(child.block in own for child in node.children.values())
            if mine:
                own.add(block)
        return own

    def apply(self) -> Moves:
        """Update the block table and return the device's moves, in order.

        The caller then drops the tokens (Sequence.discard).
        """
        seq, prefixes = self.seq, self.cache.prefixes
        self._own = self._own_blocks()
        while seq.kv.n_committed > self.first * BLOCK_SIZE:
            assert seq.kv.node.parent is not None
            seq.kv.node = seq.kv.node.parent
            seq.kv.n_committed -= BLOCK_SIZE
        source = list(seq.kv.blocks)
        if seq.kv.copy is not None:  # pending copy: read its source
            source[source.index(seq.kv.copy[1])] = seq.kv.copy[0]
        for block in reversed(seq.kv.blocks):
            if block in self._own:
                prefixes.claim(block)
        table = seq.kv.blocks[: self.first]
        for block in seq.kv.blocks[self.first : self.n_blocks]:
            table.append(block if block in self._own else prefixes.allocate())
        first, n_later = range(self.first * BLOCK_SIZE, self.n_keep), seq.n_computed - self.n_keep - self.n_discard
        later = range(self.n_keep + self.n_discard, seq.n_computed)
        sources = token_slots(source, [*first, *later])
        targets = token_slots(table, [*first, *range(self.n_keep, self.n_keep + n_later)])
        turns = [0] * len(first) + [-self.n_discard] * n_later
        moves: Moves = [m for m in zip(sources, targets, turns, strict=True) if m[0] != m[1]]
        remaining = set(table)
        for block in reversed(seq.kv.blocks):
            if block not in remaining:
                prefixes.release(block)
        self.cache.copies_done(seq)
        seq.kv.blocks, seq.kv.uploaded = table, False
        seq.kv.n_dropped += self.n_discard
        return moves


def swap_out(cache: KVCacheManager, seq: Sequence) -> None:
    """Swap out the blocks of a sequence that cannot recompute them.

    Raises MemoryError or OSError if the device cannot be read; nothing has changed then.
    """
    source = list(seq.kv.blocks[: n_blocks_for(seq.n_computed)])
    if seq.kv.copy is not None:  # pending copy: read its source
        source[source.index(seq.kv.copy[1])] = seq.kv.copy[0]
    blocks: list[Bytes] = [cache.store.read(block) for block in source]
    seq.kv.swapped, seq.kv.n_swapped = blocks, seq.n_computed


def swap_in(cache: KVCacheManager, seq: Sequence, slot: Slot) -> int:
    """Swap the blocks of a sequence in again and return its number of computed tokens.

    The caller has checked that enough blocks are available. Raises MemoryError or OSError if the
    device cannot be written; the blocks are lost then.
    """
    prefixes = cache.prefixes
    try:
        for data in seq.kv.swapped:
            seq.kv.blocks.append(prefixes.allocate())
            cache.store.write(seq.kv.blocks[-1], data)
    except (MemoryError, OSError):
        cache.free(seq, slot)
        raise
    seq.kv.swapped, seq.kv.uploaded = [], False
    return seq.kv.n_swapped

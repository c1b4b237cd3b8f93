"""Context shift: a sequence that has filled its context forgets a part in the middle, and what follows moves up.

The semantics are llama-server's: the first n_keep tokens stay, the next n_discard go (half of the rest by default), the
keys of those after them are turned back. What such a sequence has in its cells depends on what it has forgotten, so
from there on they are nobody else's: they are no known prefix, and when it is paused its pages go to host memory whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import n_pages_for
from logitless.engine.kv_cache.host_cache import Bytes
from logitless.engine.kv_cache.manager import KvCache
from logitless.engine.sequence import Sequence, Slot

if TYPE_CHECKING:
    pass

Moves = list[tuple[int, int, int]]  # (from cell, to cell, positions further on)


def is_full(seq: Sequence) -> bool:
    """Whether a running sequence has no room for its next token and the one after that."""
    return seq.slot is not None and seq.n_computed + 1 >= seq.slot.n_ctx


def kept_and_discarded(seq: Sequence, *, add_bos: bool) -> tuple[int, int]:
    """n_keep and n_discard as they apply to a full sequence."""
    assert seq.slot is not None
    request = seq.request
    n_keep = (seq.n_prompt if request.n_keep < 0 else request.n_keep) + add_bos
    n_keep = max(0, min(n_keep, seq.slot.n_ctx - 4, seq.n_computed - 1))
    n_left = seq.n_computed - n_keep
    return n_keep, max(1, min(request.n_discard or n_left // 2, n_left))


class Shift:
    """What has to be done to one sequence. Nothing has been done before `apply`."""

    def __init__(self, cache: KvCache, seq: Sequence, n_keep: int, n_discard: int) -> None:
        self.cache, self.seq, self.n_keep, self.n_discard = cache, seq, n_keep, n_discard
        self.first = n_keep // PAGE  # the pages before this one stay as they are
        self.n_pages = n_pages_for(seq.n_computed - n_discard)
        self._own: set[int] = set()

    @property
    def n_missing(self) -> int:
        """Pages that it needs because others have a share in its own."""
        self._own = self._own_pages()
        return sum(page not in self._own for page in self.seq.kv.blocks[self.first : self.n_pages])

    def forget_others(self) -> bool:
        """Forget known prefixes that go on from this sequence's pages and that no sequence needs: whether there were
        any. Without them these pages may be its own."""
        table = set(self.seq.kv.blocks[self.first :])
        return self.cache.prefixes.forget_after(table)

    def _own_pages(self) -> set[int]:
        """Pages that nobody needs but this sequence: unknown ones, and known ones with nothing known after them."""
        pages, prefixes = self.cache.pages, self.cache.prefixes
        own: set[int] = set()
        for page in reversed(self.seq.kv.blocks[self.first :]):
            node = prefixes.node_of(page)
            if node is None:
                mine = pages.refs[page] == 1
            else:
                mine = pages.refs[page] == 2 and all(child.page in own for child in node.children.values())
            if mine:
                own.add(page)
        return own

    def apply(self) -> Moves:
        """Bring the book-keeping up to date; returns the device's moves, in order. The caller then discards the
        tokens."""
        seq, prefixes = self.seq, self.cache.prefixes
        self._own = self._own_pages()
        while seq.kv.n_committed > self.first * PAGE:
            assert seq.kv.node.parent is not None
            seq.kv.node = seq.kv.node.parent
            seq.kv.n_committed -= PAGE
        source = list(seq.kv.blocks)
        if seq.kv.copy is not None:  # not done yet: read where it would be copied from
            source[source.index(seq.kv.copy[1])] = seq.kv.copy[0]
        for page in reversed(seq.kv.blocks):
            if page in self._own:
                prefixes.claim(page)
        table = seq.kv.blocks[: self.first]
        for page in seq.kv.blocks[self.first : self.n_pages]:
            table.append(page if page in self._own else prefixes.allocate())
        moves: Moves = []
        for p in range(self.first * PAGE, seq.n_computed):
            at = source[p // PAGE] * PAGE + p % PAGE
            back = 0 if p < self.n_keep else self.n_discard
            if self.n_keep <= p < self.n_keep + self.n_discard:
                continue
            to = table[(p - back) // PAGE] * PAGE + (p - back) % PAGE
            if at != to:
                moves.append((at, to, -back))
        kept = set(table)
        for page in reversed(seq.kv.blocks):
            if page not in kept:
                prefixes.release(page)
        self.cache.copied(seq)
        seq.kv.blocks, seq.kv.uploaded = table, False
        seq.kv.n_dropped += self.n_discard
        return moves


def park(cache: KvCache, seq: Sequence) -> None:
    """Take a copy of the pages of a sequence that cannot compute them again. MemoryError, OSError: there is none."""
    source = list(seq.kv.blocks[: n_pages_for(seq.n_computed)])
    if seq.kv.copy is not None:  # not done yet
        source[source.index(seq.kv.copy[1])] = seq.kv.copy[0]
    pages: list[Bytes] = [cache.store.read(page) for page in source]
    seq.kv.swapped, seq.kv.n_swapped = pages, seq.n_computed


def unpark(cache: KvCache, seq: Sequence, slot: Slot) -> int:
    """Bring them back, where there is room. MemoryError, OSError: they are lost.

    Returns the number of computed tokens."""
    prefixes = cache.prefixes
    try:
        for data in seq.kv.swapped:
            seq.kv.blocks.append(prefixes.allocate())
            cache.store.write(seq.kv.blocks[-1], data)
    except (MemoryError, OSError):
        cache.release(seq, slot)
        raise
    seq.kv.swapped, seq.kv.uploaded = [], False
    return seq.kv.n_swapped

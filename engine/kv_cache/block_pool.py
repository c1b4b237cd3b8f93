"""Who owns which page of the KV cache: a free list and reference counts, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logitless.engine.batch import APART, PAGE


def n_pages_for(n_tokens: int) -> int:
    """The pages that hold so many tokens of one sequence."""
    return -(-n_tokens // PAGE)


def pool_size(n_ctx: int, n_slots: int, *, unified: bool) -> int:
    """The pages of a cache of n_ctx cells. The engine has one more, with this id, for rows that pad a batch."""
    if unified:
        return n_pages_for(n_ctx)
    return n_slots * n_pages_for(n_ctx // n_slots)


def window_pages(n: int, window: int) -> range:
    """Which pages of a sequence are read to go on after n tokens, where layers see the last `window` positions."""
    return range(max(0, n - window + 1) // PAGE, n_pages_for(n))


def reach(seen: Callable[[int], range], here: Sequence[bool], n_more: int = 0, *, more_here: bool) -> tuple[int, int]:
    """(whole pages, tokens after them) after which one can go on: after n tokens it takes something of the pages
    seen(n); `here` says which of a prefix's have it, and `more_here` the page of n_more tokens that follow it."""
    first: list[int] = [0]  # after i pages: of those before it that all have it
    for i, is_here in enumerate(here):
        first.append(first[-1] if is_here else i + 1)
    n = len(here)
    if n_more and more_here and first[n] <= seen(n * PAGE + n_more).start:
        return n, n_more
    while first[n] > seen(n * PAGE).start:
        n -= 1
    return n, 0


def near_pool_size(window: int, n_slots: int, n_ubatch: int, n_kept: int) -> int:
    """The pages of layers with a window, so that no step is without: what slots see, what a step writes, and one that
    it interrupts, and `n_kept` windows of what is known."""
    seen = -(-(window - 1) // PAGE) + 1
    written = n_pages_for(n_ubatch) + n_pages_for(min(n_ubatch, APART[0]))
    return n_slots * (seen + 2) + written + n_kept * seen  # 2: a step begins a page, and one is copied


class Pages:
    """A pool of pages. A page is free, or has a reference from each table, cache node and copy that needs it."""

    __slots__ = ("free", "n_pages", "refs")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.refs = [0] * n_pages
        self.free = list(range(n_pages - 1, -1, -1))  # a stack: allocation is deterministic and prefers warm pages

    @property
    def n_used(self) -> int:
        return self.n_pages - len(self.free)

    def take(self) -> int:
        """A free page, with one reference."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more owner."""
        self.refs[page] += 1

    def drop(self, page: int) -> int:
        """One owner less; the references that are left. Without any the page is free."""
        left = self.refs[page] - 1
        self.refs[page] = left
        if left == 0:
            self.free.append(page)
        return left

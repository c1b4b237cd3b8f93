"""The KV cache as sequences see it: attach a known prefix, grow, let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import Pages, n_pages_for, reach
from logitless.engine.kv_cache.host_cache import HostCache, Store
from logitless.engine.kv_cache.offload import Offload
from logitless.engine.kv_cache.prefix_cache import Node, PrefixCache, Tail
from logitless.engine.kv_cache.recurrent_state import NOTHING, States
from logitless.engine.kv_cache.sliding_window import NearStore, Windows
from logitless.engine.sequence import Sequence, Slot

NEAR_END = 8  # tokens before a prompt's end, which templates write another time (a thought that begins)
MARK_EVERY = 4096  # tokens of a prompt: somewhere in it others may part from it
AHEAD = (
    64 << 20
)  # bytes of pages that go to host memory before others take their place (see logitless.engine.runner.prefault)


class _Found(NamedTuple):
    """What a sequence begins with: nodes of full pages, then n_more tokens that `page` begins with."""

    path: list[Node]
    n_more: int
    page: int
    inexact: bool  # some of it
    n_known: int  # tokens of full pages that are known, if not to go on from
    beside: int  # the row of states, or what layers with a window have of `page`


class KvCache:
    """Gives sequences their pages and keeps what they leave behind."""

    __slots__ = ("beside", "host", "keep_idle", "offload", "pages", "prefixes", "states", "store", "windows")

    def __init__(
        self,
        n_pages: int,
        store: Store,
        host: HostCache | None = None,
        keep_idle: bool = True,
        n_slots: int = 0,
        states: Store | None = None,
        near: NearStore | None = None,
    ) -> None:
        """`host` keeps what the device has no room for: paused sequences, and with `keep_idle` known prefixes too.
        `states`: rows of such, where the model has them; `near`: of layers with a window, where these have pages of
        their own. No model has both."""
        self.pages = Pages(n_pages)
        self.prefixes = PrefixCache(self.pages)
        self.prefixes.by_ends = states is not None
        self.store = store
        self.host = host
        self.keep_idle = keep_idle
        self.states = States(states, n_slots) if states is not None else None
        self.windows = Windows(near) if near is not None else None
        self.beside: States | Windows | None = self.states or self.windows  # what is kept beside sequences' pages
        if self.beside is not None:
            self.prefixes.on_forget = self.beside.forget
        self.offload = Offload(self.prefixes, store, self.beside, host)
        if host is not None and keep_idle:
            self.prefixes.on_evict = self.offload.save
            if self.beside is not None:
                self.beside.on_evict = self.offload.save_beside

    @property
    def n_available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return self.prefixes.n_available

    def attach(self, seq: Sequence, slot: Slot, limit: int, tails: Iterable[Tail]) -> None:
        """Start an empty table with what is known of the sequence's first `limit` tokens."""
        prefixes, tails = self.prefixes, list(tails)
        found = self._match(seq, limit, tails)
        if self.host is not None and len(self.host):
            n_found = len(found.path) * PAGE + found.n_more
            if self.offload.restore(seq.root, seq.tokens, limit, n_found, 1 << slot.id, inexact=seq.takes_inexact):
                found = self._match(seq, limit, tails)
        path, n_more = found.path, found.n_more
        if self.states is not None:
            self.states.hold(seq, found.beside, len(path) * PAGE + n_more)
        if self.windows is not None:
            self.windows.attach(seq, path, n_more)
        for node in path:
            prefixes.acquire(node.page)
            node.owners |= 1 << slot.id
            seq.table.append(node.page)
        seq.node = path[-1] if path else seq.root
        seq.sealed = len(path) * PAGE
        if n_more and not self._begin_page(seq, found.page, found.beside):
            self._let_go(seq)
            self.attach(seq, slot, len(path) * PAGE, ())
            return
        seq.n_computed = seq.sealed + n_more
        seq.inexact = seq.inexact or found.inexact
        seq.table_sent = False
        if self.beside is not None:  # next time more can be gone on from: where what is known ended, and a prompt
            seq.marks.clear()
            seq.mark(found.n_known)
            seq.mark(seq.n_prompt - NEAR_END)
        if self.states is not None and self.host is not None and self.keep_idle:  # which takes those that give way
            for position in range(MARK_EVERY, seq.n_prompt, MARK_EVERY):
                seq.mark(position)

    def _match(self, seq: Sequence, limit: int, tails: list[Tail]) -> _Found:
        """What one can go on from of what is known."""
        path, n_more, page, inexact = self.prefixes.match(seq.tokens, limit, tails, seq.root, seq.takes_inexact)
        n_known, beside = len(path) * PAGE, NOTHING
        if self.states is not None:
            path, begun, n_more, beside = self.states.match(seq.tokens, limit, path, seq.root)
            page = -1 if begun is None else begun.page
        if self.windows is not None:
            near = self._near_of(self.windows, page, tails) if n_more else None
            here = [self.windows.of(node) is not None for node in path]
            n_pages, n_more = reach(self.windows.seen, here, n_more, more_here=near is not None)
            path, beside = path[:n_pages], NOTHING if near is None else near
        return _Found(path, n_more, page, inexact, n_known, beside)

    def _near_of(self, windows: Windows, page: int, tails: list[Tail]) -> int | None:
        """What layers with a window have of a page that is known in part, or being written."""
        node = self.prefixes.node_of(page)
        return windows.of(node) if node is not None else next(tail.near for tail in tails if tail.page == page)

    def _begin_page(self, seq: Sequence, source: int, near: int) -> bool:
        """Go on in a page that another one begins like, `source`, and in `near` of layers with a window: a copy of it,
        or the page itself. False: there is no room."""
        prefixes, windows, node = self.prefixes, self.windows, self.prefixes.node_of(source)
        prefixes.acquire(source)
        if windows is not None:
            near = windows.acquire(node) if node is not None else windows.share(near)
        if prefixes.n_available:
            seq.table.append(prefixes.allocate())
            seq.copy = source, seq.table[-1]
            if windows is not None:
                seq.near.append(windows.take())
                seq.near_copy = near, seq.near[-1]
        elif prefixes.claim(source):  # nobody else needs it: write on where the match ends
            seq.table.append(source)
            if windows is not None:
                seq.near.append(near)
        else:
            prefixes.release(source)
            if windows is not None:
                windows.release(near)
            return False
        return True

    def grow(self, seq: Sequence, n: int) -> int:
        """Find cells for the next n tokens; returns for how many there are some."""
        missing = n_pages_for(seq.n_computed + n) - len(seq.table)
        if missing > 0:
            for _ in range(min(missing, self.prefixes.n_available)):
                seq.table.append(self.prefixes.allocate())
            seq.table_sent = False
        return min(n, len(seq.table) * PAGE - seq.n_computed)

    def trim(self, seq: Sequence) -> None:
        """Give back the pages in which only rejected drafts were."""
        while len(seq.table) > n_pages_for(len(seq.tokens)):
            self.prefixes.release(seq.table.pop())

    def pause(self, seq: Sequence, slot: Slot) -> None:
        """Let go of all pages of a sequence that will go on later."""
        node: Node | None = self.release(seq, slot)
        if self.host is not None and not self.keep_idle:
            while node is not None and node.parent is not None:
                self.offload.save(node)
                node = node.parent

    def forget(self, slot: Slot) -> None:
        """Drop what only this slot's sequences have had."""
        self.prefixes.forget(1 << slot.id)
        if self.host is not None:
            self.host.forget(1 << slot.id)

    def prepare_ahead(self, wanted: Callable[[], bool]) -> None:
        """Have known prefixes in host memory that sequences will soon take the place of, for no step to wait for it."""
        nbytes = self.store.nbytes  # 0: all layers keep states
        n = AHEAD // nbytes - len(self.pages.free) if nbytes else 0
        if self.host is not None and self.keep_idle and n > 0:
            self.offload.save_ahead(list(islice(self.prefixes.idle, n)), wanted)

    def sleep(self) -> None:
        """The device is about to forget its pages, and no sequence has any: keep in host memory what may be there."""
        if self.prefixes.on_evict is not None:
            for node in list(self.prefixes.idle):
                self.prefixes.on_evict(node)
        self.prefixes.clear()

    def wake(self) -> None:
        """Nothing to do: what host memory has comes back when it is asked for."""

    def copied(self, seq: Sequence) -> None:
        """The device has done the sequence's copy."""
        if seq.copy is not None:
            self.prefixes.release(seq.copy[0])
            seq.copy = None
        if seq.near_copy is not None and self.windows is not None:
            self.windows.release(seq.near_copy[0])
            seq.near_copy = None

    def seal(self, seq: Sequence, slot: Slot) -> None:
        """Make the pages known that have become full."""
        while seq.sealed + PAGE <= seq.n_computed and not seq.n_dropped:
            i = seq.sealed // PAGE
            tokens = seq.content(seq.sealed + PAGE)
            if seq.inexact and tokens in seq.node.children:
                break  # known already, but with other bits
            seq.node = self.prefixes.seal(seq.node, tokens, seq.table[i], 1 << slot.id)
            if seq.node.page != seq.table[i]:  # another sequence was faster: share its page, the bits are the same
                seq.table[i] = seq.node.page
                seq.table_sent = False
            if self.windows is not None:
                self.windows.seal(seq, i)
            seq.sealed += PAGE

    def release(self, seq: Sequence, slot: Slot) -> Node:
        """Let go of all pages. What they hold stays known until the pages are needed: up to this one."""
        end = seq.node
        known: Node | None = seq.node if seq.n_computed == seq.sealed else None
        if seq.copy is not None:  # then the last page has no content yet
            self.copied(seq)
        elif seq.sealed < seq.n_computed < seq.sealed + PAGE and not seq.n_dropped:
            page = seq.table[seq.sealed // PAGE]
            known = self.prefixes.keep(seq.node, seq.content(seq.n_computed), page, 1 << slot.id)
        self._let_go(seq, known)
        return known or end

    def _let_go(self, seq: Sequence, known: Node | None = None) -> None:
        """Of all pages; `known`: what they hold is, under this name."""
        if self.beside is not None:
            self.beside.leave(seq, known)
        for page in reversed(seq.table):
            self.prefixes.release(page)
        seq.table = []
        seq.node = seq.root
        seq.sealed = seq.n_computed = 0

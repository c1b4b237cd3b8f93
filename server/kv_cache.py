"""The KV cache as sequences see it: attach a known prefix, grow, let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from models.adapter_bank import Choice
from server.host_cache import Bytes, HostCache, PageStore, chain_key
from server.pages import Pages, n_pages_for
from server.prefix import INEXACT, Node, PrefixCache, Tail
from server.sequence import Sequence, Slot
from server.states import NEAR_END, States
from server.ubatch import PAGE

SPARE = 64 << 20  # bytes of host memory at most that are taken before a step needs them (see server.prefault)


class KvCache:
    """Gives sequences their pages and keeps what they leave behind."""

    __slots__ = ("host", "keep_idle", "pages", "prefixes", "states", "store")

    def __init__(
        self,
        n_pages: int,
        store: PageStore,
        host: HostCache | None = None,
        keep_idle: bool = True,
        n_states: int = 0,
        n_slots: int = 0,
    ) -> None:
        """`host` keeps what the device has no room for: paused sequences, and with `keep_idle` known prefixes too.
        `n_states`: rows of states, where the model has such."""
        self.pages = Pages(n_pages)
        self.prefixes = PrefixCache(self.pages)
        self.store = store
        self.host = host
        self.keep_idle = keep_idle
        self.states = States(n_states, n_slots, self.prefixes) if n_states else None
        if host is not None and keep_idle:
            self.prefixes.on_evict = self._to_host

    @property
    def n_available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return self.prefixes.n_available

    def attach(self, seq: Sequence, slot: Slot, limit: int, tails: Iterable[Tail]) -> None:
        """Start an empty table with what is known of the sequence's first `limit` tokens."""
        prefixes = self.prefixes
        if self.host is not None and len(self.host):
            self._bring_back(seq.root, seq.tokens, limit, 1 << slot.id, seq.takes_inexact)
        path, n_more, source, inexact = prefixes.match(seq.tokens, limit, tails, seq.root, seq.takes_inexact)
        if self.states is not None:
            path, n_more, source = self._with_state(self.states, seq, limit, path)
        for node in path:
            prefixes.acquire(node.page)
            node.owners |= 1 << slot.id
            seq.table.append(node.page)
        seq.node = path[-1] if path else seq.root
        seq.sealed = seq.n_computed = len(path) * PAGE
        if n_more:
            prefixes.acquire(source)
            if prefixes.n_available:
                page = prefixes.allocate()
                seq.copy = source, page
            elif prefixes.claim(source):
                page = source  # nobody else needs it: write on where the match ends
            else:
                prefixes.release(source)
                n_more, inexact = 0, seq.node.inexact
                if self.states is not None and seq.state_at > seq.n_computed:
                    self._start_anew(self.states, seq)
        if n_more:
            seq.table.append(page)
            seq.n_computed += n_more
        seq.inexact = seq.inexact or inexact
        seq.table_sent = False

    @staticmethod
    def _with_state(states: States, seq: Sequence, limit: int, path: list[Node]) -> tuple[list[Node], int, int]:
        """The part of what is known that can be gone on from. Next time it is more: where it ends is a place to keep,
        as is the end of a prompt."""
        found, begun, n_more, row = states.match(seq.tokens, limit, path, seq.root)
        seq.n_computed = len(found) * PAGE + n_more
        states.hold(seq, row, seq.n_computed)
        seq.marks.clear()
        states.mark(seq, len(path) * PAGE)
        states.mark(seq, seq.n_prompt - NEAR_END)
        return found, n_more, -1 if begun is None else begun.page

    def _start_anew(self, states: States, seq: Sequence) -> None:
        """There is no page to go on in from where its state is."""
        states.release(seq)
        self._let_go(seq)

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
        if self.host is not None and not self.keep_idle:
            node: Node | None = seq.node
            while node is not None and node.parent is not None:
                self._to_host(node)
                node = node.parent
        self.release(seq, slot)

    def forget(self, slot: Slot) -> None:
        """Drop what only this slot's sequences have had."""
        self.prefixes.forget(1 << slot.id)
        if self.host is not None:
            self.host.forget(1 << slot.id)

    def prepare_ahead(self, wanted: Callable[[], bool]) -> None:
        """Have host memory at hand for known prefixes that sequences will soon take the place of."""
        nbytes = self.store.page_nbytes
        n = min(SPARE // nbytes, len(self.prefixes.idle))
        if self.host is not None and self.keep_idle and len(self.pages.free) < n:
            self.host.stock(n, nbytes, wanted)

    def sleep(self) -> None:
        """The device is about to forget its pages, and no sequence has any: keep in host memory what may be there."""
        if self.prefixes.on_evict is not None:
            for node in list(self.prefixes.idle):
                self.prefixes.on_evict(node)
        self.prefixes.clear()

    def wake(self) -> None:
        """Nothing to do: what host memory has comes back when it is asked for."""

    def copy_out(self, tokens: list[int], slot: Slot, choice: Choice) -> tuple[list[int], list[Bytes]]:
        """The leading tokens whose cells are known, on the device or in host memory, and the bytes of their pages."""
        root = self.prefixes.root_of(choice)
        path, n_more, partial, _ = self.prefixes.match(tokens, len(tokens), root=root)
        pages = [self.store.read_page(node.page) for node in path]
        node = path[-1] if path else root
        if self.host is not None and not n_more:
            key = node.key
            while (len(pages) + 1) * PAGE <= len(tokens):
                key = chain_key(key, tuple(tokens[len(pages) * PAGE : (len(pages) + 1) * PAGE]))
                data = self.host.get(key, 1 << slot.id)
                if data is None:
                    break
                pages.append(data)
        n_known = len(pages) * PAGE
        if n_more:
            pages.append(self.store.read_page(partial))
        return tokens[: n_known + n_more], pages

    def copy_in(self, tokens: list[int], pages: list[Bytes], slot: Slot, choice: Choice) -> bool:
        """Make these pages known; False, and nothing done, when there is no room for those that are not known yet."""
        prefixes, owner = self.prefixes, 1 << slot.id
        n_full = len(tokens) // PAGE
        node = prefixes.root_of(choice)
        held: list[int] = []  # nothing of this path may be evicted meanwhile
        try:
            for i in range(n_full):
                child = node.children.get(tuple(tokens[i * PAGE : (i + 1) * PAGE]))
                if child is None:
                    break
                prefixes.acquire(child.page)
                child.owners |= owner
                held.append(child.page)
                node = child
            if prefixes.n_available < len(pages) - len(held):
                return False
            for i in range(len(held), len(pages)):
                page = prefixes.allocate()
                held.append(page)
                self.store.write_page(page, pages[i])
                part = tuple(tokens[i * PAGE : (i + 1) * PAGE])
                if len(part) == PAGE:
                    node = prefixes.insert(node, part, page, owner)
                else:
                    prefixes.keep(node, part, page, owner)
            return True
        finally:
            for page in reversed(held):
                prefixes.release(page)

    def share(self, source: Slot, slot: Slot) -> None:
        """Count what is known of a slot's tokens as another one's too."""
        tokens, root = source.cached, self.prefixes.root_of(source.choice)
        path, n_more, partial, _ = self.prefixes.match(tokens, len(tokens), root=root)
        for node in path:
            node.owners |= 1 << slot.id
        last = self.prefixes.node_of(partial) if n_more else None
        if last is not None:
            last.owners |= 1 << slot.id
        elif self.host is not None:
            key = path[-1].key if path else root.key
            for start in range(len(path) * PAGE, len(tokens) - PAGE + 1, PAGE):
                key = chain_key(key, tuple(tokens[start : start + PAGE]))
                if not self.host.add_owners(key, 1 << slot.id):
                    break

    def _to_host(self, node: Node) -> None:
        """Save a full page's bytes. A page that the device cannot read is computed again one day."""
        assert self.host is not None
        if node.n_tokens < PAGE or self.host.add_owners(node.key, node.owners):
            return
        with suppress(MemoryError, OSError):
            room = self.host.room(self.store.page_nbytes)
            self.host.put(node.key, node.owners, self.store.read_page(node.page, room))

    def _bring_back(self, root: Node, tokens: list[int], limit: int, owner: int, inexact: bool) -> None:
        """Make those pages of tokens[:limit] known again that host memory has, as long as there is room."""
        prefixes, host = self.prefixes, self.host
        assert host is not None
        node = root
        held: list[int] = []  # nothing of this path may be evicted meanwhile
        while (len(held) + 1) * PAGE <= limit:
            part = tuple(tokens[len(held) * PAGE : (len(held) + 1) * PAGE])
            child, data = node.children.get(part), None
            if child is None:
                data = host.get(chain_key(node.key, part), owner)
            if child is None and data is None and inexact:
                part = (INEXACT, *part)
                child, data = node.children.get(part), host.get(chain_key(node.key, part), owner)
            if child is not None:
                prefixes.acquire(child.page)
            else:
                if data is None or not prefixes.n_available:
                    break
                page = prefixes.allocate()
                try:
                    self.store.write_page(page, data)
                except (MemoryError, OSError):
                    prefixes.release(page)
                    break
                host.n_restored += 1
                child = prefixes.insert(node, part, page, owner)
            held.append(child.page)
            node = child
        for page in reversed(held):
            prefixes.release(page)

    def copied(self, seq: Sequence) -> None:
        """The device has done the sequence's copy."""
        if seq.copy is not None:
            self.prefixes.release(seq.copy[0])
            seq.copy = None

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
            seq.sealed += PAGE

    def release(self, seq: Sequence, slot: Slot) -> None:
        """Let go of all pages. What they hold stays known until the pages are needed."""
        known: Node | None = seq.node if seq.n_computed == seq.sealed else None
        if seq.copy is not None:  # then the last page has no content yet
            self.copied(seq)
        elif seq.sealed < seq.n_computed < seq.sealed + PAGE and not seq.n_dropped:
            page = seq.table[seq.sealed // PAGE]
            known = self.prefixes.keep(seq.node, seq.content(seq.n_computed), page, 1 << slot.id)
        if self.states is not None:
            self.states.leave(seq, known)
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Of all pages, whether what they hold is known or not."""
        for page in reversed(seq.table):
            self.prefixes.release(page)
        seq.table = []
        seq.node = seq.root
        seq.sealed = seq.n_computed = 0

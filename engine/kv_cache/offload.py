"""Known pages as bytes: in host memory, when others need their place on the device, and in the files of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import reach
from logitless.engine.kv_cache.host_cache import Bytes, HostCache, Store, chain_key
from logitless.engine.kv_cache.prefix_cache import INEXACT, Node, PrefixCache
from logitless.engine.sequence import Slot
from logitless.models.adapters.adapter_bank import Choice


class Known(NamedTuple):
    """A page that is known on the device, as `node`, or in host memory, as `key`."""

    name: tuple[int, ...]
    key: bytes
    node: Node | None


class Beside(Protocol):
    """What else it takes to go on from known pages: logitless.engine.kv_cache.recurrent_state,
    logitless.engine.kv_cache.sliding_window.
    """

    @property
    def store(self) -> Store: ...

    def of(self, node: Node | None, /) -> int | None:
        """The number of what the device has of a node."""

    def is_wanted(self, node: Node, /) -> bool:
        """Whether anybody will ask for that."""

    def seen(self, n: int, /) -> range:
        """The pages that it takes to go on after n tokens."""

    def put(self, nodes: list[Node], data: Mapping[Node, Bytes], /) -> None:
        """Bring in what the device has not. MemoryError, OSError: it could not."""


def _beside(key: bytes) -> bytes:
    """The name of what there is beside a page."""
    return b"beside" + key


def _beside_key(page: Known) -> bytes:
    return _beside(page.node.key if page.node is not None else page.key)


class Offload:
    """What is known of sequences beyond the pages that have it. `host` None: nothing is kept in host memory."""

    def __init__(self, prefixes: PrefixCache, store: Store, beside: Beside | None, host: HostCache | None) -> None:
        self.prefixes, self.store, self.beside, self.host = prefixes, store, beside, host

    def save(self, node: Node) -> None:
        """Keep a page's bytes, and what there is beside it."""
        if self._is_kept(node):
            self.save_beside(node)
            self._save_page(node)

    def _save_page(self, node: Node) -> None:
        """A page that the device cannot read is computed again one day."""
        assert self.host is not None
        if not self.host.add_owners(node.key, node.owners):
            with suppress(MemoryError, OSError):
                self.host.put(node.key, node.owners, self.store.read(node.page))

    def save_ahead(self, nodes: Iterable[Node], wanted: Callable[[], bool]) -> None:
        """Keep the bytes of pages that will soon be saved, until somebody waits (`wanted`), or what others have left
        would have to go for them."""
        assert self.host is not None
        for node in nodes:
            if wanted() or not self.host.has_room(self.store.nbytes):
                break
            if node.key not in self.host and self._is_kept(node):
                self._save_page(node)

    def _is_kept(self, node: Node) -> bool:
        """Full pages are; of others, which may take as long to compute where one goes on from ends, such ends."""
        assert self.host is not None
        if node.n_tokens == PAGE:
            return True
        return self.prefixes.by_ends and self._has_beside(Known(node.tokens, b"", node))

    def save_beside(self, node: Node) -> None:
        """Keep what there is beside a page, if anybody will ask for that."""
        assert self.host is not None
        if self.beside is None or not self._is_kept(node) or not self.beside.is_wanted(node):
            return
        key, number = _beside(node.key), self.beside.of(node)
        assert number is not None
        if not self.host.add_owners(key, node.owners):
            with suppress(MemoryError, OSError):
                self.host.put(key, node.owners, self.beside.store.read(number))

    def restore(self, root: Node, tokens: list[int], limit: int, n_found: int, owner: int, *, inexact: bool) -> bool:
        """Make those pages of tokens[:limit] known again that host memory has, as long as there is room; whether one
        may go on from more than n_found tokens now."""
        prefixes = self.prefixes
        known = self._known(root, tokens, limit, inexact=inexact)
        end = self._end(root, known, tokens[:limit]) if prefixes.by_ends else (None, 0)
        known, n_tokens = self._reached(known, *end)
        if n_tokens <= n_found:
            return False
        nodes: list[Node] = []  # nothing of this path may be evicted meanwhile
        for name, key, node in known:
            if node is None:
                node = self._restored(nodes[-1] if nodes else root, name, key, owner)
                if node is None:
                    break
            else:
                prefixes.acquire(node.page)
            nodes.append(node)
        if self.beside is not None:
            self._restore_beside(self.beside, nodes, owner)
        for node in reversed(nodes):
            prefixes.release(node.page)
        return True

    def _restored(self, parent: Node, name: tuple[int, ...], key: bytes, owner: int) -> Node | None:
        """A page from host memory, with a reference; None: there is no room, or it is gone."""
        prefixes, host = self.prefixes, self.host
        assert host is not None
        data = host.get(key, owner)
        if data is None or not prefixes.n_available:
            return None
        page = prefixes.allocate()
        try:
            self.store.write(page, data)
        except (MemoryError, OSError):
            prefixes.release(page)
            return None
        host.n_restored += 1
        return prefixes.insert(parent, name, page, owner)

    def _restore_beside(self, beside: Beside, nodes: list[Node], owner: int) -> None:
        """What it takes to go on from the last of these pages, from host memory where it is there."""
        assert self.host is not None
        seen = [nodes[i] for i in beside.seen(len(nodes) * PAGE)]
        data: dict[Node, Bytes] = {}
        for node in seen:
            if beside.of(node) is None:
                found = self.host.get(_beside(node.key), owner)
                if found is None:
                    return
                data[node] = found
        with suppress(MemoryError, OSError):
            beside.put(seen, data)

    def copy_out(self, tokens: list[int], slot: Slot, choice: Choice) -> tuple[list[int], list[Bytes], list[Bytes]]:
        """The leading tokens that one can go on from, on the device or in host memory; the bytes of their pages, and of
        what it takes beside them."""
        root, owner = self.prefixes.root_of(choice), 1 << slot.id
        known = self._known(root, tokens, len(tokens))
        known, n_tokens = self._reached(known, *self._end(root, known, tokens))
        others: list[Bytes] = []
        if self.beside is not None:
            others = [self._read_beside(known[i], owner) for i in self.beside.seen(n_tokens)]
        return tokens[:n_tokens], [self._read(page, owner) for page in known], others

    def _reached(self, known: list[Known], end: Known | None, n_more: int) -> tuple[list[Known], int]:
        """Of known pages, and one that the n_more tokens after them begin: those that one can go on from, and after how
        many tokens."""
        n = len(known)
        if self.beside is not None:
            here = [self._has_beside(page) for page in known]
            n, n_more = reach(self.beside.seen, here, n_more, more_here=end is not None and self._has_beside(end))
        last = [end] if end is not None and n_more else []
        return [*known[:n], *last], n * PAGE + n_more

    def _end(self, root: Node, known: list[Known], tokens: list[int]) -> tuple[Known | None, int]:
        """A page that begins with tokens which follow known ones, and how many of them. Best one that ends with the
        last of them; where one goes on from ends, the longest that these tokens are enough for, and that has one."""
        node, key = (known[-1].node, known[-1].key) if known else (root, b"")
        rest = tuple(tokens[len(known) * PAGE :][: PAGE - 1])
        if self.prefixes.by_ends:
            for n in range(len(rest), 0, -1):
                found = self._next(node, key, rest[:n], inexact=False)
                if found is not None and self._has_beside(found):
                    return found, n
            return None, 0
        if node is None or not rest:
            return None, 0
        exact = node.children.get(rest)
        if exact is not None:
            return Known(rest, b"", exact), len(rest)
        match = self.prefixes.match(tokens, len(tokens), root=root)
        last = self.prefixes.node_of(match.page) if match.n_more else None
        return (None, 0) if last is None else (Known(last.tokens, b"", last), match.n_more)

    def copy_in(self, tokens: list[int], pages: list[Bytes], others: list[Bytes], slot: Slot, choice: Choice) -> bool:
        """Make known what `copy_out` gave; False, and nothing done, when there is no room for pages that are not."""
        prefixes, owner = self.prefixes, 1 << slot.id
        n_full = len(tokens) // PAGE
        node = prefixes.root_of(choice)
        held: list[int] = []  # nothing of this path may be evicted meanwhile
        path: list[Node] = []
        try:
            for i in range(n_full):
                child = node.children.get(tuple(tokens[i * PAGE : (i + 1) * PAGE]))
                if child is None:
                    break
                prefixes.acquire(child.page)
                child.owners |= owner
                held.append(child.page)
                path.append(child)
                node = child
            if prefixes.n_available < len(pages) - len(held):
                return False
            for i in range(len(held), len(pages)):
                page = prefixes.allocate()
                held.append(page)
                self.store.write(page, pages[i])
                part = tuple(tokens[i * PAGE : (i + 1) * PAGE])
                if len(part) == PAGE:
                    node = prefixes.insert(node, part, page, owner)
                    path.append(node)
                elif (last := prefixes.keep(node, part, page, owner)) is not None:
                    path.append(last)
            if self.beside is not None and len(path) == len(pages):
                seen = path[len(path) - len(others) :]
                self.beside.put(seen, dict(zip(seen, others, strict=True)))
            return True
        finally:
            for page in reversed(held):
                prefixes.release(page)

    def share(self, source: Slot, slot: Slot) -> None:
        """Count what is known of a slot's tokens as another one's too."""
        tokens, root, owner = source.cached, self.prefixes.root_of(source.choice), 1 << slot.id
        known = self._known(root, tokens, len(tokens))
        end, _ = self._end(root, known, tokens)
        for page in known if end is None else [*known, end]:
            if page.node is not None:
                page.node.owners |= owner
            elif self.host is not None:
                self.host.add_owners(page.key, owner)
            if self.host is not None:  # what is beside a page may be there without it
                self.host.add_owners(_beside_key(page), owner)

    def _known(self, root: Node, tokens: list[int], limit: int, *, inexact: bool = False) -> list[Known]:
        """The leading full pages of tokens[:limit] that are on the device or in host memory; `inexact`: such too, where
        there is nothing exact."""
        known: list[Known] = []
        node: Node | None = root
        for start in range(0, limit - PAGE + 1, PAGE):
            part = tuple(tokens[start : start + PAGE])
            found = self._next(node, known[-1].key if known and node is None else b"", part, inexact=inexact)
            if found is None:
                break
            known.append(found)
            node = found.node
        return known

    def _next(self, node: Node | None, key: bytes, part: tuple[int, ...], *, inexact: bool) -> Known | None:
        """The page after a node, or after the one with this key in host memory. No node comes after what has none."""
        for name in (part, (INEXACT, *part)) if inexact else (part,):
            child = node.children.get(name) if node is not None else None
            if child is not None:
                return Known(name, b"", child)
            if self.host is not None and len(self.host):
                own = chain_key(node.key if node is not None else key, name)
                if own in self.host:
                    return Known(name, own, None)
        return None

    def _has_beside(self, page: Known) -> bool:
        """Whether there is what it has beside."""
        assert self.beside is not None
        if self.beside.of(page.node) is not None:
            return True
        return self.host is not None and _beside_key(page) in self.host

    def _read(self, page: Known, owner: int) -> Bytes:
        if page.node is not None:
            return self.store.read(page.node.page)
        data = self.host.get(page.key, owner) if self.host is not None else None
        assert data is not None
        return data

    def _read_beside(self, page: Known, owner: int) -> Bytes:
        assert self.beside is not None
        number = self.beside.of(page.node)
        if number is not None:
            return self.beside.store.read(number)
        data = self.host.get(_beside_key(page), owner) if self.host is not None else None
        assert data is not None
        return data

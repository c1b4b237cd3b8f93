"""Known pages as bytes: in host memory, when others need their place on the device, and in the files of slots."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from models.adapter_bank import Choice
from server.host_cache import Bytes, HostCache, PageStore, chain_key
from server.pages import window_pages
from server.prefix import INEXACT, Node, PrefixCache
from server.sequence import Slot
from server.ubatch import PAGE
from server.windows import Windows


class Known(NamedTuple):
    """A full page that is known on the device, as `node`, or in host memory, as `key`."""

    name: tuple[int, ...]
    key: bytes
    node: Node | None


def _near(key: bytes) -> bytes:
    """The name of what layers with a window have of a page."""
    return b"near" + key


class Offload:
    """What is known of sequences beyond the pages that have it. `host` None: nothing is kept in host memory."""

    def __init__(
        self, prefixes: PrefixCache, store: PageStore, windows: Windows | None, host: HostCache | None
    ) -> None:
        self.prefixes, self.store, self.windows, self.host = prefixes, store, windows, host

    def save(self, node: Node) -> None:
        """Keep a full page's bytes. A page that the device cannot read is computed again one day."""
        assert self.host is not None
        if node.n_tokens < PAGE:
            return
        self.save_near(node)
        if self.host.add_owners(node.key, node.owners):
            return
        with suppress(MemoryError, OSError):
            room = self.host.room(self.store.page_nbytes)
            self.host.put(node.key, node.owners, self.store.read_page(node.page, room))

    def save_near(self, node: Node) -> None:
        """Keep what layers with a window have of it, if anybody will ask for that."""
        assert self.host is not None
        if self.windows is None or node.n_tokens < PAGE or not self.windows.is_wanted(node):
            return
        key, page = _near(node.key), self.windows.page_of(node)
        assert page is not None
        if not self.host.add_owners(key, node.owners):
            with suppress(MemoryError, OSError):
                self.host.put(key, node.owners, self.windows.store.read_page(page))

    def restore(self, root: Node, tokens: list[int], limit: int, owner: int, *, inexact: bool) -> None:
        """Make those pages of tokens[:limit] known again that host memory has, as long as there is room."""
        prefixes, host = self.prefixes, self.host
        assert host is not None
        known = self._known(root, tokens, limit, inexact=inexact)
        if self.windows is not None:
            n, _ = self.windows.reach([self._has_near(page) for page in known])
            del known[n:]
        nodes: list[Node] = []  # nothing of this path may be evicted meanwhile
        for name, key, node in known:
            if node is None:
                node = self._restored(nodes[-1] if nodes else root, name, key, owner)
                if node is None:
                    break
            else:
                prefixes.acquire(node.page)
            nodes.append(node)
        if self.windows is not None:
            self._restore_window(self.windows, nodes, owner)
        for node in reversed(nodes):
            prefixes.release(node.page)

    def _restored(self, parent: Node, name: tuple[int, ...], key: bytes, owner: int) -> Node | None:
        """A page from host memory, with a reference; None: there is no room, or it is gone."""
        prefixes, host = self.prefixes, self.host
        assert host is not None
        data = host.get(key, owner)
        if data is None or not prefixes.n_available:
            return None
        page = prefixes.allocate()
        try:
            self.store.write_page(page, data)
        except (MemoryError, OSError):
            prefixes.release(page)
            return None
        host.n_restored += 1
        return prefixes.insert(parent, name, page, owner)

    def _restore_window(self, windows: Windows, nodes: list[Node], owner: int) -> None:
        """What the window sees that ends with these pages, from host memory where it is there."""
        assert self.host is not None
        data: dict[Node, Bytes] = {}
        for i in window_pages(len(nodes) * PAGE, windows.window):
            if windows.page_of(nodes[i]) is None:
                found = self.host.get(_near(nodes[i].key), owner)
                if found is None:
                    return
                data[nodes[i]] = found
        with suppress(MemoryError, OSError):
            windows.put([nodes[i] for i in window_pages(len(nodes) * PAGE, windows.window)], data)

    def copy_out(self, tokens: list[int], slot: Slot, choice: Choice) -> tuple[list[int], list[Bytes], list[Bytes]]:
        """The leading tokens that one can go on from, on the device or in host memory, and the bytes of their pages; of
        layers with a window those that it sees."""
        root, owner = self.prefixes.root_of(choice), 1 << slot.id
        known = self._known(root, tokens, len(tokens))
        path, n_more, partial, _ = self.prefixes.match(tokens, len(tokens), root=root)
        if len(path) < len(known):
            n_more = 0
        last = self.prefixes.node_of(partial) if n_more else None
        near: list[Bytes] = []
        if self.windows is not None:
            here = [self._has_near(page) for page in known]
            n, n_more = self.windows.reach(here, n_more, more_here=self.windows.page_of(last) is not None)
            del known[n:]
            seen = window_pages(n * PAGE + n_more, self.windows.window)
            near = [self._read_near(self.windows, page.node, page.key, owner) for page in known[seen.start :]]
            if n_more:
                near.append(self._read_near(self.windows, last, b"", owner))
        pages = [self._read(page, owner) for page in known]
        if n_more:
            pages.append(self.store.read_page(partial))
        return tokens[: len(known) * PAGE + n_more], pages, near

    def copy_in(self, tokens: list[int], pages: list[Bytes], near: list[Bytes], slot: Slot, choice: Choice) -> bool:
        """Make these pages known; False, and nothing done, when there is no room for those that are not known yet."""
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
                self.store.write_page(page, pages[i])
                part = tuple(tokens[i * PAGE : (i + 1) * PAGE])
                if len(part) == PAGE:
                    node = prefixes.insert(node, part, page, owner)
                    path.append(node)
                elif (last := prefixes.keep(node, part, page, owner)) is not None:
                    path.append(last)
            if self.windows is not None and len(path) == len(pages):
                seen = path[len(path) - len(near) :]
                self.windows.put(seen, dict(zip(seen, near, strict=True)))
            return True
        finally:
            for page in reversed(held):
                prefixes.release(page)

    def share(self, source: Slot, slot: Slot) -> None:
        """Count what is known of a slot's tokens as another one's too."""
        tokens, root, owner = source.cached, self.prefixes.root_of(source.choice), 1 << slot.id
        for page in self._known(root, tokens, len(tokens)):
            if page.node is not None:
                page.node.owners |= owner
            elif self.host is not None:
                self.host.add_owners(page.key, owner)
                self.host.add_owners(_near(page.key), owner)
        match = self.prefixes.match(tokens, len(tokens), root=root)
        if match.n_more and (last := self.prefixes.node_of(match.page)) is not None:
            last.owners |= owner

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

    def _has_near(self, page: Known) -> bool:
        """Whether it can be seen by layers with a window."""
        assert self.windows is not None
        if self.windows.page_of(page.node) is not None:
            return True
        return self.host is not None and _near(page.node.key if page.node is not None else page.key) in self.host

    def _read(self, page: Known, owner: int) -> Bytes:
        if page.node is not None:
            return self.store.read_page(page.node.page)
        data = self.host.get(page.key, owner) if self.host is not None else None
        assert data is not None
        return data

    def _read_near(self, windows: Windows, node: Node | None, key: bytes, owner: int) -> Bytes:
        page = windows.page_of(node)
        if page is not None:
            return windows.store.read_page(page)
        data = self.host.get(_near(node.key if node is not None else key), owner) if self.host is not None else None
        assert data is not None
        return data

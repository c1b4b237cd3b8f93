"""Prefixes that the KV cache already holds, found by token content, whoever computed them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

from logitless.engine.batch import PAGE
from logitless.engine.kv_cache.block_pool import Pages
from logitless.engine.kv_cache.host_cache import chain_key
from logitless.models.adapters.adapter_bank import BASE

# before a page's tokens: its cells were moved there (cache_reuse.py), or computed after such cells
INEXACT = -1


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens are equal. Compares slices, so it runs at C speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class Node:
    """A page with known content: these tokens after those of its ancestors. Only a full page has children.

    Inexact content has INEXACT before its tokens: nobody finds it who does not look for it.
    """

    __slots__ = ("__weakref__", "_key", "children", "owners", "page", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], page: int, root_key: bytes = b"") -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}
        self.owners = 0  # a bit for each slot whose sequences have had it
        self._key: bytes | None = root_key if parent is None else None

    @property
    def inexact(self) -> bool:
        return self.tokens[:1] == (INEXACT,)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) - self.inexact

    @property
    def key(self) -> bytes:
        """The name of this content (see logitless.engine.kv_cache.host_cache)."""
        path = []
        node = self
        while node._key is None:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        key = node._key
        for node in reversed(path):
            node._key = key = chain_key(key, node.tokens)
        return key


class Match(NamedTuple):
    """What is known of a sequence of tokens: nodes of full pages, then n_more tokens that `page` begins with."""

    path: list[Node]
    n_more: int
    page: int
    inexact: bool  # some of it


class Tail(NamedTuple):
    """A page that is still being written."""

    parent: Node
    tokens: tuple[int, ...]
    page: int
    near: int | None  # of layers with a window, where these have other pages


class PrefixCache:
    """A radix tree of pages over `Pages`. The tree holds one reference to each page in it.

    A page that nobody but the tree needs is *idle* and may be evicted. `idle` is ordered by last use, and owners let go
    of their deepest page first, so a child always stands before its parent there: the oldest idle node is a leaf.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        # one goes on after a page's last token only (recurrent_state.py), so ends of each other's stay
        self.by_ends = False
        self.root = Node(None, (), -1)
        self._roots: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()  # pages and sequences hold theirs
        self._roots[BASE] = self.root
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.on_forget: Callable[[Node], None] | None = None  # told when content is no longer known
        self.on_evict: Callable[[Node], None] | None = None  # told before a known page is given to somebody else
        self._node_of: list[Node | None] = [None] * pages.n_pages

    @property
    def n_available(self) -> int:
        """Pages that `allocate` can give without taking any from a sequence."""
        return len(self.pages.free) + len(self.idle)

    def root_of(self, choice: Hashable) -> Node:
        """Where the prefixes begin that were computed with these weights and adapters."""
        root = self._roots.get(choice)
        if root is None:
            root = self._roots[choice] = Node(None, (), -1, repr(choice).encode())
        return root

    @property
    def nodes(self) -> list[Node]:
        return [node for node in self._node_of if node is not None]

    def node_of(self, page: int) -> Node | None:
        """The known content of a page."""
        return self._node_of[page]

    def allocate(self) -> int:
        """A page for writing, with one reference: a free one, else that of the prefix not used for longest."""
        if not self.pages.free:
            oldest = next(iter(self.idle))
            if self.on_evict is not None:
                self.on_evict(oldest)
            self._remove(oldest)
        return self.pages.take()

    def match(
        self,
        tokens: list[int],
        limit: int,
        tails: Iterable[Tail] = (),
        root: Node | None = None,
        inexact: bool = False,
    ) -> Match:
        """The longest known prefix of tokens[:limit]; `inexact`: that too, where there is nothing exact."""
        node = root or self.root
        path: list[Node] = []
        while (len(path) + 1) * PAGE <= limit:
            start = len(path) * PAGE
            part = tuple(tokens[start : start + PAGE])
            child = node.children.get(part)
            if child is None and inexact:
                child = node.children.get((INEXACT, *part))
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * PAGE
        rest = tuple(tokens[start : min(limit, start + PAGE)])
        best, page, found_inexact = 0, -1, node.inexact
        if rest:
            begun = [(child.tokens, child.page) for child in node.children.values()]
            begun += [(tail.tokens, tail.page) for tail in tails if tail.parent is node]
            for written, candidate in begun:
                n = _common(rest, written)
                if inexact and written[0] == INEXACT:
                    n = _common(rest, written[1:])
                if n > best:
                    best, page, found_inexact = n, candidate, written[0] == INEXACT
        return Match(path, best, page, found_inexact)

    def acquire(self, page: int) -> None:
        """One more owner of a page; it is not idle any more."""
        if self.pages.refs[page] == 1:
            node = self._node_of[page]
            if node is not None:
                del self.idle[node]
        self.pages.share(page)

    def release(self, page: int) -> None:
        """One owner less. Owners of several pages of a sequence release the deepest first."""
        if self.pages.drop(page) == 1:
            node = self._node_of[page]
            if node is not None:
                self.idle[node] = None

    def claim(self, page: int) -> bool:
        """Take a page away from the tree if the caller is its only other owner; it may then be written to."""
        node = self._node_of[page]
        if node is None or node.children or self.pages.refs[page] != 2:
            return False
        self._detach(node)
        self.pages.drop(page)
        return True

    def seal(self, parent: Node, tokens: tuple[int, ...], page: int, owner: int) -> Node:
        """Make the caller's full page known. If its content is known already the caller gets that page in its place."""
        known = parent.children.get(tokens)
        if known is not None:
            self.acquire(known.page)
            self.release(page)
            known.owners |= owner
            return known
        return self.insert(parent, tokens, page, owner)

    def keep(self, parent: Node, tokens: tuple[int, ...], page: int, owner: int) -> Node | None:
        """Make the last, partly filled page of a sequence that ends known, unless a known page does as well, one that
        begins like it: the node that has these tokens and no more."""
        n = len(tokens)
        for child in parent.children.values():
            if child.tokens == tokens or (child.tokens[:n] == tokens and not self.by_ends):
                if child in self.idle:
                    self.idle.move_to_end(child)
                child.owners |= owner
                return child if len(child.tokens) == n else None
        return self.insert(parent, tokens, page, owner)

    def forget_after(self, pages: set[int]) -> bool:
        """Drop idle content that goes on from these pages and is not in them; whether there was any."""
        found = False
        for node in list(self.idle):  # children come before their parents
            above = node.parent
            while above is not None and above.page not in pages:
                above = above.parent
            if above is not None and node.page not in pages and not node.children:
                self._remove(node)
                found = True
        return found

    def forget(self, owner: int) -> None:
        """Drop what only this slot's sequences have had."""
        for node in self.nodes:
            node.owners &= ~owner
        for node in list(self.idle):  # children come before their parents
            if not node.owners and not node.children:
                self._remove(node)

    def clear(self) -> None:
        """Drop everything that no sequence uses: the pages' memory was lost."""
        for node in list(self.idle):  # children come before their parents
            self._remove(node)

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int, owner: int) -> Node:
        """Make the caller's page known; it keeps its own reference."""
        for child in list(parent.children.values()) if not self.by_ends else ():
            # Shorter pages with the same beginning are of no more use.
            if child in self.idle and len(child.tokens) < len(tokens) and child.tokens == tokens[: len(child.tokens)]:
                self._remove(child)
        node = Node(parent, tokens, page)
        node.owners = owner
        parent.children[tokens] = node
        self._node_of[page] = node
        self.pages.share(page)
        return node

    def _remove(self, node: Node) -> None:
        del self.idle[node]
        self._detach(node)
        self.pages.drop(node.page)

    def _detach(self, node: Node) -> None:
        if self.on_forget is not None:
            self.on_forget(node)
        if node.parent is not None:
            del node.parent.children[node.tokens]
        self._node_of[node.page] = None

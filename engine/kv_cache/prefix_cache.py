"""Prefix cache: a radix tree of KV blocks by token content, shared by all sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from hashlib import blake2b
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import BlockPool
from logitless.engine.kv_cache.host_cache import chain_key
from logitless.models.adapters.stacked_lora import BASE

# first item of a block's key if its KV entries were moved (cache_reuse.py) or follow moved ones
INEXACT = -1


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal leading tokens. Compares slices, so it runs at C speed."""
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
    """Radix node: a cached block with these tokens, after those of its ancestors.

    Only full blocks have children. The key of inexact content begins with INEXACT, so that only
    requests that accept it match it.
    """

    __slots__ = ("__weakref__", "_key", "block", "children", "owners", "parent", "tokens", "transient")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int, root_key: bytes = b"") -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.children: dict[tuple[int, ...], Node] = {}
        self.owners = 0  # bit mask of the slots whose sequences have used it
        self._key: bytes | None = root_key if parent is None else None
        # never in host memory: of weights that are about to change
        self.transient: bool = parent is not None and parent.transient

    @property
    def inexact(self) -> bool:
        return self.tokens[:1] == (INEXACT,)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) - self.inexact

    @property
    def key(self) -> bytes:
        """Hash key of the content (host_cache.chain_key)."""
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
    """Cached prefix of a token sequence: nodes of full blocks, then the first `n_more` tokens of
    `block`.
    """

    path: list[Node]
    n_more: int
    block: int
    inexact: bool  # part of it is moved KV


class PartialBlock(NamedTuple):
    """Partial block that a running sequence still writes."""

    parent: Node
    tokens: tuple[int, ...]
    block: int
    window_block: int | None  # its block in the sliding-window KV group, if that is separate


class CacheListener(Protocol):
    """Listener of what a prefix cache and its host memory have (engine/kv_events/block_events.py)."""

    def rooted(self, root: Node, choice: Hashable, salt: str, /) -> None:
        """A root of prefixes is new."""

    def stored(self, node: Node, /) -> None:
        """A block is cached."""

    def removed(self, node: Node, /) -> None:
        """A block is cached no longer."""

    def saved(self, node: Node, /) -> None:
        """A block has a copy in host memory."""

    def cleared(self) -> None:
        """Everything is lost."""


class PrefixCache:
    """Radix tree over the block pool. The tree holds one reference to each of its blocks.

    A block that only the tree references is *idle* and may be evicted. `idle` is in LRU order.
    Owners release their deepest block first, so a child precedes its parent: the oldest idle node
    is a leaf.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # sequences resume only at the end of a block, so shorter partial blocks stay
        # (recurrent_state.py)
        self.by_ends = False
        self.root = Node(None, (), -1)
        # children and sequences hold theirs
        self._roots: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()
        self._roots[BASE] = self.root
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.on_forget: Callable[[Node], None] | None = None  # called when content leaves the cache
        # called before a cached block is evicted
        self.on_evict: Callable[[Node], None] | None = None
        self.listener: CacheListener | None = None
        # what a new root's key is made of: weights, cache salt, and whether it is transient
        self.root_name: Callable[[Hashable, str, bool], object] = lambda choice, salt, _: (choice, salt)
        self._node_of: list[Node | None] = [None] * pool.n_blocks

    @property
    def n_available(self) -> int:
        """Number of free and idle blocks."""
        return len(self.pool.free) + len(self.idle)

    def root_of(self, choice: Hashable, salt: str = "", *, transient: bool = False) -> Node:
        """Root of the prefixes that were computed with these weights and adapters for requests of
        this cache salt. `transient`: a new one's blocks are not worth host memory.
        """
        name = (choice, salt) if salt else choice
        root = self._roots.get(name)
        if root is None:
            label = repr(self.root_name(choice, salt, transient)).encode()
            root = self._roots[name] = Node(None, (), -1, blake2b(label, digest_size=16).digest())
            root.transient = transient
            if self.listener is not None:
                self.listener.rooted(root, choice, salt)
        return root

    @property
    def nodes(self) -> list[Node]:
        return [node for node in self._node_of if node is not None]

    def node_of(self, block: int) -> Node | None:
        """Node of a cached block; None: the block is not cached."""
        return self._node_of[block]

    def allocate(self) -> int:
        """Take a free block, or evict the least recently used idle one. It has one reference."""
        if not self.pool.free:
            oldest = next(iter(self.idle))
            if self.on_evict is not None:
                self.on_evict(oldest)
            self._remove(oldest)
        return self.pool.take()

    def match(
        self,
        tokens: list[int],
        limit: int,
        tails: Iterable[PartialBlock] = (),
        root: Node | None = None,
        inexact: bool = False,
    ) -> Match:
        """Longest cached prefix of tokens[:limit].

        `tails`: partial blocks of running sequences. `inexact`: accept moved KV where no exact
        block is cached.
        """
        node = root or self.root
        path: list[Node] = []
        while (len(path) + 1) * BLOCK_SIZE <= limit:
            start = len(path) * BLOCK_SIZE
            part = tuple(tokens[start : start + BLOCK_SIZE])
            child = node.children.get(part)
            if child is None and inexact:
                child = node.children.get((INEXACT, *part))
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * BLOCK_SIZE
        rest = tuple(tokens[start : min(limit, start + BLOCK_SIZE)])
        best, block, found_inexact = 0, -1, node.inexact
        if rest:
            begun = [(child.tokens, child.block) for child in node.children.values()]
            begun += [(tail.tokens, tail.block) for tail in tails if tail.parent is node]
            for written, candidate in begun:
                n = _common(rest, written)
                if inexact and written[0] == INEXACT:
                    n = _common(rest, written[1:])
                if n > best:
                    best, block, found_inexact = n, candidate, written[0] == INEXACT
        return Match(path, best, block, found_inexact)

    def acquire(self, block: int) -> None:
        """Add a reference to a block. An idle one is idle no longer."""
        if self.pool.refs[block] == 1:
            node = self._node_of[block]
            if node is not None:
                del self.idle[node]
        self.pool.share(block)

    def release(self, block: int) -> None:
        """Drop a reference to a block. Release the deepest block of a sequence first."""
        if self.pool.drop(block) == 1:
            node = self._node_of[block]
            if node is not None:
                self.idle[node] = None

    def claim(self, block: int) -> bool:
        """Remove a block from the tree for writing, if the caller is its only other owner."""
        node = self._node_of[block]
        if node is None or node.children or self.pool.refs[block] != 2:
            return False
        self._detach(node)
        self.pool.drop(block)
        return True

    def insert_full(self, parent: Node, tokens: tuple[int, ...], block: int, owner: int) -> Node:
        """Commit the caller's full block.

        If its content is cached already, the caller gets that block instead.
        """
        existing = parent.children.get(tokens)
        if existing is not None:
            self.acquire(existing.block)
            self.release(block)
            existing.owners |= owner
            return existing
        return self.insert(parent, tokens, block, owner)

    def insert_partial(self, parent: Node, tokens: tuple[int, ...], block: int, owner: int) -> Node | None:
        """Cache the partial block at the end of a finished sequence.

        A cached block that begins with the same tokens serves as well. Returns the node with
        exactly these tokens, or None.
        """
        n = len(tokens)
        for child in parent.children.values():
            if child.tokens == tokens or (child.tokens[:n] == tokens and not self.by_ends):
                if child in self.idle:
                    self.idle.move_to_end(child)
                child.owners |= owner
                return child if len(child.tokens) == n else None
        return self.insert(parent, tokens, block, owner)

    def forget_after(self, blocks: set[int]) -> bool:
        """Evict idle descendants of these blocks; True if there were any."""
        any_evicted = False
        for node in list(self.idle):  # children come before their parents
            above = node.parent
            while above is not None and above.block not in blocks:
                above = above.parent
            if above is not None and node.block not in blocks and not node.children:
                self._remove(node)
                any_evicted = True
        return any_evicted

    def forget(self, owner: int) -> None:
        """Drop blocks that only this slot's sequences have used."""
        for node in self.nodes:
            node.owners &= ~owner
        for node in list(self.idle):  # children come before their parents
            if not node.owners and not node.children:
                self._remove(node)

    def clear(self) -> None:
        """Drop every idle block: the device has lost its memory."""
        for node in list(self.idle):  # children come before their parents
            self._remove(node)

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int, owner: int) -> Node:
        """Add the caller's block to the tree. The caller keeps its reference."""
        for child in list(parent.children.values()) if not self.by_ends else ():
            # Idle partial blocks with the same beginning have no further use.
            if child in self.idle and len(child.tokens) < len(tokens) and child.tokens == tokens[: len(child.tokens)]:
                self._remove(child)
        node = Node(parent, tokens, block)
        node.owners = owner
        parent.children[tokens] = node
        self._node_of[block] = node
        self.pool.share(block)
        if self.listener is not None:
            self.listener.stored(node)
        return node

    def _remove(self, node: Node) -> None:
        del self.idle[node]
        self._detach(node)
        self.pool.drop(node.block)

    def _detach(self, node: Node) -> None:
        if self.on_forget is not None:
            self.on_forget(node)
        if self.listener is not None:
            self.listener.removed(node)
        if node.parent is not None:
            del node.parent.children[node.tokens]
        self._node_of[node.block] = None

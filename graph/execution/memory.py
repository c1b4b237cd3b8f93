"""Arena offsets by liveness: measure first, allocate exactly that, reuse memory as soon as its last reader has run.

The free-list rules are ggml's dynamic tensor allocator's: best fit among all free blocks but the last, ties to the
later block, the last block (the open end of the arena) as the last resort, neighbours merged on free. Sources that only
gave a shape and barriers for concurrent nodes have no counterpart here: ops have neither.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from logitless.graph.op import OPS, destination
from logitless.graph.tensor import ALIASES, Tensor

MAX_FREE_BLOCKS = 256
UNLIMITED = 1 << 62  # the fictitious address range of measure mode


class OutOfArena(MemoryError):
    """The arena is too small, or too fragmented; the message holds both sizes."""


class Allocator:
    """Offsets within one arena of `size` bytes (by default unlimited: measure mode).

    An arena of the measured `max_size` gives the same offsets as the measurement did.
    """

    def __init__(self, alignment: int, size: int = UNLIMITED) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        self.alignment, self.size = alignment, size
        self.max_size = 0  # the highest end ever handed out
        self.free_blocks: list[tuple[int, int]] = [(0, size)]  # (offset, size) by address

    def padded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int:
        """The offset of a block; OutOfArena names the bytes needed and the largest block there is."""
        need = self.padded(nbytes)
        best = -1
        for i, (offset, size) in enumerate(self.free_blocks):
            open_end = offset + size == self.size  # what is left when the end is used up is a hole like the others
            if size >= need and (best < 0 or (size <= self.free_blocks[best][1] and not open_end)):
                best = i
        if best < 0:
            largest = max((size for _, size in self.free_blocks), default=0)
            raise OutOfArena(f"arena: {need} bytes needed, the largest free block has {largest}")
        offset, size = self.free_blocks[best]
        if size == need:
            del self.free_blocks[best]
        else:
            self.free_blocks[best] = (offset + need, size - need)
        self.max_size = max(self.max_size, offset + need)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a block back, merged with its neighbours."""
        size = self.padded(nbytes)
        i = bisect(self.free_blocks, (offset, 0))
        if i < len(self.free_blocks) and offset + size == self.free_blocks[i][0]:
            size += self.free_blocks.pop(i)[1]
        if i > 0 and sum(self.free_blocks[i - 1]) == offset:
            i -= 1
            offset, before = self.free_blocks.pop(i)
            size += before
        if len(self.free_blocks) >= MAX_FREE_BLOCKS:
            raise OutOfArena(f"arena: more than {MAX_FREE_BLOCKS} free blocks")
        self.free_blocks.insert(i, (offset, size))


Roots = Mapping[Tensor, tuple[Tensor, int]]


def roots_of(order: Sequence[Tensor]) -> Roots:
    """Each tensor's owner (the tensor whose bytes it shares) and its byte offset there.

    Aliases and writes own no bytes.
    """
    roots: dict[Tensor, tuple[Tensor, int]] = {}
    for t in order:
        owner = t.src[0] if t.op in ALIASES else destination(t)
        root, offset = (t, 0) if owner is None else roots[owner]
        if t.op == "slice_rows":
            offset += t.attrs["start"] * (t.nbytes // t.shape[0])
        roots[t] = root, offset
    return roots


@dataclass(frozen=True)
class Layout:
    """Arena offset of every owning node, the owner of every node's bytes, and each arena's size in bytes."""

    offsets: Mapping[Tensor, int]
    roots: Roots
    sizes: Mapping[int, int]


def layout(
    order: Sequence[Tensor],
    arena_of: Callable[[Tensor], int],
    alignments: Sequence[int],
    pinned: Sequence[Tensor] = (),
    *,
    in_place: bool = True,
) -> Layout:
    """Offsets for the nodes of `order` in their arenas; `pinned` ones keep their bytes to the end of the run.

    A node's bytes are free again after its last reader (of it, or of an alias of it). An op that declares `inplace`
    takes over a source that nobody else reads, whole and of the same size.
    """
    roots = roots_of(order)
    owner = {i: root for i, (root, _) in roots.items()}
    readers = Counter([owner[s] for t in order if t.op not in ALIASES for s in t.src])
    readers.update(owner[t] for t in pinned)
    arenas = [Allocator(a) for a in alignments]
    offsets: dict[Tensor, int] = {}
    live: set[Tensor] = set()  # owners that have bytes in an arena

    def take_over(t: Tensor) -> bool:
        for i in OPS[t.op].inplace if t.op in OPS else ():
            parent, at = roots[t.src[i]]
            whole = at == 0 and parent.nbytes == t.src[i].nbytes == t.nbytes and parent.dtype == t.dtype
            if whole and parent in live and readers[parent] == 1 and arena_of(parent) == arena_of(t):
                live.remove(parent)
                offsets[t] = offsets[parent]
                return True
        return False

    def release_unread(t: Tensor) -> None:
        if readers[t] == 0 and t in live:
            live.remove(t)
            arenas[arena_of(t)].free(offsets[t], t.nbytes)

    for t in order:
        if t.is_leaf or t.op in ALIASES:
            continue
        if owner[t] is t:
            if not (in_place and take_over(t)):
                offsets[t] = arenas[arena_of(t)].allocate(t.nbytes)
            live.add(t)
        for s in t.src:
            read = owner[s]
            readers[read] -= 1
            release_unread(read)
        release_unread(t)
    return Layout(offsets, roots, {i: a.max_size for i, a in enumerate(arenas)})

"""Memory planning: tensors share one arena; the bytes of a tensor are reused after its last reader.

The free-list rules are those of ggml's dynamic tensor allocator: best fit among all free blocks but
the last, ties to the later block, the last block (the open end of the arena) as the last resort,
neighbours merged on free. ggml's sources that only give a shape and its barriers for concurrent
nodes have no counterpart here."""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from logitless.graph.op import OPS, destination
from logitless.graph.tensor import ALIASES, Tensor

UNLIMITED = 1 << 62  # bytes of the arena that measure mode pretends to have


class OutOfArena(MemoryError):
    """The arena is too small; the message names both sizes."""


class Allocator:
    """Allocates offsets within one arena of `size` bytes (by default unlimited: measure mode).

    An arena of the measured `max_size` gives the same offsets as the measurement did.
    ValueError for an alignment that is no power of two."""

    def __init__(self, alignment: int, size: int = UNLIMITED) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        self.alignment, self.size = alignment, size
        self.max_size = 0  # the highest end ever handed out
        self.free_blocks: list[tuple[int, int]] = []  # (offset, size) by address
        self._by_size: list[tuple[int, int]] = []  # (size, -offset) of all but the open end, the best fit first
        self._insert(0, size)

    def padded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int:
        """The offset of a free block of `nbytes`, taken. OutOfArena names them and the largest free block."""
        need = self.padded(nbytes)
        best = bisect(self._by_size, (need, -self.size - 1))
        if best < len(self._by_size):
            size, negative = self._by_size[best]
            offset = -negative
        else:  # the open end, if it is not used up: then the last block is a hole like the others
            offset, size = self.free_blocks[-1] if self.free_blocks else (0, 0)
            if size < need:
                largest = max((size for _, size in self.free_blocks), default=0)
                raise OutOfArena(f"arena: {need} bytes needed, the largest free block has {largest}")
        self._remove(bisect_left(self.free_blocks, (offset, size)))
        if size > need:
            self._insert(offset + need, size - need)
        self.max_size = max(self.max_size, offset + need)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block and merge it with free neighbours."""
        size = self.padded(nbytes)
        i = bisect(self.free_blocks, (offset, 0))
        if i < len(self.free_blocks) and offset + size == self.free_blocks[i][0]:
            size += self._remove(i)[1]
        if i > 0 and sum(self.free_blocks[i - 1]) == offset:
            offset, before = self._remove(i - 1)
            size += before
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self.free_blocks, (offset, size))
        if offset + size != self.size:
            insort(self._by_size, (size, -offset))

    def _remove(self, i: int) -> tuple[int, int]:
        offset, size = self.free_blocks.pop(i)
        if offset + size != self.size:
            del self._by_size[bisect_left(self._by_size, (size, -offset))]
        return offset, size


# tensor → (the tensor that owns its bytes, offset there)
Owners = Mapping[Tensor, tuple[Tensor, int]]


def owners_of(order: Sequence[Tensor]) -> Owners:
    """The owner of each tensor's bytes and its offset there. Aliases and writes own none."""
    owners: dict[Tensor, tuple[Tensor, int]] = {}
    for t in order:
        source = t.src[0] if t.op in ALIASES else destination(t)
        owner, offset = (t, 0) if source is None else owners[source]
        if t.op == "slice_rows":
            offset += t.attrs["start"] * (t.nbytes // t.shape[0])
        owners[t] = owner, offset
    return owners


@dataclass(frozen=True)
class ArenaLayout:
    """Memory of a graph's results: arena offset of every owner, owners of all bytes, size of each arena."""

    offsets: Mapping[Tensor, int]
    owners: Owners
    sizes: Mapping[int, int]


def lay_out_arenas(
    order: Sequence[Tensor],
    arena_of: Callable[[Tensor], int],
    alignments: Sequence[int],
    pinned: Sequence[Tensor] = (),
    *,
    in_place: bool = True,
) -> ArenaLayout:
    """Lay out the results of nodes in their arenas; `pinned` ones keep their bytes to the end of
    the run.

    A node's bytes are free again after the last reader of it or of an alias of it. An op that
    declares `inplace` takes over a source that nobody else reads, whole and of the same size."""
    owners = owners_of(order)
    owner_of = {t: owner for t, (owner, _) in owners.items()}
    readers = Counter([owner_of[s] for t in order if t.op not in ALIASES for s in t.src])
    readers.update([owner_of[t] for t in pinned])
    arenas = [Allocator(a) for a in alignments]
    offsets: dict[Tensor, int] = {}
    live: set[Tensor] = set()  # owners that have bytes in an arena

    def take_over(t: Tensor) -> bool:
        for i in OPS[t.op].inplace if t.op in OPS else ():
            parent, offset = owners[t.src[i]]
            whole = offset == 0 and parent.nbytes == t.src[i].nbytes == t.nbytes and parent.dtype == t.dtype
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
        if owner_of[t] is t:
            if not (in_place and take_over(t)):
                offsets[t] = arenas[arena_of(t)].allocate(t.nbytes)
            live.add(t)
        for s in t.src:
            source = owner_of[s]
            readers[source] -= 1
            release_unread(source)
        release_unread(t)
    return ArenaLayout(offsets, owners, {i: a.max_size for i, a in enumerate(arenas)})

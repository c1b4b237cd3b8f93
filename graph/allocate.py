"""Arena offsets by liveness: measure first, allocate exactly that, reuse memory as soon as its last reader has run.

The free-list rules are ggml's dynamic tensor allocator's: best fit among all free blocks but the last, ties to the
later block, the last block (the open end of the arena) as the last resort, neighbours merged on free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graph.op import OPS, destination
from graph.tensor import ALIASES, Tensor

MAX_FREE_BLOCKS = 256
UNLIMITED = 1 << 62  # the fictitious address range of measure mode


class OutOfArena(MemoryError):
    """The arena is too small, or too fragmented; the message holds both sizes."""


class Allocator:
    """Offsets within one arena of `size` bytes (by default unlimited: measure mode)."""

    def __init__(self, alignment: int, size: int = UNLIMITED) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        self.alignment = alignment
        self.max_size = 0  # the highest end ever handed out
        self.free_blocks: list[tuple[int, int]] = [(0, size)]  # (offset, size) by address

    def padded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int:
        """The offset of a block; OutOfArena names the bytes needed and the largest block there is."""
        need = self.padded(nbytes)
        best = -1
        for i, (_, size) in enumerate(self.free_blocks[:-1]):
            if size >= need and (best < 0 or size <= self.free_blocks[best][1]):
                best = i
        if best < 0:
            if not self.free_blocks or self.free_blocks[-1][1] < need:
                largest = max((s for _, s in self.free_blocks), default=0)
                raise OutOfArena(f"arena: {need} bytes needed, the largest free block has {largest}")
            best = len(self.free_blocks) - 1
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
        i = 0
        while i < len(self.free_blocks) and self.free_blocks[i][0] < offset:
            i += 1
        if i < len(self.free_blocks) and offset + size == self.free_blocks[i][0]:
            size += self.free_blocks.pop(i)[1]
        if i > 0 and sum(self.free_blocks[i - 1]) == offset:
            before = self.free_blocks.pop(i - 1)
            offset, size, i = before[0], before[1] + size, i - 1
        if len(self.free_blocks) >= MAX_FREE_BLOCKS:
            raise OutOfArena(f"arena: more than {MAX_FREE_BLOCKS} free blocks")
        self.free_blocks.insert(i, (offset, size))


def root_of(t: Tensor) -> tuple[Tensor, int]:
    """The tensor that owns t's bytes, and t's offset in it: aliases and destinations of writes are followed."""
    offset = 0
    while True:
        if t.op == "slice_rows":
            offset += t.attrs["start"] * (t.nbytes // t.shape[0])
        if t.op in ALIASES:
            t = t.src[0]
        elif (written := destination(t)) is not None:
            t = written
        else:
            return t, offset


@dataclass(frozen=True)
class Layout:
    """Arena offset of every owning node by id, and each arena's size in bytes."""

    offsets: Mapping[int, int]
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
    readers: dict[int, int] = {}
    for t in order:
        for s in t.src:
            if t.op not in ALIASES:
                root = root_of(s)[0]
                readers[id(root)] = readers.get(id(root), 0) + 1
    for t in pinned:
        root = root_of(t)[0]
        readers[id(root)] = readers.get(id(root), 0) + 1

    arenas = [Allocator(a) for a in alignments]
    offsets: dict[int, int] = {}
    owned: dict[int, Tensor] = {}  # alive in an arena, by id of the owner

    def take_over(t: Tensor) -> bool:
        for i in OPS[t.op].inplace if t.op in OPS else ():
            parent, at = root_of(t.src[i])
            same = at == 0 and parent.nbytes == t.nbytes == t.src[i].nbytes and parent.dtype == t.dtype
            others = sum(root_of(s)[0] is parent for s in t.src)
            if same and id(parent) in owned and readers[id(parent)] == 1 == others and arena_of(parent) == arena_of(t):
                offsets[id(t)] = offsets[id(parent)]
                del owned[id(parent)]
                readers[id(parent)] = 0
                return True
        return False

    for t in order:
        if t.is_leaf or t.op in ALIASES:
            continue
        if destination(t) is None:
            if not (in_place and take_over(t)):
                offsets[id(t)] = arenas[arena_of(t)].allocate(t.nbytes)
            owned[id(t)] = t
        for s in t.src:
            root = root_of(s)[0]
            if readers.get(id(root), 0) > 0:
                readers[id(root)] -= 1
                if readers[id(root)] == 0 and id(root) in owned:
                    del owned[id(root)]
                    arenas[arena_of(root)].free(offsets[id(root)], root.nbytes)
        if id(t) in owned and readers.get(id(t), 0) == 0:  # nobody reads it
            del owned[id(t)]
            arenas[arena_of(t)].free(offsets[id(t)], t.nbytes)
    return Layout(offsets, {i: a.max_size for i, a in enumerate(arenas)})

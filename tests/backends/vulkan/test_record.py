"""Command buffer barriers: one before each command that conflicts with earlier ones, and no other."""

from __future__ import annotations

import random

from logitless.backends.vulkan.record import Hazards, Range


def test_read_after_write_needs_one_barrier() -> None:
    h = Hazards()
    assert not h.meets([], [(0, 64)])
    assert not h.meets([(64, 128)], [(128, 192)])
    assert h.meets([(0, 64)], [(256, 320)])
    assert not h.meets([(128, 192)], [(320, 384)])  # the barrier covered it already


def test_write_after_read_needs_a_barrier() -> None:
    h = Hazards()
    assert not h.meets([(0, 64)], [(64, 128)])
    assert h.meets([], [(32, 40)])


def test_read_after_read_needs_no_barrier() -> None:
    h = Hazards()
    assert not any(h.meets([(0, 64)], [(64 * i, 64 * i + 64)]) for i in range(1, 9))


def test_hazards_agree_with_a_list_of_all_ranges() -> None:
    rng = random.Random(0)
    for _ in range(200):
        h, read, written = Hazards(), list[Range](), list[Range]()
        for _ in range(40):
            reads, writes = ([_range(rng) for _ in range(rng.randrange(3))] for _ in range(2))
            wanted = any(_overlap(a, b) for a in reads + writes for b in written)
            wanted |= any(_overlap(a, b) for a in writes for b in read)
            assert h.meets(reads, writes) == wanted
            if wanted:
                read, written = [], []
            read += reads
            written += writes


def _range(rng: random.Random) -> Range:
    start = rng.randrange(1000)
    return start, start + rng.randrange(1, 40)


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]

"""Memory planning: best fit, alignment, merging, lifetimes, in-place ops and arenas, by hand-worked cases."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.graph.execution.memory import Allocator, OutOfArena, lay_out_arenas
from logitless.graph.op import OPS
from logitless.graph.ops.attention.paged_attention import copy_pages
from logitless.graph.ops.elementwise import add, mul, scale, silu, sum_to
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import rope
from logitless.graph.ops.shape import pad_rows, reshape, slice_rows
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.evaluate import evaluate
from tests.helpers.random_graphs import feeds_of, graphs, lay_out, run_in_arena

ROW = 64  # bytes of 16 f32


def sizes(*nodes: Tensor, in_place: bool = True) -> int:
    return lay_out(nodes, in_place=in_place)[1].sizes[0]


def holes(a: Allocator, *wanted: int) -> None:
    """Free blocks of these sizes, each followed by 16 bytes in use."""
    made = []
    for size in wanted:
        made.append((a.allocate(size), size))
        a.allocate(16)
    for offset, size in made:
        a.free(offset, size)


# --- best fit -------------------------------------------------------------------------------------


def test_allocator_follows_a_trace_worked_by_hand() -> None:
    a = Allocator(16, 1024)
    assert [a.allocate(n) for n in (64, 32, 128, 16, 48)] == [0, 64, 96, 224, 240]
    a.free(0, 64)
    a.free(96, 128)
    assert a.free_blocks == [(0, 64), (96, 128), (288, 736)]
    assert a.allocate(48) == 0  # 64 fits better than 128
    assert a.free_blocks == [(48, 16), (96, 128), (288, 736)]
    assert a.allocate(128) == 96  # to the byte: the block is gone
    assert a.allocate(32) == 288  # only the last block is large enough
    assert a.allocate(1) == 48  # padded to 16
    assert a.free_blocks == [(320, 704)]
    assert a.max_size == 320


def test_the_last_block_is_the_last_resort() -> None:
    a = Allocator(16, 512)
    holes(a, 256)  # leaves 240 bytes at the end, a better fit for 240 than the hole of 256
    assert a.free_blocks == [(0, 256), (272, 240)]
    assert a.allocate(240) == 0


def test_a_tie_goes_to_the_later_block() -> None:
    a = Allocator(16)
    holes(a, 32, 64, 32, 32)
    assert a.allocate(32) == 32 + 16 + 64 + 16 + 32 + 16


def test_free_blocks_without_bound_are_reused_in_order_of_fit() -> None:
    """20,000 holes: a search that visits each of them for each allocation would take minutes."""
    n = 20_000
    a = Allocator(16)
    sizes = [16 * (1 + i * 7919 % n) for i in range(n)]  # all different, in no order
    holes(a, *sizes)
    assert len(a.free_blocks) == n + 1  # and the open end
    end = a.max_size
    for size in sorted(sizes, reverse=True):
        assert a.allocate(size - 8) < end  # the only hole that fits, to the byte
    assert a.max_size == end
    assert len(a.free_blocks) == 1


class LinearAllocator:
    """The rules of best fit, word by word: every free block is looked at."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, [(0, size)]

    def allocate(self, need: int) -> int:
        last = (self.blocks or [(0, 0)])[-1]
        inner = [b for b in self.blocks if sum(b) != self.size and b[1] >= need]
        best = min(inner, key=lambda b: (b[1], -b[0])) if inner else last
        if best[1] < need:
            raise OutOfArena
        self.blocks.remove(best)
        self.blocks = sorted([*self.blocks, *([(best[0] + need, best[1] - need)] if best[1] > need else [])])
        return best[0]

    def free(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self.blocks, (offset, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((begin, length))
        self.blocks = merged


@given(seed=st.integers(0, 2**32), n=st.integers(1, 200), size=st.sampled_from([512, 1024, 1 << 40]))
def test_allocator_equals_a_linear_search_for_the_best_fit(seed: int, n: int, size: int) -> None:
    a, reference, rng = Allocator(16, size), LinearAllocator(size), random.Random(seed)
    alive: list[tuple[int, int]] = []
    for _ in range(n):
        if alive and rng.random() < 0.45:
            block = alive.pop(rng.randrange(len(alive)))
            a.free(*block)
            reference.free(*block)
        else:
            need = rng.choice((16, 16, 32, 48, 64, 208))
            try:
                expected = reference.allocate(need)
            except OutOfArena:
                with pytest.raises(OutOfArena):
                    a.allocate(need)
                continue
            assert a.allocate(need) == expected
            alive.append((expected, need))
        assert a.free_blocks == reference.blocks


# --- alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [0, -64, 3, 48, 100])
def test_alignment_must_be_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"{alignment} is not a power of two"):
        Allocator(alignment)


@pytest.mark.parametrize("alignment", [1, 32, 256])
@given(wanted=st.lists(st.integers(0, 1000), max_size=20))
def test_offsets_and_sizes_are_multiples_of_the_alignment(alignment: int, wanted: list[int]) -> None:
    a = Allocator(alignment)
    offsets = [a.allocate(n) for n in wanted]
    assert all(offset % alignment == 0 for offset in offsets)
    assert a.max_size % alignment == 0
    assert len(set(offsets)) == len(offsets)  # nothing bytes long has a place of its own, too


# --- merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ACB", "ABC", "CBA", "BAC", "BCA", "CAB"])
def test_neighbours_merge(order: str) -> None:
    a = Allocator(16)
    blocks = {name: a.allocate(size) for name, size in zip("ABC", (16, 32, 48), strict=True)}
    a.allocate(16)
    for name in order:
        a.free(blocks[name], {"A": 16, "B": 32, "C": 48}[name])
    assert a.free_blocks[0] == (0, 96)
    assert len(a.free_blocks) == 2  # and the open end


def test_merging_with_the_open_end() -> None:
    a = Allocator(16, 160)
    offset = a.allocate(64)
    a.free(offset, 64)
    assert a.free_blocks == [(0, 160)]


# --- measure, then allocate that much -------------------------------------------------------------


def play(a: Allocator, seed: int, n: int) -> list[int]:
    """A random sequence of allocations and frees: the offsets."""
    rng, alive, offsets = random.Random(seed), [], []
    for _ in range(n):
        if alive and rng.random() < 0.45:
            a.free(*alive.pop(rng.randrange(len(alive))))
        else:
            size = rng.choice((16, 16, 32, 48, 64, 200))
            offsets.append(a.allocate(size))
            alive.append((offsets[-1], size))
    return offsets


@given(seed=st.integers(0, 2**32), n=st.integers(1, 120))
def test_measured_size_gives_the_same_offsets(seed: int, n: int) -> None:
    measured = Allocator(16)
    offsets = play(measured, seed, n)
    exact = Allocator(16, measured.max_size)
    assert play(exact, seed, n) == offsets
    assert exact.max_size == measured.max_size
    with pytest.raises(OutOfArena):
        play(Allocator(16, measured.max_size - 16), seed, n)


@given(roots=graphs())
def test_a_graph_fits_its_measured_size(roots: list[Tensor]) -> None:
    """The size is the highest end of any node."""
    order, plan = lay_out(roots)
    ends = [plan.offsets[t] + t.nbytes for t in order if t in plan.offsets]
    assert plan.sizes[0] == max((-(-end // 32) * 32 for end in ends), default=0)


# --- lifetimes ------------------------------------------------------------------------------------


@given(roots=graphs())
@settings(max_examples=150)
def test_freed_memory_is_never_read(roots: list[Tensor]) -> None:
    feeds = feeds_of(roots)
    expected = evaluate(roots, feeds, {}, np.float32)
    for in_place in (True, False):  # the same bits either way
        order, plan = lay_out(roots, in_place=in_place)
        for e, got in zip(expected, run_in_arena(roots, feeds, order, plan), strict=True):
            assert np.asarray(e, np.float32).tobytes() == got.tobytes()


def test_one_reader_fewer_needs_no_more_memory() -> None:
    x = feed("x", (4, 16))
    early = silu(x)
    late = scale(sum_to(silu(pad_rows(early, before=0, after=4)), shape=(1, 16)), factor=2.0)
    # early must outlive the sum, which has its place otherwise
    assert sizes(add(late, early)) == sizes(late) + ROW
    assert sizes(add(late, x)) == sizes(late)


def test_a_chain_needs_two_blocks_and_in_place_one() -> None:
    x = feed("x", (4, 16))
    for _ in range(10):
        x = silu(x)
    assert sizes(x, in_place=False) == 2 * 4 * ROW
    assert sizes(x) == 4 * ROW


def test_an_alias_keeps_its_source_alive() -> None:
    x = feed("x", (4, 16))
    kept, other = silu(x), add(x, x)
    late = add(slice_rows(kept, start=3, stop=4), slice_rows(scale(other, factor=2.0), start=0, stop=1))
    order, plan = lay_out([late])
    a, b = (next(t for t in order if t.op == op) for op in ("silu", "scale"))
    assert abs(plan.offsets[a] - plan.offsets[b]) >= 4 * ROW


def test_fetches_live_to_the_end_and_unread_results_do_not() -> None:
    x = feed("x", (4, 16))
    held = silu(x)
    after = sum_to(scale(silu(held), factor=2.0), shape=(16,))
    assert sizes(after) == 4 * ROW + ROW  # silu, silu and scale in one place
    assert sizes(held, after) == 2 * 4 * ROW + ROW
    unread = silu(x)
    assert lay_out_arenas(toposort([unread, after]), lambda t: 0, [32], [after]).sizes[0] == sizes(after)


# --- in place -------------------------------------------------------------------------------------


def shares(t: Tensor, source: Tensor, *others: Tensor) -> bool:
    """True when t took over the memory of the source; t and the others are fetched."""
    plan = lay_out([t, *others])[1]
    return plan.offsets[t] == plan.offsets[plan.owners[source][0]]


def produced(*shape: int) -> Tensor:
    return pad_rows(feed("x", (shape[0] - 1, *shape[1:])), before=1, after=0)


def test_inplace_ops_take_over_their_source() -> None:
    """The ops that compute element by element; masks and softmax are part of attention here."""
    declared = {name for name, o in OPS.items() if o.inplace}
    assert declared >= {"add", "mul", "scale", "silu", "gelu", "softcap", "glu", "rms_norm", "rope"}
    p = produced(4, 16)
    assert shares(silu(p), p)
    assert shares(rms_norm(p, feed("w", (16,)), eps=1e-5), p)
    assert shares(rope(reshape(p, shape=(2, 2, 16)), feed("a", (2, 2, 8)), interleaved=True), p)
    assert shares(add(feed("a", (4, 16)), p), p)  # the second source
    assert shares(add(feed("a", (16,)), p), p)  # where the first is broadcast


def test_inplace_op_keeps_a_source_with_other_readers() -> None:
    p = produced(4, 16)
    y = silu(p)
    assert not shares(y, p, add(y, p))
    assert not shares(y, p, scale(p, factor=2.0))
    assert not shares(y, p, p)  # a fetch reads it at the end
    assert not shares(y, p, reshape(p, shape=(-1,)))  # under any alias
    assert not shares(mul(p, p), p)  # twice by the same node


def test_inplace_op_keeps_a_source_of_another_size_or_type() -> None:
    one, p = slice_rows(produced(4, 16), start=1, stop=2), produced(4, 16)
    assert not shares(add(one, feed("a", (4, 16))), one)
    assert not shares(sum_to(p, shape=(4, 1)), p)
    assert not shares(pad_rows(p, before=0, after=0), p)  # the same size, but not declared
    halves = Tensor("silu", (p,), (4, 32), "f16")
    assert halves.nbytes == p.nbytes
    assert not shares(halves, p)


def test_inplace_op_takes_over_whole_aliases_only() -> None:
    p = produced(4, 16)
    flat = reshape(p, shape=(-1,))
    assert shares(silu(flat), p)
    assert not shares(silu(slice_rows(p, start=0, stop=2)), p)  # from the first byte, but not whole
    assert not shares(silu(slice_rows(p, start=2, stop=4)), p)
    assert not shares(silu(flat), p, silu(slice_rows(p, start=0, stop=1)))  # another alias


# --- what is not ours -----------------------------------------------------------------------------


def test_feeds_and_variables_are_outside_of_arenas() -> None:
    x, kv = feed("x", (4, 16)), variable("kv", (4, 16))
    y = add(silu(x), copy_pages(kv, feed("pairs", (1, 2), "i32")))
    order, plan = lay_out([y])
    assert {t.op for t in order if t in plan.offsets} == {"silu", "add"}
    assert plan.sizes[0] == 4 * ROW  # silu in its own memory, add in silu's


def test_a_write_to_an_ordinary_node_stays_in_its_memory() -> None:
    p = produced(4, 16)
    y = silu(copy_pages(p, feed("pairs", (1, 2), "i32")))
    assert lay_out([y])[1].offsets == {p: 0, y: 0}


# --- several arenas -------------------------------------------------------------------------------


def test_every_node_lands_in_its_own_arena() -> None:
    x = feed("x", (4, 16))
    a = silu(x)
    b = scale(a, factor=2.0)
    c = silu(b)
    home = {a: 0, b: 1, c: 1}
    plan = lay_out_arenas(toposort([c]), lambda t: home[t], [32, 1024], [c])
    assert plan.sizes == {0: 256, 1: 1024}  # b cannot take a's place, c takes b's
    assert plan.offsets[c] == plan.offsets[b] == 0


# --- order of evaluation --------------------------------------------------------------------------


def test_reverse_order_can_need_less_memory() -> None:
    """add(small, big): the small result waits while the big one is made, or the other way round."""
    x = feed("x", (4, 16))
    wide = pad_rows(x, before=0, after=60)

    def narrow(t: Tensor) -> Tensor:
        return sum_to(t, shape=(1, 16))

    right_heavy = add(pad_rows(narrow(x), before=3, after=0), pad_rows(narrow(silu(wide)), before=0, after=3))
    peaks = {}
    for reverse in (False, True):
        order = toposort([right_heavy], reverse=reverse)
        peaks[reverse] = lay_out_arenas(order, lambda t: 0, [32], [right_heavy]).sizes[0]
    assert peaks[True] < peaks[False]


# --- the message ----------------------------------------------------------------------------------


def test_out_of_arena_names_both_sizes() -> None:
    a = Allocator(16, 256)
    holes(a, 64)
    with pytest.raises(OutOfArena, match=r"208 bytes needed.* has 176"):
        a.allocate(200)
    full = Allocator(16, 16)
    full.allocate(1)
    with pytest.raises(MemoryError, match=r"16 bytes needed.* has 0"):
        full.allocate(1)

"""Scheduler invariants between two steps, on a device that reports its cells' contents."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.helpers.scheduler_fakes import FakeEngine


def chain(previous: int, token: int) -> int:
    """Content of a cell: like K and V, it depends on every token up to its own."""
    return zlib.crc32(token.to_bytes(4, "little", signed=True), previous)


def check_all(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Check all invariants."""
    check_pages(scheduler)
    check_cells(scheduler, engine)
    check_states(scheduler, engine)
    check_windows(scheduler, engine)


def check_cells(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Every block table shows its sequence's tokens; every cached prefix has the tokens it claims."""
    for seq in scheduler.running:
        content = 0
        for p in range(seq.n_computed if not seq.kv.recomputable and seq.kv.copy is None else 0):
            cell = engine.full_kv.cells[seq.kv.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]
            assert cell is not None
            assert cell[0] == p
        known = seq.n_computed if seq.kv.copy is None and not seq.kv.n_dropped else seq.kv.n_committed
        for p in range(known if not seq.kv.shifted else 0):
            content = chain(content, seq.tokens[p])
            assert engine.full_kv.cells[seq.kv.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] == (p, content)
    for node in scheduler.cache.prefixes.nodes:
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        assert path[-1].block == -1
        content = p = 0
        for link in reversed(path[:-1]):
            assert link.parent is not None
            assert link.parent.children[link.tokens] is link
            assert link.n_tokens == BLOCK_SIZE or link is node
            assert link.inexact or not link.parent.inexact
            for i, token in enumerate(link.tokens[link.inexact :]):
                content = chain(content, token)
                cell = engine.full_kv.cells[link.block * BLOCK_SIZE + i]
                assert cell is not None
                assert cell == (p, cell[1] if link.inexact else content)
                p += 1


def check_states(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Every stored state row has the tokens its name claims, and every reference an owner."""
    states = scheduler.cache.states
    if states is None:
        return
    assert engine.states is not None
    rows = engine.states.rows
    owners = [0] * len(rows)
    for seq in scheduler.running:
        for row in (seq.kv.state_row, *seq.kv.state_writes.values()):
            owners[row] += row > 0
        content = 0
        for token in seq.tokens[: seq.kv.state_at]:
            content = chain(content, token)
        assert rows[seq.kv.state_row] == (seq.kv.state_at, content)
        assert not seq.started or seq.kv.state_at == seq.n_computed
    for node, row in states._checkpoints.items():
        owners[row] += 1
        tokens, above = list(node.tokens), node.parent
        while above is not None:
            tokens[:0] = above.tokens
            above = above.parent
        content = 0
        for token in tokens:
            content = chain(content, token)
        assert rows[row] == (len(tokens), content)
        assert node in scheduler.cache.prefixes.nodes
    assert owners == states._refs
    assert sorted(states._free) == [row for row, n in enumerate(owners) if row and not n]


def check_windows(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Every sliding-window block has the tokens its name claims, and every reference an owner."""
    windows = scheduler.cache.windows
    if windows is None:
        return
    assert engine.window_kv is not None
    owners = [0] * engine.window_kv.n
    for seq in scheduler.running:
        for block in seq.kv.window_blocks:
            if block < engine.window_kv.n:
                owners[block] += 1
        if seq.kv.window_copy is not None:
            owners[seq.kv.window_copy[0]] += 1
        under_way = scheduler.interleaved.n if seq is scheduler.interleaved.seq else 0
        assert len(seq.kv.window_blocks) * BLOCK_SIZE < seq.n_computed + under_way + BLOCK_SIZE
    for node, block in windows._of.items():
        owners[block] += 1
        assert windows._nodes[block] is node
        assert node in scheduler.cache.prefixes.nodes
        assert (node in windows._reusable or node in windows._behind) == (windows._pool.refs[block] == 1)
        n = node.n_tokens
        assert engine.window_kv.cells[block * BLOCK_SIZE :][:n] == engine.full_kv.cells[node.block * BLOCK_SIZE :][:n]
    assert owners == windows._pool.refs
    assert sorted(windows._pool.free) == [block for block, n in enumerate(owners) if not n]


def check_pages(scheduler: Scheduler) -> None:
    """References and owners of blocks match; idle nodes are ordered so that leaves are evicted
    first.
    """
    cache, pool = scheduler.cache.prefixes, scheduler.cache.pool
    owners = [0] * pool.n_blocks
    for seq in scheduler.running:
        assert seq.started or not seq.kv.blocks
        assert len(seq.kv.blocks) <= n_blocks_for(len(seq.tokens)), "blocks beyond what it owes"
        for block in seq.kv.blocks:
            owners[block] += 1
        assert not (seq.kv.swapped and seq.kv.blocks)
        if seq.kv.copy is not None:
            assert seq.kv.blocks[-1] == seq.kv.copy[1] or seq.kv.copy[1] in seq.kv.blocks
            owners[seq.kv.copy[0]] += 1
    for node in cache.nodes:
        owners[node.block] += 1
    assert owners == pool.refs
    assert sorted(pool.free) == [block for block, n in enumerate(pool.refs) if n == 0]
    host = scheduler.cache.host
    if host is not None:
        kept = [data for _, data, _ in host._blocks.values()]
        assert host.nbytes == sum(data.nbytes for data in kept) <= (host.limit or host.nbytes)
    order = {node: i for i, node in enumerate(cache.idle)}
    assert set(order) == {node for node in cache.nodes if pool.refs[node.block] == 1}
    for node, i in order.items():
        assert all(order[child] < i for child in node.children.values())
    for slot in scheduler.slots:
        assert slot.is_processing == any(seq.slot is slot for seq in scheduler.running)
    assert [seq.rank for seq in scheduler.running] == sorted(seq.rank for seq in scheduler.running)

"""KV cache copies and moves: copies blocks (copy on write) and moves token slots, between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from logitless.engine.batch import BLOCK_SIZE
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor, feed
from logitless.models.batch import PagedMemory
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.kv_move import move_cells
from logitless.models.kv_pool import PagePool
from logitless.models.model import Model

MOVES = 128  # token slots that one device run moves
COPIES = 8  # blocks that one device run copies


class KVMover:
    """Copies and moves KV entries on the device.

    Padding uses the last block of a pool, which no sequence owns. `can_move` is set by
    `prepare_moves`."""

    def __init__(self, session: Session, model: Model, memory: PagedMemory, drafter: FileDrafter | None = None) -> None:
        self._session, self._model, self._memory, self._drafter = session, model, memory, drafter
        self.can_move = False

    def prepare_copies(self) -> None:
        """Make the plans that `copy` runs."""
        for pool in self._memory.pools:
            self._session.cached_plan(("copies", pool.tables.name), partial(_copied, pool))

    def prepare_moves(self, load: Callable[[Sequence[Tensor]], None], *, soon: bool) -> str:
        """Prepare `move`; returns the reason why the device cannot move KV entries, or "".

        `load` loads the kernels of the nodes that run on the CPU. `soon`: make the plan now."""
        try:
            placement, _ = self._session.measure(self.moved)
        except ValueError as error:
            return f"the device cannot move cells of the cache ({error})"
        self.can_move = True
        load(placement.nodes_of(len(self._session.backends) - 1))
        if soon:
            self._session.cached_plan("moves", self.moved)
        return ""

    def copied(self) -> list[Tensor]:
        """Graph of `copy`: the caches after it."""
        return [cache for pool in self._memory.pools for cache in _copied(pool)]

    def copy(self, *pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks. `pairs`: (from, to) of each pool; no block is both source and target."""
        for pool, part in zip(self._memory.pools, pairs, strict=False):
            for start in range(0, len(part), COPIES):
                piece = list(part[start : start + COPIES])
                piece += [(pool.n - 1,) * 2] * (COPIES - len(piece))
                feeds = {"copies": np.array(piece, np.int32)}
                self._session.run(("copies", pool.tables.name), partial(_copied, pool), feeds, [0] * len(pool.caches))

    def moved(self) -> list[Tensor]:
        """Graph of `move`: the caches after it."""
        return move_cells(self._model.hparams, self._model.rotary, self._memory, MOVES, self._drafter)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move token slots: (source, target, change of position), ordered so that reads precede writes."""
        spare = (self._memory.full.n - 1) * BLOCK_SIZE
        for start in range(0, len(moves), MOVES):
            part = list(moves[start : start + MOVES])
            part += [(spare, spare, 0)] * (MOVES - len(part))
            feeds = dict(zip(("from", "to", "turn"), np.array(part, np.int32).T, strict=True))
            self._session.run("moves", self.moved, feeds, [0] * len(self._memory.full.caches))


def _copied(pool: PagePool) -> list[Tensor]:
    return pool.copied(feed("copies", (COPIES, 2), "i32"))

"""Copying pages and moving cells of the cache, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor, feed
from logitless.models.batch import PagedMemory
from logitless.models.kv_move import move_cells
from logitless.models.kv_pool import PagePool
from logitless.models.model import Model

MOVES = 128  # cells that one run of the device moves
COPIES = 8  # pages that one run copies


class Cells:
    """The last page of a pool is nobody's. `can_move` is known after `prepare_moves`."""

    def __init__(self, session: Session, model: Model, memory: PagedMemory) -> None:
        self._session, self._model, self._memory = session, model, memory
        self.can_move = False

    def prepare_copies(self) -> None:
        """Make the plans of `copy`."""
        for pool in self._memory.pools:
            self._session.cached_plan(("copies", pool.tables.name), partial(_copied, pool))

    def prepare_moves(self, load: Callable[[Sequence[Tensor]], None], *, soon: bool) -> str:
        """Why cells cannot be moved; "": they can, and `load` has loaded what the CPU runs of it. `soon`: the plan is
        made, too."""
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
        """The caches after `copy`."""
        return [cache for pool in self._memory.pools for cache in _copied(pool)]

    def copy(self, *pairs: Sequence[tuple[int, int]]) -> None:
        """Pages (from, to) of each pool. None of them is both."""
        for pool, part in zip(self._memory.pools, pairs, strict=False):
            for start in range(0, len(part), COPIES):
                piece = list(part[start : start + COPIES])
                piece += [(pool.n - 1,) * 2] * (COPIES - len(piece))
                feeds = {"copies": np.array(piece, np.int32)}
                self._session.run(("copies", pool.tables.name), partial(_copied, pool), feeds, [0] * len(pool.caches))

    def moved(self) -> list[Tensor]:
        """The caches after `move`."""
        return move_cells(self._model.hparams, self._model.rotary, self._memory, MOVES)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Cells (from, to, positions further on), in order of (from); a cell may be written after it was read."""
        spare = (self._memory.far.n - 1) * PAGE
        for start in range(0, len(moves), MOVES):
            part = list(moves[start : start + MOVES])
            part += [(spare, spare, 0)] * (MOVES - len(part))
            feeds = dict(zip(("from", "to", "turn"), np.array(part, np.int32).T, strict=True))
            self._session.run("moves", self.moved, feeds, [0] * len(self._memory.far.caches))


def _copied(pool: PagePool) -> list[Tensor]:
    return pool.copied(feed("copies", (COPIES, 2), "i32"))

"""Copying pages and moving cells of the cache, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graph.ops.attention import PAGE
from graph.session import Session
from graph.tensor import Tensor, feed
from models.batch import PagedMemory
from models.model import Model
from models.moves import move_cells

MOVES = 128  # cells that one run of the device moves
COPIES = 8  # pages that one run copies


class Cells:
    """`spare`: a page that no sequence has. `can_move` is known after `prepare_moves`."""

    def __init__(self, session: Session, model: Model, memory: PagedMemory, spare: int) -> None:
        self._session, self._model, self._memory, self._spare = session, model, memory, spare
        self.can_move = False

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
            self._session.prepare("moves", self.moved)
        return ""

    def copied(self) -> list[Tensor]:
        """The caches after `copy`."""
        return self._memory.copied(feed("copies", (COPIES, 2), "i32"))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Pages (from, to). None of them is both."""
        for start in range(0, len(pairs), COPIES):
            part = list(pairs[start : start + COPIES])
            part += [(self._spare, self._spare)] * (COPIES - len(part))
            feeds = {"copies": np.array(part, np.int32)}
            self._session.run("copies", self.copied, feeds, [0] * len(self._memory.caches))

    def moved(self) -> list[Tensor]:
        """The caches after `move`."""
        return move_cells(self._model.hparams, self._model.rotary, self._memory, MOVES)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Cells (from, to, positions further on), in order of (from); a cell may be written after it was read."""
        spare = self._spare * PAGE
        for start in range(0, len(moves), MOVES):
            part = list(moves[start : start + MOVES])
            part += [(spare, spare, 0)] * (MOVES - len(part))
            feeds = dict(zip(("from", "to", "turn"), np.array(part, np.int32).T, strict=True))
            self._session.run("moves", self.moved, feeds, [0] * len(self._memory.caches))

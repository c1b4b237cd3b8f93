"""Where a draft model whose layers keep states can go back to: a few rows of them for each sequence."""

from __future__ import annotations

from collections.abc import Iterable

N_ROWS = 4  # of a sequence: two that it can go back to, and two that drafts read and write by turns


class Places:
    """After how many of a sequence's tokens there is a state: where its own tokens end, before its drafts, and near the
    end of its prompt, which the next turn of a chat may write another time."""

    def __init__(self, rows: Iterable[int]) -> None:
        """`rows`: N_ROWS of them."""
        self._free = list(rows)
        self._row: dict[int, int] = {}
        self._mark = 0

    def go_back(self, n: int) -> int:
        """The most of n tokens after which there is a state. What lies behind is forgotten."""
        place = max((p for p in self._row if p <= n), default=0)
        self._mark = self._mark if self._mark <= place else 0
        self._keep({place, self._mark})
        return place

    def step(self, start: int, end: int, n_sure: int, mark: int) -> tuple[list[int], list[int]]:
        """Rows that a batch of the tokens from `start` to `end` reads and writes (UBatch.begin, UBatch.end). The first
        n_sure tokens are the sequence's own; `mark`: after how many of them another prompt may part."""
        n = end - start
        begin, ends = [self._row[start] if start else 0, *[-1] * (n - 1)], [-1] * n
        if start < mark <= end:
            self._mark = mark
        for place in {end, mark} if start < mark <= end else {end}:
            self._row[place] = ends[place - start - 1] = self._free.pop()
        self._keep({self._mark, end, max((p for p in self._row if p <= n_sure), default=0)})
        return begin, ends

    def _keep(self, places: set[int]) -> None:
        for place in self._row.keys() - places:
            self._free.append(self._row.pop(place))

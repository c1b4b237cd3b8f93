"""State rows of a recurrent draft model: the positions that a sequence can roll back to."""

from __future__ import annotations

from collections.abc import Iterable

N_ROWS = 4  # rows of a sequence: two to roll back to, and two that drafts read and write in turn


class StateRows:
    """State rows of one sequence, by number of tokens.

    There is a state at the end of the sequence's own tokens, before its draft, and one near the end
    of its prompt, which the next chat turn may render differently.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        """`rows`: N_ROWS of them."""
        self._free = list(rows)
        self._row: dict[int, int] = {}
        self._mark = 0

    def go_back(self, n: int) -> int:
        """Roll back to the last state after at most n tokens; returns its number of tokens."""
        place = max((p for p in self._row if p <= n), default=0)
        self._mark = self._mark if self._mark <= place else 0
        self._keep({place, self._mark})
        return place

    def step(self, start: int, end: int, n_sure: int, mark: int) -> tuple[list[int], list[int]]:
        """Rows that a batch of the tokens `start` to `end` reads and writes (UBatch.begin,
        UBatch.end).

        The first `n_sure` tokens are the sequence's own. `mark`: number of tokens after which
        another prompt may branch off.
        """
        n = end - start
        begin, ends = [self._row[start] if start else 0, *[-1] * (n - 1)], [-1] * n
        if start < mark <= end:
            self._mark = mark
        for place in {end, mark} if start < mark <= end else {end}:
            self._row[place] = ends[place - start - 1] = self._free.pop()
        self._keep({self._mark, end, max((p for p in self._row if p <= n_sure), default=0)})
        return begin, ends

    def _keep(self, state_rows: set[int]) -> None:
        for place in self._row.keys() - state_rows:
            self._free.append(self._row.pop(place))

"""Shared n-gram table (ngram-mod): hash of n tokens → next token, for all requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

N_ENTRIES = 1 << 22
MOST_USED = 0.25  # share of used entries at which the table is cleared, for collisions make bad drafts
_FACTOR, _MASK = 6364136223846793005, (1 << 64) - 1  # Knuth's, of his 64-bit linear congruential generator


class ModTable:
    """Hash table of constant size: 16 MiB from the first use on.

    A collision only makes a bad draft.
    """

    def __init__(self, n_match: int) -> None:
        self.n_match = n_match
        self.n_used = 0
        self._next: array[int] = array("i")
        self._drop = pow(_FACTOR, n_match, 1 << 64)

    def hash_of(self, tokens: Sequence[int]) -> int:
        """Hash of n_match tokens."""
        h = 0
        for token in tokens:
            h = (h * _FACTOR + token + 1) & _MASK
        return h

    def roll(self, h: int, oldest: int, newest: int) -> int:
        """Rolling hash: the window moved by one token."""
        return (h * _FACTOR + newest + 1 - (oldest + 1) * self._drop) & _MASK

    def get(self, h: int) -> int:
        """Token that followed, or -1."""
        return self._next[(h >> 20) % N_ENTRIES] if self._next else -1

    def put(self, h: int, token: int) -> None:
        if not self._next or self.n_used > MOST_USED * N_ENTRIES:
            self._next = array("i", [-1]) * N_ENTRIES
            self.n_used = 0
        at = (h >> 20) % N_ENTRIES
        self.n_used += self._next[at] < 0
        self._next[at] = token


class ModDrafter:
    """Drafter of one sequence: adds its tokens to the table and drafts as far as the table leads."""

    def __init__(self, table: ModTable, n_min: int, n_max: int) -> None:
        self._table = table
        self._n_min, self._n_max = min(n_min, n_max), n_max
        self._done = 0  # tokens added to the table so far
        self._hash = 0  # hash of the n_match tokens before that position

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        table, n = self._table, self._table.n_match
        if len(tokens) < n:
            return []
        if self._done == 0:
            self._hash, self._done = table.hash_of(tokens[:n]), n
        for end in range(self._done, len(tokens)):
            table.put(self._hash, tokens[end])
            self._hash = table.roll(self._hash, tokens[end - n], tokens[end])
        self._done = len(tokens)
        draft: list[int] = []
        window = list(tokens[-n:])
        h = self._hash
        while len(draft) < min(n_most, self._n_max) and (token := table.get(h)) >= 0:
            h = table.roll(h, window[len(draft)], token)
            draft.append(token)
            window.append(token)
        return draft if len(draft) >= min(self._n_min, n_most) else []

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass

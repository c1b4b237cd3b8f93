"""Rows of the device's memory that hold what the last layer said of tokens (models/architectures/mtp.py): where a
step puts them,
and where later ones find them."""

from __future__ import annotations

from logitless.engine.sequence import Sequence

Span = tuple[int, range]  # (rows given before the step minus its first position, positions)

NOTHING = 0  # the row of what is before a sequence's first token, or not there any more: it stays zero


class HiddenRows:
    """Tokens have rows in turn, two of the largest steps of them, and then the first ones again.

    What a row is of is a matter of how good a guess is, and of nothing else. So a sequence that has waited for long, or
    goes on from known pages, has nothing before its next token.
    """

    def __init__(self, n_ubatch: int, n_slots: int) -> None:
        self._kept = n_ubatch  # of the last tokens that had one
        self._n_turns = 2 * n_ubatch
        self.n = 1 + self._n_turns + n_slots + 1
        self._next = 0  # how many tokens have had one
        self._spans: dict[int, tuple[int, list[Span]]] = {}  # by slot: the sequence's id, its last two steps

    @property
    def spare(self) -> int:
        """Where tokens go that fill a batch up."""
        return self.n - 1

    def place(self, seq: Sequence, n: int) -> tuple[list[int], list[int]]:
        """Of a sequence's next n tokens: the rows of what is before each, and their own."""
        before, start = self.of(seq, seq.n_computed - 1), seq.n_computed
        rows = [1 + i % self._n_turns for i in range(self._next, self._next + n)]
        assert seq.slot is not None
        last = (self._next - start, range(start, start + n))
        self._spans[seq.slot.id] = seq.id, [last, *self._spans_of(seq)[:1]]
        self._next += n
        return [before, *rows[:-1]], rows

    def of(self, seq: Sequence, position: int) -> int:
        """The row of a token that was in one of the sequence's last two steps."""
        for offset, positions in self._spans_of(seq):
            if position in positions:
                i = position + offset
                return 1 + i % self._n_turns if i >= self._next - self._kept else NOTHING
        return NOTHING

    def _spans_of(self, seq: Sequence) -> list[Span]:
        id, spans = self._spans.get(seq.slot.id, (-1, [])) if seq.slot is not None else (-1, [])
        return spans if id == seq.id else []

    def guess(self, slot: int) -> int:
        """The row of what guesses said of their own tokens."""
        return 1 + self._n_turns + slot

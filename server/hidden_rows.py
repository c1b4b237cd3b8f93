"""Rows of the device's memory that hold what the last layer said of tokens (models/nextn.py): where a step puts them,
and where the next one finds them."""

from __future__ import annotations

from server.sequence import Sequence

NOTHING = 0  # the row of what is before a sequence's first token, or not there any more: it stays zero


class HiddenRows:
    """A step of the scheduler has one half of the rows, the next one the other, which still has what the last one left.

    What a row is of is a matter of how good a guess is, and of nothing else. So a sequence that was not in the last
    step, or went on from known pages, has nothing before its next token, and a step that is tried again writes over
    what its first try left.
    """

    def __init__(self, n_ubatch: int, n_slots: int) -> None:
        self._half = n_ubatch
        self._guesses = 1 + 2 * n_ubatch
        self.n = self._guesses + n_slots + 1
        self._step = 0
        self._used = 0  # rows of this step's half

    @property
    def spare(self) -> int:
        """Where tokens go that fill a batch up."""
        return self.n - 1

    def begin(self) -> None:
        """A step begins."""
        self._step += 1
        self._used = 0

    def place(self, seq: Sequence, n: int) -> tuple[list[int], list[int]]:
        """Of a sequence's next n tokens: the rows of what is before each, and their own."""
        before = self.of(seq, seq.n_computed - 1)
        if self._used + n > self._half:
            self._used = 0
        first = 1 + self._step % 2 * self._half + self._used
        self._used += n
        seq.hidden = self._step, first - seq.n_computed, range(seq.n_computed, seq.n_computed + n)
        rows = list(range(first, first + n))
        return [before, *rows[:-1]], rows

    def of(self, seq: Sequence, position: int) -> int:
        """The row of a token that was in the last step."""
        step, offset, positions = seq.hidden
        return position + offset if step == self._step - 1 and position in positions else NOTHING

    def guess(self, slot: int) -> int:
        """The row of what guesses said of their own tokens."""
        return self._guesses + slot

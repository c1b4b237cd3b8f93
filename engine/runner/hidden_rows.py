"""Hidden states for the MTP head or a drafter: a ring buffer of rows on the device."""

from __future__ import annotations

from logitless.engine.batch import token_slots
from logitless.engine.sequence import Sequence

Span = tuple[int, range]  # (row counter before the step minus its first position, positions)

N_EXAMPLES = 4096  # tokens whose rows a draft head learns from
NOTHING = 0  # row of zeros: before a sequence's first token, or overwritten already


class HiddenRows:
    """Assigns rows of the ring buffer, which holds the tokens of two steps of the largest size.

    Stale rows only lower the acceptance rate of drafts; they never affect results. A sequence that
    has waited for long, or resumes from a cached prefix, has no row before its next token."""

    def __init__(
        self,
        n_ubatch: int,
        n_slots: int,
        n_least: int = 0,
        n_states: int = 0,
        *,
        behind: bool = False,
        n_block: int = 1,
        fixed: bool = False,
    ) -> None:
        """`n_least`: rows of tokens at least; else two of the largest steps have room. `n_states`: rows of recurrent
        state, behind which the MTP head has two of each slot. `behind`: a token's keys
        and values go to the cell of the one before (EAGLE-3). `n_block`: rows of a sequence in a draft step.
        `fixed`: all tokens of a draft have the position of the first, and none is cached (Gemma 4)."""
        self.behind, self.n_block, self.fixed, self._n_states = behind, n_block, fixed, n_states
        self.n_turns = max(2 * n_ubatch, n_least)
        self._n_valid = self.n_turns - n_ubatch  # latest tokens whose rows are still valid
        self.n = 1 + self.n_turns + n_slots + 1
        self._next = 0  # row counter: tokens that have had a row
        # by slot: the sequence's id, its last two steps
        self._spans: dict[int, tuple[int, list[Span]]] = {}

    @property
    def spare(self) -> int:
        """Row that padding tokens write."""
        return self.n - 1

    def place(self, seq: Sequence, n: int) -> tuple[list[int], list[int]]:
        """Assign rows to a sequence's next n tokens; returns (rows of the tokens before each, their own rows)."""
        before, start = self.of(seq, seq.n_computed - 1), seq.n_computed
        rows = [1 + i % self.n_turns for i in range(self._next, self._next + n)]
        assert seq.slot is not None
        last = (self._next - start, range(start, start + n))
        self._spans[seq.slot.id] = seq.id, [last, *self._spans_of(seq)[:1]]
        self._next += n
        return [before, *rows[:-1]], rows

    @staticmethod
    def cells(seq: Sequence, before: list[int]) -> list[int]:
        """Cells of the tokens before a sequence's next ones; -1 where their hidden state is gone."""
        start = seq.n_computed - 1
        cells = token_slots(seq.kv.blocks, range(start, start + len(before)))
        return [-1 if row == NOTHING else cell for row, cell in zip(before, cells, strict=True)]

    def of(self, seq: Sequence, position: int) -> int:
        """Row of a token of one of the sequence's last two steps; NOTHING if it is gone."""
        for offset, positions in self._spans_of(seq):
            if position in positions:
                i = position + offset
                return 1 + i % self.n_turns if i >= self.oldest else NOTHING
        return NOTHING

    def last_span(self, seq: Sequence) -> Span | None:
        """The sequence's last step, rejected drafts included; None: it has had none."""
        return next(iter(self._spans_of(seq)), None)

    @property
    def oldest(self) -> int:
        """Row counter of the oldest token whose row is still valid; the row is 1 + counter mod n_turns."""
        return self._next - self._n_valid

    def _spans_of(self, seq: Sequence) -> list[Span]:
        id, spans = self._spans.get(seq.slot.id, (-1, [])) if seq.slot is not None else (-1, [])
        return spans if id == seq.id else []

    def states(self, seq: Sequence, n: int) -> tuple[list[int], list[int]]:
        """State rows that the MTP head reads and writes at a sequence's draft token n; none without states."""
        if not self._n_states or seq.slot is None:
            return [], []
        own = [self._n_states + 2 * seq.slot.id + i % 2 for i in (n - 1, n)]
        return [own[0] if n else seq.kv.state_row], [own[1]]

    def draft_row(self, slot: int) -> int:
        """Row of a slot for the MTP head's own hidden states while it drafts."""
        return 1 + self.n_turns + slot

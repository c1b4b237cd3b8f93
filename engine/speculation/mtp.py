"""draft-mtp: the model's own block that predicts one token more guesses for several sequences at once, each guess from
what it said of the one before (models/architectures/mtp.py). Its keys and values are in the model's pages, so there
is nothing to
catch up with, and nothing that the next step does not write again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from logitless.engine.batch import PAGE, DeviceFailed, StepResult, UBatch
from logitless.engine.runner.hidden_rows import NOTHING, HiddenRows
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.guess import Grow, Guess

log = logging.getLogger("logitless.speculation")
REST = 12  # steps after a guess that failed: the next one may fail, too


class StepEngine(Protocol):
    """What runs the model (logitless.engine.runner.model_runner.Engine)."""

    def step(self, batch: UBatch, /) -> StepResult:
        """Run one batch."""


class NextnDrafter:
    """Drafts by the model's own block."""

    def __init__(self, engine: StepEngine, hidden: HiddenRows, n_vocab: int, eog_ids: Iterable[int] = ()) -> None:
        self._engine = engine
        self._hidden = hidden
        self._n_vocab = n_vocab
        self._eog_ids = frozenset(eog_ids)
        self._rest = 0  # steps without guesses

    def propose(self, wanted: list[tuple[Sequence, int]], grow: Grow) -> dict[Sequence, list[int]]:
        """Drafts for (sequence, most tokens) of those whose last step left what a guess begins with. `grow`: as
        KvCache.grow. DeviceFailed: a device was lost meanwhile, which the target cannot go on without noticing."""
        guesses: list[Guess] = []
        if self._rest:
            self._rest -= 1
            return {}
        for seq, n_most in wanted:
            begins = seq.owed == 1 and seq.kv.copy is None and self._hidden.of(seq, seq.n_computed - 1) != NOTHING
            if n_most <= 0 or not begins:  # a page that is still to be copied comes with the next step
                continue
            n_most = grow(seq, n_most)  # cells for the token that it owes, and for all of the draft but its last
            if n_most > 0:
                guesses.append(Guess(seq, n_most))
        for weights in {guess.seq.choice.weights for guess in guesses}:
            self._draft([guess for guess in guesses if guess.seq.choice.weights == weights], weights)
        return {guess.seq: guess.draft for guess in guesses if guess.draft}

    def _draft(self, guesses: list[Guess], weights: int) -> None:
        """Make the drafts of sequences with the same weights, a token of each at a time."""
        while guesses:
            try:
                result = self._engine.step(self._batch(guesses, weights))
            except DeviceFailed:  # it is the target's device: all that was in its memory is gone
                raise
            except Exception as error:  # no reason for the target to fail: it goes on without these drafts
                log.warning("guessing failed: %s", " ".join(str(error).split()))
                self._rest = REST
                return
            guesses = [g for i, g in enumerate(guesses) if g.take(result, i, self._n_vocab, self._eog_ids)]

    def _batch(self, guesses: list[Guess], weights: int) -> UBatch:
        """The last token of each."""
        batch = UBatch(weights=weights, guesses=True)
        for i, guess in enumerate(guesses):
            seq = guess.seq
            assert seq.slot is not None
            id, pos = seq.slot.id, len(seq.tokens) - 1 + len(guess.draft)
            batch.tokens.append(guess.draft[-1] if guess.draft else seq.tokens[-1])
            batch.pos.append(pos)
            batch.slot.append(id)
            batch.cells.append(seq.kv.blocks[pos // PAGE] * PAGE + pos % PAGE)
            own = self._hidden.guess(id)
            batch.hidden_before.append(own if guess.draft else self._hidden.of(seq, pos - 1))
            batch.hidden_to.append(own)
            if not seq.kv.uploaded and not guess.draft:
                batch.tables[id] = seq.kv.blocks
            guess.ask(batch, i, self._n_vocab)
        return batch

    def sleep(self) -> None:
        """Its memory is the model's."""

    def wake(self) -> None:
        """Its memory is the model's."""

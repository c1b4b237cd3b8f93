"""Fake device with an MTP head (models/architectures/mtp.py).

Rows hold the hidden states of tokens; the head's cells hold what it computed from them.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from logitless.engine.batch import BLOCK_SIZE, DeviceFailed, StepFailed, StepResult, UBatch
from logitless.engine.runner.hidden_rows import NOTHING, HiddenRows
from logitless.engine.speculation.mtp import MTPDrafter
from tests.helpers.scheduler_checks import chain
from tests.helpers.scheduler_fakes import N_VOCAB, Bench, Cell, FakeEngine, FakePages, next_id


class GuessedPages(FakePages):
    """KV pages with those of the MTP head: position (-1 if copied from elsewhere) and hidden state."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.own: list[Cell] = [None] * (n * BLOCK_SIZE)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        super().copy(copies)
        for source, to in copies:
            self.own[to * BLOCK_SIZE : (to + 1) * BLOCK_SIZE] = self.own[
                source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE
            ]

    def write(self, page: int, data: Any) -> None:
        super().write(page, data)
        self.own[page * BLOCK_SIZE : (page + 1) * BLOCK_SIZE] = [(-1, 0)] * BLOCK_SIZE

    def keep(self, slot: int, pos: int, content: int) -> None:
        self.own[self.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE] = pos, content


class GuessingEngine(FakeEngine):
    """Engine that drafts what the model will generate, except for every `wrong`-th token.

    It needs the hidden state of the token before.
    """

    pages_kind = GuessedPages
    wrong = 0
    no_guesses = False  # drafting raises a device error
    lost_at_guess = False  # drafting loses the device and its memory
    n_blind = 0  # tokens of steps without the hidden state of the token before
    guessed: list[UBatch]
    pages: GuessedPages

    def open(self, n_ubatch: int, n_slots: int) -> None:
        assert isinstance(self.full_kv, GuessedPages)
        self.pages = self.full_kv
        self.hidden = HiddenRows(n_ubatch, n_slots)
        self.rows = [0] * self.hidden.n
        self.guessed = []

    def _step(self, batch: UBatch) -> StepResult:
        assert len(batch.hidden_before) == len(batch.hidden_to) == len(batch.tokens)
        assert NOTHING not in batch.hidden_to
        if batch.mtp:
            return self._guess(batch)
        result = super()._step(batch)
        rows = list(self.rows)
        for slot, pos, to in zip(batch.slot, batch.pos, batch.hidden_to, strict=True):
            rows[to] = self.full_kv.content(slot, pos)
        assert len(set(batch.hidden_to)) == len(batch.tokens)
        assert not set(batch.hidden_before) - set(range(len(rows) - 1)), "what fills a batch up is nobody's"
        self.rows = rows
        for token, slot, pos, before in zip(batch.tokens, batch.slot, batch.pos, batch.hidden_before, strict=True):
            self.pages.keep(slot, pos, chain(rows[before], token))
            self.n_blind += rows[before] != self.full_kv.content(slot, pos - 1)
        return result

    def move_cells(self, moves: list[tuple[int, int, int]]) -> None:
        super().move_cells(moves)
        for _, to, _ in moves:
            self.pages.own[to] = -1, 0

    def _guess(self, batch: UBatch) -> StepResult:
        if self.no_guesses:
            raise StepFailed("out of memory")
        if self.lost_at_guess:
            self.lost_at_guess = False
            self.full_kv.lose()
            raise DeviceFailed("it fell off the bus")
        self.full_kv.tables.update({slot: list(table) for slot, table in batch.tables.items()})
        assert len(set(batch.slot)) == len(batch.tokens) == len(batch.out)
        assert batch.begin == batch.end == batch.copies == batch.window_copies == []
        assert len(batch.window_slot_mapping) in (0, len(batch.tokens))
        assert (not batch.window_slot_mapping) == (self.window_kv is None)
        if (window := self.window_kv) is not None:
            window.tables.update({slot: list(table) for slot, table in batch.window_tables.items()})
            for slot, pos, cell in zip(batch.slot, batch.pos, batch.window_slot_mapping, strict=True):
                assert cell == window.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE
                window.cells[cell] = -1, 0
        ids = []
        for i, (token, slot, pos) in enumerate(zip(batch.tokens, batch.slot, batch.pos, strict=True)):
            assert batch.slot_mapping[i] == self.full_kv.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE
            said = self.rows[batch.hidden_before[i]]
            if batch.hidden_before[i] != batch.hidden_to[i]:  # the first token of a draft
                assert said == self.full_kv.content(slot, pos - 1)
            for p in range(pos):  # it attends to every earlier token
                cell = self.pages.own[self.full_kv.tables[slot][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE]
                assert cell is not None
                assert cell[0] in (p, -1)
            content = chain(said, token)
            self.pages.keep(slot, pos, content)
            self.rows[batch.hidden_to[i]] = content
            ids.append(next_id(content))
            if self.wrong and zlib.crc32(bytes([i]), pos) % self.wrong == 0:
                ids[-1] = 1 + ids[-1] % (N_VOCAB - 1)
        self.guessed.append(batch)
        probs = None
        if batch.n_probs:
            sure = np.array([0.9 if pos % 3 else 0.1 for pos in batch.pos], np.float32)
            nothing = np.zeros((len(ids), 1), np.int32)
            probs = np.ones(len(ids), np.int32), sure, nothing, nothing.astype(np.float32)
        return StepResult(np.array(ids, np.uint32), probs=probs)


def let_guess(bench: Bench, wrong: int = 0) -> GuessingEngine:
    """Let the bench's device draft from now on."""
    engine, scheduler = bench.engine, bench.scheduler
    assert isinstance(engine, GuessingEngine)
    engine.wrong = wrong
    engine.open(scheduler.n_ubatch, len(scheduler.slots))
    assert engine.hidden is not None
    scheduler.speculator.models["draft-mtp"] = MTPDrafter(engine, engine.hidden, range(N_VOCAB), [0])
    return engine

"""draft-simple: a smaller model guesses for several sequences at once, with a KV cache of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from logitless.engine.batch import PAGE, StepResult, UBatch
from logitless.engine.kv_cache.block_pool import n_pages_for
from logitless.engine.kv_cache.manager import NEAR_END
from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.guess import Grow, Guess
from logitless.engine.speculation.state_rows import N_ROWS, Places

log = logging.getLogger("logitless.speculation")
PROMPT_CHUNK = 128  # tokens of prompts that one step of the target may wait for, when others wait too


class StepEngine(Protocol):
    """What runs the draft model (logitless.engine.runner.model_runner.Engine)."""

    def step(self, batch: UBatch, /) -> StepResult:
        """Run one batch."""

    def sleep(self) -> None:
        """Give up all memory."""

    def wake(self) -> None:
        """Load again; nothing is cached any more."""


@dataclass(slots=True)
class _Mirror:
    """What the draft model has computed for the sequence in one slot; it outlives the sequence, for the next one."""

    tokens: list[int] = field(default_factory=list)  # in its cache
    table: list[int] = field(default_factory=list)
    sent: bool = False  # the engine knows the table as it is
    places: Places | None = None  # of a model whose layers keep states


@dataclass(slots=True)
class _Guess(Guess):
    """One sequence's draft, and where its model is."""

    mirror: _Mirror = field(default_factory=lambda: _Mirror())
    n_now: int = 0  # tokens that the next batch takes in


class ModelDrafter:
    """Drafts by a second model. It computes a prompt piecemeal while the target goes on without it."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        n_pages: int,
        n_vocab: int,
        n_ubatch: int,
        eog_ids: Iterable[int] = (),
        has_states: bool = False,
    ) -> None:
        """`n_vocab`: ids below it mean the same to both models; others are neither fed nor drafted. `has_states`: its
        layers keep such, and the engine has N_ROWS of them for each slot."""
        self._engine = engine
        self._n_vocab = n_vocab
        self._n_ubatch = n_ubatch
        self._eog_ids = frozenset(eog_ids)
        self._has_states = has_states
        self._free = list(range(n_pages - 1, -1, -1))
        self._mirrors: dict[int, _Mirror] = {}  # by slot, the one used longest ago first
        self._active: set[int] = set()  # slots that this step drafts for

    def propose(self, wanted: list[tuple[Sequence, int]], grow: Grow) -> dict[Sequence, list[int]]:
        """Drafts for (sequence, most tokens); with 0 it only keeps up. Its pages are its own."""
        guesses = self._catch_up(wanted)
        drafts: dict[Sequence, list[int]] = {}
        while guesses:
            try:
                result = self._run(guesses)
            except Exception as error:  # no reason for the target to fail: it goes on without these drafts
                log.warning("the draft model failed: %s", " ".join(str(error).split()))
                self._forget_all()
                break
            row = 0
            going_on = []
            for guess in guesses:
                if guess.n_most == 0 or len(guess.mirror.tokens) < len(guess.seq.tokens):
                    continue
                more = guess.take(result, row, self._n_vocab, self._eog_ids)
                row += 1
                if guess.draft:
                    drafts[guess.seq] = guess.draft
                if more and self._has_room(guess.mirror, 1):
                    guess.n_now = 1
                    going_on.append(guess)
            guesses = going_on
        return drafts

    def _catch_up(self, wanted: list[tuple[Sequence, int]]) -> list[_Guess]:
        """What each sequence's mirror owes, as far as this step may wait for it."""
        self._active = {seq.slot.id for seq, _ in wanted if seq.slot is not None}
        for id in self._active:
            self._mirrors[id] = self._mirrors.pop(id) if id in self._mirrors else self._mirror(id)
        left = self._n_ubatch if len(wanted) == 1 else min(self._n_ubatch, PROMPT_CHUNK)
        guesses = []
        for seq, n_most in wanted:
            assert seq.slot is not None
            mirror = self._mirrors[seq.slot.id]
            known = self._forget(mirror, min(common_prefix(mirror.tokens, seq.tokens), len(seq.tokens) - 1))
            n = min(left, len(seq.tokens) - known)
            if n > 0 and max(seq.tokens[known : known + n]) < self._n_vocab and self._has_room(mirror, n):
                guesses.append(_Guess(seq, max(0, n_most), mirror=mirror, n_now=n))
                left -= n
        return guesses

    def sleep(self) -> None:
        """Give up the model's memory. Only `wake` may be called next."""
        self._forget_all()
        self._engine.sleep()

    def wake(self) -> None:
        """Load the model again."""
        self._engine.wake()

    def _forget_all(self) -> None:
        for mirror in self._mirrors.values():
            self._forget(mirror, 0)

    def _mirror(self, slot: int) -> _Mirror:
        rows = range(1 + slot * N_ROWS, 1 + (slot + 1) * N_ROWS)
        return _Mirror(places=Places(rows) if self._has_states else None)

    def _forget(self, mirror: _Mirror, n: int) -> int:
        """Keep n tokens at most, the first; how many."""
        if mirror.places is not None:
            n = mirror.places.go_back(n)
        del mirror.tokens[n:]
        while len(mirror.table) > n_pages_for(n):
            self._free.append(mirror.table.pop())
        return n

    def _has_room(self, mirror: _Mirror, n: int) -> bool:
        """Find pages for n more tokens, if need be those of the mirror that was used longest ago."""
        missing = n_pages_for(len(mirror.tokens) + n) - len(mirror.table)
        for id, other in self._mirrors.items():
            if len(self._free) >= missing or id in self._active:
                break
            self._forget(other, 0)
        if len(self._free) < missing:
            return False
        if missing > 0:
            mirror.table += [self._free.pop() for _ in range(missing)]
            mirror.sent = False
        return True

    def _run(self, guesses: list[_Guess]) -> StepResult:
        """One batch: the next tokens of each, and a row where its last known token is among them."""
        batch = UBatch()
        for guess in guesses:
            seq, mirror = guess.seq, guess.mirror
            assert seq.slot is not None
            start = len(mirror.tokens)
            end = start + guess.n_now
            mirror.tokens += (seq.tokens + guess.draft)[start:end]
            batch.tokens += mirror.tokens[start:]
            batch.pos += range(start, end)
            batch.slot += [seq.slot.id] * guess.n_now
            batch.cells += [mirror.table[p // PAGE] * PAGE + p % PAGE for p in range(start, end)]
            if mirror.places is not None:
                begin, ends = mirror.places.step(start, end, len(seq.tokens), seq.n_prompt - NEAR_END)
                batch.begin += begin
                batch.end += ends
            if not mirror.sent:
                batch.tables[seq.slot.id] = mirror.table
                mirror.sent = True
            if guess.n_most > 0 and end >= len(seq.tokens):
                guess.ask(batch, len(batch.tokens) - 1, self._n_vocab)
        return self._engine.step(batch)

"""Draft model (draft-simple): a smaller model with its own KV cache makes drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from logitless.engine.batch import StepResult, UBatch, token_slots
from logitless.engine.kv_cache.block_pool import n_blocks_for
from logitless.engine.kv_cache.manager import NEAR_END
from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.sequence import Sequence
from logitless.engine.sleep import Sleeper
from logitless.engine.speculation.draft_builder import AllocateSlots, DraftBuilder, StepRunner

log = logging.getLogger("logitless.speculation")
# prompt tokens that the draft model prefills in one step, while several sequences draft
PROMPT_CHUNK = 128
# state rows of a sequence: two to roll back to, and two that drafts read and write in turn
N_ROWS = 4


class DraftRunner(StepRunner, Sleeper, Protocol):
    """Model runner of the draft model."""


class StateRows:
    """State rows of one sequence of a recurrent draft model, by number of tokens.

    There is a state at the end of the sequence's own tokens, before its draft, and one near the end
    of its prompt, which the next chat turn may render differently."""

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
        another prompt may branch off."""
        n = end - start
        begin, ends = [self._row[start] if start else 0, *[-1] * (n - 1)], [-1] * n
        if start < mark <= end:
            self._mark = mark
        for place in {end, mark} if start < mark <= end else {end}:
            self._row[place] = ends[place - start - 1] = self._free.pop()
        self._keep({self._mark, end, max((p for p in self._row if p <= n_sure), default=0)})
        return begin, ends

    def _keep(self, positions: set[int]) -> None:
        for place in self._row.keys() - positions:
            self._free.append(self._row.pop(place))


@dataclass(slots=True)
class _DraftCache:
    """KV cache of the draft model for one slot.

    It outlives a sequence, for the next one of the slot."""

    tokens: list[int] = field(default_factory=list)  # computed tokens
    table: list[int] = field(default_factory=list)  # block table
    sent: bool = False  # the device has the block table
    state_rows: StateRows | None = None  # state rows, if the model is recurrent


@dataclass(slots=True)
class _ModelDraft(DraftBuilder):
    """Draft of one sequence in the making, with the draft model's KV cache for it."""

    cache: _DraftCache = field(default_factory=lambda: _DraftCache())
    n_now: int = 0  # tokens in the next batch


class ModelDrafter:
    """Drafts by a second model.

    It prefills a prompt in chunks while the target decodes without drafts."""

    def __init__(
        self,
        engine: DraftRunner,
        *,
        n_blocks: int,
        n_vocab: int,
        n_ubatch: int,
        eog_ids: Iterable[int] = (),
        has_states: bool = False,
    ) -> None:
        """`n_vocab`: ids below it are the same tokens in both models; others are neither fed nor
        drafted.

        `has_states`: the model is recurrent, and the runner has N_ROWS state rows for each slot."""
        self._engine = engine
        self._n_vocab = n_vocab
        self._n_ubatch = n_ubatch
        self._eog_ids = frozenset(eog_ids)
        self._has_states = has_states
        self._free = list(range(n_blocks - 1, -1, -1))
        self._caches: dict[int, _DraftCache] = {}  # by slot, in LRU order
        self._active: set[int] = set()  # slots of this step

    def propose(self, requests: list[tuple[Sequence, int]], allocate: AllocateSlots) -> dict[Sequence, list[int]]:
        """Draft for each (sequence, most tokens); with 0 the draft model only takes in new tokens.

        The draft model has its own KV blocks, so `allocate` is not used."""
        builders = self._catch_up(requests)
        drafts: dict[Sequence, list[int]] = {}
        while builders:
            try:
                result = self._run(builders)
            except Exception as error:  # the target continues without these drafts
                log.warning("the draft model failed: %s", " ".join(str(error).split()))
                self._forget_all()
                break
            row = 0
            going_on = []
            for builder in builders:
                if builder.n_most == 0 or len(builder.cache.tokens) < len(builder.seq.tokens):
                    continue
                more = builder.take(result, row, range(self._n_vocab), self._eog_ids)
                row += 1
                if builder.draft:
                    drafts[builder.seq] = builder.draft
                if more and self._has_room(builder.cache, 1):
                    builder.n_now = 1
                    going_on.append(builder)
            builders = going_on
        return drafts

    def _catch_up(self, requests: list[tuple[Sequence, int]]) -> list[_ModelDraft]:
        """Start the drafts: choose each sequence's uncomputed tokens, within the prefill budget of the step."""
        self._active = {seq.slot.id for seq, _ in requests if seq.slot is not None}
        for id in self._active:
            self._caches[id] = self._caches.pop(id) if id in self._caches else self._new_cache(id)
        budget = self._n_ubatch if len(requests) == 1 else min(self._n_ubatch, PROMPT_CHUNK)
        builders = []
        for seq, n_most in requests:
            assert seq.slot is not None
            cache = self._caches[seq.slot.id]
            n_common = self._forget(cache, min(common_prefix(cache.tokens, seq.tokens), len(seq.tokens) - 1))
            n = min(budget, len(seq.tokens) - n_common)
            if n > 0 and max(seq.tokens[n_common : n_common + n]) < self._n_vocab and self._has_room(cache, n):
                builders.append(_ModelDraft(seq, max(0, n_most), cache=cache, n_now=n))
                budget -= n
        return builders

    def sleep(self) -> None:
        """Free the model's memory. Only `wake` may be called next."""
        self._forget_all()
        self._engine.sleep()

    def wake(self) -> None:
        """Load the model again."""
        self._engine.wake()

    def _forget_all(self) -> None:
        for cache in self._caches.values():
            self._forget(cache, 0)

    def _new_cache(self, slot: int) -> _DraftCache:
        rows = range(1 + slot * N_ROWS, 1 + (slot + 1) * N_ROWS)
        return _DraftCache(state_rows=StateRows(rows) if self._has_states else None)

    def _forget(self, cache: _DraftCache, n: int) -> int:
        """Roll back to the first n tokens at most, and free their blocks; returns the number of tokens kept."""
        if cache.state_rows is not None:
            n = cache.state_rows.go_back(n)
        del cache.tokens[n:]
        while len(cache.table) > n_blocks_for(n):
            self._free.append(cache.table.pop())
        return n

    def _has_room(self, cache: _DraftCache, n: int) -> bool:
        """Allocate blocks for n more tokens, evicting the least recently used slots if needed."""
        missing = n_blocks_for(len(cache.tokens) + n) - len(cache.table)
        for id, other in self._caches.items():
            if len(self._free) >= missing or id in self._active:
                break
            self._forget(other, 0)
        if len(self._free) < missing:
            return False
        if missing > 0:
            cache.table += [self._free.pop() for _ in range(missing)]
            cache.sent = False
        return True

    def _run(self, builders: list[_ModelDraft]) -> StepResult:
        """Run one batch: the next tokens of each sequence, sampled where they reach its last token."""
        batch = UBatch()
        for builder in builders:
            seq, cache = builder.seq, builder.cache
            assert seq.slot is not None
            start = len(cache.tokens)
            end = start + builder.n_now
            cache.tokens += (seq.tokens + builder.draft)[start:end]
            batch.tokens += cache.tokens[start:]
            batch.pos += range(start, end)
            batch.slot += [seq.slot.id] * builder.n_now
            batch.slot_mapping += token_slots(cache.table, range(start, end))
            if cache.state_rows is not None:
                begin, ends = cache.state_rows.step(start, end, len(seq.tokens), seq.n_prompt - NEAR_END)
                batch.begin += begin
                batch.end += ends
            if not cache.sent:
                batch.tables[seq.slot.id] = cache.table
                cache.sent = True
            if builder.n_most > 0 and end >= len(seq.tokens):
                builder.ask(batch, len(batch.tokens) - 1, range(self._n_vocab))
        return self._engine.step(batch)

"""Grammar mask (structured output): grammar state and token bitmask of a row, from worker threads.

Facts about lazy grammars: llama.cpp, `llama_grammar_accept_impl` (2026). Until a trigger matches,
every token is allowed. The grammar's text starts at the trigger token, or at the first group of the
trigger pattern."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.grammar import Grammar, GrammarError, Matcher
from logitless.models.grammar.triggers import Pattern

Bits = npt.NDArray[np.uint32]
MaskResult = Bits | GrammarError | None  # None: every token is allowed
N_WORKERS = 4
MOST_SECONDS = 1.0  # of a processor for the bitmask of one token


@dataclass(frozen=True, eq=False, slots=True)
class GrammarConstraint:
    """Grammar of a request.

    `text` and `triggers` are its source, as generation_settings shows it."""

    grammar: Grammar
    text: str = ""
    lazy: bool = False
    tokens: frozenset[int] = frozenset()  # trigger tokens of a lazy grammar
    words: tuple[bytes, ...] = ()  # trigger words; the first one in the text counts
    patterns: tuple[Pattern, ...] = ()
    triggers: tuple[dict[str, Any], ...] = ()


class GrammarState:
    """Grammar state of one generation. For one thread at a time."""

    def __init__(self, constraint: GrammarConstraint) -> None:
        self.constraint = constraint
        self.awaiting = constraint.lazy
        self._matcher: Matcher | None = None if constraint.lazy else constraint.grammar.matcher()
        self._mask: Bits | None = None  # bitmask of the current state, once computed
        self._text = b""  # generated text, while a trigger may match
        self._starts: list[tuple[int, int]] = []  # (offset in the text, id) of each token

    def mask(self) -> Bits | None:
        """Token bitmask (n_vocab / 32,) u32 of the next token; None: every token is allowed.

        Raises GrammarError if the grammar cannot continue."""
        if self._matcher is None:
            return None
        if self._mask is None:
            self._mask = self._matcher.mask()
        return self._mask

    def accept(self, id: int) -> None:
        """Advance by a token. Raises GrammarError if it is not allowed."""
        self._mask = None
        if self._matcher is not None:
            if not self._matcher.accept(id):
                raise GrammarError("a token came that the grammar does not allow")
            return
        constraint, tokenizer = self.constraint, self.constraint.grammar.tokenizer
        at = len(self._text)
        if id in constraint.tokens:
            self._begin([tokenizer.piece(id)])
            return
        self._text += tokenizer.piece(id)
        self._starts.append((at, id))
        longest = max(map(len, constraint.words), default=0)
        results = [self._text.find(word, max(0, at - longest + 1)) for word in constraint.words]
        results += [pattern.search(self._text) for pattern in constraint.patterns]
        start = min((place for place in results if place >= 0), default=-1)
        if start < 0:
            return
        ends = [place for place, _ in self._starts[1:]] + [len(self._text)]
        pieces = [
            self._text[max(start, place) : end]
            for (place, _), end in zip(self._starts, ends, strict=True)
            if end > start
        ]
        self._text, self._starts = b"", []
        self._begin(pieces)

    def _begin(self, pieces: list[bytes]) -> None:
        self.awaiting = False
        self._matcher = self.constraint.grammar.matcher()
        for piece in pieces:
            if piece and not self._matcher.accept_bytes(piece):
                raise GrammarError("does not allow the text of its trigger")

    def masks(self, draft: Sequence[int]) -> list[MaskResult]:
        """Token bitmasks of the next token and after each draft token, as far as the draft is
        allowed.

        An error at a draft token is returned in place of its mask, for the token may be rejected.
        The state is rolled back; while a trigger is awaited it is not, so call this on a copy then.
        """
        results: list[MaskResult] = [self.mask()]
        n_accepted = 0
        try:
            for id in draft:
                if self._matcher is None:
                    self.accept(id)
                    results.append(self.mask())
                elif self._matcher.accept(id):
                    n_accepted += 1
                    results.append(self._matcher.mask())
                else:
                    break
        except GrammarError as error:
            results.append(error)
        if self._matcher is not None:
            self._matcher.rollback(n_accepted)
        return results

    def copy(self) -> GrammarState:
        """Independent copy of the state."""
        other = GrammarState(self.constraint)
        other.awaiting, other._text, other._starts = self.awaiting, self._text, self._starts.copy()
        other._matcher = None if self._matcher is None else self._matcher.copy()
        return other


class TokenBitmask:
    """Token bitmask of one row of a step; a worker may still compute it."""

    __slots__ = ("_index", "_job", "bits")

    def __init__(self, job: Future[list[MaskResult]], index: int) -> None:
        self._job, self._index = job, index
        self.bits: Bits | None = None  # set by `wait`

    def wait(self, seconds: float) -> Bits | None:
        """Wait for the bitmask; None: every token is allowed.

        Raises TimeoutError if it is still pending, GrammarError if the grammar cannot continue. A
        row after a forbidden draft token gets an arbitrary mask, for it will be rejected."""
        masks = self._job.result(max(0.0, seconds))
        results = masks[min(self._index, len(masks) - 1)]
        if isinstance(results, GrammarError):
            raise results
        self.bits = results
        return results


class TokenBitmasks:
    """Token bitmasks of one generation, for the engine thread. Workers compute them."""

    def __init__(self, constraint: GrammarConstraint) -> None:
        self._state = GrammarState(constraint)
        self._busy = threading.Lock()  # guards the grammar state
        # accepted tokens that the grammar state has yet to take in
        self._accepted: deque[int] = deque()
        self._problem: GrammarError | None = None  # why there are no masks any more
        self._job: Future[list[MaskResult]] = Future()
        self._rows: list[TokenBitmask] = []
        self.ended = False  # the text was complete, and a bias ruled out every end token
        self._submit(())

    @property
    def awaiting(self) -> bool:
        """True if every token is allowed, because no trigger has matched yet."""
        return self._state.awaiting

    @property
    def ready(self) -> bool:
        """True if the next mask is computed."""
        return self._state.awaiting or self._job.done()

    def rows(self, draft: Sequence[int] = ()) -> list[TokenBitmask | None]:
        """Start the masks of the next token and after each draft token; None: every token is allowed."""
        if self._state.awaiting:
            state = self._state.copy()
            with suppress(GrammarError):  # the worker raises it, too
                for id in draft:
                    state.accept(id)
                    if not state.awaiting:
                        break
            if state.awaiting:
                self._rows = []
                return [None] * (1 + len(draft))
            self._job = _workers().submit(self._state.copy().masks, tuple(draft))
        elif draft:
            self._submit(tuple(draft))
        self._rows = [TokenBitmask(self._job, i) for i in range(1 + len(draft))]
        return list(self._rows)

    def accept(self, id: int) -> bool:
        """Advance by the token of the next row; False: its mask forbids the token."""
        row = self._rows.pop(0) if self._rows else None
        if row is not None and row.bits is not None and not row.bits[id // 32] >> np.uint32(id % 32) & 1:
            self.ended = self.at_end(row.bits)
            return False
        self._go_on(id)
        return True

    def force(self, id: int) -> None:
        """Advance by a forced token, allowed or not."""
        self._rows = []
        self._go_on(id)

    def _go_on(self, id: int) -> None:
        if self._state.awaiting:
            try:
                self._state.accept(id)
            except GrammarError as error:
                self._problem = error
            if self._state.awaiting:
                return
        else:
            self._accepted.append(id)
        self._submit(())

    def at_end(self, bits: Bits) -> bool:
        """True if a mask allows only end-of-generation tokens."""
        rest = bits.copy()
        for id in self._state.constraint.grammar.tokenizer.eog_ids:
            rest[id // 32] &= ~np.uint32(1 << (id % 32))
        return not rest.any()

    def _submit(self, draft: tuple[int, ...]) -> None:
        if self._state.awaiting:
            self._job = Future()
            self._job.set_result([None])
        else:
            self._job = _workers().submit(self._work, draft)

    def _work(self, draft: tuple[int, ...]) -> list[MaskResult]:
        with self._busy:
            began = time.thread_time()
            if self._problem is None:
                try:
                    while self._accepted:
                        self._state.accept(self._accepted.popleft())
                except GrammarError as error:
                    self._problem = error
            if self._problem is not None:
                raise self._problem
            masks = self._state.masks(draft)
            if time.thread_time() - began > MOST_SECONDS * (1 + len(draft)):
                self._problem = GrammarError(f"takes more than {MOST_SECONDS:g} s of a processor for one token")
                raise self._problem
            return masks


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(N_WORKERS, thread_name_prefix="grammar")

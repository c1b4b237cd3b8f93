"""A request's grammar: when it begins, and its masks, which other threads compute while the device works.

Facts about lazy grammars: llama.cpp, `llama_grammar_accept_impl` (2026). Until a trigger comes everything is allowed; a
trigger token, or the text from the beginning of what a trigger pattern's first group matched, is the grammar's start.
"""

from __future__ import annotations

import functools
import threading
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
Found = Bits | GrammarError | None  # None: everything is allowed
N_WORKERS = 4


@dataclass(frozen=True, eq=False, slots=True)
class Constraint:
    """What a generation's text must be like. `text` and `triggers` are how generation_settings shows it."""

    grammar: Grammar
    text: str = ""
    lazy: bool = False
    tokens: frozenset[int] = frozenset()  # any of them begins a lazy grammar
    words: tuple[bytes, ...] = ()  # and so does the first of these in the text
    patterns: tuple[Pattern, ...] = ()
    triggers: tuple[dict[str, Any], ...] = ()


class Guide:
    """One generation's place in its constraint. For one thread at a time."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.awaiting = constraint.lazy
        self._matcher: Matcher | None = None if constraint.lazy else constraint.grammar.matcher()
        self._mask: Bits | None = None  # of where it is, once it has been asked for
        self._text = b""  # so far, while a trigger may come
        self._starts: list[tuple[int, int]] = []  # (where in the text, id) of each token

    def mask(self) -> Bits | None:
        """The tokens that may come next; None: all. GrammarError when the grammar cannot be gone on with."""
        if self._matcher is None:
            return None
        if self._mask is None:
            self._mask = self._matcher.mask()
        return self._mask

    def accept(self, id: int) -> None:
        """Go on with a token; GrammarError where it is not allowed."""
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
        found = [self._text.find(word, max(0, at - longest + 1)) for word in constraint.words]
        found += [pattern.search(self._text) for pattern in constraint.patterns]
        start = min((place for place in found if place >= 0), default=-1)
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

    def masks(self, draft: Sequence[int]) -> list[Found]:
        """The masks here and after each drafted token, as far as the draft is allowed; where a drafted token ends the
        grammar, why: it need not come. Leaves the place as it is, unless a trigger is awaited: then call it on a
        copy."""
        found: list[Found] = [self.mask()]
        n_accepted = 0
        try:
            for id in draft:
                if self._matcher is None:
                    self.accept(id)
                    found.append(self.mask())
                elif self._matcher.accept(id):
                    n_accepted += 1
                    found.append(self._matcher.mask())
                else:
                    break
        except GrammarError as error:
            found.append(error)
        if self._matcher is not None:
            self._matcher.rollback(n_accepted)
        return found

    def copy(self) -> Guide:
        """The same place, on its own."""
        other = Guide(self.constraint)
        other.awaiting, other._text, other._starts = self.awaiting, self._text, self._starts.copy()
        other._matcher = None if self._matcher is None else self._matcher.copy()
        return other


class Mask:
    """The mask of one row of a step, which may still be on its way."""

    __slots__ = ("_index", "_job", "bits")

    def __init__(self, job: Future[list[Found]], index: int) -> None:
        self._job, self._index = job, index
        self.bits: Bits | None = None  # once `wait` has given it

    def wait(self, seconds: float) -> Bits | None:
        """The mask, None if all tokens are allowed. TimeoutError: not there yet. GrammarError: there is none. Of a row
        that the draft before it rules out, anything."""
        masks = self._job.result(max(0.0, seconds))
        found = masks[min(self._index, len(masks) - 1)]
        if isinstance(found, GrammarError):
            raise found
        self.bits = found
        return found


class Masks:
    """A generation's masks, for the engine's thread. Whatever may take time happens in a worker."""

    def __init__(self, constraint: Constraint) -> None:
        self._guide = Guide(constraint)
        self._busy = threading.Lock()  # held by who uses the guide
        self._accepted: deque[int] = deque()  # tokens that the guide does not know yet
        self._problem: GrammarError | None = None  # a token has come after which there are no masks
        self._job: Future[list[Found]] = Future()
        self._rows: list[Mask] = []
        self.ended = False  # the grammar's text was whole, and only its end was ruled out
        self._submit(())

    @property
    def awaiting(self) -> bool:
        """Whether everything is allowed, because no trigger has come."""
        return self._guide.awaiting

    @property
    def ready(self) -> bool:
        """Whether the next mask has come."""
        return self._guide.awaiting or self._job.done()

    def rows(self, draft: Sequence[int] = ()) -> list[Mask | None]:
        """The masks of the next token and of those after each drafted one; None: everything is allowed."""
        if self._guide.awaiting:
            guide = self._guide.copy()
            with suppress(GrammarError):  # the worker will find it, too
                for id in draft:
                    guide.accept(id)
                    if not guide.awaiting:
                        break
            if guide.awaiting:
                self._rows = []
                return [None] * (1 + len(draft))
            self._job = _workers().submit(self._guide.copy().masks, tuple(draft))
        elif draft:
            self._submit(tuple(draft))
        self._rows = [Mask(self._job, i) for i in range(1 + len(draft))]
        return list(self._rows)

    def accept(self, id: int) -> bool:
        """Go on with the token of the first row that has none yet; False: its mask does not have it."""
        row = self._rows.pop(0) if self._rows else None
        if row is not None and row.bits is not None and not row.bits[id // 32] >> np.uint32(id % 32) & 1:
            self.ended = self.at_end(row.bits)
            return False
        self._go_on(id)
        return True

    def force(self, id: int) -> None:
        """Go on with a token that comes whether it is allowed or not."""
        self._rows = []
        self._go_on(id)

    def _go_on(self, id: int) -> None:
        if self._guide.awaiting:
            try:
                self._guide.accept(id)
            except GrammarError as error:
                self._problem = error
            if self._guide.awaiting:
                return
        else:
            self._accepted.append(id)
        self._submit(())

    def at_end(self, bits: Bits) -> bool:
        """Whether a mask allows nothing but tokens that end a generation."""
        rest = bits.copy()
        for id in self._guide.constraint.grammar.tokenizer.eog_ids:
            rest[id // 32] &= ~np.uint32(1 << (id % 32))
        return not rest.any()

    def _submit(self, draft: tuple[int, ...]) -> None:
        if self._guide.awaiting:
            self._job = Future()
            self._job.set_result([None])
        else:
            self._job = _workers().submit(self._work, draft)

    def _work(self, draft: tuple[int, ...]) -> list[Found]:
        with self._busy:
            if self._problem is None:
                try:
                    while self._accepted:
                        self._guide.accept(self._accepted.popleft())
                except GrammarError as error:
                    self._problem = error
            if self._problem is not None:
                raise self._problem
            return self._guide.masks(draft)


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(N_WORKERS, thread_name_prefix="grammar")

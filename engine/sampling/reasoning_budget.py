"""Reasoning budget: counts reasoning tokens and forces their end (`reasoning_budget_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """Reasoning tags of a chat template and the token budget between them."""

    opening: bytes
    closing: bytes
    forced: tuple[int, ...]  # tokens of the closing tag
    budget: int = -1  # tokens between the tags; -1: no limit, but a client can end the reasoning
    begun: bool = False  # the prompt contains the opening tag
    calls: tuple[bytes, ...] = ()  # beginnings of calls that end the reasoning as its closing tag does


class ReasoningBudget:
    """Reasoning state of one generation. `due`: forced tokens, which replace sampled ones."""

    __slots__ = ("_limit", "_piece", "_tail", "due", "n_tokens", "state")

    def __init__(self, limit: ReasoningLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._tail = b""  # text that may be part of a tag
        self.state = "inside" if limit.begun else "before"  # then "after"
        self.n_tokens = 0
        self.due: tuple[int, ...] = ()

    def push(self, id: int) -> None:
        """Count a sampled token."""
        if self.state == "after":
            return
        limit = self._limit
        self._tail += self._piece(id)
        if self.state == "before":
            begun = self._tail.lstrip()
            if begun.startswith(limit.opening):
                self.state, self._tail = "inside", begun[len(limit.opening) :]
            elif not limit.opening.startswith(begun):
                self.state = "after"
        else:
            self.n_tokens += 1
        if self.state == "before":
            return
        ends = (limit.closing, *limit.calls)
        if any(end in self._tail for end in ends):
            self.state = "after"
            return
        self._tail = self._tail[1 - max(map(len, ends)) :]
        if 0 <= limit.budget <= self.n_tokens:
            self.end()

    def end(self) -> bool:
        """Force the closing tag from the next token on; False: the model is not reasoning."""
        if self.state != "inside":
            return False
        self.state, self.due = "after", self._limit.forced
        return True

    def take(self) -> tuple[int, ...]:
        """Return the forced tokens and clear them."""
        due, self.due = self.due, ()
        return due

"""How long a model may reason: counts the tokens of it, and says what ends it (`reasoning_budget_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The tags as bytes, and the tokens that stand for the closing one."""

    opening: bytes
    closing: bytes
    forced: tuple[int, ...]
    budget: int = -1  # tokens between the tags; -1: no limit, but it can be ended
    begun: bool = False  # the prompt has the opening tag


class Thoughts:
    """One generation's reasoning. `due` are the tokens that must come next instead of sampled ones."""

    __slots__ = ("_limit", "_piece", "_tail", "due", "n_tokens", "state")

    def __init__(self, limit: ReasoningLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._tail = b""  # what may be a part of a tag
        self.state = "inside" if limit.begun else "before"  # then "after"
        self.n_tokens = 0
        self.due: tuple[int, ...] = ()

    def push(self, id: int) -> None:
        """Take in a token that was sampled."""
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
        if limit.closing in self._tail:
            self.state = "after"
        self._tail = self._tail[1 - len(limit.closing) :]
        if 0 <= limit.budget <= self.n_tokens:
            self.end()

    def end(self) -> bool:
        """End it with the next token; False: it is not going on."""
        if self.state != "inside":
            return False
        self.state, self.due = "after", self._limit.forced
        return True

    def take(self) -> tuple[int, ...]:
        """The tokens that are due, once."""
        due, self.due = self.due, ()
        return due

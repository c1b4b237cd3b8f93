"""Deferred slot tasks: actions on a busy slot, run when its sequence has ended, as in llama-server.

A claimed slot takes no new request, so a task waits for one generation and not for a queue of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from logitless.engine.sequence import Slot


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """A task that runs once none of its slots is in use."""

    slots: tuple[Slot, ...]
    act: Callable[[], None]  # raises nothing


class Claims:
    """Waiting tasks, in order of arrival."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._waiting: list[Claim] = []

    def add(self, ids: Sequence[int], act: Callable[[], None]) -> Claim:
        """Run a task as soon as its slots are free: at once, if they are."""
        claim = Claim(tuple(self._slots[id] for id in ids), act)
        self._waiting.append(claim)
        self.settle()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Cancel a task that has not run yet."""
        if claim in self._waiting:
            self._waiting.remove(claim)
            self.settle()

    def hold(self, slot: Slot) -> bool:
        """True if a task waits for the slot."""
        return any(slot in claim.slots for claim in self._waiting)

    def settle(self) -> None:
        """Run the tasks whose slots are free."""
        taken: set[int] = {slot.id for slot in self._slots if slot.is_processing} if self._waiting else set()
        for claim in list(self._waiting):
            ids = {slot.id for slot in claim.slots}
            if ids & taken:
                taken |= ids
            else:
                self._waiting.remove(claim)
                claim.act()

"""Actions on slots that run something: like llama-server's deferred tasks, they wait until it has ended.

A slot with a claim on it takes no new request, so an action waits for one generation and not for a queue of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from logitless.engine.sequence import Slot


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """To `act` once none of these slots is in use."""

    slots: tuple[Slot, ...]
    act: Callable[[], None]  # raises nothing


class Claims:
    """What waits, in order of arrival."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._waiting: list[Claim] = []

    def add(self, ids: Sequence[int], act: Callable[[], None]) -> Claim:
        """Act as soon as the slots are free: at once, if they are."""
        claim = Claim(tuple(self._slots[id] for id in ids), act)
        self._waiting.append(claim)
        self.settle()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Do not act any more, if that has not happened yet."""
        if claim in self._waiting:
            self._waiting.remove(claim)
            self.settle()

    def hold(self, slot: Slot) -> bool:
        """Whether a slot is kept free for somebody."""
        return any(slot in claim.slots for claim in self._waiting)

    def settle(self) -> None:
        """Let act who can."""
        taken: set[int] = {slot.id for slot in self._slots if slot.is_processing} if self._waiting else set()
        for claim in list(self._waiting):
            wanted = {slot.id for slot in claim.slots}
            if wanted & taken:
                taken |= wanted
            else:
                self._waiting.remove(claim)
                claim.act()

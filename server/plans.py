"""Which sizes of a step have a plan: usual ones are made while nobody waits, larger ones stand in for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

from server.ubatch import bucket

WASTE = 8  # tokens more than a step has may the plan have that stands in, or a quarter more
BESIDE = 128  # tokens: prompts beside streams come in all sizes up to here (see server.pace)
PATIENCE = 8  # times that one does before somebody has to wait for the plan that fits


@dataclass(frozen=True)
class Shape:
    """What a plan depends on: everything that is structure and not a value."""

    n_tokens: int
    n_out: int
    n_copies: int = 0
    n_list: int = 16  # entries of the sparse lists (biases, penalties)
    n_top: int = 0
    n_probs: int = 0
    lora: int = 0  # the generation of the adapters' stack; 0: no row has an adapter
    n_masks: int = 0  # rows of the grammars' masks
    weights: int = 0  # whose: see models.weight_sets

    def holds(self, other: Shape) -> bool:
        """Whether a step of that shape can run as one of this, filled up."""
        more = self.n_tokens - other.n_tokens
        enough = 0 <= more <= max(WASTE, other.n_tokens // 4) and other.n_out <= self.n_out
        return enough and replace(other, n_tokens=self.n_tokens, n_out=self.n_out) == self


class Plans:
    """What to make next, and what to use meanwhile. Making a plan takes as long as several steps."""

    def __init__(self) -> None:
        self._ahead: list[Shape] = []  # to make when there is time, the last first
        self._missed: Counter[Shape] = Counter()

    def usual(self, n_ubatch: int, n_slots: int) -> None:
        """Plan for a few streams, for prompts beside streams, and for the prompts of one request."""
        sizes = sorted({bucket(n) for n in range(2, n_ubatch + 1)})
        prompts = [Shape(n, 1) for n in sizes]
        mixed = [Shape(n, bucket(min(n, n_slots))) for n in sizes if 8 < n <= BESIDE] if n_slots > 1 else []
        several = [Shape(n, n) for n in range(2, min(n_slots, 8) + 1)]
        self._ahead = [*reversed(prompts), *reversed(mixed), *reversed(several)]

    def clear(self) -> None:
        self._ahead.clear()
        self._missed.clear()

    def next(self) -> Shape | None:
        """The shape that is most wanted, which is no longer listed then."""
        return self._ahead.pop() if self._ahead else None

    def choose(self, wanted: Shape, kept: Collection[Hashable]) -> Shape:
        """The shape to run as: `wanted`, or a larger one that is among those kept."""
        if wanted in kept:
            return wanted
        self._missed[wanted] += 1
        larger = [shape for shape in kept if isinstance(shape, Shape) and shape.holds(wanted)]
        if not larger or self._missed[wanted] > PATIENCE:
            del self._missed[wanted]
            return wanted
        if self._missed[wanted] == 1:
            self._ahead.append(wanted)
        return min(larger, key=lambda shape: (shape.n_tokens, shape.n_out))

"""Draft sampling: builds a draft token by token with the sampler of the target model.

Draft tokens are sampled with the sequence's settings, its history and the same random numbers as
the target uses at each position. Two models with the same probabilities then choose the same token
at any temperature."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol, overload

from msgspec.structs import replace

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.sampling.sampler import Row
from logitless.engine.sequence import Sequence
from logitless.graph.ops.sampling import samplers as s

AllocateSlots = Callable[
    [Sequence, int], int
]  # KVCacheManager.allocate_draft: allocates token slots for a sequence's next tokens


class TokenSelection(Ordered[int]):
    """Token ids of a drafter that knows some of the model's tokens only; finds an id's place at once."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = [int(id) for id in ids]
        self._places = {id: place for place, id in enumerate(self._ids)}

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._ids[place]

    def __contains__(self, id: object) -> bool:
        return id in self._places

    def index(self, id: int, start: int = 0, stop: int | None = None) -> int:
        return self._places[id]


class StepRunner(Protocol):
    """Model runner of a model that drafts."""

    def step(self, batch: UBatch, /) -> StepResult:
        """Run one batch."""


@dataclass(slots=True)
class DraftBuilder:
    """Draft of one sequence in the making."""

    seq: Sequence
    n_most: int  # tokens at most
    draft: list[int] = field(default_factory=list)
    n_dist: int = 0  # random draws of the selection that the draft has used
    n_xtc: int = 0  # random draws of XTC that the draft has used

    @property
    def p_min(self) -> float:
        """Probability below which a token ends the draft."""
        return self.seq.request.speculation.p_min

    def ask(self, batch: UBatch, i: int, ids: Ordered[int]) -> None:
        """Sample after token `i` of the batch. `ids`: token ids of the logits' columns."""
        batch.out.append(i)
        batch.rows.append(self.row(ids))
        batch.targets.append(-1)
        batch.n_probs = max(batch.n_probs, int(self.p_min > 0))

    def row(self, ids: Ordered[int]) -> Row:
        """Sampling row of the target after the draft so far, for logits of these ids only."""
        row = self.seq.sampler.feeds_after(self.draft, self.n_dist, self.n_xtc)
        if isinstance(ids, range) and all(id in ids for id in row.ids):
            return row
        entries = [
            (kind, ids.index(id), value)
            for kind, id, value in zip(row.kinds, row.ids, row.values, strict=True)
            if id in ids
        ]
        kinds, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return replace(row, kinds=kinds, ids=columns, values=values)

    def take(self, result: StepResult, i: int, ids: Ordered[int], ends: Container[int]) -> bool:
        """Append the token of row `i` to the draft; returns True if the draft may continue (not after `ends`)."""
        word = int(result.ids[i])
        sure = result.probs is None or float(result.probs[1][i]) >= self.p_min
        column = word & s.ID
        if not sure or column >= len(ids):
            return False
        id = ids[column]
        self.draft.append(id)
        n_dist, n_xtc = s.used(word)
        self.n_dist += n_dist
        self.n_xtc += n_xtc
        return len(self.draft) < self.n_most and id not in ends

"""A draft in the making, token by token, as models make them.

Its choices are sampled as the model that is drafted for will sample its own: by the sequence's settings, history and
the very random numbers of each position. Two models that agree on the probabilities then agree on the token, at any
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.sampling.sampler import Row
from logitless.engine.sequence import Sequence
from logitless.graph.ops.sampling import samplers as s

Grow = Callable[[Sequence, int], int]  # cells for a sequence's next tokens: for how many there are some


@dataclass(slots=True)
class Guess:
    """One sequence's draft."""

    seq: Sequence
    n_most: int  # tokens
    draft: list[int] = field(default_factory=list)
    n_dist: int = 0  # uniforms that the draft's tokens have used
    n_xtc: int = 0

    @property
    def p_min(self) -> float:
        """The draft ends before a choice that has less probability."""
        return self.seq.request.speculation.p_min

    def ask(self, batch: UBatch, i: int, n_vocab: int) -> None:
        """Have the device choose what follows the batch's token i."""
        batch.out.append(i)
        batch.rows.append(self.row(n_vocab))
        batch.targets.append(-1)
        batch.n_probs = max(batch.n_probs, int(self.p_min > 0))

    def row(self, n_vocab: int) -> Row:
        """How the target will sample after what is drafted so far; ids below n_vocab mean the same to both."""
        row = self.seq.sampler.guess_feeds(self.draft, self.n_dist, self.n_xtc)
        if all(id < n_vocab for id in row.ids):
            return row
        entries = [entry for entry in zip(row.kinds, row.ids, row.values, strict=True) if entry[1] < n_vocab]
        kinds, ids, values = zip(*entries, strict=True) if entries else ((), (), ())
        return replace(row, kinds=kinds, ids=ids, values=values)

    def take(self, result: StepResult, i: int, n_vocab: int, ends: Container[int]) -> bool:
        """Take row i of what the device chose; whether more may follow: not after `ends`."""
        word = int(result.ids[i])
        sure = result.probs is None or float(result.probs[1][i]) >= self.p_min
        id = word & s.ID
        if not sure or id >= n_vocab:
            return False
        self.draft.append(id)
        n_dist, n_xtc = s.used(word)
        self.n_dist += n_dist
        self.n_xtc += n_xtc
        return len(self.draft) < self.n_most and id not in ends

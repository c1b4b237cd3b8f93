"""One sequence's drafters, and what became of their guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.speculation.settings import SpeculationParams


class Drafter(Protocol):
    """Guesses what follows the tokens of one sequence. A wrong guess costs time and never changes a result."""

    def propose(self, tokens: Sequence[int], n_most: int, /) -> list[int]:
        """At most n_most tokens that may come next, after all of `tokens` (which only ever grow)."""

    def judged(self, n_drafted: int, n_accepted: int, /) -> None:
        """Of what was proposed last, n_drafted tokens were tried and the first n_accepted came true."""


class Drafts:
    """The drafters of one sequence in order of precedence; a draft model comes after them (`wants_model`)."""

    __slots__ = (
        "_client",
        "_source",
        "drafters",
        "n_accepted",
        "n_drafted",
        "n_prediction_accepted",
        "n_prediction_drafted",
        "params",
        "wants_model",
    )

    def __init__(
        self, params: SpeculationParams, client: Drafter | None, others: Sequence[Drafter], wants_model: bool
    ) -> None:
        self.params = params
        self.drafters = [client, *others] if client is not None else list(others)
        self.wants_model = wants_model
        self.n_drafted = self.n_accepted = 0  # tokens, of all drafters
        self.n_prediction_drafted = self.n_prediction_accepted = 0  # of these, the client's
        self._client = client
        self._source: Drafter | None = None  # whose draft is out

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """The draft of the first drafter that has one; empty: the draft model's turn, if there is one."""
        self._source = None
        if self.params.n_max is not None:
            n_most = min(n_most, self.params.n_max)
        if n_most < max(1, self.params.n_min):
            return []
        for drafter in self.drafters:
            draft = drafter.propose(tokens, n_most)
            if len(draft) >= max(1, self.params.n_min):
                self._source = drafter
                return draft
        return []

    def judged(self, n_drafted: int, n_accepted: int) -> None:
        """Count what became of the last draft, and tell the drafter that it came from."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        if self._source is None:
            return
        if self._source is self._client:
            self.n_prediction_drafted += n_drafted
            self.n_prediction_accepted += n_accepted
        self._source.judged(n_drafted, n_accepted)

"""Draft state of a sequence: its drafters, current draft tokens and acceptance counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from logitless.engine.speculation.draft_length import AcceptanceRate
from logitless.engine.speculation.settings import CLIENT_N_MAX, MAX_DRAFT, SpeculationParams

FIRST_DRAFT = 8  # tokens of a drafter's first draft
MAX_PAUSE = 63  # steps that a failing drafter pauses at most


class TokenDrafter(Protocol):
    """Drafter of one sequence. A rejected draft token costs time and never changes a result."""

    def propose(self, tokens: Sequence[int], n_most: int, /) -> list[int]:
        """Draft at most n_most tokens after `tokens`, which only ever grow."""

    def record_outcome(self, n_drafted: int, n_accepted: int, /) -> None:
        """Record that n_drafted tokens of the last draft were verified and the first n_accepted accepted."""


class Pace:
    """Draft length of one drafter, by its recent acceptance.

    A fully accepted draft doubles the length; one of which less than half is accepted halves it.
    When the shortest draft is rejected, the drafter pauses, twice as long each time."""

    __slots__ = ("_least", "_pause", "_rest", "length")

    def __init__(self, length: int, least: int = 1) -> None:
        self._least = max(1, least)
        self.length = max(self._least, length)
        self._pause = self._rest = 0  # steps

    def next(self) -> int:
        """Draft length for this step; 0: the drafter pauses."""
        if self._rest:
            self._rest -= 1
            return 0
        return self.length

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        if n_accepted == n_drafted:
            self.length, self._pause = min(MAX_DRAFT, 2 * self.length), 0
        elif self.length > self._least:
            if 2 * n_accepted < n_drafted:
                self.length = max(self._least, self.length // 2)
        elif not n_accepted:
            self._pause = self._rest = min(MAX_PAUSE, 2 * self._pause + 1)


class Drafts:
    """Draft state of one sequence.

    `drafters` are in order of precedence. A model that drafts comes after them; `model` is its
    kind."""

    __slots__ = (
        "_by_model",
        "_client",
        "_model_pace",
        "_paces",
        "_source",
        "acceptance",
        "drafters",
        "model",
        "n_accepted",
        "n_drafted",
        "n_prediction_accepted",
        "n_prediction_drafted",
        "params",
        "tokens",
    )

    def __init__(
        self,
        params: SpeculationParams,
        client: TokenDrafter | None,
        others: Sequence[TokenDrafter],
        model: str = "",
        acceptance: AcceptanceRate | None = None,
        *,
        throttled: bool = False,
    ) -> None:
        """`acceptance`: acceptance rate of the model's drafts.

        `throttled`: the model pauses when its drafts fail. A grammar may rule out the model's
        drafts so often that they do not pay."""
        self.params = params
        self.tokens: list[int] = []  # draft tokens to verify in this step
        self.drafters = [client, *others] if client is not None else list(others)
        self.model = model
        self.acceptance = acceptance or AcceptanceRate()
        self._by_model = False  # the current draft is the model's
        self.n_drafted = self.n_accepted = 0  # tokens, of all drafters
        self.n_prediction_drafted = self.n_prediction_accepted = 0  # of these, the client's
        self._client = client
        first_length = params.n_max or CLIENT_N_MAX  # a client's draft starts at full length
        self._paces = [Pace(first_length if d is client else FIRST_DRAFT, params.n_min) for d in self.drafters]
        self._model_pace = Pace(FIRST_DRAFT, params.n_min) if throttled else None
        self._source: tuple[TokenDrafter | None, Pace] | None = None  # source of the current draft

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return the draft of the first drafter that has one; empty: the model drafts, if there is one."""
        self._source, self._by_model = None, False
        if self.params.n_max is not None:
            n_most = min(n_most, self.params.n_max)
        if n_most < max(1, self.params.n_min):
            return []
        for drafter, pace in zip(self.drafters, self._paces, strict=True):
            n = pace.next()
            draft = drafter.propose(tokens, n_most)[:n] if n else []
            if len(draft) >= max(1, self.params.n_min):
                self._source = drafter, pace
                return draft
        return []

    def of_model(self, n_most: int) -> int:
        """Let the model make this step's draft; returns its length at most."""
        self._by_model = True
        if self._model_pace is None:
            return n_most
        self._source = None, self._model_pace
        return min(n_most, self._model_pace.next())

    def clear(self) -> None:
        """Remove the draft tokens, verified or not."""
        self.tokens = []

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        """Count the outcome of the last draft and pass it to its drafter."""
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        if self._by_model:
            self.acceptance.record_outcome(n_drafted, n_accepted)
        if self._source is None:
            return
        drafter, pace = self._source
        if drafter is not None and drafter is self._client:
            self.n_prediction_drafted += n_drafted
            self.n_prediction_accepted += n_accepted
        if drafter is not None:
            drafter.record_outcome(n_drafted, n_accepted)
        pace.record_outcome(n_drafted, n_accepted)

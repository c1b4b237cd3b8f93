"""Speculator: creates each sequence's drafters and collects the draft tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from logitless.engine.requests import CompletionRequest
from logitless.engine.sequence import Sequence
from logitless.engine.sleep import Sleeper
from logitless.engine.speculation.client_draft import ClientDrafter
from logitless.engine.speculation.draft_builder import AllocateSlots
from logitless.engine.speculation.draft_length import AcceptanceRate, AdaptiveDraftLength
from logitless.engine.speculation.draft_state import Drafts, TokenDrafter
from logitless.engine.speculation.ngram import (
    CacheDrafter,
    Map4Drafter,
    MapDrafter,
    ModDrafter,
    ModTable,
    SimpleDrafter,
)
from logitless.engine.speculation.settings import CLIENT_N_MAX, MODELS, SpeculationSettings

# kind of draft model → (sequence, most draft tokens)
ProposalsByModel = dict[str, list[tuple[Sequence, int]]]


class BatchDrafter(Sleeper, Protocol):
    """Draft model or MTP head: drafts for a batch of sequences."""

    def propose(self, requests: list[tuple[Sequence, int]], allocate: AllocateSlots, /) -> dict[Sequence, list[int]]:
        """Draft for each (sequence, most tokens); with 0 the model only takes in new tokens."""


class Speculator:
    """Creates and asks the drafters of all sequences."""

    def __init__(
        self,
        settings: SpeculationSettings | None = None,
        models: Mapping[str, BatchDrafter] | None = None,
        draft_length: AdaptiveDraftLength | None = None,
    ) -> None:
        """`models`: draft models by kind (MODELS).

        `draft_length`: adaptive draft length; None: always the maximum."""
        self.settings = settings or SpeculationSettings()
        self.models = dict(models or {})
        self._draft_length = draft_length
        self._table = ModTable(self.settings.mod_n_match)

    def begin(self, seq: Sequence) -> Drafts | None:
        """Create the drafters that a sequence's request asks for; None: no speculation.

        A stateful sampler cannot roll back rejected tokens, so its sequence gets none."""
        params = seq.request.speculation
        if not (params.draft or params.kinds) or seq.sampler.stateful or not seq.samples:
            return None
        client = None
        if params.draft:
            client = ClientDrafter(params.draft, seq.n_prompt, params.n_max or CLIENT_N_MAX)
        others = [self._make(kind, seq.request) for kind in params.kinds if kind not in MODELS]
        model = next((kind for kind in params.kinds if kind in self.models), "")
        # Draft models sample without the token bitmask, so a grammar may reject their drafts.
        acceptance = AcceptanceRate(self._draft_length.acceptance if self._draft_length is not None else None)
        return Drafts(params, client, others, model, acceptance, throttled=seq.request.sampling.grammar is not None)

    def propose(self, requests: list[tuple[Sequence, int]], n_all: int, room: int, allocate: AllocateSlots) -> None:
        """Set the draft tokens of each (sequence, most tokens).

        `n_all`: sequences of the step. `room`: draft tokens of all of them together."""
        budget = room
        for_models: ProposalsByModel = {}
        for seq, n_most in requests:
            drafts = _drafts_of(seq)
            drafts.tokens = drafts.propose(seq.tokens, n_most)
            if kind := drafts.model:
                n_max = drafts.params.n_max
                n_max = self.settings.draft_n_max if n_max is None else n_max
                n = 0 if drafts.tokens or n_most <= 0 else drafts.of_model(min(n_most, n_max))
                for_models.setdefault(kind, []).append((seq, n))
            budget -= len(drafts.tokens)
        for_models = self._shortened(for_models, n_all, budget)
        for kind, part in for_models.items():
            for seq, draft in self.models[kind].propose(part, allocate).items():
                drafts = _drafts_of(seq)
                if not drafts.tokens and len(draft) >= drafts.params.n_min:
                    drafts.tokens = draft
        _share_room([seq for seq, _ in requests if _drafts_of(seq).tokens], room, allocate)

    def _shortened(self, for_models: ProposalsByModel, n_all: int, room: int) -> ProposalsByModel:
        """Limit drafts to equal shares of `room` and to the adaptive draft length."""
        drafting = {seq.drafts: n for part in for_models.values() for seq, n in part if n and seq.drafts is not None}
        if not drafting:
            return for_models
        length = min(max(drafting.values()), max(0, -(-room // len(drafting))))
        if self._draft_length is not None and length:
            n_least = max(drafts.params.n_min for drafts in drafting)
            length = self._draft_length.choose(
                [drafts.acceptance for drafts in drafting], n_all - len(drafting), n_least, length
            )

        def of(drafts: Drafts | None, n: int) -> int:
            n = min(n, length)
            return n if drafts is not None and n >= drafts.params.n_min else 0

        return {kind: [(seq, of(seq.drafts, n)) for seq, n in part] for kind, part in for_models.items()}

    def observe(self, seconds: float, *, counts: bool) -> None:
        """Record the seconds of the step, drafting included.

        `counts`: it was a pure decode step."""
        if self._draft_length is not None:
            self._draft_length.observe(seconds, counts=counts)

    def _make(self, kind: str, request: CompletionRequest) -> TokenDrafter:
        s, n_max = self.settings, request.speculation.n_max
        if kind == "ngram-simple":
            return SimpleDrafter(s.simple, n_max)
        if kind == "ngram-map-k":
            return MapDrafter(s.map_k, n_max)
        if kind == "ngram-map-k4v":
            return Map4Drafter(s.map_k4v, n_max)
        if kind == "ngram-cache":
            return CacheDrafter(s.cache_n_max if n_max is None else n_max)
        assert kind == "ngram-mod", kind
        n_max = s.mod_n_max if n_max is None else n_max
        return ModDrafter(self._table, s.mod_n_min, n_max, request.cache_salt)


def _drafts_of(seq: Sequence) -> Drafts:
    assert seq.drafts is not None
    return seq.drafts


def _share_room(drafting: list[Sequence], room: int, allocate: AllocateSlots) -> None:
    """Cut drafts to equal shares of `room` and to free KV blocks; short drafts leave the rest of their share."""
    drafting.sort(key=lambda seq: len(_drafts_of(seq).tokens))
    for i, seq in enumerate(drafting):
        drafts = _drafts_of(seq)
        tokens = drafts.tokens[: room // (len(drafting) - i)]
        n = allocate(seq, seq.n_uncomputed + len(tokens))
        drafts.tokens = tokens[: max(0, n - seq.n_uncomputed)]
        room -= len(drafts.tokens)

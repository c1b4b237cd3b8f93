"""Draft vocabulary: the tokens that a draft head has logits of, those that texts had lately."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from logitless.engine.speculation.draft_builder import TokenSelection


class DraftVocabulary(TokenSelection):
    """Token ids in a fixed number of places, the columns of the logits."""

    def __init__(self, ids: list[int]) -> None:
        """`ids`: the list that changes with the vocabulary."""
        super().__init__(ids)
        self._ids = ids
        # time of each place's last use; of places without use the later ones are replaced first
        self._used = -np.arange(len(ids), dtype=np.int64)
        self._clock = 0

    def columns(self, ids: Iterable[int]) -> list[int]:
        """The columns of tokens; -1: it has none."""
        return [self._places.get(id, -1) for id in ids]

    def use(self, ids: Iterable[int]) -> list[int]:
        """Note tokens of a text; returns the columns that have another token now."""
        changed = []
        for id in ids:
            self._clock += 1
            place = self._places.get(id)
            if place is None:
                place = int(self._used.argmin())
                del self._places[self._ids[place]]
                self._ids[place], self._places[id] = id, place
                changed.append(place)
            self._used[place] = self._clock
        return changed

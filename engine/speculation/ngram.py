"""N-gram drafters: draft the tokens that followed earlier occurrences of the last n tokens.

ngram-simple, ngram-map-k and ngram-map-k4v as llama.cpp names and describes them
(docs/speculative.md). These look a key up in a table instead of searching the history. A draft that
reaches the end of the history continues in itself, as in LZ77, so that a periodic text is drafted
at full length.
"""

from __future__ import annotations

from collections.abc import Sequence

from logitless.engine.speculation.settings import NgramSizes

Key = tuple[int, ...]
MAX_VALUES = 4  # ngram-map-k4v: continuations counted for each key
CLEAR_LEAD = 3  # ngram-map-k4v: count of the best continuation over the sum of the others, at least


def copy_forward(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """Copy n tokens from `start` on; past the end the copy repeats itself."""
    copied = list(tokens[start : start + n])
    period = len(tokens) - start
    while len(copied) < n:
        copied.append(copied[len(copied) - period])
    return copied


class _Keys:
    """Table of the n-grams of a growing history, without the last one: count and end of the latest
    occurrence.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.ends: dict[Key, int] = {}
        self.counts: dict[Key, int] = {}
        self._done = n  # the next end to take in

    def update(self, tokens: Sequence[int]) -> Key:
        """Add the new tokens' n-grams and return the last n-gram."""
        n = self.n
        for end in range(self._done, len(tokens)):
            key = tuple(tokens[end - n : end])
            self.ends[key] = end
            self.counts[key] = self.counts.get(key, 0) + 1
        self._done = max(self._done, len(tokens))
        return tuple(tokens[-n:])


class SimpleDrafter:
    """ngram-simple: drafts the m tokens that followed the latest occurrence."""

    def __init__(self, sizes: NgramSizes, n_max: int | None) -> None:
        self._keys = _Keys(sizes.n)
        self._min_hits = sizes.min_hits
        self._m = sizes.m if n_max is None else n_max

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        key = self._keys.update(tokens)
        if self._keys.counts.get(key, 0) < self._min_hits:
            return []
        return copy_forward(tokens, self._keys.ends[key], min(n_most, self._m))

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass


class MapDrafter:
    """ngram-map-k: like ngram-simple, with a draft length for each key.

    After a rejection the key drafts one token more than was accepted. (llama.cpp drafts exactly as
    many as were accepted, so that a key that failed once is never tried again.)
    """

    def __init__(self, sizes: NgramSizes, n_max: int | None) -> None:
        self._keys = _Keys(sizes.n)
        self._min_hits = sizes.min_hits
        self._m = sizes.m if n_max is None else n_max
        self._lengths: dict[Key, int] = {}
        self._key: Key = ()

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        self._key = key = self._keys.update(tokens)
        if self._keys.counts.get(key, 0) < self._min_hits:
            return []
        n = min(n_most, self._m, self._lengths.get(key, self._m))
        return copy_forward(tokens, self._keys.ends[key], n)

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        if n_accepted < n_drafted:
            self._lengths[self._key] = n_accepted + 1
        else:
            self._lengths.pop(self._key, None)


class Map4Drafter:
    """ngram-map-k4v: counts up to four continuations of m tokens for each key.

    It drafts one that occurred at least three times as often as the others together.
    """

    def __init__(self, sizes: NgramSizes, n_max: int | None) -> None:
        self._n, self._min_hits = sizes.n, sizes.min_hits
        self._m = sizes.m if n_max is None else n_max
        self._values: dict[Key, dict[Key, int]] = {}
        self._done = sizes.n + self._m  # the next end of a key and its continuation to take in
        self._lengths: dict[tuple[Key, Key], int] = {}
        self._last: tuple[Key, Key] = (), ()

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        n, m = self._n, self._m
        for end in range(self._done, len(tokens) + 1):
            values = self._values.setdefault(tuple(tokens[end - m - n : end - m]), {})
            value = tuple(tokens[end - m : end])
            if value in values or len(values) < MAX_VALUES:
                values[value] = values.get(value, 0) + 1
        self._done = max(self._done, len(tokens) + 1)
        key = tuple(tokens[-n:])
        values = self._values.get(key, {})
        total = sum(values.values())
        if total < max(1, self._min_hits):
            return []
        best = max(values, key=lambda value: values[value])
        if values[best] < CLEAR_LEAD * (total - values[best]):
            return []
        self._last = key, best
        return list(best[: min(n_most, self._lengths.get(self._last, m))])

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        if n_accepted < n_drafted:
            self._lengths[self._last] = n_accepted + 1
        else:
            self._lengths.pop(self._last, None)

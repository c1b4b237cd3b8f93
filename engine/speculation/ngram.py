"""N-gram drafters: draft the tokens that followed earlier occurrences of the last n tokens.

The kinds are llama.cpp's (its docs/speculative.md): ngram-simple, ngram-map-k and ngram-map-k4v
look keys of one sequence up in a table; ngram-cache counts what followed 1 to 4 tokens (lookup
decoding); ngram-mod hashes n tokens into one table for all requests. A draft of the first two that
reaches the end of the history continues in itself, as in LZ77, so that a periodic text is drafted
at full length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from logitless.engine.speculation.settings import NgramSizes

Key = tuple[int, ...]
MAX_VALUES = 4  # ngram-map-k4v: continuations counted for each key
CLEAR_LEAD = 3  # ngram-map-k4v: count of the best continuation over the sum of the others, at least
# ngram-cache: minimum count of the best continuation, and its minimum share, for keys of 1 to 4
# tokens.
LEAST_COUNT = (2, 2, 1, 1)
LEAST_SHARE = (0.66, 0.5, 0.5, 0.5)
LONGEST_KEY = len(LEAST_COUNT)
N_ENTRIES = 1 << 22  # ngram-mod: entries of the table
# ngram-mod: share of used entries at which the table is cleared, for collisions make bad drafts
MOST_USED = 0.25
# Knuth's, of his 64-bit linear congruential generator
_FACTOR, _MASK = 6364136223846793005, (1 << 64) - 1


def copy_forward(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """Copy n tokens from `start` on; past the end the copy repeats itself."""
    copied = list(tokens[start : start + n])
    period = len(tokens) - start
    while len(copied) < n:
        copied.append(copied[len(copied) - period])
    return copied


class _Keys:
    """Table of the n-grams of a growing history, without the last one: count and end of the latest occurrence."""

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
    many as were accepted, so that a key that failed once is never tried again.)"""

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

    It drafts one that occurred at least three times as often as the others together."""

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


class CacheDrafter:
    """Drafts token by token: the commonest continuation of the longest key that passes the thresholds."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._done = 1  # the next token to count

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        for at in range(self._done, len(tokens)):
            for n in range(1, min(LONGEST_KEY, at) + 1):
                counts = self._counts.setdefault(tuple(tokens[at - n : at]), {})
                counts[tokens[at]] = counts.get(tokens[at], 0) + 1
        self._done = max(self._done, len(tokens))
        recent = list(tokens[-LONGEST_KEY:])
        draft: list[int] = []
        while len(draft) < min(n_most, self._n_max) and (token := self._guess(recent)) is not None:
            draft.append(token)
            recent = [*recent[-LONGEST_KEY + 1 :], token]
        return draft

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass

    def _guess(self, recent: list[int]) -> int | None:
        for n in range(min(LONGEST_KEY, len(recent)), 0, -1):
            counts = self._counts.get(tuple(recent[-n:]))
            if counts:
                best = max(counts, key=lambda token: (counts[token], -token))
                if counts[best] >= max(LEAST_COUNT[n - 1], LEAST_SHARE[n - 1] * sum(counts.values())):
                    return best
        return None


class ModTable:
    """Hash table of constant size: 16 MiB from the first use on.

    A collision only makes a bad draft."""

    def __init__(self, n_match: int) -> None:
        self.n_match = n_match
        self.n_used = 0
        self._next: array[int] = array("i")
        self._drop = pow(_FACTOR, n_match, 1 << 64)

    def hash_of(self, tokens: Sequence[int]) -> int:
        """Hash of n_match tokens."""
        h = 0
        for token in tokens:
            h = (h * _FACTOR + token + 1) & _MASK
        return h

    def roll(self, h: int, oldest: int, newest: int) -> int:
        """Rolling hash: the window moved by one token."""
        return (h * _FACTOR + newest + 1 - (oldest + 1) * self._drop) & _MASK

    def get(self, h: int) -> int:
        """Token that followed, or -1."""
        return self._next[(h >> 20) % N_ENTRIES] if self._next else -1

    def put(self, h: int, token: int) -> None:
        if not self._next or self.n_used > MOST_USED * N_ENTRIES:
            self._next = array("i", [-1]) * N_ENTRIES
            self.n_used = 0
        at = (h >> 20) % N_ENTRIES
        self.n_used += self._next[at] < 0
        self._next[at] = token


class ModDrafter:
    """Drafter of one sequence: adds its tokens to the table and drafts as far as the table leads.

    Sequences with different salts find nothing of each other."""

    def __init__(self, table: ModTable, n_min: int, n_max: int, salt: str = "") -> None:
        self._table = table
        self._salt = int.from_bytes(blake2b(salt.encode(), digest_size=8).digest()) if salt else 0
        self._n_min, self._n_max = min(n_min, n_max), n_max
        self._done = 0  # tokens added to the table so far
        self._hash = 0  # hash of the n_match tokens before that position

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        table, n = self._table, self._table.n_match
        if len(tokens) < n:
            return []
        if self._done == 0:
            self._hash, self._done = table.hash_of(tokens[:n]), n
        for end in range(self._done, len(tokens)):
            table.put(self._hash ^ self._salt, tokens[end])
            self._hash = table.roll(self._hash, tokens[end - n], tokens[end])
        self._done = len(tokens)
        draft: list[int] = []
        window = list(tokens[-n:])
        h = self._hash
        while len(draft) < min(n_most, self._n_max) and (token := table.get(h ^ self._salt)) >= 0:
            h = table.roll(h, window[len(draft)], token)
            draft.append(token)
            window.append(token)
        return draft if len(draft) >= min(self._n_min, n_most) else []

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass

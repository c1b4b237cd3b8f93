"""Penalties and bans of tokens: repetition counts and DRY as llama.cpp computes them, token bans.

All give sparse entries for the op `sample`. Penalties count the prompt's tokens, bans do not."""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitless.engine.sampling.params import FLOAT_MAX
from logitless.models.tokenizer import Tokenizer

MAX_BREAKER_BYTES, MAX_TAIL = 40, 20
LOG_FLOAT_MAX = 88.7228391


class Penalties:
    """Counts of each token among the last `last_n` tokens (none for 0)."""

    def __init__(self, last_n: int) -> None:
        self.last: deque[int] = deque(maxlen=last_n)
        self.counts: dict[int, int] = {}

    def push(self, token: int) -> None:
        if self.last.maxlen == 0:
            return
        if len(self.last) == self.last.maxlen:
            oldest = self.last[0]
            if self.counts[oldest] == 1:
                del self.counts[oldest]
            else:
                self.counts[oldest] -= 1
        self.last.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1

    def copy(self) -> Penalties:
        other = copy.copy(self)
        other.last, other.counts = self.last.copy(), self.counts.copy()
        return other


@dataclass(frozen=True)
class Breakers:
    """Sequence breakers of DRY: a head token followed by one of its tails.

    No repetition reaches across."""

    tails: dict[int, list[tuple[int, ...]]]
    is_head: npt.NDArray[np.bool_]  # (n_vocab,)

    def is_single(self, token: int) -> bool:
        """True if the token alone contains a breaker."""
        return () in self.tails.get(token, ())


@functools.lru_cache(maxsize=4)
def _texts(vocab: Tokenizer) -> list[bytes]:
    return [vocab.decode([id], special=True) for id in range(vocab.n_vocab)]


@functools.lru_cache(maxsize=16)
def find_breakers(vocab: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    """Find the tokens that contain a breaker, or end with the start of one (tail: the tokens of the rest)."""
    tails: dict[int, list[tuple[int, ...]]] = {}
    for text in texts:
        breaker = text.encode()[:MAX_BREAKER_BYTES]
        if not breaker:
            continue
        for id, word in enumerate(_texts(vocab)):
            if breaker in word:
                tails.setdefault(id, []).append(())
                continue
            at = word.find(breaker[:1])
            while at >= 0:
                overlap = min(len(breaker), len(word) - at)
                if word[at : at + overlap] == breaker[:overlap]:
                    rest = breaker[overlap:].decode(errors="replace")
                    tail = tuple(vocab.encode(rest, add_special=False, parse_special=False)[:MAX_TAIL])
                    if tail not in tails.setdefault(id, []):
                        tails[id].append(tail)
                at = word.find(breaker[:1], at + 1)
    is_head = np.zeros(vocab.n_vocab, bool)
    is_head[list(tails)] = True
    return Breakers(tails, is_head)


def suffix_lengths(tokens: Sequence[int]) -> list[int]:
    """Length of the common suffix of tokens[: j + 1] and all tokens, for every j but the last.

    This is the Z-algorithm on the reversed tokens."""
    n = len(tokens)
    back = tokens[::-1]
    z = [0] * n
    left = right = 0
    for k in range(1, n):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < n and back[length] == back[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return z[:0:-1]


class Dry:
    """DRY sampler ("don't repeat yourself"): penalises tokens that extend a repetition.

    The penalty grows exponentially with the length of a repetition of `allowed` tokens or more,
    among the last `window` tokens (p-e-w's sampler; llama.cpp's rules)."""

    def __init__(self, multiplier: float, base: float, allowed: int, window: int, breakers: Breakers) -> None:
        self.multiplier, self.base = float(np.float32(multiplier)), float(np.float32(base))
        self.allowed, self.window, self.breakers = allowed, window, breakers
        self.max_exponent = int(LOG_FLOAT_MAX / math.log(self.base)) if self.base > 1.000001 else 0
        self.n = 0
        self.tokens = np.zeros(256, np.int32)
        self.same = np.zeros(256, np.int32)  # suffix_lengths of the tokens, updated by `push`
        self._next = np.zeros(256, np.int32)

    def copy(self) -> Dry:
        other = copy.copy(self)
        other.tokens, other.same, other._next = self.tokens.copy(), self.same.copy(), self._next.copy()
        return other

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with these tokens."""
        tokens = list(tokens[-self.window :])
        self.n = len(tokens)
        size = 256
        while size <= self.n:
            size *= 2
        self.tokens, self.same = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._next = np.zeros(size, np.int32)
        self.tokens[: self.n] = tokens
        if self.n:
            self.same[: self.n - 1] = suffix_lengths(tokens)

    def push(self, token: int) -> None:
        n = self.n
        if n == len(self.tokens):
            self._make_room()
            n = self.n
        if n:
            longer = self._next
            longer[0] = 1
            np.add(self.same[: n - 1], 1, out=longer[1:n])
            longer[:n] *= self.tokens[:n] == token
            self.same, self._next = longer, self.same
        self.tokens[n] = token
        self.n = n + 1

    def _make_room(self) -> None:
        if self.n >= 2 * self.window:  # drop the tokens before the window
            for array in (self.tokens, self.same):
                array[: self.window] = array[self.n - self.window : self.n].copy()
            self.n = self.window
            return
        self.tokens, self.same = np.resize(self.tokens, 2 * self.n), np.resize(self.same, 2 * self.n)
        self._next = np.zeros(2 * self.n, np.int32)

    def _limit(self, recent: npt.NDArray[np.int32]) -> int:
        """Longest repetition that does not reach across the last breaker."""
        for at in np.flatnonzero(self.breakers.is_head[recent])[::-1].tolist():
            best = -1
            for tail in self.breakers.tails[int(recent[at])]:
                if len(tail) > best and tuple(recent[at + 1 : at + 1 + len(tail)].tolist()) == tail:
                    best = len(tail)
            if best >= 0:
                return len(recent) - 1 - int(at) - best
        return len(recent)

    def penalties(self) -> dict[int, float]:
        """Penalties to subtract from the logits, by token."""
        n = min(self.n, self.window)
        recent = self.tokens[self.n - n : self.n]
        if n <= self.allowed:
            return {}
        limit = self._limit(recent)
        if limit < self.allowed:
            return {}
        lengths = np.minimum(self.same[self.n - n : self.n - 1], np.arange(1, n))
        at = np.flatnonzero(lengths >= self.allowed)
        longest: dict[int, int] = {}
        for token, length in zip(recent[at + 1].tolist(), lengths[at].tolist(), strict=True):
            longest[token] = max(longest.get(token, 0), min(length, limit))
        return {token: self._penalty(length) for token, length in longest.items() if not self.breakers.is_single(token)}

    def _penalty(self, length: int) -> float:
        exponent = length - self.allowed
        if self.max_exponent > 0:
            exponent = min(exponent, self.max_exponent)
        penalty = self.multiplier * math.pow(self.base, exponent)
        return float(np.float32(min(max(penalty, -FLOAT_MAX), FLOAT_MAX)))


class TokenBans:
    """Banned tokens of one generation: end tokens below `min_tokens`, and tokens that would complete
    a bad word. `push` each generated token."""

    __slots__ = ("_end_ids", "_last", "_n_left", "_words")

    def __init__(self, min_tokens: int, end_ids: Collection[int], bad_words: Sequence[tuple[int, ...]]) -> None:
        """`end_ids` are banned until there are `min_tokens` tokens; `bad_words`: their token ids."""
        self._n_left = min_tokens if end_ids else 0
        self._end_ids = tuple(end_ids)
        self._words = [(word[:-1], word[-1]) for word in bad_words]
        self._last: deque[int] = deque(maxlen=max((len(before) for before, _ in self._words), default=0))

    def push(self, token: int) -> None:
        """Add a generated token."""
        self._n_left -= self._n_left > 0
        self._last.append(token)

    def copy(self) -> TokenBans:
        """Independent copy of the state."""
        other = TokenBans(self._n_left, self._end_ids, ())
        other._words, other._last = self._words, self._last.copy()
        return other

    def ids(self) -> list[int]:
        """Tokens that the next one must not be."""
        last = tuple(self._last)
        banned = [end for before, end in self._words if not before or last[-len(before) :] == before]
        return [*banned, *self._end_ids] if self._n_left else banned

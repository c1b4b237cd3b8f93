"""MT19937 as std::mt19937 gives it, one 32-bit word after the other, with words that can be looked at before use."""

from __future__ import annotations

import secrets

import numpy as np

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's default: choose one


def choose_seed(seed: int) -> int:
    """The seed itself modulo 2³², or a random one for -1 and 4294967295."""
    seed &= 0xFFFFFFFF
    return secrets.randbelow(RANDOM_SEED) if seed == RANDOM_SEED else seed


class Generator:
    """The words of std::mt19937(seed). Looking consumes nothing; `advance` says what was used."""

    __slots__ = ("_at", "_source", "_words", "n_used")

    def __init__(self, seed: int) -> None:
        self._source = np.random.MT19937(0)
        self._source._legacy_seeding(seed & 0xFFFFFFFF)  # init_genrand, as the C++ standard prescribes
        self._words: list[int] = []
        self._at = 0
        self.n_used = 0

    def peek(self, n: int, skip: int = 0) -> list[int]:
        """The n words after the next `skip`."""
        start = self._at + skip
        while start + n > len(self._words):
            del self._words[: self._at]
            start -= self._at
            self._at = 0
            self._words += self._source.random_raw(128).tolist()
        return self._words[start : start + n]

    def advance(self, n: int) -> None:
        """n words have been used."""
        self.peek(n)
        self._at += n
        self.n_used += n

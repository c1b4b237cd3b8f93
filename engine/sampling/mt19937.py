"""Mersenne Twister: the 32-bit words of std::mt19937, with lookahead."""

from __future__ import annotations

import secrets

import numpy as np

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's default: a random seed


def choose_seed(seed: int) -> int:
    """Seed modulo 2³², or a random one for -1 and 4294967295."""
    seed &= 0xFFFFFFFF
    return secrets.randbelow(RANDOM_SEED) if seed == RANDOM_SEED else seed


class Generator:
    """Words of std::mt19937(seed). `peek` consumes nothing, `advance` consumes words."""

    __slots__ = ("_at", "_source", "_words", "n_used")

    def __init__(self, seed: int) -> None:
        self._source = np.random.MT19937(0)
        self._source._legacy_seeding(seed & 0xFFFFFFFF)  # init_genrand, as the C++ standard prescribes
        self._words: list[int] = []
        self._at = 0
        self.n_used = 0

    def peek(self, n: int, skip: int = 0) -> list[int]:
        """Return the n words after the next `skip` words."""
        start = self._at + skip
        while start + n > len(self._words):
            del self._words[: self._at]
            start -= self._at
            self._at = 0
            self._words += self._source.random_raw(128).tolist()
        return self._words[start : start + n]

    def advance(self, n: int) -> None:
        """Consume n words."""
        self.peek(n)
        self._at += n
        self.n_used += n

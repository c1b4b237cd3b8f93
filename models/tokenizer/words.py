"""The ids of words that were seen before: text repeats its words, and their merges do not depend on
what is around."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MOST = 50_000  # words; then it begins anew
LONGEST = 64  # characters; longer words hardly come again


class KnownWords(dict[str, list[int]]):
    """`words[word]` is `encode(word)`."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode(word)
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[word] = ids
        return ids


def gaps(tokens: Iterable[str]) -> re.Pattern[str]:
    """Positions where a text may be split: before a ▁, except after characters that a token has
    before an inner ▁."""
    before_space = set(re.findall("([^▁\0])▁", "\0".join(tokens))) | {"▁"}
    return re.compile(f"(?<=[^{''.join(map(re.escape, sorted(before_space)))}])(?=▁)")

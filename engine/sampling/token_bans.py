"""Token bans: end tokens below `min_tokens`, and tokens that would complete a bad word."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class TokenBans:
    """Banned tokens of one generation. `push` each generated token."""

    __slots__ = ("_end_ids", "_last", "_left", "_words")

    def __init__(self, min_tokens: int, end_ids: Collection[int], bad_words: Sequence[tuple[int, ...]]) -> None:
        """`end_ids` are banned until there are `min_tokens` tokens; `bad_words`: their token ids."""
        self._left = min_tokens if end_ids else 0
        self._end_ids = tuple(end_ids)
        self._words = [(word[:-1], word[-1]) for word in bad_words]
        self._last: deque[int] = deque(maxlen=max((len(before) for before, _ in self._words), default=0))

    def push(self, token: int) -> None:
        """Add a generated token."""
        self._left -= self._left > 0
        self._last.append(token)

    def copy(self) -> TokenBans:
        """Independent copy of the state."""
        other = TokenBans(self._left, self._end_ids, ())
        other._words, other._last = self._words, self._last.copy()
        return other

    def ids(self) -> list[int]:
        """Tokens that the next one must not be."""
        last = tuple(self._last)
        banned = [end for before, end in self._words if not before or last[-len(before) :] == before]
        return [*banned, *self._end_ids] if self._left else banned

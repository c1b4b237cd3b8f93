"""N-gram cache (ngram-cache): drafts by counts of what followed 1 to 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence

# Minimum count of the best continuation, and its minimum share, for keys of 1, 2, 3 and 4 tokens.
LEAST_COUNT = (2, 2, 1, 1)
LEAST_SHARE = (0.66, 0.5, 0.5, 0.5)
LONGEST = len(LEAST_COUNT)


class CacheDrafter:
    """Drafts token by token: the commonest continuation of the longest key that passes the
    thresholds.
    """

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._done = 1  # the next token to count

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        for at in range(self._done, len(tokens)):
            for n in range(1, min(LONGEST, at) + 1):
                counts = self._counts.setdefault(tuple(tokens[at - n : at]), {})
                counts[tokens[at]] = counts.get(tokens[at], 0) + 1
        self._done = max(self._done, len(tokens))
        recent = list(tokens[-LONGEST:])
        draft: list[int] = []
        while len(draft) < min(n_most, self._n_max) and (token := self._guess(recent)) is not None:
            draft.append(token)
            recent = [*recent[-LONGEST + 1 :], token]
        return draft

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass

    def _guess(self, recent: list[int]) -> int | None:
        for n in range(min(LONGEST, len(recent)), 0, -1):
            counts = self._counts.get(tuple(recent[-n:]))
            if counts:
                best = max(counts, key=lambda token: (counts[token], -token))
                if counts[best] >= max(LEAST_COUNT[n - 1], LEAST_SHARE[n - 1] * sum(counts.values())):
                    return best
        return None

"""Client drafts: draft tokens from OpenAI's `prediction` or from token ids (`draft_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_KEY, SHORTEST_KEY = 8, 2  # tokens that must match to resume the draft after a difference


class ClientDrafter:
    """Drafts from the client's text, from its beginning on.

    After a difference it resumes where the draft has the same last tokens: the longest match wins,
    then the nearest one ahead."""

    def __init__(self, draft: Sequence[int], n_prompt: int, n_max: int) -> None:
        self._draft = list(draft)
        self._at = 0  # index of the next token in the draft; ~index while out of step
        self._n_read = n_prompt  # tokens of the sequence that `_at` takes into account
        self._n_prompt = n_prompt
        self._n_max = max(1, n_max)
        # end positions of each shortest key
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def propose(self, tokens: Sequence[int], n_most: int) -> list[int]:
        for token in tokens[self._n_read :]:
            if 0 <= self._at < len(self._draft) and self._draft[self._at] == token:
                self._at += 1
            elif self._at >= 0:
                self._at = ~self._at  # out of step
        self._n_read = len(tokens)
        if self._at < 0 and not self._find(tokens):
            return []
        return self._draft[self._at : self._at + min(n_most, self._n_max)]

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        pass

    def _find(self, tokens: Sequence[int]) -> bool:
        if self._places is None:
            self._places = {}
            for end in range(SHORTEST_KEY, len(self._draft)):
                self._places.setdefault(tuple(self._draft[end - SHORTEST_KEY : end]), []).append(end)
        if len(tokens) - self._n_prompt < SHORTEST_KEY:
            return False
        deletion = ~self._at
        best: tuple[int, int, int] | None = None
        tail = list(tokens[max(self._n_prompt, len(tokens) - LONGEST_KEY) :])
        for end in self._places.get(tuple(tail[-SHORTEST_KEY:]), ()):
            same = SHORTEST_KEY
            while same < min(len(tail), end) and self._draft[end - same - 1] == tail[-same - 1]:
                same += 1
            ahead = end >= deletion
            rank = (same, int(ahead), -abs(end - deletion))
            if best is None or rank > best:
                best, self._at = rank, end
        return best is not None

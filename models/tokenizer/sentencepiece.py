"""SentencePiece vocabularies (`tokenizer.ggml.model` = llama): the best-scored pair merges first,
with byte fallback.

Not the sentencepiece package, for three reasons. It refuses what GGUF files have: repeated or empty
pieces, an incomplete set of byte tokens, no <unk>. It never merges into control, unknown or byte
pieces, while llama.cpp merges into any token. And a cache of words beats it on text: the merges of
a word do not depend on its neighbours where no token spans the gap.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from logitless.models.tokenizer.base import KnownWords, Tokenizer, gaps
from logitless.models.tokenizer.vocab import Vocab


class SpmTokenizer(Tokenizer):
    """llama.cpp's SPM tokenizer."""

    def __init__(self, vocab: Vocab) -> None:
        ids = vocab.ids
        self._score = {text: vocab.scores[i] for text, i in ids.items()}
        # a byte's token is named <0x0A>, or in some vocabularies is the byte itself
        raw = [bytes([b]).decode("utf-8", "surrogateescape") for b in range(256)]
        self._byte_ids = [ids.get(f"<0x{b:02X}>", ids.get(raw[b])) for b in range(256)]
        self._words = KnownWords(self._encode_word)
        self._gap = gaps(ids)
        super().__init__(vocab)

    def _encode_fragments(self, fragments: list[str | int]) -> list[int]:
        ids: list[int] = []
        after_special = True
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._encode_text(" " + fragment if self.add_space_prefix and after_special else fragment))
            after_special = isinstance(fragment, int)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._gap.split(text.replace(" ", "▁")):
            ids.extend(self._words[word])
        return ids

    def _encode_word(self, word: str) -> list[int]:
        """Merge the adjacent pair whose union scores highest, the leftmost of equals, until no
        union is a token."""
        whole, score = self.vocab.ids, self._score
        n = len(word)
        end = list(range(1, n + 1))  # of the symbol that starts here
        before = list(range(-1, n - 1))  # where the symbol before this one starts
        alive = [True] * n
        heap = []  # (-score, left start, right start, right end)
        for i in range(n - 1):
            value = score.get(word[i : i + 2])
            if value is not None:
                heap.append((-value, i, i + 1, i + 2))
        heapify(heap)
        while heap:
            _, left, right, stop = heappop(heap)
            if not (alive[left] and alive[right]) or end[left] != right or end[right] != stop:
                continue  # one of the two has merged meanwhile
            alive[right] = False
            end[left] = stop
            previous = before[left]
            if previous >= 0:
                value = score.get(word[previous:stop])
                if value is not None:
                    heappush(heap, (-value, previous, left, stop))
            if stop < n:
                before[stop] = left
                after = end[stop]
                value = score.get(word[left:after])
                if value is not None:
                    heappush(heap, (-value, left, stop, after))
        ids: list[int] = []
        start = 0
        while start < n:
            symbol = word[start : end[start]]
            id = whole.get(symbol)
            ids.extend([id] if id is not None else self._bytes_or_unknown(symbol))
            start = end[start]
        return ids

    def _bytes_or_unknown(self, char: str) -> list[int]:
        ids = [id for id in map(self._byte_ids.__getitem__, char.encode("utf-8", "surrogateescape")) if id is not None]
        if len(ids) == len(char.encode("utf-8", "surrogateescape")):
            return ids
        return [] if self.vocab.special.get("unk") is None else [self.vocab.special["unk"]]

"""SentencePiece tokenizer (`tokenizer.ggml.model` = llama): best-scored pair first, byte fallback.

Not the sentencepiece package, for three reasons. It refuses what GGUF files have: repeated or empty
pieces, an incomplete set of byte tokens, no <unk>. It never merges into control, unknown or byte
pieces, while llama.cpp merges into any token. And a cache of words beats it on text: the merges of
a word do not depend on its neighbours where no token spans the gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from logitless.models.tokenizer.base import LONGEST, KnownWords, Tokenizer, blocks, gaps
from logitless.models.tokenizer.vocab import Vocab

_BLOCK = 1 << 18  # characters that are tokenized at once; smaller blocks take a fifth longer
_MERGES = 1 << 13  # between two moments at which a long word can be given up


class _LongWord(Exception):
    """A word takes long enough for its client to leave meanwhile."""


class SpmTokenizer(Tokenizer):
    """llama.cpp's SPM tokenizer."""

    def __init__(self, vocab: Vocab) -> None:
        ids = vocab.ids
        scores = {text: vocab.scores[i] for text, i in ids.items()}
        ranks = {score: rank for rank, score in enumerate(sorted(set(scores.values()), reverse=True))}
        self._rank = {text: ranks[score] for text, score in scores.items()}  # 0 merges first
        # a byte's token is named <0x0A>, or in some vocabularies is the byte itself
        raw = [bytes([b]).decode("utf-8", "surrogateescape") for b in range(256)]
        self._byte_ids = [ids.get(f"<0x{b:02X}>", ids.get(raw[b])) for b in range(256)]
        self._words = KnownWords(self._encode_word)
        self._gap = gaps(ids)
        super().__init__(vocab)

    def _encode_fragments(self, fragments: list[str | int], *, begins: bool = True) -> Iterator[Sequence[int]]:
        after_special = begins
        for fragment in fragments:
            if isinstance(fragment, int):
                yield (fragment,)
            else:
                yield from self._encode_text(" " + fragment if self.add_space_prefix and after_special else fragment)
            after_special = isinstance(fragment, int)

    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        for block in blocks(text.replace(" ", "▁"), self._gap, _BLOCK):
            words = self._gap.split(block)
            try:
                ids = list(chain.from_iterable(map(self._words.__getitem__, words)))
            except _LongWord:
                for word in words:
                    yield from (self._words[word],) if len(word) <= LONGEST else self._encode_parts_of(word)
            else:
                yield ids

    def _encode_word(self, word: str) -> list[int]:
        if len(word) > LONGEST:
            raise _LongWord
        return list(chain.from_iterable(self._encode_parts_of(word)))

    def _encode_parts_of(self, word: str) -> Iterator[Sequence[int]]:
        """Merge the adjacent pair whose union scores highest, the leftmost of equals, until no
        union is a token. The ids come at the end; before them nothing does, many times in a long word.
        """
        rank_of, n = self._rank.get, len(word)
        bits = n.bit_length()
        end = list(range(1, n + 1))  # of the symbol that starts here
        before = list(range(-1, n - 1))  # where the symbol before this one starts
        # rank of the union of the symbol that starts here with the next one, -1: it is no token
        union = [rank_of(word[i : i + 2], -1) for i in range(n)]
        union[n - 1 :] = [-1] * min(n, 1)
        heap = [rank << bits | i for i, rank in enumerate(union) if rank >= 0]
        heapify(heap)
        while heap:
            yield ()
            for _ in range(min(len(heap), _MERGES)):
                rank, left = divmod(heappop(heap), 1 << bits)
                if union[left] != rank:
                    continue  # one of the two has merged meanwhile
                right = end[left]
                stop = end[left] = end[right]
                union[right] = -1
                rank = -1
                if stop < n:
                    before[stop] = left
                    rank = rank_of(word[left : end[stop]], -1)
                    if rank >= 0:
                        heappush(heap, rank << bits | left)
                union[left] = rank
                previous = before[left]
                if previous >= 0:
                    rank = union[previous] = rank_of(word[previous:stop], -1)
                    if rank >= 0:
                        heappush(heap, rank << bits | previous)
        whole = self.vocab.ids
        ids: list[int] = []
        start = 0
        while start < n:
            symbol = word[start : end[start]]
            id = whole.get(symbol)
            ids.extend([id] if id is not None else self._bytes_or_unknown(symbol))
            start = end[start]
        yield ids

    def _bytes_or_unknown(self, char: str) -> list[int]:
        ids = [id for id in map(self._byte_ids.__getitem__, char.encode("utf-8", "surrogateescape")) if id is not None]
        if len(ids) == len(char.encode("utf-8", "surrogateescape")):
            return ids
        return [] if self.vocab.special.get("unk") is None else [self.vocab.special["unk"]]

"""Unigram tokenizer (Kudo, 2018; `tokenizer.ggml.model` = t5): the likeliest pieces of a text.

Of T5, XLM-RoBERTa and the models for vectors that are made of it. Not the sentencepiece package,
which wants its own file of the vocabulary, nor the one of tokenizers, whose normalisation differs
from llama.cpp's on combined characters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from logitless.models.tokenizer.base import KnownWords, Tokenizer, blocks, gaps
from logitless.models.tokenizer.vocab import Attr, Vocab, VocabError

_PENALTY = 10.0  # penalty of a character without a token, below the least likely token
_MATCHED = int(Attr.NORMAL | Attr.USER_DEFINED | Attr.UNUSED)


class UgmTokenizer(Tokenizer):
    """llama.cpp's UGM tokenizer. Words are told apart where no token reaches over the gap; that two
    ways to spell one are equally likely to the last bit is decided within it. llama.cpp also leaves
    text as it is that only begins like a token that a user has defined; here it is normalised, as
    sentencepiece does."""

    def __init__(self, vocab: Vocab) -> None:
        kinds = list(zip(vocab.tokens, vocab.attrs, strict=True))
        self._charsmap = Charsmap(vocab.charsmap)
        self._user_defined = _longest_of(text for text, attr in kinds if attr & Attr.USER_DEFINED)
        self._score = {  # user-defined tokens are likelier than any other
            text: 0.0 if kinds[id][1] & Attr.USER_DEFINED else vocab.scores[id]
            for text, id in vocab.ids.items()
            if kinds[id][1] & _MATCHED
        }
        normal = [score for score, (_, attr) in zip(vocab.scores, kinds, strict=True) if attr & Attr.NORMAL]
        self._unknown = float(np.float32(min(normal, default=0.0)) - np.float32(_PENALTY))
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self._score:
            lengths[text[0]].add(len(text))
        # lengths of the tokens that start with it
        self._lengths = {char: sorted(sizes) for char, sizes in lengths.items()}
        self._gap = gaps(self._score)
        self._words = KnownWords(self._encode_word)
        super().__init__(vocab)

    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        last: int | None = None
        for block in blocks(self._normalised(text), self._gap):
            ids: list[int] = []
            for word in self._gap.split(block):
                if pieces := self._words[word]:
                    ids.extend(pieces[1:] if last == pieces[0] == self.unk_id else pieces)
                    last = pieces[-1]
            yield ids

    def _normalised(self, text: str) -> str:
        """Text with ▁ for spaces, several of which may become one, and one ▁ in front."""
        out: list[str] = []
        in_word = prepended = False
        merged = self.vocab.merge_spaces
        for part in self._parts(text):
            for char in part:
                if char != " ":
                    if not in_word and (merged or (self.add_space_prefix and not prepended)):
                        out.append("▁")
                        prepended = True
                    in_word = True
                    out.append(char)
                else:
                    in_word = False
                    if not merged:
                        out.append("▁")
        return "".join(out)

    def _parts(self, text: str) -> Iterator[str]:
        """Normalised characters of the text, except those of user-defined tokens."""
        at = 0
        while at < len(text):
            if self._user_defined and (match := self._user_defined.match(text, at)):
                yield match[0]
                at = match.end()
            else:
                n, new = self._charsmap.longest(text, at)
                yield new if n else text[at]
                at += n or 1

    def _encode_word(self, word: str) -> list[int]:
        """The pieces whose scores have the greatest sum (Viterbi, 1967); neighbours that no token has are one <unk>."""
        best = [0.0] + [-np.inf] * len(word)  # of the text up to there
        begin = [0] * (len(word) + 1)  # of the piece that ends there
        is_token = [False] * (len(word) + 1)
        for start, char in enumerate(word):
            so_far = best[start]
            for length in self._lengths.get(char, ()):
                stop = start + length
                if stop > len(word):
                    break
                score = self._score.get(word[start:stop])
                if score is not None and so_far + score > best[stop]:
                    best[stop], begin[stop], is_token[stop] = so_far + score, start, True
            if char not in self._score and so_far + self._unknown > best[start + 1]:
                best[start + 1], begin[start + 1], is_token[start + 1] = so_far + self._unknown, start, False
        ids: list[int] = []
        stop = len(word)
        while stop > 0:
            start = begin[stop]
            id = self.vocab.ids[word[start:stop]] if is_token[stop] else self.unk_id
            if id is not None and not (ids and id == ids[-1] == self.unk_id):
                ids.append(id)
            stop = start
        return ids[::-1]


def _longest_of(texts: Iterator[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class Charsmap:
    """Sentencepiece's table of normalisations: beginnings of texts, and their replacements.

    A length, a trie as a double array of that many bytes (Aoe, 1989; 32 bits a node: the character
    that leads here, a flag whether a beginning ends here, and an offset to the children, which is
    taken by exclusive or), then the new texts, each ended by a 0. Empty: there is none. VocabError
    for one that is cut off."""

    def __init__(self, data: bytes) -> None:
        nbytes = int.from_bytes(data[:4], "little")
        if data and (nbytes % 4 or len(data) < 4 + nbytes):
            raise VocabError("tokenizer.ggml.precompiled_charsmap is cut off")
        self._nodes: list[int] = np.frombuffer(data[4 : 4 + nbytes], "<u4").tolist()
        self._texts = data[4 + nbytes :]
        self._new: dict[int, str] = {}

    def longest(self, text: str, at: int) -> tuple[int, str]:
        """The most characters from there on that are such a beginning, 0 if none are, and what they become."""
        nodes, length, value = self._nodes, 0, 0
        if not nodes:
            return 0, ""
        index = _children(nodes[0])
        for n in range(at, len(text)):
            for byte in text[n].encode("utf-8", "surrogateescape"):
                index ^= byte
                if byte == 0 or index >= len(nodes) or nodes[index] & 0x800000FF != byte:
                    return length, self._text(value) if length else ""
                node = nodes[index]
                index ^= _children(node)
            if node >> 8 & 1 and index < len(nodes):
                length, value = n - at + 1, nodes[index] & 0x7FFFFFFF
        return length, self._text(value) if length else ""

    def _text(self, start: int) -> str:
        new = self._new.get(start)
        if new is None:
            new = self._new[start] = self._texts[start:].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        return new


def _children(node: int) -> int:
    return node >> 10 << ((node & 1 << 9) >> 6)

"""WordPiece tokenizer (`tokenizer.ggml.model` = bert): greedy longest match inside normalised words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from logitless.models.tokenizer.base import KnownWords, Tokenizer, blocks
from logitless.models.tokenizer.vocab import Vocab

_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}
_SPACE = re.compile("(?= )")
_HAN_RANGES = (  # 0x2B920 is a slip of HF's that llama.cpp shares
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WpmTokenizer(Tokenizer):
    """llama.cpp's WPM tokenizer; a word that its tokens cannot spell is one [UNK]."""

    def __init__(self, vocab: Vocab) -> None:
        self._chars: dict[str, str] = {}
        self._words = KnownWords(self._encode_word)
        # longest length of tokens that start with this character
        self._longest: dict[str, int] = {}
        for text in vocab.tokens:
            if len(text) > self._longest.get(text[0], 0):
                self._longest[text[0]] = len(text)
        super().__init__(vocab)

    def _prefix_ids(self) -> list[int]:
        return [] if self.bos_id is None else [self.bos_id]

    def _suffix_ids(self) -> list[int]:
        return [] if self.sep_id is None else [self.sep_id]

    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        chars = self._chars
        for char in set(text).difference(chars):
            chars[char] = self._normalise(char)
        for block in blocks(text, _SPACE):
            words = "".join(map(chars.__getitem__, block)).split(" ")
            yield [id for word in words if word for id in self._words[word]]

    def _normalise(self, char: str) -> str:
        """A character as normalised: a space, the character with spaces around if it is its own word, or ""."""
        if self.vocab.strip_accents:
            # the base; llama.cpp's table has no more, even for Hangul
            char = unicodedata.normalize("NFD", char)[0]
        category = unicodedata.category(char)
        if char in _SPACES:
            return " "
        if (
            char == "\ufffd"
            or category in ("Cc", "Cf", "Cs", "Co")
            or (self.vocab.strip_accents and category[0] == "M")
        ):
            return ""
        lower = char.lower()[0] if self.vocab.lowercase else char
        alone = category[0] == "P" or (category[0] == "S" and char < "\x7f")
        alone = alone or any(low <= ord(char) <= high for low, high in _HAN_RANGES)
        return f" {lower} " if alone else lower

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        word = "▁" + word
        start = 0
        while start < len(word):
            for stop in range(min(len(word), start + self._longest.get(word[start], 0)), start, -1):
                id = self.vocab.ids.get(word[start:stop])
                if id is not None:
                    ids.append(id)
                    start = stop
                    break
            else:
                return [] if self.unk_id is None else [self.unk_id]
        return ids

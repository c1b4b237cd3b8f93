"""Streaming detokenizer: emits text as soon as its characters are complete."""

from __future__ import annotations

import codecs

from logitless.models.tokenizer.base import Tokenizer


class StreamDecoder:
    """Turns tokens into text one by one and never splits a character.

    What all calls return, put together, is the UTF-8 of all pieces with U+FFFD for invalid bytes;
    nothing is lost and nothing comes twice. Special tokens have no text unless `special`, or they
    are among the `preserved`."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, preserved: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._preserved = preserved
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this token completes, perhaps none. Raises IndexError for an id outside the vocabulary."""
        return self.push_bytes(self._tokenizer.piece(id, special=self._special or id in self._preserved))

    def push_bytes(self, piece: bytes) -> str:
        """The text that these bytes complete."""
        return self._decoder.decode(piece)

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def flush(self) -> str:
        """Buffered rest: U+FFFD for an incomplete character, else "". The decoder may be used again."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest

"""RWKV's tokenizer (`tokenizer.ggml.model` = rwkv): greedy longest match of bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from logitless.models.tokenizer.base import Tokenizer
from logitless.models.tokenizer.vocab import Vocab

_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_BLANKS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_PART = 4096  # ids that are yielded at once


class RwkvTokenizer(Tokenizer):
    """llama.cpp's RWKV tokenizer; tokens are Python's bytes literals. A byte that no token begins with is unknown,
    or left out where the vocabulary has no such token."""

    def __init__(self, vocab: Vocab) -> None:
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = defaultdict(set)  # of the tokens that begin with these two bytes
        for i, text in enumerate(vocab.tokens):
            token = unescaped(text)
            if token:
                self._ids[token] = i  # the last of equal ones
                lengths[token[:2]].add(len(token))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        super().__init__(vocab)

    def _prefix_ids(self) -> list[int]:
        return []

    def _suffix_ids(self) -> list[int]:
        return []

    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        data, at, part = text.encode(), 0, list[int]()
        ids, lengths = self._ids, self._lengths
        while at < len(data):
            for length in lengths.get(data[at : at + 2], ()):
                id = ids.get(data[at : at + length])
                if id is not None:
                    break
            else:
                length, id = 1, ids.get(data[at : at + 1], self.unk_id)
            at += length
            if id is not None:
                part.append(id)
            if len(part) >= _PART:
                yield part
                part = []
        yield part

    def _make_piece(self, id: int) -> bytes:
        return unescaped(self.vocab.tokens[id])


def unescaped(text: str) -> bytes:
    r"""The bytes of a token: \t, \n, \r and \xNN as in Python, and the character behind any other backslash."""

    def byte(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes([int(escape[1:], 16)]) if len(escape) == 3 else _BLANKS.get(escape, escape)

    return _ESCAPE.sub(byte, text.encode("utf-8", "surrogateescape"))

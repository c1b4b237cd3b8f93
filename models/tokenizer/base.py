"""Base of all tokenizers: special tokens split from the text first, pieces, detokenization."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from logitless.models.tokenizer.vocab import Attr, Vocab

_C_SPACES = " \t\n\v\f\r"  # blanks that a special token with lstrip or rstrip removes
# plain numbers: an operation of flags takes a microsecond, as long as all else of a token's piece
_NORMAL, _BYTE, _SILENT = int(Attr.NORMAL), int(Attr.BYTE), int(Attr.CONTROL | Attr.UNKNOWN)
_SPECIAL = _SILENT | int(Attr.USER_DEFINED)
MOST = 50_000  # known words; then it begins anew
LONGEST = 64  # characters of a known word; longer words hardly come again
BLOCK = 1 << 16  # characters of a long text that are tokenized at once


class Tokenizer(ABC):
    """Text to token ids and back, with exactly llama.cpp's results.

    Ids of special tokens are None where the vocabulary has none. Instances are immutable for their
    users and may be shared by threads."""

    def __init__(self, vocab: Vocab) -> None:
        special = vocab.special
        self.vocab = vocab
        self.vocab_type = vocab.vocab_type
        self.n_vocab = len(vocab.tokens)
        self.bos_id = special.get("bos")
        self.eos_id = special.get("eos")
        self.eot_id = special.get("eot")
        self.unk_id = special.get("unk")
        self.sep_id = special.get("sep")
        self.pad_id = special.get("pad")
        self.fim_pre_id = special.get("fim_pre")
        self.fim_suf_id = special.get("fim_suf")
        self.fim_mid_id = special.get("fim_mid")
        self.fim_rep_id = special.get("fim_rep")
        self.fim_sep_id = special.get("fim_sep")
        self.eog_ids = vocab.eog_ids
        self.suppressed_ids = vocab.suppressed_ids
        self.add_bos = vocab.add_bos
        self.add_eos = vocab.add_eos
        self.add_sep = vocab.add_sep
        self.add_space_prefix = vocab.add_space_prefix
        self._pieces: dict[int, bytes] = {}
        self._special_groups = self._group_special_tokens()

    # -- encoding

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        `add_special` adds the BOS, EOS, CLS and SEP that the vocabulary asks for. `parse_special`
        turns the text of control tokens into their ids; user-defined tokens are always recognised.
        Lone surrogates, which have no UTF-8, count as U+FFFD."""
        ids: list[int] = []
        for part in self.encode_parts(text, add_special=add_special, parse_special=parse_special):
            ids += part
        return ids

    def encode_parts(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> Iterator[Sequence[int]]:
        """The same ids, some at a time (sometimes none), so that a long text can be given up."""
        if add_special:
            yield self._prefix_ids()
        yield from self._encode_fragments(self._partition(_without_lone_surrogates(text), parse_special))
        if add_special:
            yield self._suffix_ids()

    def encode_after(self, text: str) -> list[int]:
        """The ids of a text that goes on directly behind other text: no space is put in front."""
        fragments = self._partition(_without_lone_surrogates(text), parse_special=True)
        return [id for part in self._encode_fragments(fragments, begins=False) for id in part]

    def _prefix_ids(self) -> list[int]:
        return [self.bos_id] if self.add_bos and self.bos_id is not None else []

    def _suffix_ids(self) -> list[int]:
        return [self.eos_id] if self.add_eos and self.eos_id is not None else []

    def _encode_fragments(self, fragments: list[str | int], *, begins: bool = True) -> Iterator[Sequence[int]]:
        for fragment in fragments:
            if isinstance(fragment, int):
                yield (fragment,)
            else:
                yield from self._encode_text(fragment)

    @abstractmethod
    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        """The ids of a text without special tokens, some at a time."""

    def _group_special_tokens(self) -> dict[str, list[int]]:
        """Special tokens by their first three characters.

        One search then rules out the thousands of <unused…> that some files have."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i in np.flatnonzero(np.array(self.vocab.attrs) & _SPECIAL).tolist():
            groups[self.vocab.tokens[i][:3]].append(i)
        return dict(groups)

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut special tokens out of a text: the longest wherever it occurs, then the next longest in what is left."""
        tokens, attrs = self.vocab.tokens, self.vocab.attrs
        ignored = 0 if parse_special else _SILENT
        present = [
            i
            for start, group in self._special_groups.items()
            if start in text
            for i in group
            if not attrs[i] & ignored and tokens[i] in text
        ]
        fragments: list[str | int] = [text] if text else []
        for i in sorted(present, key=lambda i: (-len(tokens[i].encode("utf-8", "surrogateescape")), i)):
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int) or tokens[i] not in fragment:
                    cut.append(fragment)
                    continue
                parts = fragment.split(tokens[i])
                for n, part in enumerate(parts):
                    if n > 0:
                        cut.append(i)
                        part = part.lstrip(_C_SPACES) if attrs[i] & Attr.RSTRIP else part
                    if n < len(parts) - 1 and attrs[i] & Attr.LSTRIP:
                        part = part.rstrip(_C_SPACES)
                    if part:
                        cut.append(part)
            fragments = cut
        return fragments

    # -- decoding

    def piece(self, id: int, *, special: bool = True) -> bytes:
        """The bytes of one token; none for control and unknown tokens unless `special`.

        Raises IndexError for an id outside the vocabulary."""
        if not 0 <= id < self.n_vocab:
            raise IndexError(f"token id {id} is outside the vocabulary of {self.n_vocab}")
        if not special and self.vocab.attrs[id] & _SILENT:
            return b""
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._make_piece(id)
        return piece

    def _make_piece(self, id: int) -> bytes:
        attr, text = self.vocab.attrs[id], self.vocab.tokens[id]
        if attr & _SPECIAL:
            return text.encode("utf-8", "surrogateescape")
        if attr & _NORMAL:
            return self._normal_piece(text)
        if attr & _BYTE:
            return byte_of(text)
        return b""

    def _normal_piece(self, text: str) -> bytes:
        return text.replace("▁", " ").encode("utf-8", "surrogateescape")

    def pieces(self, ids: Iterable[int], *, special: bool = True) -> bytes:
        """The pieces of some tokens, one after the other, as in llama-server's /detokenize and in generated texts."""
        cached = self._pieces if special else {}
        return b"".join([cached.get(id) or self.piece(id, special=special) for id in ids])

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of a text that starts with these tokens: the pieces without the space that
        `encode` put in front.

        As llama_detokenize without its clean-up of spaces before punctuation, which loses text of the
        tokens. The space is taken from the first token only, so after a BOS it stays, as there."""
        first, *rest = [self.piece(id, special=special) for id in ids] or [b""]
        return b"".join([first.removeprefix(b" ") if self.add_space_prefix else first, *rest])

    # -- the vocabulary

    def text(self, id: int) -> str:
        """The vocabulary's own string for a token, such as "▁the", "Ġthe" or "<s>"."""
        return self.vocab.tokens[id].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def attr(self, id: int) -> Attr:
        """Attributes of a token."""
        return Attr(self.vocab.attrs[id])

    def is_eog(self, id: int) -> bool:
        """True for an end-of-generation token."""
        return id in self.eog_ids


def byte_of(text: str) -> bytes:
    """The byte of a byte token such as <0x0A>; b"" where its text is something else."""
    match = re.match(r"<0x([0-9A-Fa-f]{2})>\Z", text)
    return bytes([int(match[1], 16)]) if match else b""


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class KnownWords(dict[str, list[int]]):
    """`words[word]` is `encode(word)`. A text repeats its words, and their merges do not depend on what is around."""

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
    """Positions where a text may be split: before a ▁, except after characters that a token has before an inner ▁."""
    before_space = set(re.findall("([^▁\0])▁", "\0".join(tokens))) | {"▁"}
    return re.compile(f"(?<=[^{''.join(map(re.escape, sorted(before_space)))}])(?=▁)")


def blocks(text: str, gap: re.Pattern[str], size: int = BLOCK) -> Iterator[str]:
    """The text in parts of at least `size` characters, cut at gaps."""
    start = 0
    while len(text) - start > size and (match := gap.search(text, start + size)):
        yield text[start : match.start()]
        start = match.start()
    yield text[start:] if start else text

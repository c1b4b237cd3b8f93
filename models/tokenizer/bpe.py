"""BPE tokenizer (`tokenizer.ggml.model` = gpt2, gemma4), merged by the `tokenizers` package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from logitless.models.tokenizer.base import Tokenizer, blocks
from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS
from logitless.models.tokenizer.vocab import Vocab, is_unicode


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters mean their own byte, the rest are U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_alphabet()


class BpeTokenizer(Tokenizer):
    """llama.cpp's BPE tokenizer."""

    def __init__(self, vocab: Vocab, merges: list[tuple[str, str]]) -> None:
        import tokenizers  # here: other vocabularies do not need it
        from tokenizers import pre_tokenizers
        from tokenizers.models import BPE

        self.vocab, pre = vocab, vocab.pre
        # tokens that are not UTF-8 are in no text
        ids = dict(vocab.ids) if is_unicode(vocab.ids) else {t: id for t, id in vocab.ids.items() if is_unicode([t])}
        # Symbols that are no tokens may still merge and stand between others. `tokenizers` knows no
        # such symbols, so they get ids past the vocabulary, which then become what llama.cpp makes
        # of them: the ids of those of their bytes that are tokens.
        self._extra: list[list[int]] = []
        self._add_symbols(ids, set(BYTE_OF_CHAR) if pre.byte_level else set())
        try:
            model = BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
        except Exception:
            # nothing more precise is raised for merges outside the vocabulary; looking first costs
            # 0.2 s
            self._add_symbols(ids, {symbol for a, b in merges for symbol in (a, b, a + b)})
            model = BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        if pre.byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._gap = re.compile(pre.gap)
        super().__init__(vocab)

    def _add_symbols(self, ids: dict[str, int], symbols: set[str]) -> None:
        token_ids = self.vocab.ids
        for symbol in sorted(symbols.difference(ids)):
            ids[symbol] = len(self.vocab.tokens) + len(self._extra)
            self._extra.append([token_ids[c] for c in symbol if c in token_ids] if self.vocab.pre.byte_level else [])

    def _encode_text(self, text: str) -> Iterator[Sequence[int]]:
        for block in blocks(text, self._gap):
            if self.vocab.pre.byte_level:
                yield self._merge(block)
            elif self.vocab.pre is not PRE_TOKENIZERS["gemma4"]:
                yield self._merge(block.replace(" ", "▁"))
            else:  # a run of newlines that is a token stays whole, merges or not
                for part in re.split(r"(\n+)", block.replace(" ", "▁")):
                    newlines = self.vocab.ids.get(part) if part.startswith("\n") else None
                    yield self._merge(part) if newlines is None else (newlines,)

    def _merge(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._extra and ids and max(ids) >= len(self.vocab.tokens):
            n = len(self.vocab.tokens)
            return [token for id in ids for token in ([id] if id < n else self._extra[id - n])]
        return ids

    def _normal_piece(self, text: str) -> bytes:
        if not self.vocab.pre.byte_level:
            return super()._normal_piece(text)
        try:
            return bytes([BYTE_OF_CHAR[char] for char in text])
        except KeyError:
            return b"".join([self._byte_or_mark(char, text) for char in text])

    @staticmethod
    def _byte_or_mark(char: str, text: str) -> bytes:
        if char in BYTE_OF_CHAR:
            return bytes([BYTE_OF_CHAR[char]])
        raw = char.encode("utf-8", "surrogateescape")
        return b"[UNK_BYTE_0x" + raw.hex().encode() + text.encode("utf-8", "surrogateescape") + b"]"

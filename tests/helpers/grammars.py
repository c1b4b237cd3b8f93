"""Grammars compiled for a small vocabulary of bytes and pieces, and matching of texts."""

from __future__ import annotations

import functools
import random

import numpy as np

from logitless.models.grammar import Grammar
from logitless.models.tokenizer import Tokenizer, from_metadata

PIECES = [*"abcxy ", "ab", "abc", "ba", "é", "{", "}", '"', ":", ",", "0", "1", "true", '{"', '"}']
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
EOS = 2


def tokenizer() -> Tokenizer:
    return tokenizer_of()


@functools.cache
def tokenizer_of(*more: str) -> Tokenizer:
    """The small vocabulary, with more pieces."""
    tokens = [*TOKENS, *more]
    types = [2, 3, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260)]
    vocab = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": types}
    return from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in vocab.items()} | {"tokenizer.ggml.eos_token_id": EOS}
    )


def compile_grammar(source: str, kind: str = "gbnf") -> Grammar:
    return Grammar.compile(kind, source, tokenizer())


def accepts(grammar: Grammar, text: str) -> bool:
    """True if the grammar accepts the complete text."""
    matcher = grammar.matcher()
    return all(matcher.accept_bytes(bytes([byte])) for byte in text.encode()) and matcher.can_end


def text_of(grammar: Grammar, seed: int, most: int = 4000) -> str:
    """A random text of a grammar, which ends as soon as it may."""
    choose, matcher, text = random.Random(seed), grammar.matcher(), b""
    for _ in range(most):
        if matcher.can_end:
            return text.decode()
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        id = choose.choice(np.flatnonzero(bits).tolist())
        assert matcher.accept(id)
        text += grammar.tokenizer.piece(id)
    raise AssertionError(f"no end: {text!r}")

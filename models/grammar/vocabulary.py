"""Vocabulary of the grammar engine: a trie of the bytes of every token, made once for a tokenizer."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from logitless.models.grammar.json_text import PieceTable
from logitless.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LARGE = 48_000  # tokens
# Bounds on work, in llguidance's units; at its own speeds about 40 ms to compile, 20 ms and 20 MB
# for a mask.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 100_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

_tries: weakref.WeakKeyDictionary[Tokenizer, tuple[LLTokenizer, PieceTable]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Wrapper:
    """Tokenizer interface that llguidance reads.

    As in llama.cpp a special token counts as its text, so that a grammar may spell it, and a token
    without text is never allowed; tokens that end a generation have none here, since the matcher
    decides about them. Bytes 0xFF, which no UTF-8 has, mark special tokens in llguidance. After the
    vocabulary come 255 tokens of one byte each, for the part of a token with which a lazy grammar
    begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(id) for id in range(tokenizer.n_vocab)]
        for id, piece in enumerate(pieces):
            if id in tokenizer.eog_ids or piece[:1] in (b"\xff", b"\0"):
                pieces[id] = b""
        self.tokens = pieces + [bytes([byte]) for byte in range(255)] + [b"</s>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        """No tokens: llguidance asks for them to force text, which is switched off."""
        return []


def prepare_ahead(tokenizer: Tokenizer) -> bool:
    """Make the trie of a large vocabulary while the engine is idle; False if there is nothing to
    do.

    llguidance holds the GIL for 5 µs a token in one call: made with the first grammar it would
    pause every stream."""
    if tokenizer.n_vocab < LARGE or tokenizer in _tries:
        return False
    vocabulary_of(tokenizer)
    return True


def vocabulary_of(tokenizer: Tokenizer) -> tuple[LLTokenizer, PieceTable]:
    """The trie of a tokenizer, and the tables for JSON; made by the first call."""
    with _lock:
        trie = _tries.get(tokenizer)
        if trie is None:
            import llguidance

            wrapper: Any = _Wrapper(tokenizer)
            pieces = PieceTable(wrapper.tokens[: tokenizer.n_vocab], tokenizer.n_vocab)
            trie = llguidance.LLTokenizer(wrapper, n_vocab=len(wrapper.tokens)), pieces
            _tries[tokenizer] = trie
        return trie


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The id of the extra token for one byte (not 0xFF)."""
    return tokenizer.n_vocab + byte


@functools.cache
def byte_vocabulary() -> LLTokenizer:
    """A vocabulary of single bytes, in which a grammar compiles in a millisecond."""
    import llguidance

    return llguidance.LLTokenizer("byte")

"""Grammar matcher: a grammar compiled for a vocabulary, its state in a generation, its token bitmask.

llguidance parses and computes the masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logitless.models.grammar.errors import GrammarError, reason
from logitless.models.grammar.json_text import JsonText, Limits, limits_of
from logitless.models.grammar.sources import KINDS, explained, to_lark
from logitless.models.grammar.vocabulary import LIMITS, byte_token, vocabulary_of
from logitless.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.uint32]

MAX_CHARS = 1 << 20  # of a source
# Any tokens that spell an allowed text are allowed, as in llama.cpp, and not only those that a
# tokenizer would choose.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class Grammar:
    """A grammar, compiled. Immutable: any number of generations and threads may take matchers of it."""

    def __init__(
        self, kind: str, source: str, tokenizer: Tokenizer, start: LLMatcher, limits: Limits | None = None
    ) -> None:
        self.kind = kind
        self.source = source
        self.tokenizer = tokenizer
        self._start = start
        self._limits = limits

    @classmethod
    def compile(cls, kind: str, source: str, tokenizer: Tokenizer) -> Grammar:
        """A grammar for a vocabulary. GrammarError names the fault and its place.

        kind is one of KINDS: "gbnf" (llama.cpp's dialect), "json_schema" (the schema as JSON text;
        keywords that cannot be enforced are ignored, as llama.cpp does) and "strict_json_schema"
        (they are errors), "regex" (Rust's dialect, of the whole output), or "lark" (llguidance's,
        whose rules may contain `json_rule(schema)` and `quoted(text)`). The first grammar of a
        large vocabulary takes a second: not for the event loop."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of grammar {kind!r}; known are {', '.join(KINDS)}")
        if len(source) > MAX_CHARS:
            raise GrammarError(f"has {len(source)} characters, more than {MAX_CHARS}")
        vocabulary, _ = vocabulary_of(tokenizer)
        lark = _NO_FORCING + to_lark(kind, source, tokenizer)
        start = _start(vocabulary, lark)
        if start.is_error():
            raise explained(kind, source, start.get_error())
        grammar = cls(kind, source, tokenizer, start, limits_of(lark))
        if not grammar.matcher().mask().any():
            raise GrammarError("allows no text")
        return grammar

    def matcher(self) -> Matcher:
        """A new generation's state."""
        engine = self._start.deep_copy()
        if self._limits is None:
            return Matcher(self.tokenizer, engine)
        return Matcher(self.tokenizer, engine, JsonText(engine, vocabulary_of(self.tokenizer)[1], self._limits))


class Matcher:
    """Grammar state of one generation. For one thread at a time; long calls release the GIL."""

    def __init__(self, tokenizer: Tokenizer, matcher: LLMatcher, json: JsonText | None = None) -> None:
        self.tokenizer = tokenizer
        self.ended = False  # by an end token
        self._matcher = matcher
        self._json = json  # between the text and the engine, where a grammar has JSON
        self._history: list[int] = []  # llguidance tokens of each accepted token

    def mask(self) -> Bits:
        """Token bitmask of the next position, (⌈V/32⌉,) u32: bit i of word w allows token 32·w + i.

        End tokens are allowed where the grammar can end, and are the only ones where it must.
        Raises GrammarError if the grammar has become too complex."""
        n_vocab = self.tokenizer.n_vocab
        bits = np.zeros(-(-(n_vocab + 256) // 32), np.uint32)
        if not self.ended and self._json is not None:
            self._json.mask(bits)
        elif not self.ended and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        words = bits[: -(-n_vocab // 32)]
        if n_vocab % 32:
            words[-1] &= np.uint32((1 << (n_vocab % 32)) - 1)
        if self.can_end:
            for id in self.tokenizer.eog_ids:
                words[id // 32] |= np.uint32(1 << (id % 32))
        return words

    def accept(self, id: int) -> bool:
        """Advance by a token; False, and no change, if the grammar does not allow it."""
        if id in self.tokenizer.eog_ids:
            if not self.can_end:
                return False
            self.ended = True
            self._history.append(0)
            return True
        if self.ended or not self._consume(id):
            self._check()
            return False
        self._history.append(1)
        return True

    def accept_bytes(self, text: bytes) -> bool:
        """Advance by the bytes of a token, or of its last part; `rollback` counts them as one token."""
        if self._json is not None:
            if self.ended or not self._json.accept(text):
                self._check()
                return False
            self._history.append(1)
            return True
        ids = [byte_token(self.tokenizer, byte) for byte in text if byte != 0xFF]
        n_accepted = 0 if self.ended or len(ids) != len(text) else self._matcher.try_consume_tokens(ids)
        if n_accepted != len(text):
            if n_accepted:
                self._matcher.rollback(n_accepted)
            self._check()
            return False
        self._history.append(n_accepted)
        return True

    def rollback(self, n: int) -> None:
        """Undo the last n accepted tokens."""
        if not 0 <= n <= len(self._history):
            raise ValueError(f"{n} tokens to take back of {len(self._history)}")
        lengths = self._history[len(self._history) - n :]
        del self._history[len(self._history) - n :]
        if n:
            self.ended = False
        if self._json is not None:
            self._json.rollback(sum(lengths))
        elif sum(lengths):
            self._matcher.rollback(sum(lengths))

    @property
    def can_end(self) -> bool:
        """True if the accepted text is complete."""
        return self.ended or bool((self._json or self._matcher).is_accepting())

    def copy(self) -> Matcher:
        """An independent copy of the state."""
        json = None if self._json is None else self._json.copy()
        other = Matcher(self.tokenizer, self._matcher.deep_copy() if json is None else json.engine, json)
        other.ended, other._history = self.ended, self._history.copy()
        return other

    def _consume(self, id: int) -> bool:
        if self._json is not None:
            return self._json.accept(self.tokenizer.piece(id), id)
        return not self._matcher.is_stopped() and bool(self._matcher.try_consume_tokens([id]) == 1)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(reason(self._matcher.get_error()))


def _start(vocabulary: LLTokenizer, lark: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS)
    return LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)

"""Synthetic SentencePiece vocabulary of any size: text round-trips, and random ids read as words.

Three control tokens, 256 byte tokens and the printable ASCII characters make it complete; the rest
are syllables and words, each preceded by all of its own prefixes, so that merging from the left
reaches every piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, flag, numbers, text, texts, u32

SPACE = "▁"  # SentencePiece's visible space
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # gguf.TokenType
N_SPECIAL = 3  # <unk>, <s>, </s>
_CHARACTERS = [SPACE, *map(chr, range(33, 127))]
SMALLEST = N_SPECIAL + 256 + len(_CHARACTERS)

_WORDS = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by not but what
some we can out other were all there when up use your how said an each she which do their time if will way about
many then them would like so these her long make thing see him two has look more day could go come did number no
most people my over know than call first who may down side been now find little big girl boy dog cat house
"""
_SYLLABLES = ["".join(pair) for pair in product("tnsrldmkbpgvfhwjzc", "aeiou")]


def _words() -> Iterator[str]:
    """Endless, or nearly: 8 million words."""
    yield from (SPACE + word for word in _WORDS.split())
    for n in (1, 2, 3):
        for syllables in product(_SYLLABLES, repeat=n):
            word = "".join(syllables)
            yield SPACE + word
            yield word
    yield from ("".join(syllables) for syllables in product(_SYLLABLES, repeat=4))


def _pieces() -> Iterator[str]:
    """Pieces of two characters and more, each once, after its own prefixes."""
    prefixes = set()
    for word in _words():
        for n in range(2, len(word) + 1):
            if word[:n] not in prefixes:
                prefixes.add(word[:n])
                yield word[:n]


def vocabulary(n_vocab: int) -> tuple[list[bytes], list[float], list[int]]:
    """Pieces, scores and token types of a vocabulary of that size. Raises ValueError below SMALLEST (354) pieces."""
    if n_vocab < SMALLEST:
        raise ValueError(f"a vocabulary of {n_vocab} pieces is too small; the least is {SMALLEST}")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = list(islice(_pieces(), n_vocab - SMALLEST))
    tokens = [piece.encode() for piece in [*special, *pieces, *_CHARACTERS]]
    if len(tokens) != n_vocab:
        raise ValueError(f"a vocabulary of {n_vocab} pieces is too large")
    # earlier merges first
    scores = [0.0] * len(special) + [-float(rank) for rank in range(n_vocab - len(special))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (n_vocab - len(special))
    return tokens, scores, types


def vocabulary_keys(
    tokens: Sequence[str | bytes], scores: Sequence[float], types: Sequence[int], *, space_prefix: bool = True
) -> dict[str, Key]:
    """Keys of a vocabulary that begins with <unk>, <s> and </s>. `space_prefix`: texts get a space in front."""
    keys = {
        "model": text("llama"),
        "pre": text("default"),
        "tokens": texts(tokens),
        "scores": numbers(scores),
        "token_type": Key(types, ValueType.ARRAY, ValueType.INT32),
        "unknown_token_id": u32(0),
        "bos_token_id": u32(1),
        "eos_token_id": u32(2),
        "add_bos_token": flag(True),
        "add_eos_token": flag(False),
        "add_space_prefix": flag(space_prefix),
    }
    return {f"tokenizer.ggml.{name}": key for name, key in keys.items()}

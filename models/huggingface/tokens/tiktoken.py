"""Vocabularies of tiktoken (Kimi's tiktoken.model, Qwen 1's qwen.tiktoken): tokens by rank, as bytes of base 64.

A token's merge is the pair that is left of its bytes after all merges of lower rank."""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from logitless.models.errors import ModelFileError
from logitless.models.tokenizer.bpe import BYTE_OF_CHAR

_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


@dataclass(frozen=True)
class TiktokenFile:
    pre: str  # GGUF's name of the pre-tokenizer
    special: tuple[str, ...]  # tokens behind the ranks; {} is the id


_OF_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
TIKTOKEN_FILES = {
    "tiktoken.model": TiktokenFile("kimi-k2", ("<|reserved_token_{}|>",) * 256),
    "qwen.tiktoken": TiktokenFile("qwen2", _OF_QWEN),
}


def read_ranks(path: Path) -> dict[bytes, int]:
    """ModelFileError: the file is no vocabulary of tiktoken."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise ModelFileError(path, "is no vocabulary of tiktoken, a token and its rank a line") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    if sorted(ranks.values()) != list(range(len(pairs))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelFileError(path, "has not one token for each rank and each byte")
    return ranks


def as_text(token: bytes) -> str:
    """A token in GPT-2's alphabet of bytes."""
    return "".join(_CHARS[byte] for byte in token)


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge of each token of several bytes, in order of rank."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [(a, b) for a, b in halves if ranks.get(a, rank) < rank and ranks.get(b, rank) < rank]
        if len(halves) < 2:
            merges += halves
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            i = pairs.index(min(pairs))
            if pairs[i] >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges

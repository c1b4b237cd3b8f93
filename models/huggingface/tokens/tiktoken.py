"""Vocabularies by rank, as bytes of base 64 (tiktoken's files, Mistral's tekken.json) or as literals (RWKV's file).

A token's merge is the pair that is left of its bytes after all merges of lower rank."""

from __future__ import annotations

import ast
import binascii
from base64 import b64decode
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from logitless.models.errors import ModelFileError
from logitless.models.tokenizer.bpe import BYTE_OF_CHAR

_MOST_BYTES = 1024  # of a token; the time to find its merge grows with their square
_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


@dataclass(frozen=True)
class TiktokenFile:
    pre: str  # GGUF's name of the pre-tokenizer
    special: tuple[str, ...]  # tokens behind the ranks; {} is the id


_OF_TEKKEN = (  # of files that do not list them
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_OF_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
TIKTOKEN_FILES = {
    "tiktoken.model": TiktokenFile("kimi-k2", ("<|reserved_token_{}|>",) * 256),
    "qwen.tiktoken": TiktokenFile("qwen2", _OF_QWEN),
}


class _Rank(Struct):
    rank: int
    token_bytes: str


class _Special(Struct):
    rank: int
    token_str: str


class _TekkenConfig(Struct):
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(Struct):
    config: _TekkenConfig
    vocab: list[_Rank]
    special_tokens: list[_Special] | None = None


def read_ranks(path: Path) -> dict[bytes, int]:
    """ModelFileError: the file is no vocabulary of tiktoken."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise ModelFileError(path, "is no vocabulary of tiktoken, a token and its rank a line") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    return _checked(path, ranks, len(pairs))


def read_tekken(path: Path) -> tuple[dict[bytes, int], list[str]]:
    """Ranks and the special tokens before them. ModelFileError: the file is no vocabulary of Mistral's."""
    try:
        whole = msgspec.json.decode(path.read_bytes(), type=_Tekken)
        n, n_special = whole.config.default_vocab_size, whole.config.default_num_special_tokens
        ranks = {b64decode(t.token_bytes, validate=True): t.rank for t in whole.vocab if t.rank < n - n_special}
    except (msgspec.MsgspecError, ValueError, binascii.Error) as error:
        raise ModelFileError(path, f"is no vocabulary of Mistral's: {error}") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    if not 3 <= n_special < n < 1 << 24:
        raise ModelFileError(path, f"has {n_special} special tokens of {n}")
    listed = dict(enumerate(_OF_TEKKEN)) if whole.special_tokens is None else {}
    own = {t.rank: t.token_str for t in whole.special_tokens or ()}
    if len(own) < len(whole.special_tokens or ()) or not all(0 <= rank < n_special for rank in own):
        raise ModelFileError(path, f"'special_tokens' has a rank twice, or one that is not from 0 to {n_special - 1}")
    listed |= own
    return _checked(path, ranks, n - n_special), [listed.get(i, f"<SPECIAL_{i}>") for i in range(n_special)]


def _checked(path: Path, ranks: dict[bytes, int], n: int) -> dict[bytes, int]:
    if sorted(ranks.values()) != list(range(n)) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelFileError(path, "has not one token for each rank and each byte")
    if max(map(len, ranks)) > _MOST_BYTES:
        raise ModelFileError(path, f"has a token of {max(map(len, ranks))} bytes; at most {_MOST_BYTES} are supported")
    return ranks


def read_rwkv(path: Path) -> list[str]:
    """Tokens of RWKV's file, a line `id literal length` each from 1 on, in GGUF's form: bytes' literals without quotes.
    ModelFileError: the file is no such vocabulary."""
    tokens = []
    try:
        for i, line in enumerate(path.read_text("utf-8").rstrip("\n").split("\n"), 1):
            id, _, rest = line.partition(" ")
            literal, _, length = rest.rpartition(" ")
            token = ast.literal_eval(literal)
            token = token.encode() if isinstance(token, str) else token
            if not isinstance(token, bytes) or (int(id), int(length)) != (i, len(token)):
                raise ValueError
            tokens.append(repr(token)[2:-1])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ModelFileError(path, "is no vocabulary of RWKV, an id, a token and its length a line") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    return tokens


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

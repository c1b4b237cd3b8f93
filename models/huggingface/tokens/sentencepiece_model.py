"""SentencePiece models (tokenizer.model): pieces, scores and types, read from their protobuf message.

Not the sentencepiece package, which does not tell user-defined pieces from others."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from logitless.models.errors import ModelFileError

UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[tuple[str, float, int]]  # text, score, type: GGUF's numbers are SentencePiece's
    kind: int  # UNIGRAM, BPE or another
    add_space_prefix: bool
    merge_spaces: bool
    charsmap: bytes  # normalisations


def read_model(path: Path) -> SentencePieceModel:
    """ModelFileError: the file is no SentencePiece model."""
    pieces, trainer, normalizer = [], {}, {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                text, score = piece.get(1, b""), piece.get(2, bytes(4))
                if not isinstance(text, bytes) or not isinstance(score, bytes):
                    raise ValueError
                pieces.append((text.decode(), float(struct.unpack("<f", score)[0]), int(piece.get(3, 1))))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
        charsmap = normalizer.get(2, b"")
        if not pieces or not isinstance(charsmap, bytes):
            raise ValueError
        prefix, merges = (bool(normalizer.get(number, 1)) for number in (3, 4))
        return SentencePieceModel(pieces, int(trainer.get(3, UNIGRAM)), prefix, merges, charsmap)
    except (ValueError, IndexError, TypeError, struct.error):
        raise ModelFileError(path, "is no SentencePiece model") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protobuf message by number: whole numbers, or the bytes of anything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind] if kind in (1, 5) else -1, at)
        if size < 0 or at + size > len(data):
            raise ValueError
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError

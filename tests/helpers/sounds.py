"""Sounds of tests: sines as WAV files, and in the formats that soundfile writes."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def sine(hertz: float, n: int, rate: int = 16_000, size: float = 0.5) -> F32:
    """n samples of a sine that begins at its zero."""
    return (size * np.sin(2 * np.pi * hertz / rate * np.arange(n))).astype(np.float32)


def wav(samples: F32, rate: int = 16_000, width: int = 2) -> bytes:
    """A WAV file of integers of `width` bytes, by Python's own writer. samples: (n,) or (n, channels)."""
    largest = 2 ** (8 * width - 1)
    whole = np.clip(np.rint(samples.astype(np.float64) * largest), -largest, largest - 1).astype(np.int64)
    raw = (whole + largest if width == 1 else whole).astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1 if samples.ndim == 1 else samples.shape[1], width, rate, 0, "NONE", ""))
        writer.writeframes(raw)
    return file.getvalue()


def riff(coding: int, bits: int, raw: bytes, *, rate: int = 16_000, channels: int = 1, extra: bytes = b"") -> bytes:
    """A WAV file of any coding, whatever its fields say. extra: chunks before the samples."""
    stride = channels * bits // 8
    head = struct.pack("<HHIIHH", coding, channels, rate, rate * stride & 0xFFFF_FFFF, stride & 0xFFFF, bits)
    body = b"WAVE" + chunk(b"fmt ", head) + extra + chunk(b"data", raw)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    """A chunk of a RIFF file; `size`: bytes that it says it has."""
    return name + (len(data) if size is None else size).to_bytes(4, "little") + data + b"\0" * (len(data) % 2)


def packed(samples: F32, rate: int, form: str, coding: str | None = None) -> bytes:
    """A sound file by soundfile, in one of its formats."""
    import soundfile

    file = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(file, "w", rate, channels, coding, format=form) as writer:
        for part in np.split(samples, range(1000, len(samples), 1000)):  # libsndfile fails on long parts of Vorbis
            writer.write(part)
    return file.getvalue()


def changed(data: bytes, places: Sequence[tuple[int, Any]]) -> bytes:
    """The file with other bytes in some places."""
    own = bytearray(data)
    for at, bytes_there in places:
        own[at : at + len(bytes_there)] = bytes_there
    return bytes(own)

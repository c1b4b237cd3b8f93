"""WAV files: PCM of 8 to 32 bits and floats, in blocks of samples."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
BLOCK = 1 << 16  # samples per channel of a decoded block
MAX_CHUNKS = 256  # before the samples
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_STREAMED = (0, 0xFFFF_FFFF)  # sizes of writers that cannot seek back: the samples end with the file


class AudioError(ValueError):
    """A sound file cannot be used; the text is one line without its name."""


@dataclass(frozen=True)
class Sound:
    """An opened sound file: rate in Hz, and samples in blocks (n, n_channels) f32, −1 … 1."""

    rate: int
    n_channels: int
    blocks: Iterator[F32]


def open_wav(data: bytes) -> Sound:
    """Open a WAV file. AudioError: it is broken, or its coding is neither PCM nor float."""
    coding = b""
    for name, start, size in _chunks(data):
        if name == b"fmt ":
            coding = data[start : start + size]
        elif name == b"data":
            return _sound(coding, data, start, size)
    raise AudioError("has no samples")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, start, size in bytes) of each chunk after the head. Samples of a streamed file reach to its end."""
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if name == b"data" and size in _STREAMED:
            size = len(data) - at
        if at + size > len(data):
            raise AudioError(f"is cut off: {size} bytes should follow byte {at}, there are {len(data) - at}")
        yield name, at, size
        at += size + size % 2
    raise AudioError(f"has more than {MAX_CHUNKS} chunks")


def _sound(coding: bytes, data: bytes, start: int, size: int) -> Sound:
    if len(coding) < 16:
        raise AudioError("does not tell the coding of its samples")
    kind, n_channels, rate, _, stride, bits = struct.unpack_from("<HHIIHH", coding)
    if kind == _EXTENSIBLE and len(coding) >= 26:
        kind = int.from_bytes(coding[24:26], "little")
    if (kind, bits) not in _READERS:
        raise AudioError(f"has the coding {kind} of {bits} bits; PCM of 8 to 32 and floats are read")
    if not n_channels or stride != n_channels * bits // 8:
        raise AudioError(f"has {stride} bytes for {n_channels} channels of {bits} bits")
    return Sound(rate, n_channels, _blocks(memoryview(data)[start : start + size], n_channels, stride, (kind, bits)))


def _blocks(samples: memoryview, n_channels: int, stride: int, coding: tuple[int, int]) -> Iterator[F32]:
    kind, divisor = _READERS[coding]
    for first in range(0, len(samples) // stride * stride, BLOCK * stride):
        raw = np.frombuffer(samples[first : first + BLOCK * stride], np.uint8)
        raw = raw[: len(raw) // stride * stride]
        if coding == (_PCM, 24):  # the low byte of 32 bits is 0
            raw = np.pad(raw.reshape(-1, 3), ((0, 0), (1, 0))).reshape(-1)
        x = raw.view(kind).astype(np.float32)
        if coding == (_PCM, 8):
            x -= 128
        yield (x if divisor == 1 else x * np.float32(1 / divisor)).reshape(-1, n_channels)


_READERS = {  # (coding, bits) → (type, divisor)
    (_PCM, 8): ("u1", 2**7),
    (_PCM, 16): ("<i2", 2**15),
    (_PCM, 24): ("<i4", 2**31),
    (_PCM, 32): ("<i4", 2**31),
    (_FLOAT, 32): ("<f4", 1),
    (_FLOAT, 64): ("<f8", 1),
}

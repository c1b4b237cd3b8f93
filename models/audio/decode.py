"""Decoding of sound files to waveforms: WAV by our own reader, others by libsndfile (soundfile).

A file is decoded in blocks, mixed to one channel and resampled as it is read. So it takes
the memory of its waveform, however well it is compressed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import numpy as np

from logitless.models.audio.wav import BLOCK, F32, AudioError, Sound, open_wav
from logitless.models.audio.waveform import RATE, Waveform, resampled

FORMATS = ("WAV", "MP3", "FLAC", "Ogg")
MAX_SECONDS = 600.0
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 1000, 384_000
_UNKNOWN = 2**63 - 1  # libsndfile's number of samples of a stream
_MP3 = re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)  # a tag, or a frame of the layers 1 to 3


def audio_format(data: bytes) -> str | None:
    """The format of a file by its first bytes, one of FORMATS; None: it is no sound file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] in (b"fLaC", b"OggS"):
        return "FLAC" if data[:1] == b"f" else "Ogg"
    return "MP3" if _MP3.match(data) else None


def decode_audio(data: bytes, max_seconds: float = MAX_SECONDS, check: Callable[[], None] = lambda: None) -> Waveform:
    """Decode a file to a waveform; channels are averaged. AudioError: it is none of FORMATS, broken, empty,
    or longer than `max_seconds`. `check` is called for each block;
    an exception of it ends the work."""
    kind = audio_format(data)
    if kind is None:
        raise AudioError(f"is no sound of a known format ({', '.join(FORMATS)})")
    sound = open_wav(data) if kind == "WAV" else _open(data, kind)
    if not 1 <= sound.n_channels <= MAX_CHANNELS:
        raise AudioError(f"has {sound.n_channels} channels, 1 to {MAX_CHANNELS} are possible")
    if not MIN_RATE <= sound.rate <= MAX_RATE:
        raise AudioError(f"has a rate of {sound.rate} Hz, {MIN_RATE} to {MAX_RATE} are possible")
    n, parts = 0, []
    with np.errstate(all="ignore"):  # _mono refuses NaN and infinity
        for part in resampled(_mono(sound, check), sound.rate):
            parts.append(part)
            n += len(part)
            if n > max_seconds * RATE:
                raise AudioError(f"is longer than {max_seconds:g} seconds")
    if not n:
        raise AudioError("has no samples")
    return Waveform(np.clip(np.concatenate(parts), -1, 1))


def _mono(sound: Sound, check: Callable[[], None]) -> Iterator[F32]:
    for block in sound.blocks:
        check()
        mono = block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError("has samples that are no numbers")
        yield np.clip(mono, -1, 1)


def _open(data: bytes, kind: str) -> Sound:
    """The sound of a compressed file."""
    try:
        from soundfile import LibsndfileError, SoundFile
    except (ImportError, OSError):
        raise AudioError(f"is {kind}, which needs soundfile on the server: pip install 'logitless[audio]'") from None

    broken = AudioError(f"is {kind} that cannot be decoded")

    def blocks() -> Iterator[F32]:
        n = 0
        try:
            while len(block := file.read(BLOCK, "float32", always_2d=True)):
                n += len(block)
                yield block
        except LibsndfileError:
            raise broken from None
        declared = 0 if file.frames == _UNKNOWN else file.frames
        if n < (declared if kind == "FLAC" else declared // 2):  # an estimate in other formats
            raise AudioError(f"is cut off or broken: {n} of {declared} samples can be decoded")

    try:
        file = SoundFile(io.BytesIO(data))
    except (LibsndfileError, TypeError, ValueError):
        raise broken from None
    file.seekable = lambda: False  # soundfile seeks after each block otherwise, and some files cannot be sought
    return Sound(file.samplerate, file.channels, blocks())

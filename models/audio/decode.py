"""Decoding of sound files to waveforms: WAV by our own reader, others by libsndfile (soundfile).

A file is decoded in blocks, mixed to one channel and resampled as it is read. So the memory that it
takes is that of the waveform, however much is packed into it.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from threading import Lock

import numpy as np

from logitless.models.audio.wav import BLOCK, F32, AudioError, Sound, open_wav
from logitless.models.audio.waveform import RATE, Waveform, resampled

FORMATS = ("WAV", "MP3", "FLAC", "Ogg")
MAX_SECONDS = 600.0
MAX_CHANNELS = 8
KEPT_NBYTES = 64 << 20  # samples of files that were read last
MIN_RATE, MAX_RATE = 1000, 384_000
_UNKNOWN = 2**63 - 1  # samples, as libsndfile tells them
_MP3 = re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)  # a tag, or a frame of the layers 1 to 3


def audio_format(data: bytes) -> str | None:
    """One of FORMATS, as the first bytes of a file tell it; None: it is no sound."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] in (b"fLaC", b"OggS"):
        return "FLAC" if data[:1] == b"f" else "Ogg"
    return "MP3" if _MP3.match(data) else None


def decode_audio(data: bytes, max_seconds: float = MAX_SECONDS, look: Callable[[], None] = lambda: None) -> Waveform:
    """The sound of a file, its channels averaged. AudioError: it is none of FORMATS, broken, empty,
    or longer than `max_seconds`. `look` is called for each block; what it raises ends the work."""
    kind = audio_format(data)
    if kind is None:
        raise AudioError(f"is no sound of a known format ({', '.join(FORMATS)})")
    sound = open_wav(data) if kind == "WAV" else _open(data, kind)
    if not 1 <= sound.n_channels <= MAX_CHANNELS:
        raise AudioError(f"has {sound.n_channels} channels, 1 to {MAX_CHANNELS} are possible")
    if not MIN_RATE <= sound.rate <= MAX_RATE:
        raise AudioError(f"has a rate of {sound.rate} Hz, {MIN_RATE} to {MAX_RATE} are possible")
    n, parts = 0, []
    with np.errstate(all="ignore"):  # _mono looks for what is no number
        for part in resampled(_mono(sound, look), sound.rate):
            parts.append(part)
            n += len(part)
            if n > max_seconds * RATE:
                raise AudioError(f"is longer than {max_seconds:g} seconds")
    if not n:
        raise AudioError("has no samples")
    return Waveform(np.clip(np.concatenate(parts), -1, 1))


def _mono(sound: Sound, look: Callable[[], None]) -> Iterator[F32]:
    for block in sound.blocks:
        look()
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
        told = 0 if file.frames == _UNKNOWN else file.frames
        if n < (told if kind == "FLAC" else told // 2):  # other formats only guess it
            raise AudioError(f"is cut off or broken: {n} of {told} samples can be decoded")

    try:
        file = SoundFile(io.BytesIO(data))
    except (LibsndfileError, TypeError, ValueError):
        raise broken from None
    file.seekable = lambda: False  # else it seeks after each block, which some files do not allow
    return Sound(file.samplerate, file.channels, blocks())


class KeptWaveforms:
    """Decoder that keeps the waveforms that were read last, by the hashes of their files: each
    request of a conversation has all of its sounds again. Any thread may call it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Waveform] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def read(self, data: bytes, max_seconds: float, look: Callable[[], None]) -> Waveform:
        """As decode_audio, whose work it does once for a file."""
        name = blake2b(data, digest_size=16).digest()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        waveform = decode_audio(data, max_seconds, look)
        with self._lock:
            self._kept[name] = waveform
            while sum(kept.samples.nbytes for kept in self._kept.values()) > KEPT_NBYTES:
                self._kept.popitem(last=False)
        return waveform

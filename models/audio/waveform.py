"""Waveforms: mono sound at 16 kHz, which audio encoders read, and resampling to it.

A low-pass filter in the frequency domain passes 90 % of the frequencies that both rates have and
falls to zero, as a cosine, at the last one. Windows of the sound overlap by more than its response
lasts, so their seams do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import ceil, gcd

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
RATE = 16_000  # samples a second
PASSED = 0.9  # of the frequencies that both rates have
_EDGE = 1024  # samples of the lower rate: at that distance the response is below 1e-7
_WINDOW = 1 << 15  # samples of the higher rate, at least


@dataclass(frozen=True, eq=False)
class Waveform:
    """A piece of mono sound: samples (n,) in float32, −1 … 1, RATE a second."""

    samples: F32

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    @cached_property
    def digest(self) -> bytes:
        """Hash of the samples, 16 bytes. Equal digests have equal rows."""
        return blake2b(np.ascontiguousarray(self.samples).data, digest_size=16).digest()


def resampled(blocks: Iterable[F32], rate: int) -> Iterator[F32]:
    """Resample to RATE, in blocks: ceil(n · RATE / rate) samples in all; the first keeps its time."""
    if rate == RATE:
        yield from blocks
        return
    up, down = RATE // gcd(rate, RATE), rate // gcd(rate, RATE)
    n_edge = ceil(_EDGE / min(up, down))
    n_units = 1 << (max(4 * n_edge, ceil(_WINDOW / max(up, down))) - 1).bit_length()
    response = _response(n_units * down, n_units * up, rate)
    for window, n_new in _windows(blocks, n_units * down, n_edge * down):
        spectrum = np.fft.rfft(window)[: len(response)] * response
        sound = np.fft.irfft(spectrum, n_units * up)[n_edge * up : (n_units - n_edge) * up]
        yield sound[: ceil(n_new * up / down)].astype(np.float32, copy=False)


def _response(n: int, n_out: int, rate: int) -> F32:
    """Factors of the frequencies that both n and n_out samples have."""
    last = min(n, n_out) / 2
    at = np.arange(int(last) + 1) / last
    fall = np.clip((at - PASSED) / (1 - PASSED), 0, 1)
    return ((0.5 + 0.5 * np.cos(np.pi * fall)) * (n_out / n)).astype(np.float32)


def _windows(blocks: Iterable[F32], n: int, edge: int) -> Iterator[tuple[F32, int]]:
    """(n samples, number of new ones) of a sound between two silences. Windows overlap by two edges."""
    step = n - 2 * edge
    rest = np.zeros(edge, np.float32)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) >= n:
            yield rest[:n], step
            rest = rest[step:]
    while len(rest) > edge:
        yield np.pad(rest, (0, max(0, n - len(rest))))[:n], min(step, len(rest) - edge)
        rest = rest[step:]

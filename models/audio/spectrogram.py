"""Log-mel spectrograms of waveforms, in chunks: Whisper's of 30 seconds, Gemma 4's, Qwen 3's."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from logitless.models.audio.params import N_FRAMES, SPAN, SPANS, AudioEncoderKind, AudioParams
from logitless.models.audio.waveform import RATE, Waveform

F32 = npt.NDArray[np.float32]
N_FFT, HOP = 400, 160  # samples of a frame, and from one to the next
_EDGE = N_FFT // 2  # samples of the first frame before the sound
_CHUNK = N_FRAMES * HOP
_FLOOR = 1e-10  # minimum of a power; silence has it
WINDOW, N_FFT_WIDE = 320, 512  # samples of a frame of Gemma 4, and with the zeros behind them
LEAST_MAGNITUDE = 1e-3  # minimum of a magnitude of Gemma 4


def chunks_of(waveform: Waveform, p: AudioParams) -> list[F32]:
    """Log-mel spectrograms (frames, n_mel) f32 of the chunks of a sound, in order.

    Whisper's values are relative to the loudest of the sound: 8 decades below it is silence. Gemma 4's
    are absolute, and its last chunk has fewer frames, as Qwen 3's has, which is filled up with zeros."""
    samples = np.asarray(waveform.samples, np.float32)
    if p.projector.encoder is AudioEncoderKind.SPANS:
        frames = _relative(_log_power(_mirrored(samples, N_FFT), 1 + len(samples) // HOP, p.n_mel))
        chunks = [frames[i : i + SPANS * SPAN] for i in range(0, len(frames), SPANS * SPAN)]
        return [np.pad(chunk, ((0, -len(chunk) % SPAN), (0, 0))) for chunk in chunks]
    if p.projector.encoder is AudioEncoderKind.SPEECH:
        return [_pairs(samples, p.n_mel // 2)]
    if p.projector.encoder is AudioEncoderKind.CONFORMER:
        return [_magnitudes(samples[i : i + _CHUNK], p.n_mel) for i in range(0, max(1, len(samples)), _CHUNK)]
    n = len(samples)
    n_chunks = -(-n // _CHUNK) if p.projector.mirrored else (n // HOP + N_FRAMES + 1) // N_FRAMES
    n_chunks = max(1, n_chunks)
    # frames from here on have no sample
    n_frames = min(n_chunks * N_FRAMES, (max(n, N_FFT) + _EDGE) // HOP + 1)
    padded = np.zeros(max(n_frames * HOP, n) + N_FFT, np.float32)
    padded[_EDGE : _EDGE + n] = samples
    padded[:_EDGE] = padded[_EDGE + 1 : N_FFT + 1][::-1]
    end = _EDGE + n_chunks * _CHUNK
    if p.projector.mirrored and len(padded) >= end + _EDGE:
        padded[end : end + _EDGE] = padded[end - _EDGE - 1 : end - 1][::-1]
    out = np.full((n_chunks * N_FRAMES, p.n_mel), np.log10(_FLOOR), np.float32)
    out[:n_frames] = _log_power(padded, n_frames, p.n_mel)
    return list(_relative(out).reshape(n_chunks, N_FRAMES, p.n_mel))


def _mirrored(samples: F32, n_fft: int) -> F32:
    """A sound between half a frame of its mirrored begin and of its mirrored end, with zeros where it is shorter."""
    edge = n_fft // 2
    padded = np.zeros(max(1, len(samples)) + n_fft, np.float32)
    padded[edge : edge + len(samples)] = samples
    before, after = samples[1 : edge + 1][::-1], samples[-edge - 1 : -1][::-1]
    padded[edge - len(before) : edge] = before
    padded[len(padded) - edge :][: len(after)] = after
    return padded


def _log_power(padded: F32, n_frames: int, n_mel: int, n_fft: int = N_FFT) -> F32:
    """Logarithms of powers (n_frames, n_mel) of Whisper's frames, or of these between zeros (Granite Speech)."""
    out = np.empty((n_frames, n_mel), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::HOP]
    filters = mel_filters(n_mel) if n_fft == N_FFT else _wide_filters(n_mel)
    window = np.pad(_window(), (n_fft - N_FFT) // 2)
    for i in range(0, n_frames, N_FRAMES):
        part = slice(i, min(i + N_FRAMES, n_frames))
        power = np.abs(np.fft.rfft(frames[part] * window)) ** 2
        out[part] = np.log10(np.maximum(power @ filters.T, _FLOOR))
    return out


def _pairs(samples: F32, n_mel: int) -> F32:
    """Each two frames of a sound as one (n, 2 · n_mel), without a last one."""
    samples = np.pad(samples, (0, max(0, HOP - len(samples))))
    frames = _log_power(_mirrored(samples, N_FFT_WIDE), 1 + len(samples) // HOP, n_mel, N_FFT_WIDE)
    return _relative(frames)[: len(frames) // 2 * 2].reshape(-1, 2 * n_mel)


def _relative(logs: F32) -> F32:
    """Logarithms of powers as Whisper scales them, 8 decades below the loudest at least."""
    scaled: F32 = ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)
    return scaled


def _magnitudes(samples: F32, n_mel: int) -> F32:
    """Logarithms of magnitudes (frames, n_mel): a frame each HOP, the first with half a frame of
    zeros before the sound."""
    n_frames = max(1, (len(samples) + WINDOW // 2 - WINDOW - 1) // HOP + 1)
    padded = np.zeros((n_frames - 1) * HOP + N_FFT_WIDE, np.float32)
    n = min(len(samples), len(padded) - WINDOW // 2)
    padded[WINDOW // 2 : WINDOW // 2 + n] = samples[:n]
    frames = np.lib.stride_tricks.sliding_window_view(padded, N_FFT_WIDE)[::HOP]
    window = np.zeros(N_FFT_WIDE, np.float32)
    window[:WINDOW] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    magnitudes = np.abs(np.fft.rfft(frames * window))
    logs: F32 = np.log(np.maximum(magnitudes @ _wide_filters(n_mel).T, LEAST_MAGNITUDE)).astype(np.float32)
    return logs


@lru_cache
def _wide_filters(n_mel: int) -> F32:
    """Weights (n_mel, frequencies) of triangles of height 1 on the mel scale of HTK."""
    corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 1400), n_mel + 2) / 2595) - 1)
    return _triangles(corners, N_FFT_WIDE)


@lru_cache
def _window() -> F32:
    window: F32 = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)).astype(np.float32)
    return window


@lru_cache
def mel_filters(n_mel: int) -> F32:
    """Weights (n_mel, frequencies) of triangles of equal area with equidistant corners on Slaney's mel
    scale, which is linear up to 1 kHz, then logarithmic."""
    step, knee, log_step = 200 / 3, 15.0, np.log(6.4) / 27
    top = knee + np.log(RATE / 2 / 1000) / log_step
    mels = np.linspace(0, top, n_mel + 2)
    corners = np.where(mels < knee, mels * step, 1000 * np.exp((mels - knee) * log_step))
    heights = 2 / (corners[2:] - corners[:-2])
    filters: F32 = _triangles(corners, N_FFT) * heights[:, None].astype(np.float32)
    return filters


def _triangles(corners: npt.NDArray[np.float64], n_fft: int) -> F32:
    """Weights (n_mel, n_fft // 2 + 1) of triangles between each three neighbours of n_mel + 2 corners."""
    frequencies, n_mel = np.linspace(0, RATE / 2, n_fft // 2 + 1), len(corners) - 2
    low, middle, high = (corners[i : i + n_mel, None] for i in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    triangles: F32 = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    return triangles

"""Float64 reference of Voxtral's encoder of sounds, after Whisper's: sound → spectrograms → rows of the text model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from logitless.models.audio.waveform import Waveform
from tests.helpers.audio_files import AudioSpec

Array = npt.NDArray[np.float64]
_erf = np.vectorize(math.erf)


def spectrogram(sound: Waveform, n_mel: int, *, seconds: float) -> Array:
    """Whisper's log-mel spectrogram (frames, n_mel) of a sound followed by silence up to `seconds`."""
    x = np.zeros(round(seconds * 16000))
    x[: len(sound.samples)] = sound.samples
    x = np.pad(x, 200, "reflect")
    hann = np.hanning(401)[:-1]
    power = np.array([np.abs(np.fft.rfft(x[i : i + 400] * hann)) ** 2 for i in range(0, len(x) - 400, 160)])
    log = np.log10(np.maximum(power @ _filters(n_mel), 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4


def _hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def _filters(n_mel: int) -> Array:
    """Slaney's filters, as librosa.filters.mel makes them."""
    top = 15 + math.log(8) / (math.log(6.4) / 27)
    corners = [_hertz(top * i / (n_mel + 1)) for i in range(n_mel + 2)]
    out = np.zeros((201, n_mel))
    for m, (low, middle, high) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        for k in range(201):
            f = 40.0 * k
            if low <= f <= high:
                side = (f - low) / (middle - low) if f <= middle else (high - f) / (high - middle)
                out[k, m] = side * 2 / (high - low)
    return out


def rows(path: Path, spec: AudioSpec, mel: Array) -> Array:
    """Rows of the text model of one chunk's spectrogram (3000, n_mel), by Voxtral's encoder."""
    w = {t.name: t.data.astype(np.float64) for t in GGUFReader(path).tensors}
    x = mel.T
    for i in (1, 2):
        x = _gelu(_convolved(x, w[f"a.conv1d.{i}.weight"], stride=i) + w[f"a.conv1d.{i}.bias"].reshape(-1, 1))
    x = _transformer(w, spec, x.T + w["a.position_embd.weight"][:1500])
    x = _layer_norm(w, "a.post_ln", x)
    n = len(x) // spec.stack
    x = x[: n * spec.stack].reshape(n, -1)
    return _linear(w, "mm.a.mlp.2", _gelu(_linear(w, "mm.a.mlp.1", x)))


def _transformer(w: dict[str, Any], spec: AudioSpec, x: Array) -> Array:
    for i in range(spec.n_layer):
        b = f"a.blk.{i}."
        x = x + _attention(w, b, _layer_norm(w, f"{b}ln1", x), spec.n_head)
        x = x + _linear(w, f"{b}ffn_down", _gelu(_linear(w, f"{b}ffn_up", _layer_norm(w, f"{b}ln2", x))))
    return x


def _gelu(x: Array) -> Array:
    y: Array = x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return y


def _convolved(x: Array, w: Array, stride: int) -> Array:
    padded = np.pad(x, ((0, 0), (1, 1)))
    n = x.shape[1] // stride
    taps = np.stack([padded[:, k : k + stride * (n - 1) + 1 : stride] for k in range(3)], -1)
    y: Array = np.einsum("itk,oik->ot", taps, w)
    return y


def _layer_norm(w: dict[str, Any], name: str, x: Array) -> Array:
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    y: Array = x * w[f"{name}.weight"] + w[f"{name}.bias"]
    return y


def _linear(w: dict[str, Any], name: str, x: Array) -> Array:
    y: Array = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
    return y


def _attention(w: dict[str, Any], b: str, x: Array, n_head: int) -> Array:
    q, k, v = (_linear(w, f"{b}attn_{name}", x).reshape(len(x), n_head, -1).swapaxes(0, 1) for name in "qkv")
    s = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[2]))
    y = s / s.sum(2, keepdims=True) @ v
    return _linear(w, f"{b}attn_out", y.swapaxes(0, 1).reshape(len(x), -1))

"""Float64 reference of audio encoders: sound → spectrograms → rows of the text model.

It follows the papers and the models' own code (Whisper, Qwen2-Audio, Ultravox, Voxtral), not ours."""

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
    """Rows of the text model of one chunk's spectrogram (3000, n_mel)."""
    w = {t.name: t.data.astype(np.float64) for t in GGUFReader(path).tensors}
    x = mel.T
    for i in (1, 2):
        x = _gelu(_convolved(x, w[f"a.conv1d.{i}.weight"], stride=i) + w[f"a.conv1d.{i}.bias"].reshape(-1, 1))
    x = _transformer(w, spec, x.T + w["a.position_embd.weight"][:1500])
    if spec.kind == "qwen2a":
        x = x.reshape(750, 2, -1).mean(1)
    x = _layer_norm(w, "a.post_ln", x)
    if spec.stack:
        n = len(x) // spec.stack
        x = x[: n * spec.stack].reshape(n, -1)
    if spec.kind == "qwen2a":
        return _linear(w, "mm.a.fc", x)
    if spec.kind == "voxtral":
        return _linear(w, "mm.a.mlp.2", _gelu(_linear(w, "mm.a.mlp.1", x)))
    x = _linear(w, "mm.a.mlp.1", _rms_norm(x) * w["mm.a.norm_pre.weight"])
    value, gate = np.split(x, 2, 1)
    return _linear(w, "mm.a.mlp.2", _rms_norm(value * gate / (1 + np.exp(-gate))) * w["mm.a.norm_mid.weight"])


def span_rows(path: Path, spec: AudioSpec, mel: Array) -> Array:
    """Rows of the text model of one chunk's spectrogram (100 · n, n_mel), by Qwen 3's encoder."""
    w = {t.name: t.data.astype(np.float64) for t in GGUFReader(path).tensors}
    spans = []
    for span in np.split(mel, len(mel) // 100):
        x = span.T[None]  # channels, bins, frames
        for i in (1, 2, 3):
            padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
            x = np.einsum("cftyx,ocyx->oft", windows, w[f"a.conv2d.{i}.weight"]) + w[f"a.conv2d.{i}.bias"]
            x = _gelu(x)
        x = _linear(w, "a.conv_out", x.reshape(-1, x.shape[2]).T)
        spans.append(x + w["a.position_embd.weight"][: len(x)])
    x = _layer_norm(w, "a.post_ln", _transformer(w, spec, np.concatenate(spans)))
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


def _rms_norm(x: Array) -> Array:
    y: Array = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)
    return y


def _linear(w: dict[str, Any], name: str, x: Array) -> Array:
    y: Array = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
    return y


def _attention(w: dict[str, Any], b: str, x: Array, n_head: int) -> Array:
    q, k, v = (_linear(w, f"{b}attn_{name}", x).reshape(len(x), n_head, -1).swapaxes(0, 1) for name in "qkv")
    s = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[2]))
    y = s / s.sum(2, keepdims=True) @ v
    return _linear(w, f"{b}attn_out", y.swapaxes(0, 1).reshape(len(x), -1))


def conformer_rows(path: Path, spec: AudioSpec, mel: Array) -> Array:
    """Rows of the text model of one chunk's spectrogram (frames, n_mel), by Gemma 4's conformer."""
    w = {t.name: t.data.astype(np.float64) for t in GGUFReader(path).tensors}
    x = mel[None]
    for i in range(2):
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
        x = np.einsum("ctfyx,ocyx->tfo", windows, w[f"a.conv1d.{i}.weight"])
        x = (x - x.mean(2, keepdims=True)) / np.sqrt(x.var(2, keepdims=True) + 1e-6)
        x = np.maximum(0, x * w[f"a.conv1d.{i}.norm.weight"]).transpose(2, 0, 1)
    x = _bounded(w, "a.input_projection", x.transpose(1, 2, 0).reshape(x.shape[1], -1))
    for i in range(spec.n_layer):
        b = f"a.blk.{i}."
        x = x + 0.5 * _conformer_mlp(w, b, "", x)
        x = x + _scaled(w, f"{b}attn_post_norm", _local_attention(w, b, x, spec.n_head))
        y = _bounded(w, f"{b}conv_pw1", _scaled(w, f"{b}conv_norm", x))
        value, gate = np.split(y, 2, 1)
        y = np.pad(value / (1 + np.exp(-gate)), ((4, 0), (0, 0)))
        y = np.array([(y[t : t + 5] * w[f"{b}conv_dw.weight"].T).sum(0) for t in range(len(x))])
        x = x + _bounded(w, f"{b}conv_pw2", _silu(_scaled(w, f"{b}norm_conv", y)))
        x = _scaled(w, f"{b}ln2", x + 0.5 * _conformer_mlp(w, b, "_1", x))
    x = _scaled(w, "mm.a.soft_emb_norm", _linear(w, "a.pre_encode.out", x))
    return _linear(w, "mm.a.input_projection", x)


def _scaled(w: dict[str, Any], name: str, x: Array) -> Array:
    y: Array = _rms_norm(x) * w[f"{name}.weight"]
    return y


def _silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def _bounded(w: dict[str, Any], name: str, x: Array) -> Array:
    """A product whose input and output have bounds, where the file has them."""
    if f"{name}.input_min" not in w:
        return _linear(w, name, x)
    y = _linear(w, name, np.clip(x, w[f"{name}.input_min"], w[f"{name}.input_max"]))
    found: Array = np.clip(y, w[f"{name}.output_min"], w[f"{name}.output_max"])
    return found


def _conformer_mlp(w: dict[str, Any], b: str, suffix: str, x: Array) -> Array:
    x = _silu(_bounded(w, f"{b}ffn_up{suffix}", _scaled(w, f"{b}ffn_norm{suffix}", x)))
    return _scaled(w, f"{b}ffn_post_norm{suffix}", _bounded(w, f"{b}ffn_down{suffix}", x))


def _local_attention(w: dict[str, Any], b: str, x: Array, n_head: int) -> Array:
    """A row attends to itself and the 11 rows before it, by content and distance."""
    n, size = len(x), x.shape[1] // n_head
    x = _scaled(w, f"{b}attn_pre_norm", x)
    q, k, v = (_bounded(w, f"{b}attn_{name}", x).reshape(n, n_head, size) for name in "qkv")
    q = q * w[f"{b}per_dim_scale.weight"] / math.sqrt(size) / math.log(2)
    k = k * w[f"{b}per_dim_k_scale.weight"] * math.log(1 + math.e) / math.log(2)
    half = x.shape[1] // 2
    angles = np.arange(12)[:, None] / 1e4 ** (np.arange(half) / (half - 1))
    by_distance = _linear(w, f"{b}attn_k_rel", np.concatenate([np.sin(angles), np.cos(angles)], 1))
    out = np.zeros_like(q)
    for t in range(n):
        first = max(0, t - 11)
        keys = k[first : t + 1] + by_distance[: t - first + 1][::-1].reshape(-1, n_head, size)
        s = np.exp(50 * np.tanh(np.einsum("hd,shd->sh", q[t], keys) / 50))
        out[t] = np.einsum("sh,shd->hd", s / s.sum(0), v[first : t + 1])
    return _bounded(w, f"{b}attn_out", out.reshape(n, -1))

"""Audio projector files (mmproj) with random weights, text models beside them, and sounds."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter

from logitless.models.audio.waveform import RATE, Waveform
from tests.helpers.vision_files import (
    N_TEXT,
    SPECS,
    Faults,
    Fill,
    VisionSpec,
    add_vision,
    filler,
    with_tokens,
    write_text_model,
    written,
)


@dataclass(frozen=True)
class AudioSpec:
    """A small Whisper encoder and its projector."""

    kind: str
    stack: int = 0  # rows of the encoder that become one
    n_mel: int = 80
    n_embd: int = 40  # with which llama.cpp's rounding of Ultravox's stacks is that of real ones
    n_head: int = 2
    n_ff: int = 32
    n_layer: int = 2
    vision: VisionSpec | None = None  # the encoder of images beside it
    tokens: tuple[str, ...] = ()  # around sounds, in the text model
    text: VisionSpec | None = None  # the text model, where it is not a llama
    keys: dict[str, Any] = field(default_factory=dict)


N_CTX = 2048  # tokens of the text models
BOS_EOS = ("<|audio_bos|>", "<|audio_eos|>")
AUDIO_SPECS = {
    "ultravox": AudioSpec("ultravox", stack=8, tokens=("<|audio|>",)),
    "qwen2a": AudioSpec("qwen2a", n_mel=128, tokens=BOS_EOS),
    "voxtral": AudioSpec("voxtral", stack=4, n_mel=128, tokens=("[BEGIN_AUDIO]",)),
    "qwen2.5o audio": AudioSpec("qwen2.5o", n_mel=128, vision=SPECS["qwen2.5o"]),
    "qwen3a": AudioSpec("qwen3a", n_mel=128, tokens=("<|audio_start|>", "<|audio_end|>")),
    "granite_speech": AudioSpec(
        "granite_speech",
        n_mel=32,
        tokens=("<|audio|>",),
        n_layer=3,
        keys={
            "chunk_size": 40,
            "conv_kernel_size": 5,
            "max_pos_emb": 64,
            "projector.window_size": 15,
            "projector.downsample_rate": 5,
            "projector.head_count": 4,
        },
    ),
    "gemma4a": AudioSpec("gemma4a", n_mel=24, text=SPECS["gemma4v"]),
}
_SPEECH = AUDIO_SPECS["granite_speech"]
AUDIO_SPECS["granite_speech of layers"] = replace(_SPEECH, keys=_SPEECH.keys | {"feature_layer": [0, 2]})


def write_audio_projector(path: Path, spec: AudioSpec, seed: int = 0, faults: Faults = MappingProxyType({})) -> Path:
    """Write the projector file of a spec."""
    w = GGUFWriter(path, "clip")
    fill = filler(w, seed, faults)
    if spec.vision is None or spec.vision.kind == spec.kind:
        w.add_string("clip.projector_type", spec.kind)
    else:
        w.add_string("clip.vision.projector_type", spec.vision.kind)
        w.add_string("clip.audio.projector_type", spec.kind)
    if spec.vision is not None:
        add_vision(w, spec.vision, fill)
    w.add_bool("clip.has_audio_encoder", True)
    sizes = {
        "num_mel_bins": spec.n_mel,
        "embedding_length": spec.n_embd,
        "feed_forward_length": spec.n_ff,
        "projection_dim": N_TEXT,
        "block_count": spec.n_layer,
        "attention.head_count": spec.n_head,
    }
    if spec.stack:
        sizes["projector.stack_factor"] = spec.stack
    for key, value in (sizes | spec.keys).items():
        (w.add_array if isinstance(value, list) else w.add_uint32)(f"clip.audio.{key}", value)
    w.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    if spec.kind == "gemma4a":
        _add_conformer(fill, spec)
    elif spec.kind == "granite_speech":
        _add_speech(fill, spec)
    else:
        (_add_spans if spec.kind == "qwen3a" else _add_encoder)(fill, spec)
        _add_head(fill, spec)
    return written(w, path)


def _add_encoder(fill: Fill, spec: AudioSpec) -> None:
    n = spec.n_embd
    for i, n_in in ((1, spec.n_mel), (2, n)):
        fill(f"a.conv1d.{i}.weight", n, n_in, 3, std=(3 * n_in) ** -0.5)
        fill(f"a.conv1d.{i}.bias", n, 1)
    _add_transformer(fill, spec)


def _add_spans(fill: Fill, spec: AudioSpec) -> None:
    for i, n_in in ((1, 1), (2, 12), (3, 12)):
        fill(f"a.conv2d.{i}.weight", 12, n_in, 3, 3, std=2 * (9 * n_in) ** -0.5)
        fill(f"a.conv2d.{i}.bias", 12, 1, 1)
    fill("a.conv_out.weight", spec.n_embd, 12 * (spec.n_mel // 8))
    _add_transformer(fill, spec)


def _add_transformer(fill: Fill, spec: AudioSpec) -> None:
    n = spec.n_embd
    fill("a.position_embd.weight", 1500, n, std=0.3)
    for i in range(spec.n_layer):
        b = f"a.blk.{i}."
        for name, n_out, n_in in (
            *((f"attn_{kind}", n, n) for kind in ("q", "k", "v", "out")),
            ("ffn_up", spec.n_ff, n),
            ("ffn_down", n, spec.n_ff),
        ):
            fill(f"{b}{name}.weight", n_out, n_in)
            if name != "attn_k":
                fill(f"{b}{name}.bias", n_out)
        for name in ("ln1", "ln2"):
            fill(f"{b}{name}.weight", n, mean=1.0)
            fill(f"{b}{name}.bias", n)
    fill("a.post_ln.weight", n, mean=1.0)
    fill("a.post_ln.bias", n)


def _add_conformer(fill: Fill, spec: AudioSpec) -> None:
    n, channels, out = spec.n_embd, (8, 4), 48
    for i, n_in in enumerate((1, channels[0])):
        fill(f"a.conv1d.{i}.weight", channels[i], n_in, 3, 3, std=(9 * n_in) ** -0.5)
        fill(f"a.conv1d.{i}.norm.weight", channels[i], mean=1.0)
    fill("a.input_projection.weight", n, channels[1] * (spec.n_mel // 4))
    for i in range(spec.n_layer):
        b = f"a.blk.{i}."
        for suffix in ("", "_1"):
            fill(f"{b}ffn_norm{suffix}.weight", n, mean=1.0)
            fill(f"{b}ffn_up{suffix}.weight", spec.n_ff, n)
            fill(f"{b}ffn_down{suffix}.weight", n, spec.n_ff)
            fill(f"{b}ffn_post_norm{suffix}.weight", n, mean=1.0)
        for name in ("attn_pre_norm", "attn_post_norm", "ln2", "norm_conv", "conv_norm"):
            fill(f"{b}{name}.weight", n, mean=1.0)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "attn_k_rel", "conv_pw2"):
            fill(f"{b}{name}.weight", n, n)
        fill(f"{b}per_dim_scale.weight", n // spec.n_head, mean=1.0)
        fill(f"{b}per_dim_k_scale.weight", n // spec.n_head, mean=1.0)
        fill(f"{b}conv_pw1.weight", 2 * n, n)
        fill(f"{b}conv_dw.weight", n, 5)
        for name in ("attn_q", "ffn_up", "conv_pw2"):
            for bound, mean in {"input_min": -0.8, "input_max": 0.9, "output_min": -0.7, "output_max": 1.0}.items():
                fill(f"{b}{name}.{bound}", 1, mean=mean)
    fill("a.pre_encode.out.weight", out, n)
    fill("a.pre_encode.out.bias", out)
    fill("mm.a.soft_emb_norm.weight", out, mean=1.0)
    fill("mm.a.input_projection.weight", N_TEXT, out)


def _add_speech(fill: Fill, spec: AudioSpec) -> None:
    n, width = spec.n_embd, 2 * spec.n_embd
    queries = max(1, spec.keys["projector.window_size"] // spec.keys["projector.downsample_rate"])

    def matrix(name: str, n_out: int, n_in: int, *, bias: bool = True) -> None:
        fill(f"{name}.weight", n_out, n_in)
        if bias:
            fill(f"{name}.bias", n_out)

    def norm(name: str, size: int) -> None:
        fill(f"{name}.weight", size, mean=1.0)
        fill(f"{name}.bias", size)

    matrix("a.input_projection", n, spec.n_mel)
    matrix("a.enc_ctc_out", 12, n)
    fill("a.enc_ctc_out_mid.weight", n, 12, std=1.0)
    fill("a.enc_ctc_out_mid.bias", n)
    for i in range(spec.n_layer):
        b = f"a.blk.{i}."
        for suffix in ("", "_1"):
            norm(f"{b}ffn_norm{suffix}", n)
            matrix(f"{b}ffn_up{suffix}", spec.n_ff, n)
            matrix(f"{b}ffn_down{suffix}", n, spec.n_ff)
        for name in ("attn_q", "attn_k", "attn_v"):
            matrix(b + name, n, n, bias=False)
        matrix(f"{b}attn_out", n, n)
        fill(f"{b}attn_rel_pos_emb", 2 * spec.keys["max_pos_emb"] + 1, n // spec.n_head, std=0.5)
        for name in ("ln1", "ln2", "norm_conv"):
            norm(b + name, n)
        matrix(f"{b}conv_pw1", 2 * width, n)
        fill(f"{b}conv_dw.weight", width, spec.keys["conv_kernel_size"], std=0.5)
        norm(f"{b}conv_norm", width)
        matrix(f"{b}conv_pw2", n, width)
    fill("a.proj_query", 1, queries, n, std=1.0)
    norm("a.proj_norm", n)
    for i in range(2):
        b = f"a.proj_blk.{i}."
        for name, n_in in (("self", n), ("cross", n * (1 + len(spec.keys.get("feature_layer", ()))))):
            for part in ("q", "k", "v", "out"):
                matrix(f"{b}{name}_attn_{part}", n, n_in if part in "kv" else n)
            norm(f"{b}{name}_attn_norm", n)
        matrix(f"{b}ffn_up", 56, n)
        matrix(f"{b}ffn_down", n, 56)
        norm(f"{b}ffn_norm", n)
    matrix("a.proj_linear", N_TEXT, n)


def _add_head(fill: Fill, spec: AudioSpec) -> None:
    n, hidden = spec.n_embd * max(1, spec.stack), 48
    if spec.kind == "ultravox":
        fill("mm.a.norm_pre.weight", n, mean=1.0)
        fill("mm.a.mlp.1.weight", 2 * hidden, n)
        fill("mm.a.norm_mid.weight", hidden, mean=1.0)
        fill("mm.a.mlp.2.weight", N_TEXT, hidden)
    elif spec.kind in ("voxtral", "qwen3a"):
        fill("mm.a.mlp.1.weight", hidden, n)
        fill("mm.a.mlp.2.weight", N_TEXT, hidden)
        if spec.kind == "qwen3a":
            fill("mm.a.mlp.1.bias", hidden)
            fill("mm.a.mlp.2.bias", N_TEXT)
    else:
        fill("mm.a.fc.weight", N_TEXT, n)
        fill("mm.a.fc.bias", N_TEXT)


def write_audio_text_model(path: Path, spec: AudioSpec, stories: Path) -> Path:
    """Write a text model that a projector's rows fit."""
    if (text := spec.text or spec.vision) is not None:
        return write_text_model(path, text, stories, N_CTX)
    return with_tokens(stories, path, spec.tokens)


def sound(seconds: float, seed: int = 0, *, bits: int = 16) -> Waveform:
    """Tones that come and go, and noise; values that a file of so many bits has."""
    r = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    x = 0.02 * r.normal(size=len(t))
    for pitch in r.uniform(100, 4000, 4):
        x += 0.2 * np.sin(2 * np.pi * pitch * t) * (np.sin(2 * np.pi * r.uniform(0.2, 1) * t) > 0)
    x = np.clip(x, -1, 1)
    exact = np.round(x * 32767) / 32768 if bits == 16 else np.round(x * 127 + 127.5) / 127.5 - 1
    return Waveform(exact.astype(np.float32))


def wav(waveform: Waveform, *, bits: int = 16) -> bytes:
    """The bytes of a file of a waveform."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(bits // 8)
        file.setframerate(RATE)
        x = waveform.samples
        data = np.round(x * 32768).astype("<i2") if bits == 16 else np.round((x + 1) * 127.5).astype(np.uint8)
        file.writeframes(data.tobytes())
    return out.getvalue()

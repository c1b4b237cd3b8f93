"""Projectors (mmproj) with random weights, for a text model of any width.

The files load in llama.cpp as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from logitless.models.audio.params import N_POSITIONS
from logitless.models.gguf.write import Key, Progress, f32, flag, numbers, text, u32
from logitless.models.quantization.presets import file_type
from logitless.models.synthetic.random_tensors import RandomTensor, write_random

_GEMMA3, _QWEN25VL, _QWEN2A = "gemma3", "qwen2.5vl_merger", "qwen2a"


@dataclass(frozen=True)
class ProjectorShape:
    """The hyper-parameters of an encoder of images or sounds and its projector, under their GGUF names."""

    kind: str  # projector type
    image_size: int  # 0: it reads sounds
    patch_size: int  # of a spectrogram its bins
    n_embd: int
    n_layer: int
    n_head: int
    n_ff: int
    merge: int  # patches of a side that become one row


PROJECTOR_SHAPES: dict[str, ProjectorShape] = {
    "tiny": ProjectorShape(_GEMMA3, 32, 4, 32, 2, 4, 64, 2),
    "siglip": ProjectorShape(_GEMMA3, 896, 14, 1152, 27, 16, 4304, 4),  # so400m, as Gemma 3 has it
    "qwen2.5vl": ProjectorShape(_QWEN25VL, 560, 14, 1280, 32, 16, 3420, 2),
    "whisper": ProjectorShape(_QWEN2A, 0, 128, 1280, 32, 20, 5120, 1),  # large-v3, as Qwen2-Audio has it
}


def synthesize_projector(
    path: str | Path,
    n_embd_text: int,
    shape: str | ProjectorShape = "siglip",
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> None:
    """Write a projector with random weights, F16 as most are. The same arguments give the same bytes.

    `n_embd_text`: width of the text model. `shape`: a name of PROJECTOR_SHAPES or a
    ProjectorShape. Raises ValueError for a shape that is not known."""
    if isinstance(shape, str):
        if shape not in PROJECTOR_SHAPES:
            raise ValueError(f"unknown shape {shape!r}; the shapes are {', '.join(PROJECTOR_SHAPES)}")
        label, p = shape, PROJECTOR_SHAPES[shape]
    else:
        label, p = "custom", shape
    tensors = [*_encoder(p), *_head(p, n_embd_text)] if p.image_size else _audio(p, n_embd_text)
    write_random(path, "clip", _keys(p, n_embd_text, f"random {label}, seed {seed}"), tensors, seed, progress)


def _keys(p: ProjectorShape, n_embd_text: int, name: str) -> dict[str, Key]:
    is_vision, is_gemma = p.image_size > 0, p.kind == _GEMMA3
    part = "vision" if is_vision else "audio"
    counts = {
        **({"image_size": p.image_size, "patch_size": p.patch_size} if is_vision else {"num_mel_bins": p.patch_size}),
        "embedding_length": p.n_embd,
        "feed_forward_length": p.n_ff,
        "projection_dim": n_embd_text,
        "block_count": p.n_layer,
        "attention.head_count": p.n_head,
    }
    if is_vision:
        counts["projector.scale_factor" if is_gemma else "spatial_merge_size"] = p.merge
    if p.kind == _QWEN25VL:
        counts["n_wa_pattern"] = 8  # every eighth layer attends to the whole image
    activation = {"clip.use_gelu" if is_gemma else "clip.use_silu": flag(True)}
    colours = {f"clip.vision.image_{name}": numbers([0.5] * 3) for name in ("mean", "std")}
    return {
        "general.name": text(name),
        "general.file_type": u32(file_type("F16")),
        "clip.projector_type": text(p.kind),
        f"clip.has_{part}_encoder": flag(True),
        **(activation if is_vision else {}),
        **{f"clip.{part}.{key}": u32(value) for key, value in counts.items()},
        f"clip.{part}.attention.layer_norm_epsilon": f32(1e-6 if is_vision else 1e-5),
        **(colours if is_vision else {}),
    }


def _encoder(p: ProjectorShape) -> Iterator[RandomTensor]:
    patch = (p.n_embd, 3, p.patch_size, p.patch_size)
    std = (3 * p.patch_size**2) ** -0.5
    yield RandomTensor("v.patch_embd.weight", patch, "f16", std)
    if p.kind == _QWEN25VL:
        yield RandomTensor("v.patch_embd.weight.1", patch, "f16", std)
        yield from _norm("v.post_ln", p.n_embd)
    else:
        yield _bias("v.patch_embd", p.n_embd)
        yield RandomTensor("v.position_embd.weight", ((p.image_size // p.patch_size) ** 2, p.n_embd), "f32", 0.3)
        yield from _norm("v.post_ln", p.n_embd, bias=True)
    for i in range(p.n_layer):
        b = f"v.blk.{i}."
        for name in ("ln1", "ln2"):
            yield from _norm(b + name, p.n_embd, bias=p.kind == _GEMMA3)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from _linear(b + name, p.n_embd, p.n_embd)
        for name in ("ffn_up",) if p.kind == _GEMMA3 else ("ffn_gate", "ffn_up"):
            yield from _linear(b + name, p.n_ff, p.n_embd)
        yield from _linear(b + "ffn_down", p.n_embd, p.n_ff)


def _audio(p: ProjectorShape, n_embd_text: int) -> Iterator[RandomTensor]:
    n = p.n_embd
    for i, n_in in ((1, p.patch_size), (2, n)):
        yield RandomTensor(f"a.conv1d.{i}.weight", (n, n_in, 3), "f16", (3 * n_in) ** -0.5)
        yield RandomTensor(f"a.conv1d.{i}.bias", (n, 1), "f32", 0.02)
    yield RandomTensor("a.position_embd.weight", (N_POSITIONS, n), "f32", 0.3)
    for i in range(p.n_layer):
        b = f"a.blk.{i}."
        for name in ("ln1", "ln2"):
            yield from _norm(b + name, n, bias=True)
        yield RandomTensor(f"{b}attn_k.weight", (n, n), "f16", n**-0.5)
        for name in ("attn_q", "attn_v", "attn_out"):
            yield from _linear(b + name, n, n)
        yield from _linear(f"{b}ffn_up", p.n_ff, n)
        yield from _linear(f"{b}ffn_down", n, p.n_ff)
    yield from _norm("a.post_ln", n, bias=True)
    yield from _linear("mm.a.fc", n_embd_text, n)


def _head(p: ProjectorShape, n_embd_text: int) -> Iterator[RandomTensor]:
    if p.kind == _GEMMA3:
        yield from _norm("mm.soft_emb_norm", p.n_embd)
        yield RandomTensor("mm.input_projection.weight", (p.n_embd, n_embd_text), "f16", p.n_embd**-0.5)
        return
    merged = p.n_embd * p.merge**2
    yield from _linear("mm.0", merged, merged)
    yield from _linear("mm.2", n_embd_text, merged)


def _linear(name: str, n_out: int, n_in: int) -> Iterator[RandomTensor]:
    yield RandomTensor(f"{name}.weight", (n_out, n_in), "f16", n_in**-0.5)
    yield _bias(name, n_out)


def _norm(name: str, n: int, *, bias: bool = False) -> Iterator[RandomTensor]:
    yield RandomTensor(f"{name}.weight", (n,), "f32", 0.1, 1.0)
    if bias:
        yield _bias(name, n)


def _bias(name: str, n: int) -> RandomTensor:
    return RandomTensor(f"{name}.bias", (n,), "f32", 0.02)

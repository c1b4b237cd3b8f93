"""Projector files with a key, or a tensor, that is missing or not possible: one line that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.encoders import Encoders
from logitless.models.media.params import read_media_params
from tests.helpers.audio_files import AUDIO_SPECS, write_audio_projector
from tests.helpers.vision_files import N_TEXT, SPECS, Faults, write_projector

OPTIONAL = {
    "resampler": ("resampler.pos_embed_k",),
    "qwen3a": (),
    "janus_pro": (),
    "cogvlm": ("v.class_embd",),
    "granite_speech": (),
    "deepseekocr": ("v.patch_embd.weight",),
}


def write(path: Path, name: str, faults: Faults | None = None) -> tuple[Path, int]:
    """The file of a spec, and the width of its text model."""
    if name in AUDIO_SPECS:
        return write_audio_projector(path, AUDIO_SPECS[name], faults=faults or {}), N_TEXT
    return write_projector(path, SPECS[name], faults=faults or {}), SPECS[name].n_text


@pytest.mark.parametrize(("name", "optional"), OPTIONAL.items(), ids=OPTIONAL)
def test_every_tensor_of_a_projector_is_named_if_it_is_missing_or_has_another_shape(
    name: str, optional: tuple[str, ...], tmp_path: Path
) -> None:
    path, n_text = write(tmp_path / "p.gguf", name)
    with GGUFFile.open(path) as gguf:
        tensors = gguf.tensors
        for fault in (name for name in tensors if name not in optional and not name.endswith(".bias")):
            for other in ({}, {fault: replace(tensors[fault], shape=(3, 5))}):
                gguf.tensors = {name: tensor for name, tensor in tensors.items() if name != fault} | other
                with pytest.raises(ModelFileError) as refused:
                    Encoders.check(gguf, read_media_params(gguf), n_text)
                assert fault in str(refused.value)
                assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gemma4v", "v.blk.1.attn_q_norm.weight"),
        ("gemma4v", "v.blk.0.ffn_gate.weight"),
        ("mlp", "v.blk.0.attn_k.bias"),
        ("qwen3a", "a.blk.1.attn_q.bias"),
        *((name, "v.post_ln.weight") for name in ("gemma3", "idefics3", "lfm2", "kimivl", "glm4v", "qwen2vl")),
        *(("llama4", f"v.{name}_ln.weight") for name in ("pre", "post")),
        ("glm4v", "v.norm_embd.weight"),
        ("pixtral", "v.pre_ln.weight"),
        ("mistral3", "mm.input_norm.weight"),
    ],
)
def test_tensor_that_the_type_or_another_block_has_is_named_if_it_is_missing(
    name: str, fault: str, tmp_path: Path
) -> None:
    path, n_text = write(tmp_path / "p.gguf", name, {fault: ()})
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=f"tensor '{fault}' is missing"):
        Encoders.check(gguf, read_media_params(gguf), n_text)


@pytest.mark.parametrize("part", ["q", "k"])
def test_norm_of_queries_of_another_length_than_a_head_is_named(part: str, tmp_path: Path) -> None:
    fault = f"v.blk.1.attn_{part}_norm.weight"
    path, n_text = write(tmp_path / "p.gguf", "gemma4v", {fault: (32,)})
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=rf"'{fault}' has shape \(32,\), expected \("):
        Encoders.check(gguf, read_media_params(gguf), n_text)


@pytest.mark.parametrize("shape", [(), (3, 3), (96, 1, 10**6, 10**6)])
def test_depthwise_kernel_of_no_possible_side_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Before a graph has a node for each of its taps."""
    path, n_text = write(tmp_path / "p.gguf", "gemma3nv")
    with GGUFFile.open(path) as gguf:
        fault = next(name for name in gguf.tensors if name.endswith("dw_start.conv.weight"))
        gguf.tensors = {**gguf.tensors, fault: replace(gguf.tensors[fault], shape=shape)}
        with pytest.raises(ModelFileError, match=f"tensor '{fault}' has shape"):
            Encoders.check(gguf, read_media_params(gguf), n_text)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("resampler", f"has_{kind}_encoder", np.array([1, 2])) for kind in ("vision", "audio")),
        *((name, "projector_type", np.array([1, 2])) for name in ("resampler", "qwen3a")),
        *((name, f"{part}.block_count", 1 << 30) for name, part in (("granite_speech", "audio"), ("mlp", "vision"))),
        ("deepseekocr", "vision.sam.block_count", 1 << 30),
        ("resampler", "vision.image_size", 10**9),
        ("mlp", "vision.image_mean", np.array([0.5, 1e38, 0.5])),
        *(("mlp", "vision.image_std", np.array([0.5, value, 0.5])) for value in (1e38, 1e-38)),
        ("idefics3", "vision.preproc_image_size", 10**9),
        ("paddleocr", "vision.image_min_pixels", 10**9),
        ("mlp", "vision.image_grid_pinpoints", np.array([16 * 10**6, 16])),
        ("granite_speech", "audio.projector.window_size", 10**9),
        ("granite_speech", "audio.conv_kernel_size", 10**9 + 1),
        *((name, "vision.patch_size", 65536) for name in ("gemma4v", "mlp")),
        ("gemma4uv", "vision.projector.scale_factor", 65536),
        ("mistral3", "vision.spatial_merge_size", 65536),
        ("deepseekocr", "vision.window_size", 65536),
    ],
)
def test_key_of_no_possible_value_is_named(name: str, key: str, value: object, tmp_path: Path) -> None:
    """Before anything as large as it is made."""
    path, _ = write(tmp_path / "p.gguf", name)
    with GGUFFile.open(path) as gguf:
        metadata = {**gguf.metadata, f"clip.{key}": value, "clip.audio.projector.downsample_rate": 10**9 // 3}
        damaged: Any = SimpleNamespace(metadata=metadata, tensors=gguf.tensors, path=path)
        with pytest.raises(ModelFileError) as refused:
            read_media_params(damaged)
    assert ("projector type" if key == "projector_type" else f"'clip.{key}'") in str(refused.value)
    assert "\n" not in str(refused.value)

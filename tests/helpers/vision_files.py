"""Projector files (mmproj) with random weights, text models beside them, and pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from PIL import Image

from tests.helpers.reference_model import Spec, write

N_TEXT = 64  # vectors of the text models
E2B = 1536  # those of Gemma 4 E2B, by which llama.cpp tells models with causal images
Faults = Mapping[str, tuple[int, ...]]  # other shapes of tensors, by name; (): they are missing
Fill = Callable[..., None]  # (name, *shape, std=, mean=): adds a random tensor
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
GEMMA4 = {
    "attention.sliding_window": 24,  # shorter than an image
    "attention.sliding_window_pattern": [True, False, True],
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
    "embedding_length_per_layer_input": 0,
    "attention.shared_kv_layers": 0,
}
GEMMA3N = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [i % 5 != 4 for i in range(5)],
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "embedding_length_per_layer_input": 256,
    "attention.shared_kv_layers": 0,
    "activation_sparsity_scale": [1.6448536] * 5,
    "altup.num_inputs": 4,
    "altup.active_idx": 0,
}
SMOL_TOKENS = ["\n\n", "<fake_token_around_image>", "<global-img>"]
SMOL_TOKENS += [f"<row_{y}_col_{x}>" for y in range(1, 5) for x in range(1, 5)]


@dataclass(frozen=True)
class VisionSpec:
    """A small encoder, and its projector's own tensors."""

    kind: str
    extra: Callable[[Fill, int], None]  # (fill, n_embd)
    keys: dict[str, Any] = field(default_factory=dict)
    n_embd: int = 32
    n_head: int = 4
    n_ff: int = 64
    n_layer: int = 2
    patch: int = 4
    image: int = 16
    positions: int | None = None  # rows of the table; None: as many as patches; 0: none
    patch_bias: bool = True
    flat_patches: int = 0  # side of patches whose embedding is a matrix; 0: it is a convolution
    bare: bool = False  # RMS norms, gated MLPs, no biases
    fused: bool = False  # one matrix for queries, keys and values
    swapped: bool = False  # ffn_up and ffn_down have each other's names
    gelu: bool = True
    n_text: int = N_TEXT  # vectors of the text model
    text: str = "llama"  # architecture of the text model
    text_keys: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()  # control tokens of the text model


def mlp(first: str, second: str, factor: int = 1) -> Callable[[Fill, int], None]:
    def extra(fill: Fill, n: int) -> None:
        fill(f"{first}.weight", N_TEXT, factor * n)
        fill(f"{first}.bias", N_TEXT)
        fill(f"{second}.weight", N_TEXT, N_TEXT)
        fill(f"{second}.bias", N_TEXT)

    return extra


def _clip(fill: Fill, n: int) -> None:
    fill("v.class_embd", n, std=1.0)
    fill("v.pre_ln.weight", n, mean=1.0)
    fill("v.pre_ln.bias", n)
    mlp("mm.0", "mm.2")(fill, n)


def _ldp(fill: Fill, n: int) -> None:
    mlp("mm.model.mlp.1", "mm.model.mlp.3")(fill, n)
    for i in (1, 2):
        b = f"mm.model.mb_block.{i}.block."
        fill(f"{b}0.0.weight", N_TEXT, 1, 3, 3, std=0.3)
        fill(f"{b}1.fc1.weight", 16, N_TEXT)
        fill(f"{b}1.fc1.bias", 16)
        fill(f"{b}1.fc2.weight", N_TEXT, 16, std=2.0)
        fill(f"{b}1.fc2.bias", N_TEXT)
        fill(f"{b}2.0.weight", N_TEXT, N_TEXT)
        for norm in ("0.1", "2.1"):
            fill(f"{b}{norm}.weight", N_TEXT, mean=1.0)
            fill(f"{b}{norm}.bias", N_TEXT)


def _ldp_v2(fill: Fill, n: int) -> None:
    mlp("mm.model.mlp.0", "mm.model.mlp.2")(fill, n)
    fill("mm.model.peg.0.weight", N_TEXT, 1, 3, 3, std=0.3)
    fill("mm.model.peg.0.bias", N_TEXT)


def _gemma3(fill: Fill, n: int) -> None:
    fill("mm.soft_emb_norm.weight", n, mean=1.0)
    fill("mm.input_projection.weight", n, N_TEXT)
    _post_norm(fill, n)


def _idefics3(fill: Fill, n: int) -> None:
    fill("mm.model.fc.weight", N_TEXT, 4 * n)
    _post_norm(fill, n)


def _post_norm(fill: Fill, n: int) -> None:
    fill("v.post_ln.weight", n, mean=1.0)
    fill("v.post_ln.bias", n)


def _gemma4v(fill: Fill, n: int, *, bounds: bool = False) -> None:
    fill("mm.input_projection.weight", E2B if bounds else N_TEXT, n)
    if not bounds:
        fill("v.std_bias", n)
        fill("v.std_scale", n, mean=1.0)
    for i in range(2):
        b = f"v.blk.{i}."
        for name in ("attn_q_norm", "attn_k_norm"):
            fill(f"{b}{name}.weight", n // 4, mean=1.0)
        for name in ("attn_post_norm", "ffn_post_norm", "out_scale"):
            fill(f"{b}{name}.weight", n, mean=1.0)
        for name in ("attn_q", "attn_v", "attn_out", "ffn_up", "ffn_down") if bounds else ():
            for bound, mean in {"input_min": -0.8, "input_max": 0.9, "output_min": -0.7, "output_max": 1.0}.items():
                fill(f"{b}{name}.{bound}", 1, mean=mean)


def _hunyuanvl(fill: Fill, n: int) -> None:
    fill("mm.0.weight", 48, n, 2, 2, std=0.1)
    fill("mm.0.bias", 48)
    fill("mm.2.weight", 80, 48, 1, 1, std=0.15)
    fill("mm.2.bias", 80)
    fill("mm.model.fc.weight", N_TEXT, 80)
    fill("mm.model.fc.bias", N_TEXT)
    fill("v.image_newline", 80, std=1.0)
    fill("v.view_seperator", N_TEXT)
    for name, size in (("pre", n), ("post", N_TEXT)):
        fill(f"mm.{name}_norm.weight", size, mean=1.0)
    for name in ("begin", "end"):
        fill(f"mm.image_{name}", N_TEXT, std=1.0)


def _glm4v(fill: Fill, n: int) -> None:
    fill("v.patch_embd.weight.1", n, 3, 4, 4, std=0.15)
    for name in ("v.norm_embd", "v.post_ln"):
        fill(f"{name}.weight", n, mean=1.0)
    fill("mm.patch_merger.weight", N_TEXT, n, 2, 2, std=0.1)
    fill("mm.patch_merger.bias", N_TEXT)
    fill("mm.model.fc.weight", N_TEXT, N_TEXT)
    fill("mm.post_norm.weight", N_TEXT, mean=1.0)
    fill("mm.post_norm.bias", N_TEXT)
    for name, n_out, n_in in (("gate", 96, N_TEXT), ("up", 96, N_TEXT), ("down", N_TEXT, 96)):
        fill(f"mm.{name}.weight", n_out, n_in)


def _gemma4uv(fill: Fill, n: int) -> None:
    fill("mm.input_projection.weight", N_TEXT, n)
    for i, size in enumerate((3 * 12**2, n, n), 1):
        fill(f"v.patch_norm.{i}.weight", size, mean=1.0)
        fill(f"v.patch_norm.{i}.bias", size)


def _internvl(fill: Fill, n: int) -> None:
    fill("v.class_embd", n, std=1.0)
    fill("mm.model.mlp.0.weight", 4 * n, mean=1.0)
    fill("mm.model.mlp.0.bias", 4 * n)
    mlp("mm.model.mlp.1", "mm.model.mlp.3", 4)(fill, n)
    for i in range(2):
        fill(f"v.blk.{i}.ls1.weight", n, mean=0.5)
        fill(f"v.blk.{i}.ls2.weight", n, mean=0.5)


def resampler(fill: Fill, n: int, n_queries: int = 8) -> None:
    fill("resampler.query", n_queries, 2 * N_TEXT, std=1.0)
    fill("resampler.pos_embed_k", 4, 2 * N_TEXT)
    fill("resampler.kv.weight", 2 * N_TEXT, n)
    for name in ("q", "k", "v", "out"):
        fill(f"resampler.attn.{name}.weight", 2 * N_TEXT, 2 * N_TEXT)
        fill(f"resampler.attn.{name}.bias", 2 * N_TEXT)
    for name in ("q", "kv", "post"):
        fill(f"resampler.ln_{name}.weight", 2 * N_TEXT, mean=1.0)
        fill(f"resampler.ln_{name}.bias", 2 * N_TEXT)
    fill("resampler.proj.weight", 2 * N_TEXT, 2 * N_TEXT)
    _post_norm(fill, n)


def _deepseekocr(fill: Fill, n: int, side: int = 64) -> None:
    """Three layers of SAM, of which the last attends to the whole map."""
    fill("v.class_embd", n, std=1.0)
    fill("v.pre_ln.weight", n, mean=1.0)
    fill("v.pre_ln.bias", n)
    fill("v.sam.patch_embd.weight", 24, 3, 16, 16, std=0.05)
    fill("v.sam.patch_embd.bias", 24)
    fill("v.sam.pos_embd.weight", 1, side, side, 24, std=0.5)
    for i in range(3):
        b = f"v.sam.blk.{i}."
        for name, n_out, n_in in (
            ("attn.qkv", 72, 24),
            ("attn.out", 24, 24),
            ("mlp.lin1", 40, 24),
            ("mlp.lin2", 24, 40),
        ):
            fill(f"{b}{name}.weight", n_out, n_in)
            fill(f"{b}{name}.bias", n_out)
        for name in ("pre_ln", "post_ln"):
            fill(f"{b}{name}.weight", 24, mean=1.0)
            fill(f"{b}{name}.bias", 24)
        for axis in "hw":
            fill(f"{b}attn.pos_{axis}.weight", 2 * (side if i == 2 else 14) - 1, 12, std=0.5)
    for name, n_out, n_in, size in (
        ("neck.0", 16, 24, 1),
        ("neck.2", 16, 16, 3),
        ("net_2", 20, 16, 3),
        ("net_3", n, 20, 3),
    ):
        fill(f"v.sam.{name}.weight", n_out, n_in, size, size, std=(n_in * size**2) ** -0.5)
    for i in (1, 3):
        fill(f"v.sam.neck.{i}.weight", 16, mean=1.0)
        fill(f"v.sam.neck.{i}.bias", 16)
    fill("mm.model.fc.weight", N_TEXT, 2 * n)
    fill("mm.model.fc.bias", N_TEXT)
    fill("v.image_newline", N_TEXT, std=1.0)
    fill("v.view_seperator", 1, N_TEXT, std=1.0)


def _cogvlm(fill: Fill, n: int) -> None:
    fill("v.class_embd", n, std=1.0)
    fill("mm.model.fc.weight", 48, n)
    fill("mm.post_fc_norm.weight", 48, mean=1.0)
    fill("mm.post_fc_norm.bias", 48)
    for name, n_out, n_in in (("gate", 96, 48), ("up", 96, 48), ("down", N_TEXT, 96)):
        fill(f"mm.{name}.weight", n_out, n_in)
    for name in ("boi", "eoi"):
        fill(f"v.{name}", N_TEXT, std=1.0)


def _llama4(fill: Fill, n: int) -> None:
    fill("v.class_embd", n, std=1.0)
    for name in ("v.pre_ln", "v.post_ln"):
        fill(f"{name}.weight", n, mean=1.0)
        fill(f"{name}.bias", n)
    fill("mm.model.mlp.1.weight", 96, 4 * n)
    fill("mm.model.mlp.2.weight", 80, 96)
    fill("mm.model.fc.weight", N_TEXT, 80)


def _mobilenet(fill: Fill, n: int) -> None:
    """Two blocks of each stage at least, with convolutions of both sizes in all places."""

    def conv(name: str, *shape: int) -> None:
        fill(f"{name}.weight", *shape, std=float(np.prod(shape[1:])) ** -0.5)

    def norm(name: str, size: int) -> None:
        fill(f"{name}.weight", size, mean=1.0)

    def inverted(b: str, n_in: int, hidden: int, n_out: int, start: int, middle: int) -> None:
        for name, size, side in (("dw_start", n_in, start), ("dw_mid", hidden, middle)):
            if side:
                conv(f"{b}{name}.conv", size, 1, side, side)
                norm(f"{b}{name}.bn", size)
        for name, n_rows, columns in (("pw_exp", hidden, n_in), ("pw_proj", n_out, hidden)):
            conv(f"{b}{name}.conv", n_rows, columns, 1, 1)
            norm(f"{b}{name}.bn", n_rows)
        fill(f"{b}layer_scale.gamma", 1, n_out, 1, 1, std=0.1, mean=1.0)

    def attention(b: str, size: int, halved: int) -> None:
        norm(f"{b}norm", size)
        for name, n_rows, columns in (("query", 16, size), ("key", 8, size), ("value", 8, size), ("output", size, 16)):
            conv(f"{b}attn.{name}.proj", n_rows, columns, 1, 1)
            if halved and name in ("key", "value"):
                conv(f"{b}attn.{name}.down_conv", size, 1, halved, halved)
                norm(f"{b}attn.{name}.norm", size)
        fill(f"{b}layer_scale.gamma", 1, size, 1, 1, std=0.1, mean=1.0)

    conv("v.conv_stem.conv", 16, 3, 3, 3)
    fill("v.conv_stem.conv.bias", 1, 16, 1, 1, std=0.1)
    norm("v.conv_stem.bn", 16)
    for i in range(2):
        conv(f"v.blk.0.{i}.conv_exp", 48, 16, 3, 3)
        conv(f"v.blk.0.{i}.conv_pwl", 16, 48, 1, 1)
        norm(f"v.blk.0.{i}.bn1", 48)
        norm(f"v.blk.0.{i}.bn2", 16)
    inverted("v.blk.1.0.", 16, 64, 32, 3, 5)
    inverted("v.blk.1.1.", 32, 64, 32, 5, 0)
    inverted("v.blk.2.0.", 32, 96, 48, 5, 3)
    attention("v.blk.2.1.", 48, 3)
    inverted("v.blk.2.2.", 48, 96, 48, 0, 0)
    inverted("v.blk.3.0.", 48, 128, 64, 0, 5)
    attention("v.blk.3.1.", 64, 0)
    inverted("v.blk.3.2.", 64, 128, 64, 3, 3)
    for name, n_out, n_in in (("pw_exp", 160, 112), ("pw_proj", n, 160)):
        conv(f"v.msfa.ffn.{name}.conv", n_out, n_in, 1, 1)
        norm(f"v.msfa.ffn.{name}.bn", n_out)
    norm("v.msfa.norm", n)
    norm("mm.soft_emb_norm", n)
    fill("mm.input_projection.weight", N_TEXT, n)


def _lfm2(fill: Fill, n: int) -> None:
    mlp("mm.1", "mm.2", 4)(fill, n)
    for name, size in (("mm.input_norm", 4 * n), ("v.post_ln", n)):
        fill(f"{name}.weight", size, mean=1.0)
        fill(f"{name}.bias", size)


def _kimivl(fill: Fill, n: int) -> None:
    mlp("mm.1", "mm.2", 4)(fill, n)
    for name in ("mm.input_norm", "v.post_ln"):
        fill(f"{name}.weight", n, mean=1.0)
        fill(f"{name}.bias", n)


def _pixtral(fill: Fill, n: int) -> None:
    fill("v.pre_ln.weight", n, mean=1.0)
    fill("v.token_embd.img_break", N_TEXT, std=1.0)
    mlp("mm.1", "mm.2")(fill, n)


def _mistral3(fill: Fill, n: int) -> None:
    _pixtral(fill, n)
    fill("mm.input_norm.weight", n, mean=1.0)
    fill("mm.patch_merger.weight", n, 4 * n)


def _qwen(fill: Fill, n: int, *, gate: bool = False, deepstack: Sequence[int] = ()) -> None:
    fill("v.patch_embd.weight.1", n, 3, 4, 4, std=0.15)
    fill("v.post_ln.weight", n, mean=1.0)
    if not gate:
        fill("v.post_ln.bias", n)
    mlp("mm.0", "mm.2", 4)(fill, n)
    for i in range(3 if gate else 0):
        fill(f"v.blk.{i}.ffn_gate.weight", 64, n)
        fill(f"v.blk.{i}.ffn_gate.bias", 64)
    for i in deepstack:
        fill(f"v.deepstack.{i}.norm.weight", 4 * n, mean=1.0)
        fill(f"v.deepstack.{i}.norm.bias", 4 * n)
        fill(f"v.deepstack.{i}.fc1.weight", 4 * n, 4 * n)
        fill(f"v.deepstack.{i}.fc1.bias", 4 * n)
        fill(f"v.deepstack.{i}.fc2.weight", N_TEXT, 4 * n)
        fill(f"v.deepstack.{i}.fc2.bias", N_TEXT)


_QWEN = {"positions": 0, "patch_bias": False, "image": 32, "text": "qwen2vl", "text_keys": SECTIONS}
_GEMMA4V = {"image": 48, "positions": 3360, "patch_bias": False, "bare": True, "text": "gemma4"}
SPECS: dict[str, VisionSpec] = {
    "mlp": VisionSpec("mlp", mlp("mm.0", "mm.2"), n_layer=3),
    "janus_pro": VisionSpec("janus_pro", mlp("mm.0", "mm.1")),
    "cogvlm": VisionSpec("cogvlm", _cogvlm, positions=17, fused=True, text="cogvlm"),
    # llama.cpp has grids of 24 × 24 only
    "ldp": VisionSpec("ldp", _ldp, image=96, n_layer=3),
    "ldpv2": VisionSpec("ldpv2", _ldp_v2, image=96, n_layer=3),
    "gemma3": VisionSpec("gemma3", _gemma3, {"clip.vision.projector.scale_factor": 2}, image=32, text="gemma3"),
    "gemma3nv": VisionSpec(
        "gemma3nv",
        _mobilenet,
        n_embd=N_TEXT,  # by which llama.cpp takes the projection's width
        image=256,
        n_layer=0,
        n_head=1,
        n_ff=1,
        patch=0,
        positions=0,
        patch_bias=False,
        text="gemma3n",
        text_keys=GEMMA3N,
    ),
    "gemma4v": VisionSpec("gemma4v", _gemma4v, text_keys=GEMMA4, **_GEMMA4V),
    "gemma4v E2B": VisionSpec(
        "gemma4v",
        lambda fill, n: _gemma4v(fill, n, bounds=True),
        n_text=E2B,
        text_keys=GEMMA4 | {"embedding_length_per_layer_input": 32},
        **_GEMMA4V,
    ),
    "gemma4uv": VisionSpec(
        "gemma4uv",
        _gemma4uv,
        image=48,
        n_layer=0,
        n_head=0,
        n_ff=0,
        flat_patches=12,
        positions=1120,
        text="gemma4",
        text_keys=GEMMA4,
    ),
    "idefics3": VisionSpec(
        "idefics3", _idefics3, {"clip.vision.projector.scale_factor": 2, "clip.vision.preproc_image_size": 48}
    ),
    "lfm2": VisionSpec("lfm2", _lfm2, {"clip.vision.projector.scale_factor": 2}, image=32, positions=256),
    "kimivl": VisionSpec("kimivl", _kimivl, {"clip.vision.projector.scale_factor": 2}, image=32, positions=64),
    "paddleocr": VisionSpec(
        "paddleocr",
        _kimivl,
        {
            "clip.vision.projector.scale_factor": 2,
            "clip.vision.image_min_pixels": 1024,
            "clip.vision.image_max_pixels": 1536,
        },
        image=32,
        positions=64,
        text="paddleocr",
        text_keys=SECTIONS,
    ),
    "glm4v": VisionSpec(
        "glm4v",
        _glm4v,
        {"clip.use_silu": True},
        image=32,
        positions=64,
        bare=True,
        gelu=False,
        text="glm4",
        text_keys=SECTIONS,
    ),
    "hunyuanvl": VisionSpec(
        "hunyuanvl",
        _hunyuanvl,
        {"clip.vision.image_min_pixels": 1024, "clip.vision.image_max_pixels": 1536},
        image=32,
        positions=64,
        gelu=False,
        text="hunyuan_vl",
        text_keys={"rope.dimension_sections": [2, 2, 2, 2], "rope.scaling.alpha": 1000.0},
    ),
    "internvl": VisionSpec(
        "internvl",
        _internvl,
        {"clip.vision.projector.scale_factor": 2, "clip.vision.preproc_max_tiles": 6},
        positions=17,
    ),
    "resampler": VisionSpec(
        "resampler",
        resampler,
        {"clip.minicpmv_version": np.int32(3), "clip.minicpmv_query_num": 8},
        image=24,
        positions=70**2,
        swapped=True,
        n_text=2 * N_TEXT,
        text="qwen3",
        tokens=("\n", "<image>", "</image>", "<slice>", "</slice>"),
    ),
    "deepseekocr": VisionSpec(
        "deepseekocr",
        _deepseekocr,
        {
            "clip.vision.window_size": 14,
            "clip.vision.sam.embedding_length": 24,
            "clip.vision.sam.head_count": 2,
            "clip.vision.sam.block_count": 3,
        },
        image=1024,
        patch=16,
        n_embd=32,
        positions=257,
        patch_bias=False,
        text="deepseek2-ocr",
        text_keys={"leading_dense_block_count": 1, "expert_feed_forward_length": 32, "expert_shared_count": 2},
    ),
    "llama4": VisionSpec(
        "llama4",
        _llama4,
        {"clip.vision.projector.scale_factor": 2},
        positions=17,
        patch_bias=False,
        flat_patches=4,
        text="llama4",
        text_keys={"interleave_moe_layer_step": 1},
    ),
    "pixtral": VisionSpec("pixtral", _pixtral, image=32, positions=0, patch_bias=False),
    "mistral3": VisionSpec(
        "pixtral", _mistral3, {"clip.vision.spatial_merge_size": 2}, image=32, positions=0, patch_bias=False
    ),
    "qwen2vl": VisionSpec("qwen2vl_merger", _qwen, **_QWEN),
    "qwen2.5vl": VisionSpec(
        "qwen2.5vl_merger",
        lambda fill, n: _qwen(fill, n, gate=True),
        {"clip.use_silu": True, "clip.vision.n_wa_pattern": 2},
        n_layer=3,
        gelu=False,
        **_QWEN,
    ),
    "qwen3vl": VisionSpec(
        "qwen3vl_merger",
        lambda fill, n: _qwen(fill, n, deepstack=(0,)),
        {"clip.vision.is_deepstack_layers": [True, False]},
        fused=True,
        **{**_QWEN, "positions": 64, "patch_bias": True, "text": "qwen3vl"},
    ),
}
SPECS["qwen2.5o"] = replace(SPECS["qwen2.5vl"], kind="qwen2.5o")


def write_projector(path: Path, spec: VisionSpec, seed: int = 0, faults: Faults = MappingProxyType({})) -> Path:
    """Write the projector file of a spec."""
    w = GGUFWriter(path, "clip")
    w.add_string("clip.projector_type", spec.kind)
    add_vision(w, spec, filler(w, seed, faults))
    return written(w, path)


def filler(w: GGUFWriter, seed: int, faults: Faults = MappingProxyType({})) -> Fill:
    """A function that adds random tensors to a file."""
    r = np.random.default_rng(seed)

    def fill(
        name: str, *shape: int, std: float = 0.0, mean: float = 0.0, values: np.ndarray[Any, Any] | None = None
    ) -> None:
        shape = faults.get(name, shape)
        if name in faults and not shape:
            return
        if values is not None:
            w.add_tensor(name, values.astype(np.float32))
            return
        std = std or (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        # llama.cpp reads no others
        half = (name.startswith("a.conv1d.") and len(shape) == 3) or (len(shape) == 4 and shape[1] == 1 < shape[3])
        w.add_tensor(name, (r.normal(size=shape) * std + mean).astype(np.float16 if half else np.float32))

    return fill


def written(w: GGUFWriter, path: Path) -> Path:
    """The path of a file whose keys and tensors are complete."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def add_vision(w: GGUFWriter, spec: VisionSpec, fill: Fill) -> None:
    """Add the keys and tensors of an encoder of images and its projector."""
    n = spec.n_embd
    w.add_bool("clip.has_vision_encoder", True)
    w.add_bool("clip.use_gelu", spec.gelu)
    sizes = {
        "image_size": spec.image,
        "patch_size": spec.patch or spec.image // 256,
        "embedding_length": n,
        "feed_forward_length": spec.n_ff,
        "projection_dim": spec.n_text,
        "block_count": spec.n_layer,
        "attention.head_count": spec.n_head,
    }
    for key, value in sizes.items():
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    w.add_array("clip.vision.image_mean", [0.5, 0.4, 0.6])
    w.add_array("clip.vision.image_std", [0.5, 0.6, 0.4])
    for key, given in spec.keys.items():
        add = {bool: w.add_bool, int: w.add_uint32, np.int32: w.add_int32, list: w.add_array}[type(given)]
        add(key, given)

    if spec.flat_patches:
        fill("v.patch_embd.weight", n, 3 * spec.flat_patches**2, std=0.1)
    elif spec.patch:
        fill("v.patch_embd.weight", n, 3, spec.patch, spec.patch, std=0.15)
    if spec.patch_bias:
        fill("v.patch_embd.bias", n)
    rows = (spec.image // spec.patch) ** 2 if spec.positions is None else spec.positions
    if rows:
        of_axes = (2,) if spec.kind.startswith("gemma4") else ()
        fill("v.position_embd.weight", *of_axes, rows, n, std=0.3)
    for i in range(spec.n_layer):
        b = f"v.blk.{i}."
        for name, size in [("qkv", 3 * n)] if spec.fused else [("q", n), ("k", n), ("v", n)]:
            fill(f"{b}attn_{name}.weight", size, n)
            if not spec.bare:
                fill(f"{b}attn_{name}.bias", size)
        gate = [("ffn_gate", spec.n_ff, n)] if spec.bare else []
        up, down = ("ffn_down", "ffn_up") if spec.swapped else ("ffn_up", "ffn_down")
        for name, n_out, n_in in (("attn_out", n, n), (up, spec.n_ff, n), *gate, (down, n, spec.n_ff)):
            fill(f"{b}{name}.weight", n_out, n_in)
            if not spec.bare:
                fill(f"{b}{name}.bias", n_out)
        for name in ("ln1", "ln2"):
            fill(f"{b}{name}.weight", n, mean=1.0)
            if not spec.bare:
                fill(f"{b}{name}.bias", n)
    spec.extra(fill, n)


def write_text_model(path: Path, spec: VisionSpec, stories: Path, n_ctx: int = 1024) -> Path:
    """Write a text model that a projector's rows fit: random, or `stories` with SmolVLM's tokens."""
    if spec.text == "llama":
        return with_tokens(stories, path, SMOL_TOKENS)
    keys = dict(spec.text_keys)
    if spec.text == "gemma3":
        keys["attention.sliding_window"] = 40  # some of a second image is behind it
    if spec.text == "qwen3vl":
        keys["n_deepstack_layers"] = 1
    sizes: dict[str, dict[str, Any]] = {
        "gemma4": {"head_dim": 32, "factors": {"rope_freqs": 8.0}, "n_layer": 3},
        "glm4": {"fused": True},
        "cogvlm": {"fused": True, "n_head_kv": 4, "untied": True},
        "gemma3n": {"n_layer": 5, "head_dim": 32},
        "deepseek2-ocr": {"n_head_kv": 4, "n_ff": 32, "n_expert": 6, "n_expert_used": 2, "untied": True},
        "llama4": {"n_layer": 4, "n_ff": 32, "n_expert": 4, "n_expert_used": 1},
    }
    size = sizes.get(spec.text, {})
    plain = path.with_suffix(".plain") if spec.tokens else path
    write(
        plain,
        Spec(
            spec.text,
            n_embd=spec.n_text,
            n_vocab=512,
            vocabulary=True,
            n_ctx_train=n_ctx,
            n_ctx=n_ctx,
            keys=keys,
            **size,
        ),
    )
    return with_tokens(plain, path, spec.tokens) if spec.tokens else path


def with_tokens(source: Path, path: Path, tokens: Sequence[str]) -> Path:
    """A copy of a model whose last tokens are these control tokens."""
    reader = GGUFReader(source)
    w = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for key, given in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value, kind = given.contents(), given.types[0]
        if key == "tokenizer.ggml.tokens":
            value[-len(tokens) :] = tokens
        elif key == "tokenizer.ggml.token_type":
            value[-len(tokens) :] = [3] * len(tokens)
        w.add_key_value(key, value, kind, sub_type=given.types[-1] if kind == GGUFValueType.ARRAY else None)
    for t in reader.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    return written(w, path)


def picture(width: int, height: int, seed: int = 1) -> Image.Image:
    """A random smooth RGB picture."""
    r = np.random.default_rng(seed)
    coarse = r.integers(0, 256, (max(2, height // 4), max(2, width // 4), 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()

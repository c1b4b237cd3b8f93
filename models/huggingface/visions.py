"""Image encoders of Hugging Face's models: settings of config.json as GGUF's keys, moves of their tensors.

Names of tensors are those of the gguf package's map, where a row has no others. A row: the projector's type in GGUF
(models/vision/projectors.py), what the keys of all encoders lack, and what differs in the tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.parse import FOLDER_PROJECTORS
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import f32, flag, u32
from logitless.models.huggingface import moves as m
from logitless.models.huggingface.checkpoint import Array
from logitless.models.huggingface.config import Config, read_json
from logitless.models.huggingface.families.family import Keys, Rules, Splits
from logitless.models.huggingface.families.keys import numbers
from logitless.models.huggingface.moves import Move, Shape

# Parts of a model that its projector has.
OF_IMAGES = (
    *("vision_tower", "vision_model", "visual"),
    *("multi_modal_projector", "connector", "embed_vision", "mlp1", "image_newline"),
)


OF_SOUNDS = ("audio_tower", "multi_modal_projector")


@dataclass(frozen=True)
class Settings:
    """config.json's of the whole model and of its encoder, and preprocessor_config.json's."""

    whole: Config
    vision: Config
    images: Config


@dataclass(frozen=True)
class Vision:
    kind: str
    keys: Callable[[Settings], Keys]  # without the prefix clip.vision
    splits: Splits = ()
    moves: Rules = ()
    unused: str = r"position_ids$|vision_tower\.(vision_model\.)?head\."
    break_token: str = ""  # its embedding ends lines of patches
    encoder: str = "vision_config"  # the setting of config.json
    parts: tuple[str, ...] = OF_IMAGES  # of the model

    @property
    def of_sounds(self) -> bool:
        return self.encoder == "audio_config"


def _frame(i: int) -> Move:
    """The weights of the first (0) or second (1) of two frames, of which a still image is twice the same."""
    return Move(lambda array, _: array[:, :, i], lambda shape, _: (*shape[:2], *shape[3:]))


def _gemma3(s: Settings) -> Keys:
    patches = s.vision.count("image_size") // max(1, s.vision.count("patch_size"))
    side = math.isqrt(max(1, s.whole.count("mm_tokens_per_image", default=256)))
    yield "projector.scale_factor", u32(patches // side)


def _gemma3n(s: Settings) -> Keys:
    """The keys that llama.cpp's files have; numbers of layers, heads and units are of no use."""
    size = s.images.get("size")
    if isinstance(size, dict) and "height" in size:
        height = Config(s.images.path, size).count("height")
        yield "image_size", u32(height)
        yield "patch_size", u32(max(1, height // 256))


def _qwen(s: Settings) -> Keys:
    yield "spatial_merge_size", u32(s.vision.count("spatial_merge_size", default=2))
    yield "image_size", u32(560)  # any, for images keep their sizes
    yield "attention.layer_norm_epsilon", f32(1e-6)
    size = s.images.get("size")
    limits = Config(s.images.path, {**(size if isinstance(size, dict) else {}), **s.images.values})
    names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    if all(any(name in limits for name in pair) for pair in names):
        for pair in names:
            yield f"image_{pair[0]}", u32(limits.count(*pair))


def _qwen2vl(s: Settings) -> Keys:
    yield from _qwen(s)
    n, ratio = s.vision.count("embed_dim"), s.vision.number("mlp_ratio", default=4.0)
    if not 0 < ratio < 1 << 10:
        raise s.vision.error("mlp_ratio", f"is {ratio:g}, not a positive number")
    yield "embedding_length", u32(n)
    yield "feed_forward_length", u32(int(n * ratio))


def _qwen25vl(s: Settings) -> Keys:
    yield from _qwen(s)
    whole, n = s.vision.items("fullatt_block_indexes"), s.vision.count("num_hidden_layers")
    period = whole[0] + 1 if whole and isinstance(whole[0], int) else 0
    if not period or whole != list(range(period - 1, n, period)):
        raise s.vision.error("fullatt_block_indexes", "is not every n-th layer, which is supported")
    s.vision.require(window_size=112)
    yield "n_wa_pattern", u32(period)


def deep_layers(vision: Config) -> list[int]:
    """Layers whose patches go to the first layers of the text model, too."""
    return [int(i) for i in vision.numbers("deepstack_visual_indexes")]


def _qwen3vl(s: Settings) -> Keys:
    yield from _qwen(s)
    places = math.isqrt(s.vision.count("num_position_embeddings"))
    yield "image_size", u32(places * s.vision.count("patch_size"))
    deep = deep_layers(s.vision)
    is_deep = [i in deep for i in range(s.vision.count("num_hidden_layers"))]
    yield "is_deepstack_layers", numbers(is_deep, ValueType.BOOL)


def _idefics3(s: Settings) -> Keys:
    yield "projector.scale_factor", u32(s.whole.count("scale_factor", default=2))
    size = s.images.get("size")
    longest = Config(s.images.path, size if isinstance(size, dict) else {})
    yield "preproc_image_size", u32(longest.count("longest_edge"))


def _llava(s: Settings) -> Keys:
    """The layer whose patches are read is the last but one of the file's, as in llama.cpp."""
    layer, n = s.whole.get("vision_feature_layer", default=-2), s.vision.count("num_hidden_layers")
    layer = layer + n + 1 if isinstance(layer, int) and layer < 0 else layer
    if not isinstance(layer, int) or not 0 < layer < n:
        raise s.whole.error("vision_feature_layer", f"is not one of -2 to {1 - n}, the supported ones")
    has_class = s.vision.get("model_type") == "clip_vision_model"
    usual = "default" if has_class else "full"  # without the class token
    if s.whole.get("vision_feature_select_strategy", default="default") != usual:
        raise s.whole.error("vision_feature_select_strategy", f"is not {usual}, the supported one")
    yield "block_count", u32(layer + 1)


def _llava_next(s: Settings) -> Keys:
    """Sizes of grids have the width first."""
    yield from _llava(s)
    sizes = s.whole.items("image_grid_pinpoints")
    if not all(isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) for n in size) for size in sizes):
        raise s.whole.error("image_grid_pinpoints", "has not pairs of sizes")
    if sizes:
        yield "image_grid_pinpoints", numbers([n for size in sizes for n in size[::-1]], ValueType.INT32)


def _pixtral(s: Settings) -> Keys:
    if "spatial_merge_size" in s.whole:
        yield "spatial_merge_size", u32(s.whole.count("spatial_merge_size"))


def _internvl(s: Settings) -> Keys:
    ratio = s.whole.number("downsample_ratio", default=0.5)
    if not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise s.whole.error("downsample_ratio", f"is {ratio:g}, not one by a whole number")
    if s.vision.get("norm_type", default="layer_norm") != "layer_norm" or s.vision.get(
        "use_qk_norm", "qk_normalization"
    ):
        raise s.vision.error("norm_type", "is not layer_norm without norms of queries, the supported one")
    s.whole.require(ps_version="v2")
    yield "projector.scale_factor", u32(int(1 / ratio))
    for key, of, name in (("min", s.whole, "min_dynamic_patch"), ("max", s.whole, "max_dynamic_patch")):
        of, name = (of, name) if name in of else (s.images, f"{key}_patches")
        if name in of:
            yield f"preproc_{key}_tiles", u32(of.count(name))


def _lfm2(s: Settings) -> Keys:
    s.whole.require(vision_feature_layer=-1)
    yield "image_size", u32(256)  # any, for images keep their sizes
    yield "projector.scale_factor", u32(s.whole.count("downsample_factor", default=2))


def _gemma4(s: Settings) -> Keys:
    yield "image_size", u32(224)  # any, as above
    yield "projector.scale_factor", u32(s.vision.count("pooling_kernel_size", default=3))


def _flat_patches(shape: Shape, _: Config) -> Shape:
    side = math.isqrt(shape[1] // 3)
    return shape[0], 3, side, side


def _of_flat_patches(array: Array, config: Config) -> Array:
    _, _, side, _ = _flat_patches(array.shape, config)
    return array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)


_CONVOLUTION = Move(_of_flat_patches, _flat_patches)  # of rows whose patches are flat, pixel by pixel
_TABLE = m.reshaped(lambda shape, _: shape[-2:])
# llama.cpp's patches count from 0, and the class token comes last; here it comes first
_CLASS_LAST = m.then(_TABLE, Move(lambda array, _: np.roll(array, -1, 0)))
_CHANNELS = m.reshaped(lambda shape, _: (1, *shape, 1, 1))
_FRAMES: Splits = (
    (r"patch_embed\.proj\.weight$", tuple(("v.patch_embd.weight" + n, _frame(i)) for i, n in enumerate(("", ".1")))),
)
_QWEN2VL = Vision(
    "qwen2vl_merger",
    _qwen2vl,
    (
        *_FRAMES,
        (r"merger\.mlp\.(\d)\.(weight|bias)$", r"mm.\1.\2"),
        # llama.cpp reads them apart in this type
        (
            r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)$",
            tuple((rf"v.blk.\1.attn_{name}.\2", m.third(i)) for i, name in enumerate("qkv")),
        ),
    ),
)
_QWEN3VL = Vision(
    "qwen3vl_merger",
    _qwen3vl,
    (
        *_FRAMES,
        (r"visual\.merger\.norm\.(weight|bias)$", r"v.post_ln.\1"),
        (r"visual\.merger\.linear_fc1\.(weight|bias)$", r"mm.0.\1"),
        (r"visual\.merger\.linear_fc2\.(weight|bias)$", r"mm.2.\1"),
    ),
)
_IDEFICS3 = Vision("idefics3", _idefics3)
_LLAVA = Vision(
    "mlp",
    _llava,
    (
        (r"multi_modal_projector\.linear_1\.(weight|bias)$", r"mm.0.\1"),
        (r"multi_modal_projector\.linear_2\.(weight|bias)$", r"mm.2.\1"),
    ),
    unused=r"position_ids$|post_layernorm\.|vision_tower\.(vision_model\.)?head\.",
)
_LLAVA_NEXT = replace(_LLAVA, keys=_llava_next, splits=(*_LLAVA.splits, (r"image_newline$", "v.image_newline")))
_TWO_MATRICES: Splits = ((r"multi_modal_projector\.linear_(1|2)\.(weight|bias)$", r"mm.\1.\2"),)
_PIXTRAL = Vision(
    "pixtral",
    _pixtral,
    _TWO_MATRICES,
    ((r"attn_q\.weight", m.PAIRS_OF_QUERIES), (r"attn_k\.weight", m.PAIRS_OF_KEYS)),
    break_token="[IMG_BREAK]",
)
_LFM2 = Vision(
    "lfm2",
    _lfm2,
    (
        *_TWO_MATRICES,
        (r"multi_modal_projector\.layer_norm\.(weight|bias)$", r"mm.input_norm.\1"),
        (r"embeddings\.patch_embedding\.weight$", (("v.patch_embd.weight", _CONVOLUTION),)),
    ),
)
_LAYER = r"vision_(?:tower|model)\.encoder\.layers?\.(\d+)\."
_INTERNVL = Vision(
    "internvl",
    _internvl,
    (
        (r"embeddings\.(?:cls_token|class_embedding)$", (("v.class_embd", m.VECTOR),)),
        (r"embeddings\.position_embeddings?$", (("v.position_embd.weight", _CLASS_LAST),)),
        (rf"{_LAYER}(?:lambda_|ls)(\d)$", r"v.blk.\1.ls\2.weight"),
        (r"mlp1\.(\d)\.(weight|bias)$", r"mm.model.mlp.\1.\2"),
        (r"multi_modal_projector\.layer_norm\.(weight|bias)$", r"mm.model.mlp.0.\1"),
        (r"multi_modal_projector\.linear_1\.(weight|bias)$", r"mm.model.mlp.1.\1"),
        (r"multi_modal_projector\.linear_2\.(weight|bias)$", r"mm.model.mlp.3.\1"),
        (
            rf"{_LAYER}attn\.qkv\.(weight|bias)$",
            tuple((rf"v.blk.\1.attn_{name}.\2", m.third(i)) for i, name in enumerate("qkv")),
        ),
    ),
    unused=r"position_ids$|mask_token$",
)
_GEMMA4_PARTS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"self_attn.{name}_proj": f"attn_{'out' if name == 'o' else name}" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
_GEMMA4 = Vision(
    "gemma4v",
    _gemma4,
    (
        (r"patch_embedder\.input_proj\.weight$", (("v.patch_embd.weight", _CONVOLUTION),)),
        (r"patch_embedder\.position_embedding_table$", "v.position_embd.weight"),
        (r"vision_tower\.(std_bias|std_scale)$", r"v.\1"),
        (r"embed_vision\.embedding_projection\.weight$", "mm.input_projection.weight"),
        *(
            pair
            for name, target in _GEMMA4_PARTS.items()
            for pair in (
                (rf"{_LAYER}{re.escape(name)}(?:\.linear)?\.weight$", rf"v.blk.\1.{target}.weight"),
                (rf"{_LAYER}{re.escape(name)}\.((?:in|out)put_m(?:in|ax))$", ((rf"v.blk.\1.{target}.\2", m.VECTOR),)),
            )
        ),
    ),
)

_GEMMA3N = Vision(
    "gemma3nv",
    _gemma3n,
    (
        (r"timm_model\.blocks\.(\d+\.\d+\..+)$", r"v.blk.\1"),
        (r"timm_model\.conv_stem\.conv\.bias$", (("v.conv_stem.conv.bias", _CHANNELS),)),
        (r"timm_model\.((?:conv_stem|msfa)\..+)$", r"v.\1"),
        (r"embed_vision\.embedding_projection\.weight$", "mm.input_projection.weight"),
        (r"embed_vision\.(soft|hard)_embedding_norm\.weight$", r"mm.\1_emb_norm.weight"),
        (r"embed_vision\.embedding\.weight$", "mm.embedding.weight"),
    ),
)


def _whisper(s: Settings) -> Keys:
    """Keys of all encoders of sounds."""
    yield "num_mel_bins", u32(s.vision.count("num_mel_bins", default=128))
    s.vision.require(max_source_positions=1500, activation_function="gelu")


def _voxtral(s: Settings) -> Keys:
    yield from _whisper(s)
    yield "projector.stack_factor", u32(s.vision.count("intermediate_size") // max(1, s.vision.count("hidden_size")))


_WHISPER_SPLITS: Splits = (
    (r"audio_tower\.conv(\d)\.weight$", r"a.conv1d.\1.weight"),
    (r"audio_tower\.conv(\d)\.bias$", ((r"a.conv1d.\1.bias", m.COLUMN),)),
)
_QWEN2_AUDIO = Vision(
    "qwen2a",
    _whisper,
    (*_WHISPER_SPLITS, (r"multi_modal_projector\.linear\.(weight|bias)$", r"mm.a.fc.\1")),
    encoder="audio_config",
    parts=OF_SOUNDS,
)
_SOUND_MATRICES: Splits = ((r"multi_modal_projector\.linear_(1|2)\.weight$", r"mm.a.mlp.\1.weight"),)
_VOXTRAL = replace(_QWEN2_AUDIO, kind="voxtral", keys=_voxtral, splits=(*_WHISPER_SPLITS, *_SOUND_MATRICES))

# By the name of the whole model's architecture, or by it and the kind of its encoder.
_ROWS: dict[str, Vision] = {
    "Gemma3ForConditionalGeneration": Vision(
        "gemma3",
        _gemma3,
        (("mm_input_projection_weight$", "mm.input_projection.weight"),),
        (("mm.soft_emb_norm.weight", m.PLUS_ONE),),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2VL, kind="qwen2.5vl_merger", keys=_qwen25vl),
    "Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration": _QWEN3VL,
    "Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration": _QWEN3VL,
    "Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration": _IDEFICS3,
    "LlavaForConditionalGeneration of clip_vision_model": _LLAVA,
    "LlavaNextForConditionalGeneration of clip_vision_model": _LLAVA_NEXT,
    "LlavaForConditionalGeneration of siglip_vision_model": _LLAVA,
    "LlavaForConditionalGeneration of pixtral": _PIXTRAL,
    "Mistral3ForConditionalGeneration of pixtral": _PIXTRAL,
    "InternVLChatModel, InternVLForConditionalGeneration": _INTERNVL,
    "Lfm2VlForConditionalGeneration": _LFM2,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Qwen2AudioForConditionalGeneration": _QWEN2_AUDIO,
    "VoxtralForConditionalGeneration": _VOXTRAL,
}
VISIONS = {name: vision for names, vision in _ROWS.items() for name in names.split(", ")}
# Architectures of whole models, of which families.py has the row of their text part alone.
WHOLE = {name.partition(" ")[0] for name in VISIONS}


def projector_file(folder: Path) -> Path:
    """The file of a folder that stands for its projector, and has settings of images."""
    files = [folder / name for name in FOLDER_PROJECTORS]
    return next((file for file in files if file.exists()), files[0])


def image_settings(file: Path) -> Config:
    """Settings of images in a preprocessor's file: its own, or those of transformers 5 in one part of it."""
    values = read_json(file)
    inner = values.get("image_processor")
    return Config(file, {**values, **inner} if isinstance(inner, dict) else values)


def vision_of(config: Config) -> Vision | None:
    """The row of a folder that has an encoder of images or sounds and its preprocessor; None: it has none that is
    supported."""
    if not projector_file(config.path.parent).exists():
        return None
    encoder = config.get("vision_config", default={})
    kind = encoder.get("model_type") if isinstance(encoder, dict) else None
    names = [f"{name}{end}" for name in config.items("architectures") for end in (f" of {kind}", "")]
    row = next((VISIONS[name] for name in names if name in VISIONS), None)
    return row if row is not None and isinstance(config.get(row.encoder), dict) else None


def has_projector(folder: Path) -> bool:
    """True for a folder that has an image encoder of a supported kind."""
    try:
        return folder.is_dir() and vision_of(Config.read(folder)) is not None
    except ModelFileError:
        return False


def common_keys(s: Settings) -> Keys:
    """Keys that all encoders have, without the prefix."""
    yield "embedding_length", u32(s.vision.count("hidden_size"))
    yield "feed_forward_length", u32(s.vision.count("intermediate_size", default=0))
    yield "projection_dim", u32(s.whole.count("hidden_size"))
    yield "block_count", u32(s.vision.count("num_hidden_layers"))
    yield "attention.head_count", u32(s.vision.count("num_attention_heads"))


def image_keys(s: Settings) -> Keys:
    """Further keys of all encoders of images."""
    yield "image_size", u32(_side(s.vision, "image_size", 0))
    yield "patch_size", u32(_side(s.vision, "patch_size"))
    yield "attention.layer_norm_epsilon", f32(s.vision.number("layer_norm_eps", "rms_norm_eps", default=1e-6))
    for name, plain in (("image_mean", 0.0), ("image_std", 1.0)):
        values = s.images.numbers(name) if s.images.flag("do_normalize", default=True) else [plain] * 3
        if len(values) != 3:
            raise s.images.error(name, "has not three numbers")
        yield name, numbers([float(value) for value in values], ValueType.FLOAT32)


def _side(c: Config, name: str, default: int | None = None) -> int:
    """A side of squares, which may be named twice."""
    value = c.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return Config(c.path, {name: value[0]}).count(name)
    return c.count(name, default=default)


def activation_keys(s: Settings) -> Keys:
    """Whole keys of the activation; neither of both is CLIP's GELU by a sigmoid."""
    name = str(s.vision.get("hidden_act", "hidden_activation", default="gelu_pytorch_tanh"))
    if name not in ("quick_gelu", "silu") and not name.startswith("gelu"):
        raise s.vision.error("hidden_act", f"is {shown(name)}; supported are gelu, quick_gelu, silu")
    yield "clip.use_gelu", flag(name.startswith("gelu"))
    yield "clip.use_silu", flag(name == "silu")

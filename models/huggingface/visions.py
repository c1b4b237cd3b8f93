"""Image encoders of Hugging Face's models: settings of config.json as GGUF's keys, moves of their tensors.

Names of tensors are those of the gguf package's map, where a row has no others. A row: the projector's type in GGUF
(models/vision/projectors.py), what the keys of all encoders lack, and what differs in the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from logitless.models.errors import ModelFileError
from logitless.models.gguf.parse import FOLDER_PROJECTOR
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import f32, flag, u32
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.families import Keys, Rules, Splits, numbers
from logitless.models.huggingface.moves import PLUS_ONE, Move, Shape


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


def _frame(i: int) -> Move:
    """The weights of the first (0) or second (1) of two frames, of which a still image is twice the same."""
    return Move(lambda array, _: array[:, :, i], lambda shape, _: (*shape[:2], *shape[3:]))


def _third(i: int) -> Move:
    """Queries (0), keys (1) or values (2) of one matrix."""

    def rows(shape: Shape, _: Config) -> Shape:
        return shape[0] // 3, *shape[1:]

    return Move(lambda array, _: array.reshape(3, -1, *array.shape[1:])[i], rows)


def _gemma3(s: Settings) -> Keys:
    patches = s.vision.count("image_size") // max(1, s.vision.count("patch_size"))
    side = math.isqrt(max(1, s.whole.count("mm_tokens_per_image", default=256)))
    yield "projector.scale_factor", u32(patches // side)


def _qwen(s: Settings) -> Keys:
    yield "spatial_merge_size", u32(s.vision.count("spatial_merge_size", default=2))
    yield "image_size", u32(560)  # any, for images keep their sizes
    yield "attention.layer_norm_epsilon", f32(1e-6)


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
    if s.vision.count("window_size", default=112) != 112:
        raise s.vision.error("window_size", "is not 112, the supported one")
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


_FRAMES: Splits = (
    (r"patch_embed\.proj\.weight$", tuple(("v.patch_embd.weight" + n, _frame(i)) for i, n in enumerate(("", ".1")))),
)
_QWEN2VL = Vision(
    "qwen2vl_merger",
    _qwen2vl,
    (
        *_FRAMES,
        (r"merger\.mlp\.(\d)\.(weight|bias)$", ((r"mm.\1.\2", None),)),
        # llama.cpp reads them apart in this type
        (
            r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)$",
            tuple((rf"v.blk.\1.attn_{name}.\2", _third(i)) for i, name in enumerate("qkv")),
        ),
    ),
)
_QWEN3VL = Vision(
    "qwen3vl_merger",
    _qwen3vl,
    (
        *_FRAMES,
        (r"visual\.merger\.norm\.(weight|bias)$", ((r"v.post_ln.\1", None),)),
        (r"visual\.merger\.linear_fc1\.(weight|bias)$", ((r"mm.0.\1", None),)),
        (r"visual\.merger\.linear_fc2\.(weight|bias)$", ((r"mm.2.\1", None),)),
    ),
)
_IDEFICS3 = Vision("idefics3", _idefics3)

VISIONS: dict[str, Vision] = {  # by the name of the whole model's architecture
    "Gemma3ForConditionalGeneration": Vision(
        "gemma3",
        _gemma3,
        (("mm_input_projection_weight$", (("mm.input_projection.weight", None),)),),
        (("mm.soft_emb_norm.weight", PLUS_ONE),),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2VL, kind="qwen2.5vl_merger", keys=_qwen25vl),
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), _QWEN3VL),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), _QWEN3VL),
    **dict.fromkeys(("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), _IDEFICS3),
}


def vision_of(config: Config) -> Vision | None:
    """The row of a folder that has an image encoder and its preprocessor; None: it has none that is supported."""
    if not config.path.with_name(FOLDER_PROJECTOR).exists() or not isinstance(config.get("vision_config"), dict):
        return None
    return next((VISIONS[str(name)] for name in config.items("architectures") if str(name) in VISIONS), None)


def has_projector(folder: Path) -> bool:
    """True for a folder that has an image encoder of a supported kind."""
    try:
        return folder.is_dir() and vision_of(Config.read(folder)) is not None
    except ModelFileError:
        return False


def common_keys(s: Settings) -> Keys:
    """Keys that all encoders have, without the prefix."""
    yield "image_size", u32(s.vision.count("image_size", default=0))
    yield "patch_size", u32(s.vision.count("patch_size"))
    yield "embedding_length", u32(s.vision.count("hidden_size"))
    yield "feed_forward_length", u32(s.vision.count("intermediate_size", default=0))
    yield "projection_dim", u32(s.whole.count("hidden_size"))
    yield "block_count", u32(s.vision.count("num_hidden_layers"))
    yield "attention.head_count", u32(s.vision.count("num_attention_heads"))
    yield "attention.layer_norm_epsilon", f32(s.vision.number("layer_norm_eps", default=1e-6))
    for name in ("image_mean", "image_std"):
        values = s.images.numbers(name)
        if len(values) != 3:
            raise s.images.error(name, "has not three numbers")
        yield name, numbers([float(value) for value in values], ValueType.FLOAT32)


def activation_keys(s: Settings) -> Keys:
    """Whole keys of the activation; neither of both is CLIP's GELU by a sigmoid."""
    name = str(s.vision.get("hidden_act", default="gelu_pytorch_tanh"))
    yield "clip.use_gelu", flag(name.startswith("gelu"))
    yield "clip.use_silu", flag(name == "silu")

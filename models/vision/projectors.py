"""Vision projectors by their GGUF name, with the facts that their files do not state.

The facts are llama.cpp's (`tools/mtmd`), whose results tests/models/vision compares with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from logitless.models.architectures.architecture import Activation


class Sizing(Enum):
    """Image size → tiles of the encoder."""

    FIXED = auto()  # one square of the encoder's size
    DYNAMIC = auto()  # one tile of the image's own aspect, within limits of tokens
    TILES = auto()  # an overview, then a grid of squares, each with its marker (SmolVLM)
    GRID = auto()  # a grid of squares nearest to the aspect, then an overview (InternVL)
    THUMBNAIL = auto()  # a dynamic tile; a large image also as a grid with markers before it (LFM2)
    SQUARE_ROWS = auto()  # a large image as rows of squares; an overview behind them (DeepSeek-OCR)
    SLICES = auto()  # an overview; a large image also as slices of about its aspect behind it (MiniCPM-V)


class Resample(Enum):
    """Resampling filter, as llama.cpp computes it."""

    BILINEAR = auto()
    BICUBIC = auto()
    LANCZOS = auto()


class Positions(Enum):
    """Position encoding of patches."""

    TABLE = auto()  # a learned vector each
    RESIZED_TABLE = auto()  # a learned grid, interpolated to the tile's, corners on corners
    FILTERED_TABLE = auto()  # the same, centres on centres, with anti-aliasing
    CUBIC_TABLE = auto()  # the same, bicubic, without anti-aliasing (GLM 4V)
    ENLARGED_TABLE = auto()  # the same without anti-aliasing, to a grid that is 0.1 patches larger (HunyuanVL)
    BUCKETS = auto()  # a learned grid, of whose places each patch takes the nearest before it (MiniCPM-V)
    SUMMED_TABLES = auto()  # the sum of a vector of the column and one of the row (Gemma 4)
    NONE = auto()


class PatchRope(Enum):
    """2D RoPE of patches: two halves of the pairs turn by row and by column."""

    NONE = auto()
    SECTIONS = auto()  # NeoX pairs over the whole head (Qwen VL)
    HALVES = auto()  # neighbours, rows in the first half of the head, columns in the second (Pixtral)
    COLUMNS_FIRST = auto()  # neighbours, columns in the first half, rows in the second, equal angles (Kimi-VL)
    FROM_ONE = auto()  # the same, counted from 1; a class token has 0 (Llama 4)
    COLUMNS_FIRST_NEOX = auto()  # the same with NeoX pairs within each half (Gemma 4)


class Head(Enum):
    """Layers from patch vectors to rows of the text model."""

    MLP = auto()  # mm.0, GELU, mm.2 (LLaVA)
    JANUS = auto()  # mm.0, the encoder's activation, mm.1 (Janus Pro)
    LDP = auto()  # an MLP, depthwise convolutions over the grid (MobileVLM)
    LDP_V2 = auto()  # an MLP, average pooling, a depthwise convolution (MobileVLM v2)
    POOL_NORM = auto()  # average pooling, RMS norm, matrix (Gemma 3)
    NORM_LINEAR = auto()  # RMS norm without a weight, matrix (Gemma 4 without an encoder)
    POOL_STANDARDIZE = auto()  # average pooling, √n, optional shift and scale, RMS norm, matrix (Gemma 4)
    MERGE_LINEAR = auto()  # merged patches, one matrix (Idefics 3)
    MERGE_MLP = auto()  # merged patches, optional norm, mm.1, GELU, mm.2 (LFM2)
    NORM_MERGE_MLP = auto()  # norm of each patch, merged patches, mm.1, GELU, mm.2 (Kimi-VL, PaddleOCR)
    MERGE_NORM_MLP = auto()  # merged patches, layer norm, mm.1, GELU, mm.3 (InternVL)
    CONVOLUTIONS = auto()  # RMS norm, merged patches, mm.0, GELU, mm.2, ends of lines, matrix, RMS norm (HunyuanVL)
    ADAPTER = auto()  # merged patches, mm.model.mlp.1, GELU, mm.model.mlp.2, GELU, mm.model.fc (Llama 4)
    MOBILENET = auto()  # convolutions and maps of two sizes instead of an encoder of patches (Gemma 3n)
    GATED_MERGER = auto()  # merged patches, two matrices, layer norm, GELU, SwiGLU (GLM 4V)
    MERGER = auto()  # merged patches, mm.0, GELU, mm.2 (Qwen VL)
    EXPERT = auto()  # matrix, layer norm, GELU, SwiGLU (CogVLM)
    WITH_SAM = auto()  # SAM's vectors beside those of patches, one matrix (DeepSeek-OCR)
    RESAMPLER = auto()  # learned queries attend to the patches (MiniCPM-V)
    PATCH_MERGER = auto()  # norm and one matrix over merged patches, mm.1, GELU, mm.2 (Mistral 3)


@dataclass(frozen=True)
class Projector:
    """Traits of one projector type."""

    head: Head
    sizing: Sizing = Sizing.FIXED
    begin: str = ""  # text before the rows of an image
    end: str = ""  # text after them
    resample: Resample = Resample.BICUBIC
    pad: bool = True  # keep the aspect and pad; else stretch
    pad_color: tuple[int, int, int] = (0, 0, 0)
    merge: int = 1  # patches of a side that become one row, where the file does not say
    merge_key: str = "projector.scale_factor"
    grid_side: int = 0  # most tiles of a grid's side; 0: the file bounds their number
    columns_first: bool = False  # rows of a tile go column by column
    tokens: tuple[int, int] | None = (1, 4096)  # least and most rows of a dynamic tile; None: the file states them
    pixel_limits: bool = False  # the file may state least and most pixels of a dynamic tile instead
    positions: Positions = Positions.TABLE
    rope: PatchRope = PatchRope.NONE
    rms_norm: bool = False
    norms: tuple[str, ...] = ()  # norms around the layers that every encoder of the type has
    two_patch_weights: bool = False  # the sum of two matrices: one still image is two equal frames
    windows: bool = False  # most layers attend within windows of the tile (Qwen 2.5 VL)
    skip_last_layer: bool = False
    activation: Activation | None = None  # of the encoder's MLPs, where the file does not decide
    whole_patches: bool = False  # a patch becomes one row: its sides are merged before the encoder
    framed: bool = False  # a row begins an image, one ends each of its lines, and one ends it (HunyuanVL)
    enclosed: bool = False  # a learned row begins an image, one ends it (CogVLM)
    norm_outputs: bool = False  # a layer's norms are of what its blocks give, not of what they read
    class_first: bool = False  # the class token has the first position, not the last
    rope_base: float = 10000.0
    unscaled_attention: bool = False  # scores are not divided by √head_dim
    bounded: bool = False  # inputs and outputs of matrices may have bounds
    doubled_pixels: bool = False  # the encoder maps pixels from 0…1 to −1…1 after their normalisation
    value_norm: bool = False  # RMS norm of each value head, without a weight
    causal: bool = True  # rows of an image see only earlier rows
    unused: tuple[str, ...] = ()  # tensors of files that the encoder does not need


_QWEN2VL = Projector(Head.MERGER, Sizing.DYNAMIC, "<|vision_start|>", "<|vision_end|>", merge=2,
                     merge_key="spatial_merge_size", tokens=(8, 4096), pixel_limits=True, positions=Positions.NONE,
                     rope=PatchRope.SECTIONS, two_patch_weights=True, norms=("v.post_ln",))  # fmt: skip

_QWEN25VL = replace(_QWEN2VL, rms_norm=True, windows=True)
_QWEN3VL = replace(_QWEN2VL, positions=Positions.RESIZED_TABLE)

_LLAVA = Projector(
    Head.MLP, resample=Resample.BICUBIC, pad_color=(122, 116, 104), skip_last_layer=True, class_first=True,
    unused=("v.image_newline",),
)  # fmt: skip

PROJECTORS: dict[str, Projector] = {
    "mlp": _LLAVA,
    "janus_pro": Projector(Head.JANUS, pad_color=(127, 127, 127)),
    "cogvlm": Projector(Head.EXPERT, pad_color=(122, 116, 104), enclosed=True, norm_outputs=True),
    "ldp": replace(_LLAVA, head=Head.LDP, merge=2),
    "ldpv2": replace(_LLAVA, head=Head.LDP_V2, merge=2),
    "gemma3": Projector(Head.POOL_NORM, begin="<start_of_image>", end="<end_of_image>", resample=Resample.BILINEAR,
                        norms=("v.post_ln",), merge=4, causal=False),
    "gemma3nv": Projector(Head.MOBILENET, begin="<start_of_image>", end="<end_of_image>", resample=Resample.BILINEAR,
                          positions=Positions.NONE, rms_norm=True,
                          unused=("mm.embedding.weight", "mm.hard_emb_norm.weight")),
    "gemma4v": Projector(Head.POOL_STANDARDIZE, Sizing.DYNAMIC, "<|image>", "<image|>", merge=3, tokens=(70, 1120),
                         positions=Positions.SUMMED_TABLES, rope=PatchRope.COLUMNS_FIRST_NEOX, rope_base=100.0,
                         rms_norm=True, unscaled_attention=True, value_norm=True, bounded=True, doubled_pixels=True,
                         causal=False),
    "gemma4uv": Projector(Head.NORM_LINEAR, Sizing.DYNAMIC, "<|image>", "<image|>", merge=3, whole_patches=True,
                          tokens=(70, 1120), positions=Positions.SUMMED_TABLES, causal=False,
                          norms=("v.patch_norm.1", "v.patch_norm.2", "v.patch_norm.3")),
    "idefics3": Projector(Head.MERGE_LINEAR, Sizing.TILES, norms=("v.post_ln",), resample=Resample.LANCZOS),
    "qwen2vl_merger": _QWEN2VL,
    "qwen2.5vl_merger": _QWEN25VL,
    "qwen2.5o": _QWEN25VL,
    "qwen3vl_merger": _QWEN3VL,
    "pixtral": Projector(Head.PATCH_MERGER, Sizing.DYNAMIC, end="[IMG_END]", merge_key="spatial_merge_size",
                         tokens=(8, 1024), positions=Positions.NONE, rope=PatchRope.HALVES, rms_norm=True,
                         norms=("v.pre_ln",), unused=("mm.input_norm.weight",)),
    "lfm2": Projector(Head.MERGE_MLP, Sizing.THUMBNAIL, "<|image_start|>", "<|image_end|>", resample=Resample.BILINEAR,
                      pad=False, merge=2, tokens=(64, 256), positions=Positions.FILTERED_TABLE,
                      norms=("v.post_ln",)),
    "kimivl": Projector(Head.NORM_MERGE_MLP, Sizing.DYNAMIC, "<|media_start|>", "<|media_end|>", merge=2,
                        tokens=(8, 1024), positions=Positions.FILTERED_TABLE, rope=PatchRope.COLUMNS_FIRST,
                        norms=("v.post_ln",)),
    "paddleocr": Projector(Head.NORM_MERGE_MLP, Sizing.DYNAMIC, "<|IMAGE_START|>", "<|IMAGE_END|>", merge=2,
                           tokens=None, pixel_limits=True, positions=Positions.FILTERED_TABLE, rope=PatchRope.SECTIONS,
                           norms=("v.post_ln",)),
    "glm4v": Projector(Head.GATED_MERGER, Sizing.DYNAMIC, "<|begin_of_image|>", "<|end_of_image|>", merge=2,
                       merge_key="spatial_merge_size", tokens=(8, 4096), positions=Positions.CUBIC_TABLE,
                       rope=PatchRope.SECTIONS, rms_norm=True, two_patch_weights=True,
                       norms=("v.norm_embd", "v.post_ln")),
    "hunyuanvl": Projector(Head.CONVOLUTIONS, Sizing.DYNAMIC, "<｜hy_place▁holder▁no▁100｜>",
                           "<｜hy_place▁holder▁no▁101｜>", resample=Resample.LANCZOS, pad=False, merge=2,
                           merge_key="spatial_merge_size", tokens=(256, 16384), pixel_limits=True,
                           positions=Positions.ENLARGED_TABLE, activation=Activation.GELU, framed=True,
                           unused=("v.view_seperator",)),  # of several tiles
    "deepseekocr": Projector(Head.WITH_SAM, Sizing.SQUARE_ROWS, end="\n", pad_color=(127, 127, 127), merge=4,
                             positions=Positions.CUBIC_TABLE, norms=("v.pre_ln",), unused=("v.patch_embd.weight",)),
    "llama4": Projector(Head.ADAPTER, Sizing.GRID, "<|image_start|>", "<|image_end|>", merge=2, grid_side=3,
                        columns_first=True, rope=PatchRope.FROM_ONE, norms=("v.pre_ln", "v.post_ln")),
    "resampler": Projector(Head.RESAMPLER, Sizing.SLICES, positions=Positions.BUCKETS, norms=("v.post_ln",),
                           unused=("resampler.pos_embed_k",)),  # it is computed for each grid
    "internvl": Projector(Head.MERGE_NORM_MLP, Sizing.GRID, "<img>", "</img>", resample=Resample.BICUBIC),
}  # fmt: skip

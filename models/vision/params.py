"""Hyper-parameters of a projector file (`general.architecture` = clip), by GGUF's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from logitless.models.architectures.architecture import Activation
from logitless.models.errors import ModelFileError, unsupported
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.keys import Keys
from logitless.models.media.projector_weights import projector_type, shape_of
from logitless.models.vision.mobilenet_blocks import N_STAGES, Block, read_blocks
from logitless.models.vision.projectors import PROJECTORS, Head, Positions, Projector, Sizing

MAX_ASPECT = 200  # longer side over the shorter one up to which a tile may exceed its tokens as rounding wants
NARROW_ROWS = 16384  # most rows of a narrower tile, where its projector's own limit is lower
WINDOW = 112  # pixels of the side of an attention window
MAX_TILES = 256  # of a grid
MOST_COLOUR = 1e6  # of a mean or a deviation, and most of what pixels are multiplied by
MAX_SIDE = 8192  # pixels of a tile's side
MAX_PATCH, MAX_MERGE = 128, 16  # pixels of a patch's side; patches of a side that become one row
THUMBNAIL_TILE = 512  # pixels of a side of the squares that large images are cut into (LFM2-VL)
SIDE = 16  # rows of a side of a MobileNet's result
RESAMPLER_HEAD = 128  # numbers of a head of a resampler
# pixels of a side of DeepSeek-OCR's squares and of their patches, whatever its files say
OVERVIEW, SQUARE, PATCH = 1024, 640, 16
_SLICE = ("", "<slice>", "</slice>", "")  # texts of MiniCPM-V before all slices, around each, and behind all
_SLICES = {2: ("<slice>", "<image>", "</image>", "</slice>"), **dict.fromkeys((3, 4, 5, 6, 100045), _SLICE)}


@dataclass(frozen=True)
class SAMParams:
    """Sizes of SAM's encoder (`towers/sam.py`)."""

    n_embd: int
    n_head: int
    n_layer: int
    window: int  # patches of a window's side

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @classmethod
    def read(cls, keys: Keys) -> SAMParams:
        """The sizes by their keys. ModelFileError names the one at fault."""
        n_embd, n_head = map(keys.count, ("sam.embedding_length", "sam.head_count"))
        window = keys.count("window_size", None, 2, OVERVIEW // PATCH)
        p = cls(n_embd, n_head, keys.layers("sam.block_count"), window)
        if p.n_embd % p.n_head:
            raise keys.error("sam.head_count", f"is {p.n_head}, for vectors of {p.n_embd}")
        return p


@dataclass(frozen=True)
class VisionParams:
    """Sizes and constants of one vision encoder and its projector."""

    kind: str  # key of PROJECTORS
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    patch_size: int
    image_size: int  # side of a fixed tile in pixels
    merge: int  # patches of a side that become one row
    eps: float
    activation: Activation | None  # None: x · sigmoid(1.702 x)
    mean: tuple[float, ...]  # of each colour, from 0 to 1
    std: tuple[float, ...]
    longest_edge: int  # pixels to which the longer side of a tiled image is brought
    tokens: tuple[int, int]  # least and most rows of a dynamic tile
    grids: tuple[tuple[int, int], ...] = ()  # (columns, rows) of tiles that a large image may be cut into
    causal: bool = True  # rows of an image see only earlier rows
    full_period: int = 1  # every n-th layer attends to the whole tile, the others within windows
    deepstack: tuple[int, ...] = ()  # layers whose patches go to the first layers of the text model, too (Qwen 3 VL)
    blocks: tuple[Block, ...] = ()  # of MobileNet (Gemma 3n), instead of an encoder of patches
    breaks: bool = False  # a row of its own ends each line of rows but the last (Pixtral)
    n_queries: int = 0  # rows of a tile of any size, by a resampler; 0: they depend on its patches
    slice_texts: tuple[str, ...] = _SLICE
    sam: SAMParams | None = None  # of the encoder that makes the patches' vectors (DeepSeek-OCR)

    @property
    def projector(self) -> Projector:
        return PROJECTORS[self.kind]

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def unit(self) -> int:
        """Pixels of a side that become one row."""
        return self.patch_size * self.merge

    @property
    def window(self) -> int:
        """Patches of a window's side."""
        return WINDOW // self.unit * self.merge

    @property
    def usual_size(self) -> tuple[int, int]:
        """(height, width) of a tile as large as usual images become."""
        if self.projector.sizing in (Sizing.DYNAMIC, Sizing.THUMBNAIL):
            side = math.isqrt(min(self.tokens[1], 1024)) * self.unit
            return side, side
        return self.image_size, self.image_size

    @property
    def most_columns(self) -> int:
        """Rows of the text model along a dynamic tile's side, at most."""
        return max(self.tokens[1], math.isqrt(MAX_ASPECT * self.tokens[1]) + 2)

    @property
    def narrow_rows(self) -> int:
        """Rows of a dynamic tile beyond MAX_ASPECT, at most."""
        if self.projector.positions is Positions.SUMMED_TABLES:  # it has a vector for each column
            return self.most_columns
        return max(self.tokens[1], NARROW_ROWS)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(lines, columns) of the rows that a tile of so many pixels becomes."""
        if self.n_queries:
            return 1, self.n_queries
        return height // self.unit, width // self.unit

    def n_rows(self, height: int, width: int) -> int:
        """Rows of a tile in the prompt."""
        lines, columns = self.grid(height, width)
        if self.projector.framed:
            return lines * (columns + 1) + 2
        if self.sam:
            return lines * (columns + 1) + (height == self.image_size)
        return lines * columns + self.breaks * (lines - 1) + 2 * self.projector.enclosed


def read_params(
    gguf: GGUFFile, tokens: tuple[int, int] = (0, 0), *, causal: bool = False, n_ubatch: int = 0
) -> VisionParams:
    """The parameters of a projector file. ModelFileError names the key at fault.

    `tokens`: least and most rows of a dynamic tile where not 0 (`--image-min-tokens`,
    `--image-max-tokens`). `causal`: the text model has causal images, with any projector.
    `n_ubatch`: tokens of a step, which a bidirectional image must fit into; 0: not known."""
    metadata, path = gguf.metadata, str(gguf.path)
    if metadata.get("general.architecture") != "clip":
        raise ModelFileError(path, "is no projector file (mmproj): its general.architecture is not 'clip'")
    kind = projector_type(metadata, "vision")
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise ModelFileError(path, unsupported("projector type", kind, PROJECTORS))
    projector, keys = PROJECTORS[kind], Keys(metadata, "clip.vision", path)
    sam = SAMParams.read(keys) if projector.head is Head.WITH_SAM else None
    n_embd, patch = keys.count("embedding_length"), PATCH if sam else keys.count("patch_size", high=MAX_PATCH)
    is_mobilenet = projector.head is Head.MOBILENET
    blocks = read_blocks(gguf) if is_mobilenet else ()
    n_ff, n_layer, n_head = 0, 0, 0
    if not projector.whole_patches and not is_mobilenet:
        n_ff, n_layer, n_head = keys.count("feed_forward_length"), keys.layers(), keys.count("attention.head_count")
    if sam:
        n_ff = shape_of(gguf, "v.blk.0.ffn_up.weight")[0]  # some files state another number
    if n_layer and (n_embd % n_head or (n_embd // n_head) % 4):
        raise keys.error("attention.head_count", f"is {n_head}, for vectors of {n_embd}")
    merge = projector.merge if sam else keys.count(projector.merge_key, projector.merge, high=MAX_MERGE)
    if projector.whole_patches:
        patch, merge = patch * merge, 1
    if is_mobilenet:
        patch, merge = _pixels_of_row(keys, blocks), 1
    limits = projector.tokens
    stated = keys.count_or_none("image_min_pixels") and keys.count_or_none("image_max_pixels")
    if limits is None or (projector.pixel_limits and stated):
        pixels = keys.count("image_min_pixels"), keys.count("image_max_pixels")
        limits = -(-pixels[0] // (patch * merge) ** 2), max(1, pixels[1] // (patch * merge) ** 2)
        if pixels[0] > MAX_SIDE**2:
            raise keys.error("image_min_pixels", f"is {pixels[0]}, more than an image may have")
    causal = causal or projector.causal
    if n_ubatch and not causal:
        limits = min(limits[0], n_ubatch), min(limits[1], n_ubatch)
    least, most = (limit or usual for limit, usual in zip(tokens, limits, strict=True))
    params = VisionParams(
        kind=kind,
        n_embd=n_embd,
        n_ff=n_ff,
        n_layer=n_layer,
        n_head=n_head,
        patch_size=patch,
        image_size=OVERVIEW if sam else keys.count("image_size", high=MAX_SIDE),
        merge=merge,
        eps=1e-5 if sam else keys.positive("attention.layer_norm_epsilon", 1e-6),
        activation=None if sam else projector.activation or _activation(metadata),
        mean=_colours(keys, "image_mean"),
        std=_colours(keys, "image_std"),
        longest_edge=keys.count_or_none("preproc_image_size"),
        tokens=(min(least, most), most),
        grids=_grids(keys, projector),
        causal=causal,
        full_period=keys.count("n_wa_pattern") if projector.windows else 1,
        deepstack=tuple(i for i in range(n_layer) if f"v.deepstack.{i}.fc1.weight" in gguf.tensors),
        blocks=blocks,
        breaks="v.token_embd.img_break" in gguf.tensors,
        n_queries=shape_of(gguf, "resampler.query")[0] if projector.head is Head.RESAMPLER else 0,
        sam=sam,
    )
    _check_sizes(keys, params)
    if params.n_queries:
        params = replace(params, slice_texts=_slice_texts(gguf, params.n_queries))
    if projector.sizing is Sizing.THUMBNAIL and THUMBNAIL_TILE % params.unit:
        raise keys.error("patch_size", f"is {patch}, of which a tile of {THUMBNAIL_TILE} pixels is no multiple")
    if projector.positions in (Positions.TABLE, Positions.BUCKETS) and params.image_size % params.unit:
        raise keys.error("image_size", f"is {params.image_size}, not a multiple of {params.unit}")
    return params


def _check_sizes(keys: Keys, p: VisionParams) -> None:
    """ModelFileError names a key by which an image would become more pixels than memory has."""
    if p.projector.sizing is Sizing.TILES and not 0 < p.longest_edge <= math.isqrt(MAX_TILES) * p.image_size:
        problem = f"is {p.longest_edge}, more than {MAX_TILES} tiles of {p.image_size}"
        raise keys.error("preproc_image_size", problem if p.longest_edge else "is missing")
    if any(x * y > MAX_TILES for x, y in p.grids):
        raise keys.error("image_grid_pinpoints", f"has a grid of more than {MAX_TILES} tiles")


def grids_between(least: int, most: int, longest: int = 0) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of all grids of so many tiles, and of a side that has `longest` at most, where not 0."""
    sides = range(1, (longest or most) + 1)
    return tuple((x, y) for x in sides for y in sides if least <= x * y <= most)


def _grids(keys: Keys, projector: Projector) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of tiles: as many as the file or the projector allows, or of sizes that the file lists."""
    if projector.sizing in (Sizing.GRID, Sizing.SQUARE_ROWS):
        usual = (1, 12) if projector.sizing is Sizing.GRID else (2, 9)
        least, most = keys.count("preproc_min_tiles", usual[0]), keys.count("preproc_max_tiles", usual[1], 1, MAX_TILES)
        if projector.grid_side:
            least, most = 2, projector.grid_side**2
        return grids_between(least, most, projector.grid_side)
    sizes, side = keys.get("image_grid_pinpoints"), keys.count("image_size")
    if projector.sizing is not Sizing.FIXED or sizes is None:
        return ()
    if not isinstance(sizes, np.ndarray) or sizes.size % 2 or (sizes < side).any() or (sizes % side).any():
        raise keys.error("image_grid_pinpoints", f"has not pairs of multiples of {side}")
    return tuple((int(x), int(y)) for x, y in sizes.reshape(-1, 2) // side)


def _pixels_of_row(keys: Keys, blocks: tuple[Block, ...]) -> int:
    """Pixels of a side that become a row of a MobileNet's result."""
    size = keys.count("image_size")
    if len({block.stage for block in blocks}) < N_STAGES:
        raise ModelFileError(keys.file, f"has no blocks of {N_STAGES} stages")
    if size % 256:
        raise keys.error("image_size", f"is {size}, not a multiple of 256")
    return size // SIDE


def _slice_texts(gguf: GGUFFile, n_queries: int) -> tuple[str, ...]:
    """Texts around slices by MiniCPM-V's version. ModelFileError: it, or its number of queries, is not possible."""
    keys = Keys(gguf.metadata, "clip", str(gguf.path))
    version = keys.count_or_none("minicpmv_version") or 2
    if version not in _SLICES:
        raise keys.error("minicpmv_version", f"is {version}; known are {', '.join(map(str, _SLICES))}")
    if keys.count_or_none("minicpmv_query_num", n_queries) not in (0, n_queries):
        raise keys.error("minicpmv_query_num", f"does not fit tensor 'resampler.query' of {n_queries} rows")
    return _SLICES[version]


def _activation(metadata: Mapping[str, Any]) -> Activation | None:
    if metadata.get("clip.use_gelu") is True:
        return Activation.GELU
    return Activation.SILU if metadata.get("clip.use_silu") is True else None


def _colours(keys: Keys, name: str) -> tuple[float, ...]:
    value = keys.get(name)
    if not isinstance(value, np.ndarray) or value.shape != (3,) or not np.isfinite(value).all():
        raise keys.error(name, "must be three numbers")
    if name == "image_std" and not (value > 0).all():
        raise keys.error(name, "must be positive")
    if not (abs(value) < MOST_COLOUR).all() or (name == "image_std" and not (value > 1 / MOST_COLOUR).all()):
        raise keys.error(name, "has a number that is no colour's")
    return tuple(float(x) for x in value)

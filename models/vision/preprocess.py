"""Image preprocessing: an image of any size → tiles of the encoder, with the texts around them.

Sizes follow llama.cpp (`tools/mtmd`), in f32 as there; resampling is Pillow's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logitless.models.vision.params import MAX_ASPECT, SQUARE, THUMBNAIL_TILE, VisionParams, grids_between
from logitless.models.vision.projectors import Resample, Sizing

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
Pieces = Iterator[str | Pixels]
F32 = np.float32
Color = tuple[int, int, int]
BLACK: Color = (0, 0, 0)


def pieces_of(image: Image, p: VisionParams) -> list[str | Pixels]:
    """The tiles of an RGB image in order, and the texts before, between and after them."""
    projector = p.projector
    sizing = {
        Sizing.FIXED: _fixed,
        Sizing.DYNAMIC: _dynamic,
        Sizing.TILES: _tiles,
        Sizing.GRID: _grid,
        Sizing.THUMBNAIL: _thumbnail,
        Sizing.SLICES: _slices,
        Sizing.SQUARE_ROWS: _square_rows,
    }[Sizing.GRID if p.grids and projector.sizing is Sizing.FIXED else projector.sizing]
    pieces = [projector.begin, *sizing(image, p), projector.end]
    return [piece for piece in pieces if not isinstance(piece, str) or piece]


def _fixed(image: Image, p: VisionParams) -> Pieces:
    yield _sized(image, p.image_size, p.image_size, p)


def _dynamic(image: Image, p: VisionParams) -> Pieces:
    yield _sized(image, *dynamic_size(image.width, image.height, p), p)


def dynamic_size(width: int, height: int, p: VisionParams) -> tuple[int, int]:
    """(width, height) of a tile: whole units, of about the image's aspect, within the limits of
    tokens (`smart_resize` of Qwen2-VL, which may exceed the upper one by its rounding, a very narrow
    image by more, up to `narrow_rows`; a bidirectional image must fit into a step)."""
    unit, sides = p.unit, (F32(width), F32(height))
    least, most = (n * unit * unit for n in p.tokens)
    columns, rows = (max(unit, round_half_up(float(n / F32(unit))) * unit) for n in sides)
    if columns * rows > most:
        factor = np.sqrt(F32(width * height) / F32(most))
        columns, rows = (max(unit, math.floor(n / factor / F32(unit)) * unit) for n in sides)
    elif columns * rows < least:
        factor = np.sqrt(F32(least) / F32(width * height))
        columns, rows = (math.ceil(n * factor / F32(unit)) * unit for n in sides)
    if p.causal:
        if max(sides) <= MAX_ASPECT * min(sides):
            return columns, rows
        most = p.narrow_rows * unit * unit
    if columns * rows > most:
        shorter = min(columns, rows)
        longer = most // (shorter * unit) * unit
        return (longer, rows) if rows == shorter else (columns, longer)
    return columns, rows


def round_half_up(x: float) -> int:
    return math.floor(x + 0.5)


def _tiles(image: Image, p: VisionParams) -> Pieces:
    """A grid of squares over the enlarged image, each behind its marker, then an overview (Idefics 3, SmolVLM)."""
    size, (width, height) = p.image_size, enlarged_size(*image.size, p.longest_edge)
    columns, rows = -(-width // size), -(-height // size)
    fake = "<fake_token_around_image>"
    how = _filter(p.projector.resample)
    large = np.asarray(image.resize((width, height), how).resize((columns * size, rows * size), how))
    yield from _cut(large, columns, rows, f"{fake}<row_{{}}_col_{{}}>", line_end="\n")
    yield f"\n\n{fake}<global-img>"
    yield np.asarray(image.resize((size, size), how))
    yield fake


def enlarged_size(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) whose longer side is `longest`, of about the image's aspect; the shorter side
    is even (Idefics 3)."""
    shorter = int(F32(longest) * F32(min(width, height)) / F32(max(width, height)))
    shorter = max(1, shorter + shorter % 2)
    return (longest, shorter) if width >= height else (shorter, longest)


def _grid(image: Image, p: VisionParams) -> Pieces:
    """A grid of squares over the padded image, where it is larger than one, then an overview (InternVL, Llama 4,
    LLaVA 1.6)."""
    size = p.image_size
    if max(image.size) > size:
        columns, rows = fullest_grid(image.width, image.height, size, p.grids)
        yield from _cut(_fitted(image, columns * size, rows * size, p), columns, rows)
    yield np.asarray(image.resize((size, size), _filter(p.projector.resample)))


def fullest_grid(width: int, height: int, size: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(columns, rows) of the grid that shows most pixels of an image; of equal ones the smallest."""

    def shown(grid: tuple[int, int]) -> tuple[int, int]:
        factor = min(F32(grid[0] * size) / F32(width), F32(grid[1] * size) / F32(height))
        n = min(int(F32(width) * factor) * int(F32(height) * factor), width * height)
        return n, n - grid[0] * grid[1] * size * size

    return max(grids, key=shown)


THUMBNAIL_GRIDS = grids_between(2, 10)


def _thumbnail(image: Image, p: VisionParams) -> Pieces:
    """A dynamic tile; of an image with more than twice the pixels that it may have, a grid of
    squares over the padded image before it, each behind its marker (LFM2-VL)."""
    size = THUMBNAIL_TILE
    width, height = (max(p.unit, round(n / p.unit) * p.unit) for n in image.size)  # half to even
    if width * height > 2 * p.tokens[1] * p.unit**2:
        columns, rows = nearest_grid(image.width, image.height, size, THUMBNAIL_GRIDS)
        large = _fitted(image, columns * size, rows * size, p)
        yield from _cut(large, columns, rows, "<|img_row_{}_col_{}|>")
        yield "<|img_thumbnail|>"
    yield from _dynamic(image, p)


def _square_rows(image: Image, p: VisionParams) -> Pieces:
    """The rows of a grid of squares over the stretched image, where it is larger than one, and an
    overview behind them (DeepSeek-OCR)."""
    if max(image.size) > SQUARE:
        columns, rows = nearest_grid(image.width, image.height, SQUARE, p.grids)
        size = columns * SQUARE, rows * SQUARE
        yield from _cut(np.asarray(image.resize(size, _filter(p.projector.resample))), 1, rows)
    yield _fitted(image, p.image_size, p.image_size, p, p.projector.pad_color, nearest=True)


def nearest_grid(width: int, height: int, size: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(columns, rows) of the grid whose aspect is nearest; of equal ones the largest that the image
    fills by more than half."""
    best, nearest = (1, 1), F32(math.inf)
    for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        away = abs(F32(width) / F32(height) - F32(x) / F32(y))
        if away < nearest or (away == nearest and width * height > 0.5 * size * size * x * y):
            best, nearest = (x, y), away
    return best


MAX_SLICES = 9


def _slices(image: Image, p: VisionParams) -> Pieces:
    """An overview; of an image with a longer side than a tile's, slices of about as many pixels
    behind it (MiniCPM-V)."""
    side, how = p.image_size, _filter(p.projector.resample)
    is_large = max(image.size) > side
    overview = _slice_size(*image.size, p, enlarge=False) if is_large else (side, side)
    yield "<image>"
    yield np.asarray(image.resize(overview, how))
    yield "</image>"
    if not is_large:
        return
    before, begin, end, behind = p.slice_texts
    columns, rows = slice_grid(*image.size, side)
    width, height = (_whole(n, parts) // parts for n, parts in zip(image.size, (columns, rows), strict=True))
    width, height = _slice_size(width, height, p, enlarge=True)
    large = _fitted(image, columns * width, rows * height, p)
    yield before
    yield from _cut(large, columns, rows, begin, end, "\n")
    yield behind


def slice_grid(width: int, height: int, side: int) -> tuple[int, int]:
    """(columns, rows) of about as many slices as an image has pixels of a square, at most
    MAX_SLICES, whose aspect is nearest."""
    n = min(math.ceil(F32(width) * F32(height) / F32(side * side)), MAX_SLICES)
    numbers = [i for i in (n - 1, n, n + 1) if i != 1 and i <= MAX_SLICES]
    grids = [(x, i // x) for i in numbers for x in range(1, i + 1) if i % x == 0]
    aspect = np.log(F32(width) / F32(height))
    return min(grids, key=lambda grid: abs(aspect - np.log(F32(grid[0]) / F32(grid[1]))))


def _slice_size(width: int, height: int, p: VisionParams, *, enlarge: bool) -> tuple[int, int]:
    """(width, height) of whole patches of an image's aspect with at most a square's pixels, or about as many."""
    if width * height > p.image_size**2 or enlarge:
        aspect = F32(width) / F32(height)
        height = int(F32(p.image_size) / np.sqrt(aspect))
        width = int(F32(height) * aspect)
    return _whole(width, p.unit), _whole(height, p.unit)


def _whole(n: int, unit: int) -> int:
    """The multiple of a unit, at least one, that is nearest to n."""
    return max(unit, round_half_up(float(F32(n) / F32(unit))) * unit)


def _cut(large: Pixels, columns: int, rows: int, begin: str = "", end: str = "", line_end: str = "") -> Pieces:
    """The tiles of a grid, line by line, with texts around each (`begin` has its row and column), and between lines."""
    height, width = large.shape[0] // rows, large.shape[1] // columns
    for y in range(rows):
        for x in range(columns):
            yield begin.format(y + 1, x + 1)
            yield large[y * height : (y + 1) * height, x * width : (x + 1) * width]
            yield end
        if y < rows - 1:
            yield line_end


def _filter(how: Resample) -> Resampling:
    from PIL.Image import Resampling

    return Resampling[how.name]


def _sized(image: Image, width: int, height: int, p: VisionParams) -> Pixels:
    """The image in a size: stretched, or fitted."""
    if p.projector.pad:
        return _fitted(image, width, height, p, p.projector.pad_color)
    return np.asarray(image.resize((width, height), _filter(p.projector.resample)))


def _fitted(
    image: Image, width: int, height: int, p: VisionParams, color: Color = BLACK, *, nearest: bool = False
) -> Pixels:
    """The image scaled to fit into a size with its aspect, on a plain background. `nearest`: sides
    and margins are rounded to the nearest pixel."""
    if image.size == (width, height):
        return np.asarray(image)
    factor = min(F32(width) / F32(image.width), F32(height) / F32(image.height))
    rounded = round_half_up if nearest else math.ceil
    scaled = [rounded(float(F32(n) * factor)) for n in image.size]
    inner = max(1, min(scaled[0], width)), max(1, min(scaled[1], height))
    out = np.empty((height, width, 3), np.uint8)
    out[:] = color
    top, left = (height - inner[1] + nearest) // 2, (width - inner[0] + nearest) // 2
    out[top : top + inner[1], left : left + inner[0]] = np.asarray(image.resize(inner, _filter(p.projector.resample)))
    return out

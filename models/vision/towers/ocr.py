"""DeepSeek-OCR's encoder of images: a transformer of the vectors that SAM makes, both side by side.

A tile is the overview, or a row of squares; each square is encoded by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.ops.elementwise import add, mul
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.shape import pad_rows
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor, feed
from logitless.models.vision.encoder import VisionEncoder, Windows
from logitless.models.vision.heads import normed
from logitless.models.vision.params import SAMParams
from logitless.models.vision.patches import Array, cubic_shares, flat_patches, patch_places
from logitless.models.vision.towers.sam import sam_feeds, sam_rows


@dataclass(frozen=True)
class OCREncoder(VisionEncoder):
    """The encoder of one projector file. The class token is the last row of a square."""

    @property
    def sam(self) -> SAMParams:
        assert self.p.sam is not None  # it makes this encoder
        return self.p.sam

    def feeds(self, tiles: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for tiles (height, width, 3) u8 of one size."""
        p, height = self.p, len(tiles[0])
        squares = [tile[:, x : x + height] for tile in tiles for x in range(0, tile.shape[1], height)]
        grid, side = height // p.patch_size, height // p.unit
        places, n = patch_places(grid, grid, 1), len(squares)
        feeds = sam_feeds(self.sam, self.w, np.stack([flat_patches(x, p.patch_size, places) for x in squares]))
        inner, tokens = patch_places(side, side, 1), side * side
        own = np.arange(n)[:, None] * tokens + np.arange(tokens)
        # a last row of zeros is the class token's before it has its vector
        feeds["patch.spread"] = np.pad(own, ((0, 0), (0, 1)), constant_values=n * tokens).reshape(-1).astype(np.int32)
        feeds["patch.kept"] = (own + np.arange(n)[:, None]).reshape(-1).astype(np.int32)
        feeds["patch.kind"] = np.tile(np.r_[np.zeros(tokens), 1].astype(np.int32), n)
        feeds["patch.count"] = np.full(n, tokens + 1, np.int32)
        shares = np.pad(cubic_shares(inner, (side, side), self._side, filtered=True), ((0, 1), (1, 0)))
        shares[-1, 0] = 1
        feeds["patch.shares"] = np.tile(shares, (n, 1))
        return feeds

    def rows(self, n_tiles: int, height: int, width: int) -> list[Tensor]:
        """Rows (n_tiles · rows of a tile, n_embd_text) f32, square by square; `feeds` has the inputs."""
        p, w = self.p, self.w
        n, grid, tokens = n_tiles * (width // height), height // p.patch_size, (height // p.unit) ** 2
        total = n * (tokens + 1)
        x = feed("patches", (n * grid * grid, 3 * p.patch_size**2))
        x = add(mul(x, self.constants["pixel.scale"]), self.constants["pixel.shift"])
        sam = sam_rows(self.sam, w, x, n, grid, p.n_embd)
        x = get_rows(pad_rows(sam, before=0, after=1), feed("patch.spread", (total,), "i32"))
        x = self.with_class(x, feed("patch.kind", (total,), "i32"))
        x = self._with_positions(x)
        x, _ = self.layers(normed(p, w, "v.pre_ln", x), Windows(feed("patch.count", (n,), "i32"), tokens + 1))
        x = get_rows(x, feed("patch.kept", (n * tokens,), "i32"))
        return [w.linear("mm.model.fc", concat(x, sam), w.n_text)]

    def row_places(self, height: int, width: int) -> tuple[Array, Array, Array]:
        """Indices of a tile's rows in the prompt: those of `rows`, those of extra rows; and the kinds of these."""
        lines, columns = self.p.grid(height, width)
        square, line, column = np.unravel_index(np.arange(lines * columns), (columns // lines, lines, lines))
        ends = np.arange(1, lines + 1) * (columns + 1) - 1
        rows = line * (columns + 1) + square * lines + column
        if height != self.p.image_size:
            return rows, ends, np.zeros(lines, np.int64)
        return rows, np.r_[ends, ends[-1] + 1], np.r_[np.zeros(lines, np.int64), 1]

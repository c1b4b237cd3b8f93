"""SAM's encoder of images (Kirillov et al., 2023), as DeepSeek-OCR has it: a vector for each 64 × 64 pixels.

Most layers attend within windows. Scores have a part by the distance of lines and one by that of
columns, both by the query, with one-hot vectors of places beside the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from logitless.graph.ops.elementwise import add, broadcast_to, gelu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import matmul
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import concat, transpose
from logitless.graph.tensor import Tensor, feed
from logitless.models.media.layers import convolved, distance_scores, scored_attention
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.params import PATCH, SAMParams
from logitless.models.vision.patches import Array, cubic_axis, linear_axis

GLOBAL = (2, 5, 8, 11)  # layers that attend to the whole map
EPS = 1e-6


def sam_feeds(p: SAMParams, w: ProjectorWeights, pixels: Array) -> dict[str, Array]:
    """Inputs of `sam_rows` for patches (n, grid², 3 · PATCH²) f32 of n squares."""
    n, grid = len(pixels), int(len(pixels[0]) ** 0.5)
    nearest = -(-grid // p.window)
    places = np.pad(np.arange(grid * grid).reshape(grid, grid), (0, nearest * p.window - grid), constant_values=-1)
    to = places.reshape(nearest, p.window, nearest, p.window).swapaxes(1, 2).reshape(-1)
    back = np.argsort(np.where(to < 0, to.size, to), kind="stable")[: grid * grid]
    squares = np.arange(n)[:, None]
    feeds = {
        "patches": pixels.reshape(n * grid * grid, -1),
        "sam.to": np.where(to < 0, n * grid * grid, to + squares * grid * grid).reshape(-1).astype(np.int32),
        "sam.back": (back + squares * to.size).reshape(-1).astype(np.int32),
    }
    for size, count in ((grid, n), (p.window, n * nearest**2)):
        feeds[f"sam.count.{size}"] = np.full(count, size * size, np.int32)
        y, x = np.divmod(np.arange(size * size), size)
        feeds[f"sam.places.{size}"] = np.concatenate([np.eye(size)[y], np.eye(size)[x]], 1).astype(np.float32)
        if _has_layers(p, size == grid):
            length = _n_distances(p, w, size == grid)
            feeds[f"sam.distances.{size}"] = linear_axis(2 * size - 1, length)[::-1].astype(np.float32)
    feeds["sam.cubic"] = cubic_axis(grid, w["v.sam.pos_embd"].shape[0]).astype(np.float32)
    return feeds


def _has_layers(p: SAMParams, whole: bool) -> bool:
    """True if layers attend to the whole map, or to windows."""
    return any((i in GLOBAL) is whole for i in range(p.n_layer))


def _n_distances(p: SAMParams, w: ProjectorWeights, whole: bool) -> int:
    """Rows of the tables of distances of layers that attend to the whole map, or to windows."""
    return w.shape(f"v.sam.blk.{GLOBAL[0]}.attn.pos_h.weight")[0] if whole else 2 * p.window - 1


def sam_rows(p: SAMParams, w: ProjectorWeights, x: Tensor, n: int, grid: int, n_out: int) -> Tensor:
    """Rows (n · (grid // 4)², n_out) of normalised patches x of n squares of grid² patches."""
    x = _with_positions(w, w.linear("v.sam.patch_embd", x, p.n_embd, (PATCH, PATCH)), n, grid)
    nearest = -(-grid // p.window)
    to = feed("sam.to", (n * (nearest * p.window) ** 2,), "i32")
    back = feed("sam.back", (n * grid * grid,), "i32")
    whole, parts = _Squares.of(p, w, n, grid, True), _Squares.of(p, w, n * nearest**2, p.window, False)
    for layer in range(p.n_layer):
        b = replace(w, prefix=f"v.sam.blk.{layer}.")
        y = b.layer_norm("pre_ln", x, EPS)
        if layer in GLOBAL and whole is not None:
            y = whole.attention(p, b, y)
        elif parts is not None:
            y = get_rows(parts.attention(p, b, get_rows(pad_rows(y, before=0, after=1), to)), back)
        x = add(x, y)
        x = add(x, b.linear("mlp.lin2", gelu(b.linear("mlp.lin1", b.layer_norm("post_ln", x, EPS))), p.n_embd))
    m = convolved(w, "v.sam.neck.0", reshape(x, shape=(n, grid, grid, p.n_embd)), side=1)
    m = w.layer_norm("v.sam.neck.1", m, EPS)
    m = convolved(w, "v.sam.neck.2", m, m.shape[3], side=3)
    m = convolved(w, "v.sam.net_2", w.layer_norm("v.sam.neck.3", m, EPS), side=3, stride=2)
    m = convolved(w, "v.sam.net_3", m, n_out, side=3, stride=2)
    return reshape(m, shape=(-1, n_out))


@dataclass(frozen=True)
class _Squares:
    """Squares of size² rows each that attend to each other."""

    n: int
    size: int
    count: Tensor
    places: Tensor  # one-hot vectors of lines and columns (n · size² · heads, 2 · size)
    distances: Tensor  # shares of the rows of a table in each distance, the longest way forward first

    @classmethod
    def of(cls, p: SAMParams, w: ProjectorWeights, n: int, size: int, whole: bool) -> _Squares | None:
        """The squares of layers that attend to the whole map, or to windows; None: there are none."""
        if not _has_layers(p, whole):
            return None
        area, length = size * size, _n_distances(p, w, whole)
        count = feed(f"sam.count.{size}", (n,), "i32")
        places = reshape(feed(f"sam.places.{size}", (area, 2 * size)), shape=(1, area, 1, 2 * size))
        places = broadcast_to(places, shape=(n, area, p.n_head, 2 * size))
        distances = feed(f"sam.distances.{size}", (2 * size - 1, length))
        return cls(n, size, count, reshape(places, shape=(n * area * p.n_head, 2 * size)), distances)

    def attention(self, p: SAMParams, b: ProjectorWeights, x: Tensor) -> Tensor:
        """Attention output (T, n_embd) of rows x (T, n_embd)."""
        rows, d = x.shape[0] * p.n_head, p.head_dim
        parts = (b.linear_part(f"attn.{name}", x, "attn.qkv", i) for i, name in enumerate("qkv"))
        q, k, v = (reshape(t, shape=(rows, d)) for t in parts)
        # of each query by the distance of lines (n, y, x · H, D), and by that of columns (n · y, x, H, D)
        by_line = self._by_distance(b, "h", reshape(q, shape=(self.n, self.size, self.size * p.n_head, d)))
        by_column = self._by_distance(b, "w", reshape(q, shape=(self.n * self.size, self.size, p.n_head, d)))
        scores = concat(by_line, by_column)
        y = scored_attention([q, k, v], scores, self.places, self.count, heads=p.n_head, factor=d**-0.5)
        return b.linear("attn.out", y, p.n_embd)

    def _by_distance(self, b: ProjectorWeights, axis: str, q: Tensor) -> Tensor:
        """Scores (rows, size) of queries (n, size, m, D) with each place along their second axis."""
        table = b.read(f"attn.pos_{axis}.weight", self.distances.shape[1], q.shape[3])
        return distance_scores(q, matmul(self.distances, table))


def _with_positions(w: ProjectorWeights, x: Tensor, n: int, grid: int) -> Tensor:
    """Rows x of n squares with the position table, resized to their grid line by line and column by column."""
    name, width = "v.sam.pos_embd.weight", x.shape[1]
    side = w.shape(name)[-3 if len(w.shape(name)) == 4 else 0]
    table = w.read(name, side * side, width, in_file=(1, side, side, width), in_graph=(side, side * width))
    shares = feed("sam.cubic", (grid, side))
    for size in (side, grid):
        table = reshape(matmul(shares, table), shape=(grid, size, width))
        table = reshape(transpose(table, axes=(1, 0, 2)), shape=(size, grid * width))
    x = reshape(x, shape=(n, grid * grid * width))
    return reshape(add(x, reshape(table, shape=(1, grid * grid * width))), shape=(n * grid * grid, width))

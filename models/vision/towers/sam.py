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
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.convolution import convolution, convolved
from logitless.models.media.distance_scores import distance_scores, scored_attention
from logitless.models.media.projector_weights import Declared, matrix, n_rows, plain
from logitless.models.vision.params import PATCH, SAMParams
from logitless.models.vision.patches import Array, cubic_axis, linear_axis
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import Weights

GLOBAL = (2, 5, 8, 11)  # layers that attend to the whole map
EPS = 1e-6


def sam_feeds(p: SAMParams, w: Weights, pixels: Array) -> dict[str, Array]:
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
        for length in {w[name].shape[0] for name in _distance_tables(p, size == grid)}:
            feeds[f"sam.distances.{size}"] = linear_axis(2 * size - 1, length)[::-1].astype(np.float32)
    feeds["sam.cubic"] = cubic_axis(grid, w["v.sam.pos_embd"].shape[0]).astype(np.float32)
    return feeds


def _distance_tables(p: SAMParams, whole: bool) -> list[str]:
    """Names of the tables of distances of layers that attend to the whole map, or to windows."""
    layers = [i for i in range(p.n_layer) if (i in GLOBAL) is whole]
    return [f"v.sam.blk.{i}.attn.pos_{axis}" for i in layers for axis in "hw"]


def sam_rows(p: SAMParams, w: Weights, x: Tensor, n: int, grid: int) -> Tensor:
    """Rows (n · (grid // 4)², C) of normalised patches x of n squares of grid² patches."""
    x = _with_positions(w, w.linear("v.sam.patch_embd", x), n, grid)
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
        x = add(x, b.linear("mlp.lin2", gelu(b.linear("mlp.lin1", b.layer_norm("post_ln", x, EPS)))))
    m = convolved(w, "v.sam.neck.0", reshape(x, shape=(n, grid, grid, p.n_embd)), side=1)
    m = convolved(w, "v.sam.neck.2", w.layer_norm("v.sam.neck.1", m, EPS), side=3)
    m = convolved(w, "v.sam.net_2", w.layer_norm("v.sam.neck.3", m, EPS), side=3, stride=2)
    m = convolved(w, "v.sam.net_3", m, side=3, stride=2)
    return reshape(m, shape=(-1, m.shape[3]))


@dataclass(frozen=True)
class _Squares:
    """Squares of size² rows each that attend to each other."""

    n: int
    size: int
    count: Tensor
    places: Tensor  # one-hot vectors of lines and columns (n · size² · heads, 2 · size)
    distances: Tensor  # shares of the rows of a table in each distance, the longest way forward first

    @classmethod
    def of(cls, p: SAMParams, w: Weights, n: int, size: int, whole: bool) -> _Squares | None:
        """The squares of layers that attend to the whole map, or to windows; None: there are none."""
        area, names = size * size, _distance_tables(p, whole)
        if not names:
            return None
        count = feed(f"sam.count.{size}", (n,), "i32")
        places = reshape(feed(f"sam.places.{size}", (area, 2 * size)), shape=(1, area, 1, 2 * size))
        places = broadcast_to(places, shape=(n, area, p.n_head, 2 * size))
        distances = feed(f"sam.distances.{size}", (2 * size - 1, w[names[0]].shape[0]))
        return cls(n, size, count, reshape(places, shape=(n * area * p.n_head, 2 * size)), distances)

    def attention(self, p: SAMParams, b: Weights, x: Tensor) -> Tensor:
        """Attention output (T, n_embd) of rows x (T, n_embd)."""
        rows, d = x.shape[0] * p.n_head, p.head_dim
        q, k, v = (reshape(b.linear(f"attn.{name}", x), shape=(rows, d)) for name in "qkv")
        # of each query by the distance of lines (n, y, x · H, D), and by that of columns (n · y, x, H, D)
        by_line = self._by_distance(b, "h", reshape(q, shape=(self.n, self.size, self.size * p.n_head, d)))
        by_column = self._by_distance(b, "w", reshape(q, shape=(self.n * self.size, self.size, p.n_head, d)))
        scores = concat(by_line, by_column)
        y = scored_attention([q, k, v], scores, self.places, self.count, heads=p.n_head, factor=d**-0.5)
        return b.linear("attn.out", y)

    def _by_distance(self, b: Weights, axis: str, q: Tensor) -> Tensor:
        """Scores (rows, size) of queries (n, size, m, D) with each place along their second axis."""
        return distance_scores(q, matmul(self.distances, b[f"attn.pos_{axis}"]))


def _with_positions(w: Weights, x: Tensor, n: int, grid: int) -> Tensor:
    """Rows x of n squares with the position table, resized to their grid line by line and column by column."""
    table = w["v.sam.pos_embd"]  # (side, side · C)
    side, width = table.shape[0], x.shape[1]
    shares = feed("sam.cubic", (grid, side))
    for size in (side, grid):
        table = reshape(matmul(shares, table), shape=(grid, size, width))
        table = reshape(transpose(table, axes=(1, 0, 2)), shape=(size, grid * width))
    x = reshape(x, shape=(n, grid * grid * width))
    return reshape(add(x, reshape(table, shape=(1, grid * grid * width))), shape=(n * grid * grid, width))


def sam_tensors(gguf: GGUFFile, p: SAMParams, n_out: int) -> Declared:
    """The encoder's tensors, for a result of this width."""
    n, pos_embd = p.n_embd, gguf.tensors.get("v.sam.pos_embd.weight")
    side = pos_embd.shape[1] if pos_embd is not None and len(pos_embd.shape) == 4 else 1
    yield from convolution("v.sam.patch_embd", n, 3, PATCH)
    name = "v.sam.pos_embd.weight"
    yield name, TensorSlice(name, (side * side, n), in_file=(1, side, side, n), in_graph=(side, side * n))
    for i in range(p.n_layer):
        b = f"v.sam.blk.{i}."
        for j, part in enumerate("qkv"):
            yield f"{b}attn.{part}.weight", TensorSlice(f"{b}attn.qkv.weight", (n, n), j * n)
            yield f"{b}attn.{part}.bias", TensorSlice(f"{b}attn.qkv.bias", (n,), j * n)
        yield from matrix(f"{b}attn.out", n, n)
        for axis in "hw":
            name = f"{b}attn.pos_{axis}.weight"
            length = 2 * p.window - 1
            if i in GLOBAL:
                length = n_rows(gguf, f"v.sam.blk.{GLOBAL[0]}.attn.pos_h.weight")
            yield name, TensorSlice(name, (length, p.head_dim))
        for name in ("pre_ln", "post_ln"):
            yield from _norm(b + name, n)
        n_hidden = n_rows(gguf, f"{b}mlp.lin1.weight")
        yield from matrix(f"{b}mlp.lin1", n_hidden, n)
        yield from matrix(f"{b}mlp.lin2", n, n_hidden)
    neck, net = (n_rows(gguf, f"v.sam.{name}.weight") for name in ("neck.0", "net_2"))
    yield from convolution("v.sam.neck.0", neck, n, 1)
    yield from _norm("v.sam.neck.1", neck)
    yield from convolution("v.sam.neck.2", neck, neck, 3)
    yield from _norm("v.sam.neck.3", neck)
    yield from convolution("v.sam.net_2", net, neck, 3)
    yield from convolution("v.sam.net_3", n_out, net, 3)


def _norm(name: str, n: int) -> Declared:
    yield from plain(f"{name}.weight", n, required=True)
    yield from plain(f"{name}.bias", n, required=True)

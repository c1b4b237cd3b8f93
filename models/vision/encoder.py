"""Vision encoder (ViT, Dosovitskiy et al., 2020) and projector: patches of tiles → rows of the text
model.

Patches of one row of the result are neighbours, row by row: merging them is a reshape. Tiles of one
size are a batch; they do not attend to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.encoder_attention import full_attention, mean_rows
from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scale, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import layer_norm, rms_norm
from logitless.graph.ops.pointwise import sigmoid
from logitless.graph.ops.rope import mrope_angles, rope
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, feed
from logitless.models.architectures.architecture import Activation
from logitless.models.gguf.file import GGUFFile
from logitless.models.vision.params import VisionParams
from logitless.models.vision.projectors import Head, PatchRope, Positions
from logitless.models.vision.weights import MATRICES, load_vision_weights
from logitless.models.weights.weights import Weights, vector

Array = npt.NDArray[Any]
ROPE_BASE = 10000.0
NORM_EPS = 1e-5  # of projectors whose norm is torch's default


def patch_places(rows: int, columns: int, merge: int) -> Array:
    """(row, column) of each patch of a grid, (n, 2): merged blocks row by row, in each its patches
    row by row."""
    y, x = np.mgrid[:rows, :columns]
    places = np.stack([y, x], -1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return places.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def flat_patches(pixels: Array, patch: int, places: Array) -> Array:
    """Patches (n, 3 · patch²) f32 of pixels (height, width, 3) u8, colours first, in this order."""
    height, width, _ = pixels.shape
    grid = pixels.reshape(height // patch, patch, width // patch, patch, 3).transpose(0, 2, 4, 1, 3)
    return grid[places[:, 0], places[:, 1]].reshape(len(places), -1).astype(np.float32)


def filtered_shares(places: Array, grid: tuple[int, int], side: int) -> Array:
    """Shares (n, side²) f32 of a position table's rows in patches of another grid: bilinear with
    anti-aliasing, centres on centres (torch's interpolate)."""
    axes = []
    for axis, n in enumerate(grid):
        factor = side / n
        support = max(1.0, factor)
        centres = (np.arange(n) + 0.5) * factor
        away = np.abs(np.arange(side) + 0.5 - centres[:, None]) / support
        shares = np.maximum(0.0, 1 - away)
        axes.append((shares / shares.sum(1, keepdims=True))[places[:, axis]])
    joint: Array = (axes[0][:, :, None] * axes[1][:, None, :]).reshape(len(places), side * side)
    return joint.astype(np.float32)


def resized_places(places: Array, grid: tuple[int, int], side: int) -> tuple[list[Array], list[Array]]:
    """(rows of a position table for a grid of side², their shares) whose sum is a patch's position
    in another grid: bilinear, corners on corners."""
    corners, weights = [], []
    for axis, n in enumerate(grid):
        at = places[:, axis] * ((side - 1) / max(1, n - 1))
        low = at.astype(np.int64)
        corners.append((low, np.minimum(low + 1, side - 1)))
        weights.append((1 - (at - low), at - low))
    pairs = [(y, x) for y in (0, 1) for x in (0, 1)]
    ids = [corners[0][y] * side + corners[1][x] for y, x in pairs]
    return ids, [weights[0][y] * weights[1][x] for y, x in pairs]


@dataclass(frozen=True)
class Windows:
    """Groups of patches that attend to each other: `length` rows each, of which `count` are used."""

    count: Tensor
    length: int
    to: Tensor | None = None  # patches window by window; None: they are in order
    back: Tensor | None = None

    @classmethod
    def feeds(cls, n: int, length: int, total: int) -> Windows:
        to, back = feed("window.to", (n * length,), "i32"), feed("window.back", (total,), "i32")
        return cls(feed("window.count", (n,), "i32"), length, to, back)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention output (T, H · D) of q, k and v (T, H, D)."""
        flat = (q.shape[0], q.shape[1] * q.shape[2])
        if self.to is None or self.back is None:
            return reshape(full_attention(q, k, v, self.count, length=self.length, scale=scale), shape=flat)
        parts = (get_rows(reshape(t, shape=flat), self.to) for t in (q, k, v))
        q, k, v = (reshape(t, shape=(t.shape[0], *q.shape[1:])) for t in parts)
        y = full_attention(q, k, v, self.count, length=self.length, scale=scale)
        return get_rows(reshape(y, shape=(y.shape[0], flat[1])), self.back)


@dataclass(frozen=True)
class VisionEncoder:
    """The encoder of one projector file on the session of its text model.

    A class token is the last row of a tile, and no row of the result.
    """

    p: VisionParams
    w: Weights
    constants: Mapping[str, Tensor]

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: VisionParams, n_embd_text: int) -> VisionEncoder:
        """Define weights and constants. ModelFileError names the tensor at fault."""
        w = load_vision_weights(session, gguf, p, n_embd_text)

        def constant(name: str, values: Array) -> Tensor:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            dtype = "i32" if values.dtype == np.int32 else "f32"
            return session.define(f"vision.{name}", values.shape, dtype, lambda: raw, constant=True)

        area = p.patch_size**2
        std, mean = np.array(p.std, np.float32), np.array(p.mean, np.float32)
        constants = {
            "pixel.scale": constant("pixel.scale", np.repeat(np.float32(1) / (np.float32(255) * std), area)),
            "pixel.shift": constant("pixel.shift", np.repeat(-mean / std, area)),
        }
        if (info := gguf.tensors.get("v.class_embd")) is not None:
            embedding = vector(gguf.bytes_of(info.name), info.dtype)
            constants["is_patch"] = constant("is_patch", np.array([[1.0], [0.0]], np.float32))
            constants["class"] = constant("class", np.stack([np.zeros_like(embedding), embedding]))
        if p.projector.rope is not PatchRope.NONE:
            quarter = p.head_dim // 4  # pairs of rows, and of columns
            base = ROPE_BASE ** (-np.arange(quarter) / quarter)
            odd = ROPE_BASE ** (-2 / p.head_dim) if p.projector.rope is PatchRope.HALVES else 1.0
            frequency = np.concatenate([base, base * odd]).astype(np.float32)
            constants["frequency"] = constant("frequency", frequency)
            constants["component"] = constant("component", np.repeat(np.arange(2, dtype=np.int32), quarter))
        return cls(p, w, constants)

    @property
    def has_class(self) -> bool:
        return "class" in self.constants

    def feeds(self, tiles: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for tiles (height, width, 3) u8 of one size."""
        p, n = self.p, len(tiles)
        height, width, _ = tiles[0].shape
        places = patch_places(height // p.patch_size, width // p.patch_size, p.merge)
        patches = np.stack([flat_patches(pixels, p.patch_size, places) for pixels in tiles])
        length = len(places) + self.has_class
        feeds: dict[str, Array] = {"patch.count": np.full(n, length, np.int32)}
        if self.has_class:
            patches = np.concatenate([patches, np.zeros_like(patches[:, :1])], 1)
            feeds["patch.kind"] = np.tile(np.r_[np.zeros(len(places)), 1].astype(np.int32), n)
            kept = np.arange(n)[:, None] * length + np.arange(len(places))
            feeds["patch.kept"] = kept.reshape(-1).astype(np.int32)
        feeds["patches"] = patches.reshape(n * length, -1)
        grid = height // p.patch_size, width // p.patch_size
        if p.projector.positions is Positions.RESIZED_TABLE:
            ids, shares = resized_places(places, grid, self._side)
            feeds |= {f"patch.ids.{i}": np.tile(ids[i].astype(np.int32), n) for i in range(4)}
            feeds |= {f"patch.share.{i}": np.tile(shares[i].astype(np.float32), n)[:, None] for i in range(4)}
        elif p.projector.positions is Positions.FILTERED_TABLE:
            feeds["patch.shares"] = np.tile(filtered_shares(places, grid, self._side), (n, 1))
        elif p.projector.positions is Positions.TABLE:
            ids = places @ np.array([width // p.patch_size, 1])
            if self.has_class:
                ids = np.r_[ids + 1, 0] if p.projector.class_first else np.r_[ids, len(places)]
            feeds["patch.ids"] = np.tile(ids.astype(np.int32), n)
        if p.projector.rope is not PatchRope.NONE:
            order = places[:, ::-1] if p.projector.rope is PatchRope.COLUMNS_FIRST else places
            feeds["patch.pos"] = np.tile(order.T.astype(np.int32), n)
        if p.full_period > 1:
            feeds |= self._window_feeds(places, n)
        if p.projector.head is Head.POOL_NORM:
            feeds["patch.first"] = np.arange(0, n * len(places), p.merge**2, dtype=np.int32)
            feeds["patch.pooled"] = np.full(n * len(places) // p.merge**2, p.merge**2, np.int32)
        return feeds

    @property
    def _side(self) -> int:
        """Side of the square grid that the position table is made for."""
        shape = self.w["v.position_embd"].shape
        return math.isqrt(shape[self.p.projector.positions is Positions.FILTERED_TABLE])

    def _window_feeds(self, places: Array, n: int) -> dict[str, Array]:
        """Inputs of layers that attend within windows: patches window by window, each filled up to
        one length, and the way back."""
        size = self.p.window
        windows = places // size @ np.array([1 + places[:, 1].max() // size, 1])
        n_windows, most = 1 + windows.max(), size * size
        members = [np.flatnonzero(windows == w) for w in range(n_windows)]
        to = np.zeros((n_windows, most), np.int32)
        back = np.empty(len(places), np.int32)
        for w, member in enumerate(members):
            to[w, : len(member)] = member
            back[member] = w * most + np.arange(len(member))
        tiles = np.arange(n, dtype=np.int32)[:, None]
        return {
            "window.to": (to.reshape(1, -1) + tiles * len(places)).reshape(-1),
            "window.back": (back[None] + tiles * (n_windows * most)).reshape(-1).astype(np.int32),
            "window.count": np.tile(np.array([len(member) for member in members], np.int32), n),
        }

    def rows(self, n_tiles: int, height: int, width: int) -> list[Tensor]:
        """Rows (n_tiles · rows of a tile, n_embd_text) f32 of tiles of `height` × `width` pixels,
        then as many for each deepstack layer.

        Their inputs are those of `feeds`.
        """
        p, w = self.p, self.w
        n_patches = (height // p.patch_size) * (width // p.patch_size)
        length = n_patches + self.has_class
        total = n_tiles * length
        x = feed("patches", (total, 3 * p.patch_size**2))
        x = add(mul(x, self.constants["pixel.scale"]), self.constants["pixel.shift"])
        y = linear(x, w["v.patch_embd"])
        if p.projector.two_patch_weights:
            y = add(y, linear(x, w.tensors["v.patch_embd.weight.1"]))
        if (bias := w.bias("v.patch_embd")) is not None:
            y = add(y, bias)
        if self.has_class:
            y = self._with_class(y, feed("patch.kind", (total,), "i32"))
        if p.projector.positions is Positions.RESIZED_TABLE:
            y = add(y, self._resized_positions(total))
        elif p.projector.positions is Positions.FILTERED_TABLE:
            table = w["v.position_embd"]  # (n_embd, places)
            y = add(y, linear(feed("patch.shares", (total, table.shape[1])), table))
        elif p.projector.positions is Positions.TABLE:
            y = add(y, get_rows(w["v.position_embd"], feed("patch.ids", (total,), "i32")))
        x = self._norm("v.pre_ln", y)
        angles = None
        if p.projector.rope is not PatchRope.NONE:
            pos = feed("patch.pos", (2, total), "i32")
            angles = mrope_angles(pos, self.constants["frequency"], self.constants["component"])
        whole = Windows(feed("patch.count", (n_tiles,), "i32"), length)
        parts = whole
        if p.full_period > 1:
            lines, columns = height // p.patch_size, width // p.patch_size
            n_windows = n_tiles * -(-lines // p.window) * -(-columns // p.window)
            parts = Windows.feeds(n_windows, p.window**2, total)
        deep = []
        for layer in range(p.n_layer - p.projector.skip_last_layer):
            b = replace(w, prefix=f"v.blk.{layer}.")
            windows = whole if (layer + 1) % p.full_period == 0 else parts
            x = add(x, self._scaled(b, "ls1", self._attention(b, self._norm("ln1", x, b), angles, windows)))
            x = add(x, self._scaled(b, "ls2", self._mlp(b, self._norm("ln2", x, b))))
            if layer in p.deepstack:
                b = replace(w, prefix=f"v.deepstack.{layer}.")
                merged = reshape(x, shape=(-1, p.n_embd * p.merge**2))
                deep.append(b.linear("fc2", gelu(b.linear("fc1", self._norm("norm", merged, b)))))
        x = self._norm("v.post_ln", x)
        if self.has_class:
            x = get_rows(x, feed("patch.kept", (n_tiles * n_patches,), "i32"))
        return [self._project(x), *deep]

    def _resized_positions(self, total: int) -> Tensor:
        """Position vectors (T, n_embd) between the four nearest of the table."""
        parts = []
        for i in range(4):
            row = get_rows(self.w["v.position_embd"], feed(f"patch.ids.{i}", (total,), "i32"))
            parts.append(mul(row, feed(f"patch.share.{i}", (total, 1))))
        return reduce(add, parts)

    def break_rows(self, n: int) -> Tensor:
        """n equal rows (n, n_embd_text): the ends of lines."""
        row = self.w.tensors["v.token_embd.img_break"]
        return broadcast_to(row, shape=(n, row.shape[0]))

    def line_places(self, height: int, width: int) -> tuple[Array, Array]:
        """Indices of a tile's rows in the prompt: those of `rows`, and those of the ends of lines."""
        lines, columns = self.p.grid(height, width)
        rows = np.arange(lines * columns)
        if not self.p.breaks:
            return rows, rows[:0]
        return rows + rows // columns, np.arange(1, lines) * (columns + 1) - 1

    def _with_class(self, x: Tensor, kind: Tensor) -> Tensor:
        """x (T, n_embd) with the class embedding in rows of kind 1."""
        return add(mul(x, get_rows(self.constants["is_patch"], kind)), get_rows(self.constants["class"], kind))

    def _norm(self, name: str, x: Tensor, w: Weights | None = None, eps: float = 0.0) -> Tensor:
        """Norm of x (T, n); x itself where the file has none of that name."""
        w, eps = w or self.w, eps or self.p.eps
        if name not in w:
            return x
        bias = w.bias(name)
        if self.p.projector.rms_norm:
            y = rms_norm(x, w[name], eps=eps)
            return y if bias is None else add(y, bias)
        assert bias is not None  # load_vision_weights adds it
        return layer_norm(x, w[name], bias, eps=eps)

    def _scaled(self, b: Weights, name: str, x: Tensor) -> Tensor:
        return mul(x, b[name]) if name in b else x

    def _attention(self, b: Weights, x: Tensor, angles: Tensor | None, windows: Windows) -> Tensor:
        p = self.p
        shape = (x.shape[0], p.n_head, p.head_dim)
        q, k, v = (reshape(b.linear(name, x), shape=shape) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = (self._norm(f"{name}_norm", t, b) for name, t in (("attn_q", q), ("attn_k", k)))
        if angles is not None:
            interleaved = p.projector.rope in (PatchRope.HALVES, PatchRope.COLUMNS_FIRST)
            q, k = (rope(t, angles, interleaved=interleaved) for t in (q, k))
        return b.linear("attn_out", windows.attention(q, k, v, p.head_dim**-0.5))

    def _mlp(self, b: Weights, x: Tensor) -> Tensor:
        up = b.linear("ffn_up", x)
        if "ffn_gate" in b:
            up = mul(self._activated(b.linear("ffn_gate", x)), up)
        else:
            up = self._activated(up)
        return b.linear("ffn_down", up)

    def _activated(self, x: Tensor) -> Tensor:
        if self.p.activation is None:  # GELU's approximation by a sigmoid, CLIP's
            return mul(x, sigmoid(scale(x, factor=1.702)))
        return gelu(x) if self.p.activation is Activation.GELU else silu(x)

    def _project(self, x: Tensor) -> Tensor:
        """Rows of the text model from patch vectors x (T, n_embd)."""
        p, w, head = self.p, self.w, self.p.projector.head
        n_rows, merged = x.shape[0] // p.merge**2, x.shape[1] * p.merge**2
        if head is Head.POOL_NORM:
            first, count = (feed(f"patch.{name}", (n_rows,), "i32") for name in ("first", "pooled"))
            pooled = rms_norm(mean_rows(x, first, count), w["mm.soft_emb_norm"], eps=p.eps)
            return w.linear("mm.input_projection", pooled)
        if head is Head.PATCH_MERGER and "mm.patch_merger" in w:
            x = self._norm("mm.input_norm", x)
            x = transpose(reshape(x, shape=(n_rows, p.merge**2, p.n_embd)), axes=(0, 2, 1))  # elements first
            x = w.linear("mm.patch_merger", reshape(x, shape=(n_rows, merged)))
        elif head not in (Head.MLP, Head.PATCH_MERGER):
            if head is Head.NORM_MERGE_MLP:
                x = self._norm("mm.input_norm", x, eps=NORM_EPS)
            x = reshape(x, shape=(n_rows, merged))
        if head is Head.MERGE_LINEAR:
            return w.linear("mm.model.fc", x)
        if head is Head.MERGE_NORM_MLP:
            x = self._norm("mm.model.mlp.0", x, eps=NORM_EPS)
        elif head is Head.MERGE_MLP:
            x = self._norm("mm.input_norm", x, eps=NORM_EPS)
        first_name, second_name = MATRICES[head]
        return w.linear(second_name, gelu(w.linear(first_name, x)))

"""Vision encoder (ViT, Dosovitskiy et al., 2020) and projector: patches → rows of the text model.

Patches of one row of the result are neighbours, row by row: merging them is a reshape. Tiles of one
size are a batch; they do not attend to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import add, gelu, mul
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import mrope_angles, rope
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.gguf.file import GGUFFile
from logitless.models.vision.heads import NORM_EPS, activated, extra_rows, normed, project, project_feeds
from logitless.models.vision.params import VisionParams
from logitless.models.vision.patches import cubic_shares, filtered_shares, flat_patches, patch_places, resized_places
from logitless.models.vision.projectors import PatchRope, Positions
from logitless.models.vision.resampler import resampled, resampler_feeds
from logitless.models.vision.towers.mobilenet import mobilenet_feeds, mobilenet_rows
from logitless.models.vision.weights import vision_tensors
from logitless.models.weights.weights import Weights, vector

Array = npt.NDArray[Any]
ROWS_FIRST = (PatchRope.SECTIONS, PatchRope.HALVES)
NEIGHBOURS = (PatchRope.HALVES, PatchRope.COLUMNS_FIRST, PatchRope.FROM_ONE)


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

    A class token is the last row of a tile, and no row of the result."""

    p: VisionParams
    w: Weights
    constants: Mapping[str, Tensor]

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: VisionParams, n_embd_text: int) -> VisionEncoder:
        """Define weights and constants. ModelFileError names the tensor at fault."""
        w = vision_tensors(gguf, p, n_embd_text).load(session, gguf)

        def constant(name: str, values: Array) -> Tensor:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            dtype = "i32" if values.dtype == np.int32 else "f32"
            return session.define(f"vision.{name}", values.shape, dtype, lambda: raw, constant=True)

        area = 9 if p.blocks else p.patch_size**2
        std, mean = (np.array(values, np.float32) for values in (p.std, p.mean))
        if p.projector.doubled_pixels:
            std, mean = np.float32(0.5) * std, mean + np.float32(0.5) * std
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
            base = p.projector.rope_base ** (-np.arange(quarter) / quarter)
            odd = p.projector.rope_base ** (-2 / p.head_dim) if p.projector.rope is PatchRope.HALVES else 1.0
            frequency = np.concatenate([base, base * odd]).astype(np.float32)
            constants["frequency"] = constant("frequency", frequency)
            constants["component"] = constant("component", np.repeat(np.arange(2, dtype=np.int32), quarter))
        return cls(p, w, constants)

    @property
    def states(self) -> list[str]:
        """Names of the encoder's constants on the session."""
        return [t.name for t in (*self.w.tensors.values(), *self.constants.values())]

    def n_inputs(self, height: int, width: int) -> int:
        """Patches of a tile, which attend to each other."""
        return (height // self.p.patch_size) * (width // self.p.patch_size)

    @property
    def usual_size(self) -> tuple[int, int]:
        """(height, width) of a tile as large as usual images become."""
        return self.p.usual_size

    @property
    def has_class(self) -> bool:
        return "class" in self.constants

    def feeds(self, tiles: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for tiles (height, width, 3) u8 of one size."""
        p, n = self.p, len(tiles)
        if p.blocks:
            return mobilenet_feeds(p, tiles)
        height, width, _ = tiles[0].shape
        grid = height // p.patch_size, width // p.patch_size
        places = patch_places(*grid, p.merge, columns_first=p.projector.columns_first)
        patches = np.stack([flat_patches(pixels, p.patch_size, places) for pixels in tiles])
        length = len(places) + self.has_class
        feeds: dict[str, Array] = {"patch.count": np.full(n, length, np.int32)}
        if self.has_class:
            patches = np.concatenate([patches, np.zeros_like(patches[:, :1])], 1)
            feeds["patch.kind"] = np.tile(np.r_[np.zeros(len(places)), 1].astype(np.int32), n)
            row_ids = np.arange(n)[:, None] * length + np.arange(len(places))
            feeds["patch.kept"] = row_ids.reshape(-1).astype(np.int32)
        feeds["patches"] = patches.reshape(n * length, -1)
        if p.projector.positions in (Positions.RESIZED_TABLE, Positions.ENLARGED_TABLE):
            enlarged = p.projector.positions is Positions.ENLARGED_TABLE
            ids, shares = resized_places(places, grid, self._side, enlarged=enlarged)
            feeds |= {f"patch.ids.{i}": np.tile(ids[i].astype(np.int32), n) for i in range(4)}
            feeds |= {f"patch.share.{i}": np.tile(shares[i].astype(np.float32), n)[:, None] for i in range(4)}
        elif p.projector.positions is Positions.FILTERED_TABLE:
            feeds["patch.shares"] = np.tile(filtered_shares(places, grid, self._side), (n, 1))
        elif p.projector.positions is Positions.CUBIC_TABLE:
            feeds["patch.shares"] = np.tile(cubic_shares(places, grid, self._side), (n, 1))
        elif p.projector.positions is Positions.SUMMED_TABLES:
            of_rows = self.w["v.position_embd"].shape[0] // 2
            feeds["patch.ids.x"] = np.tile(places[:, 1].astype(np.int32), n)
            feeds["patch.ids.y"] = np.tile((of_rows + places[:, 0]).astype(np.int32), n)
        elif p.projector.positions is Positions.BUCKETS:
            buckets = places * self._side // np.array(grid)
            feeds["patch.ids"] = np.tile((buckets @ np.array([self._side, 1])).astype(np.int32), n)
        elif p.projector.positions is Positions.TABLE:
            ids = places @ np.array([width // p.patch_size, 1])
            if self.has_class:
                ids = np.r_[ids + 1, 0] if p.projector.class_first else np.r_[ids, len(places)]
            feeds["patch.ids"] = np.tile(ids.astype(np.int32), n)
        if p.projector.rope is not PatchRope.NONE:
            order = places if p.projector.rope in ROWS_FIRST else places[:, ::-1]
            if p.projector.rope is PatchRope.FROM_ONE:
                order = np.concatenate([order + 1, np.zeros((int(self.has_class), 2), order.dtype)])
            feeds["patch.pos"] = np.tile(order.T.astype(np.int32), n)
        if p.full_period > 1:
            feeds |= self._window_feeds(places, n)
        if p.n_queries:
            return feeds | resampler_feeds(p, places, n, self.w["resampler.query"].shape[1])
        return feeds | project_feeds(p, places, n)

    @property
    def _side(self) -> int:
        """Side of the square grid that the position table is made for."""
        shape = self.w["v.position_embd"].shape
        return math.isqrt(shape[self.p.projector.positions in (Positions.FILTERED_TABLE, Positions.CUBIC_TABLE)])

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

        Their inputs are those of `feeds`."""
        p, w = self.p, self.w
        n_patches = self.n_inputs(height, width)
        length = n_patches + self.has_class
        total = n_tiles * length
        shape = (n_tiles * (p.image_size // 2) ** 2, 27) if p.blocks else (total, 3 * p.patch_size**2)
        x = add(mul(feed("patches", shape), self.constants["pixel.scale"]), self.constants["pixel.shift"])
        if p.blocks:
            return [mobilenet_rows(p, w, x, n_tiles)]
        x = normed(p, w, "v.patch_norm.1", x, NORM_EPS)
        y = linear(x, w["v.patch_embd"])
        if p.projector.two_patch_weights:
            y = add(y, linear(x, w.tensors["v.patch_embd.weight.1"]))
        if (bias := w.bias("v.patch_embd")) is not None:
            y = add(y, bias)
        y = normed(p, w, "v.patch_norm.2", y, NORM_EPS)
        y = normed(p, w, "v.norm_embd", y)
        if self.has_class:
            y = self.with_class(y, feed("patch.kind", (total,), "i32"))
        if p.projector.positions in (Positions.RESIZED_TABLE, Positions.ENLARGED_TABLE):
            y = add(y, self._resized_positions(total))
        elif p.projector.positions in (Positions.FILTERED_TABLE, Positions.CUBIC_TABLE):
            table = w["v.position_embd"]  # (n_embd, places)
            y = add(y, linear(feed("patch.shares", (total, table.shape[1])), table))
        elif p.projector.positions is Positions.SUMMED_TABLES:
            for axis in "xy":
                y = add(y, get_rows(w["v.position_embd"], feed(f"patch.ids.{axis}", (total,), "i32")))
        elif p.projector.positions in (Positions.TABLE, Positions.BUCKETS):
            y = add(y, get_rows(w["v.position_embd"], feed("patch.ids", (total,), "i32")))
        x = normed(p, w, "v.pre_ln", normed(p, w, "v.patch_norm.3", y, NORM_EPS))
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
        x, deep = self.layers(x, whole, parts, angles)
        x = normed(p, w, "v.post_ln", x)
        if self.has_class:
            x = get_rows(x, feed("patch.kept", (n_tiles * n_patches,), "i32"))
        if p.n_queries:
            return [resampled(p, w, x, n_tiles, (height // p.patch_size, width // p.patch_size))]
        return [project(p, w, x), *deep]

    def layers(
        self, x: Tensor, whole: Windows, parts: Windows | None = None, angles: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The transformer's layers of x (T, n_embd), of which most may attend within `parts`; and the
        rows of deepstack layers."""
        p, w = self.p, self.w
        deep = []
        for layer in range(p.n_layer - p.projector.skip_last_layer):
            b = replace(w, prefix=f"v.blk.{layer}.")
            windows = whole if parts is None or (layer + 1) % p.full_period == 0 else parts
            y = self._scaled(b, "ls1", self._attention(b, normed(p, b, "ln1", x), angles, windows))
            x = add(x, normed(p, b, "attn_post_norm", y))
            y = normed(p, b, "ffn_post_norm", self._mlp(b, normed(p, b, "ln2", x)))
            x = self._scaled(b, "out_scale", add(x, self._scaled(b, "ls2", y)))
            if layer in p.deepstack:
                b = replace(w, prefix=f"v.deepstack.{layer}.")
                merged = reshape(x, shape=(-1, p.n_embd * p.merge**2))
                deep.append(b.linear("fc2", gelu(b.linear("fc1", normed(p, b, "norm", merged)))))
        return x, deep

    def _resized_positions(self, total: int) -> Tensor:
        """Position vectors (T, n_embd) between the four nearest of the table."""
        parts = []
        for i in range(4):
            row = get_rows(self.w["v.position_embd"], feed(f"patch.ids.{i}", (total,), "i32"))
            parts.append(mul(row, feed(f"patch.share.{i}", (total, 1))))
        return reduce(add, parts)

    def extra_rows(self, kinds: Tensor) -> Tensor:
        """Rows (n, n_embd_text) beside those of patches, by kind (n,) i32."""
        return get_rows(extra_rows(self.p, self.w), kinds)

    def row_places(self, height: int, width: int) -> tuple[Array, Array, Array]:
        """Indices of a tile's rows in the prompt: those of `rows`, those of extra rows; and the kinds of these."""
        lines, columns = self.p.grid(height, width)
        rows = np.arange(lines * columns)
        ends = np.arange(1, lines + 1) * (columns + 1) - 1
        if self.p.projector.framed:
            last = ends[-1] + 2
            kinds = np.r_[np.zeros(lines, np.int64), 1, 2]
            return 1 + rows + rows // columns, np.r_[1 + ends, 0, last], kinds
        if self.p.projector.enclosed:
            return 1 + rows, np.array([0, 1 + len(rows)]), np.arange(2)
        if self.p.breaks:
            return rows + rows // columns, ends[:-1], np.zeros(lines - 1, np.int64)
        return rows, rows[:0], rows[:0]

    def with_class(self, x: Tensor, kind: Tensor) -> Tensor:
        """x (T, n_embd) with the class embedding in rows of kind 1."""
        return add(mul(x, get_rows(self.constants["is_patch"], kind)), get_rows(self.constants["class"], kind))

    def _scaled(self, b: Weights, name: str, x: Tensor) -> Tensor:
        return mul(x, b[name]) if name in b else x

    def _attention(self, b: Weights, x: Tensor, angles: Tensor | None, windows: Windows) -> Tensor:
        p = self.p
        shape = (x.shape[0], p.n_head, p.head_dim)
        q, k, v = (reshape(b.linear(name, x), shape=shape) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = (normed(p, b, f"{name}_norm", t) for name, t in (("attn_q", q), ("attn_k", k)))
        if p.projector.value_norm:
            v = rms_norm(v, const(1.0), eps=p.eps)
        if angles is not None:
            if p.projector.rope is PatchRope.COLUMNS_FIRST_NEOX:
                q, k = self._pairs_apart(q), self._pairs_apart(k)
            interleaved = p.projector.rope in NEIGHBOURS
            q, k = (rope(t, angles, interleaved=interleaved) for t in (q, k))
        factor = 1.0 if p.projector.unscaled_attention else p.head_dim**-0.5
        return b.linear("attn_out", windows.attention(q, k, v, factor))

    def _pairs_apart(self, x: Tensor) -> Tensor:
        """Heads (T, H, D) whose pairs within each half are pairs of the whole head."""
        quarters = reshape(x, shape=(-1, 2, 2, self.p.head_dim // 4))
        return reshape(transpose(quarters, axes=(0, 2, 1, 3)), shape=x.shape)

    def _mlp(self, b: Weights, x: Tensor) -> Tensor:
        up = b.linear("ffn_up", x)
        if "ffn_gate" in b:
            up = mul(activated(self.p, b.linear("ffn_gate", x)), up)
        else:
            up = activated(self.p, up)
        return b.linear("ffn_down", up)

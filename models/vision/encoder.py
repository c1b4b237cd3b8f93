"""Vision encoder (ViT, Dosovitskiy et al., 2020) and projector: patches → rows of the text model.

Patches of one row of the result are neighbours, row by row: merging them is a reshape. Tiles of one
size are a batch; they do not attend to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import add, gelu, mul
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.rope import mrope_angles, rope
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.media.projector_encoder import Array, ProjectorEncoder
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.heads import NORM_EPS, activated, as_row, extra_rows, normed, project, project_feeds
from logitless.models.vision.params import VisionParams
from logitless.models.vision.patches import cubic_shares, filtered_shares, flat_patches, patch_places, resized_places
from logitless.models.vision.projectors import PatchRope, Positions
from logitless.models.vision.resampler import resampled, resampler_feeds
from logitless.models.vision.towers.mobilenet import mobilenet_feeds, mobilenet_rows

ROWS_FIRST = (PatchRope.SECTIONS, PatchRope.HALVES)
LAYER_NORMS = (("ln1", "attn_post_norm"), ("ln2", "ffn_post_norm"))  # before and after attention and MLP
OUTPUT_NORMS = (("", "ln1"), ("", "ln2"))
PRODUCTS = (Positions.FILTERED_TABLE, Positions.CUBIC_TABLE)
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
class VisionEncoder(ProjectorEncoder[VisionParams]):
    """The encoder of images of one projector file.

    A class token is the last row of a tile, and no row of the result."""

    @staticmethod
    def numbers(p: VisionParams) -> dict[str, Array]:
        """Constants that follow from the parameters."""
        area = 9 if p.blocks else p.patch_size**2
        std, mean = (np.array(values, np.float32) for values in (p.std, p.mean))
        if p.projector.doubled_pixels:
            std, mean = np.float32(0.5) * std, mean + np.float32(0.5) * std
        numbers = {
            "pixel.scale": np.repeat(np.float32(1) / (np.float32(255) * std), area),
            "pixel.shift": np.repeat(-mean / std, area),
            "is_patch": np.array([[1.0], [0.0]], np.float32),
        }
        if p.projector.rope is not PatchRope.NONE:
            quarter = p.head_dim // 4  # pairs of rows, and of columns
            base = p.projector.rope_base ** (-np.arange(quarter) / quarter)
            odd = p.projector.rope_base ** (-2 / p.head_dim) if p.projector.rope is PatchRope.HALVES else 1.0
            numbers["frequency"] = np.concatenate([base, base * odd]).astype(np.float32)
            numbers["component"] = np.repeat(np.arange(2, dtype=np.int32), quarter)
        return numbers

    def n_inputs(self, height: int, width: int) -> int:
        """Patches of a tile, which attend to each other."""
        return (height // self.p.patch_size) * (width // self.p.patch_size)

    @property
    def usual_size(self) -> tuple[int, int]:
        """(height, width) of a tile as large as usual images become."""
        return self.p.usual_size

    @property
    def has_class(self) -> bool:
        return self.w.has("v.class_embd")

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
            of_rows = self._position_table().shape[0] // 2
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
            return feeds | resampler_feeds(p, places, n, self.w.n_text)
        return feeds | project_feeds(p, places, n)

    @property
    def _side(self) -> int:
        """Side of the square grid that the position table is made for."""
        return math.isqrt(self._position_table().shape[self.p.projector.positions in PRODUCTS])

    def _position_table(self) -> Tensor:
        """A vector for each place; (n_embd, places) where it is a factor of products."""
        p, w, name, kind = self.p, self.w, "v.position_embd.weight", self.p.projector.positions
        shape = w.shape(name)
        if kind is Positions.SUMMED_TABLES:
            n = max(p.most_columns * p.merge, shape[1] if len(shape) == 3 else 1)
            return w.read(name, 2 * n, p.n_embd, in_file=(2, n, p.n_embd))
        if p.sam:  # the class token has the first
            n = math.isqrt(max(1, shape[0] - 1)) ** 2 + 1
        elif kind is Positions.TABLE:  # at least those of a tile
            n = max(shape[0], (p.image_size // p.patch_size) ** 2 + self.has_class)
        else:
            n = math.isqrt(shape[0]) ** 2
        return w.transposed(name, p.n_embd, n) if kind in PRODUCTS else w.read(name, n, p.n_embd)

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
        y = self._patch_vectors(normed(p, w, "v.patch_norm.1", x, NORM_EPS))
        y = normed(p, w, "v.norm_embd", normed(p, w, "v.patch_norm.2", y, NORM_EPS))
        if self.has_class:
            y = self.with_class(y, feed("patch.kind", (total,), "i32"))
        y = normed(p, w, "v.patch_norm.3", self._with_positions(y), NORM_EPS)
        x = normed(p, w, "v.pre_ln", y)
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

    def _patch_vectors(self, x: Tensor) -> Tensor:
        """Vectors (T, n_embd) of normalised patches x (T, 3 · patch_size²)."""
        p, w = self.p, self.w
        names = ("v.patch_embd.weight", "v.patch_embd.weight.1")[: 1 + p.projector.two_patch_weights]
        matrices = (w.matrix(name, p.n_embd, x.shape[1], (p.patch_size, p.patch_size)) for name in names)
        y = reduce(add, (linear(x, matrix) for matrix in matrices))
        bias = w.optional("v.patch_embd.bias", p.n_embd)
        return y if bias is None else add(y, bias)

    def _with_positions(self, y: Tensor) -> Tensor:
        """Vectors y (T, n_embd) with those of their patches' places added."""
        kind, total = self.p.projector.positions, y.shape[0]
        if kind is Positions.NONE:
            return y
        table = self._position_table()
        if kind in PRODUCTS:
            return add(y, linear(feed("patch.shares", (total, table.shape[1])), table))
        if kind in (Positions.RESIZED_TABLE, Positions.ENLARGED_TABLE):  # between the four nearest
            near = (get_rows(table, feed(f"patch.ids.{i}", (total,), "i32")) for i in range(4))
            return add(y, reduce(add, (mul(t, feed(f"patch.share.{i}", (total, 1))) for i, t in enumerate(near))))
        for name in ("patch.ids.x", "patch.ids.y") if kind is Positions.SUMMED_TABLES else ("patch.ids",):
            y = add(y, get_rows(table, feed(name, (total,), "i32")))
        return y

    def layers(
        self, x: Tensor, whole: Windows, parts: Windows | None = None, angles: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The transformer's layers of x (T, n_embd), of which most may attend within `parts`; and the
        rows of deepstack layers."""
        p, w, deep = self.p, self.w, list[Tensor]()
        for layer in range(p.n_layer):
            windows = whole if parts is None or (layer + 1) % p.full_period == 0 else parts
            y = self._layer(replace(w, prefix=f"v.blk.{layer}."), x, windows, angles)
            if layer == p.n_layer - p.projector.skip_last_layer:
                break  # the file has it all the same
            x = y
            if layer in p.deepstack:
                b = replace(w, prefix=f"v.deepstack.{layer}.")
                merged = normed(p, b, "norm", reshape(x, shape=(-1, p.n_embd * p.merge**2)), required=True)
                deep.append(b.linear("fc2", gelu(b.linear("fc1", merged)), w.n_text))
        return x, deep

    def _layer(self, b: ProjectorWeights, x: Tensor, windows: Windows, angles: Tensor | None) -> Tensor:
        p = self.p
        (before, after), (before_mlp, after_mlp) = OUTPUT_NORMS if p.projector.norm_outputs else LAYER_NORMS
        y = self._scaled(b, "ls1", self._attention(b, normed(p, b, before, x), angles, windows))
        x = add(x, normed(p, b, after, y))
        y = normed(p, b, after_mlp, self._mlp(b, normed(p, b, before_mlp, x)))
        return self._scaled(b, "out_scale", add(x, self._scaled(b, "ls2", y)))

    def row_table(self) -> list[Tensor]:
        """The kinds of rows (n, n_text) that tiles have beside those of patches; most have none."""
        return extra_rows(self.p, self.w)

    def extra_rows(self, kinds: Tensor) -> Tensor:
        """Rows (n, n_embd_text) beside those of patches, by kind (n,) i32."""
        return get_rows(self.row_table()[0], kinds)

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
        of_kind = pad_rows(as_row(self.w.read("v.class_embd", x.shape[1])), before=1, after=0)
        return add(mul(x, get_rows(self.constants["is_patch"], kind)), get_rows(of_kind, kind))

    def _scaled(self, b: ProjectorWeights, name: str, x: Tensor) -> Tensor:
        factor = b.optional(f"{name}.weight", x.shape[1])
        return x if factor is None else mul(x, factor)

    def _attention(self, b: ProjectorWeights, x: Tensor, angles: Tensor | None, windows: Windows) -> Tensor:
        p = self.p
        shape, is_normed = (x.shape[0], p.n_head, p.head_dim), p.projector.value_norm
        parts = (b.linear_part(f"attn_{name}", x, "attn_qkv", i) for i, name in enumerate("qkv"))
        q, k, v = (reshape(t, shape=shape) for t in parts)
        q, k = (normed(p, b, f"attn_{name}_norm", t, required=is_normed) for name, t in (("q", q), ("k", k)))
        if is_normed:
            v = rms_norm(v, const(1.0), eps=p.eps)
        if angles is not None:
            if p.projector.rope is PatchRope.COLUMNS_FIRST_NEOX:
                q, k = self._pairs_apart(q), self._pairs_apart(k)
            interleaved = p.projector.rope in NEIGHBOURS
            q, k = (rope(t, angles, interleaved=interleaved) for t in (q, k))
        factor = 1.0 if p.projector.unscaled_attention else p.head_dim**-0.5
        return b.linear("attn_out", windows.attention(q, k, v, factor), p.n_embd)

    def _pairs_apart(self, x: Tensor) -> Tensor:
        """Heads (T, H, D) whose pairs within each half are pairs of the whole head."""
        quarters = reshape(x, shape=(-1, 2, 2, self.p.head_dim // 4))
        return reshape(transpose(quarters, axes=(0, 2, 1, 3)), shape=x.shape)

    def _mlp(self, b: ProjectorWeights, x: Tensor) -> Tensor:
        n, n_ff, names = self.p.n_embd, self.p.n_ff, ("ffn_up", "ffn_down")
        n_out = [b.shape(f"{name}.weight")[0] for name in names]
        if n != n_ff and (n_out[0] == n or n_out[1] == n_ff):  # as the first converters call them
            names = names[::-1]
        up = b.linear(names[0], x, n_ff)
        if "ffn_gate" in b:
            up = mul(activated(self.p, b.linear("ffn_gate", x, n_ff)), up)
        else:
            up = activated(self.p, up)
        return b.linear(names[1], up, n)

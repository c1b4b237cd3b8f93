"""MobileVLM projectors (LDP; Chu et al., 2023 and 2024): depthwise convolutions over patches."""

from __future__ import annotations

import math

import numpy as np

from logitless.graph.ops.attention.encoder_attention import mean_rows
from logitless.graph.ops.elementwise import add, gelu, mul, scale
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.pointwise import clamp, relu
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.media.layers import depthwise
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.params import VisionParams
from logitless.models.vision.patches import Array
from logitless.models.vision.projectors import Head

TAPS = 9  # of a convolution of 3 × 3


def ldp(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    """LDP: an MLP, then two blocks of depthwise separable convolutions, of which the second halves both sides."""
    x = w.linear("mm.model.mlp.3", gelu(w.linear("mm.model.mlp.1", x, w.n_text)), w.n_text)
    return _block(p, w, 2, add(x, _block(p, w, 1, x)))


def ldp_v2(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    """LDP v2: an MLP, average pooling, and a convolution that encodes positions."""
    x = w.linear("mm.model.mlp.2", gelu(w.linear("mm.model.mlp.0", x, w.n_text)), w.n_text)
    n = x.shape[0] // p.merge**2
    x = mean_rows(x, *(feed(f"patch.{name}", (n,), "i32") for name in ("first", "pooled")))
    bias = w.read("mm.model.peg.0.bias", w.n_text)
    return add(add(_convolved(w, "mm.model.peg.0", x, "ldp.peg"), bias), x)


def ldp_feeds(p: VisionParams, places: Array, n: int) -> dict[str, Array]:
    """Inputs of the projectors for n tiles whose patches have these (row, column) places."""
    side = math.isqrt(len(places))
    rows = np.stack(np.divmod(np.arange(len(places) // 4), side // 2), 1)  # of the half grid, line by line
    if p.projector.head is Head.LDP_V2:
        return _taps("ldp.peg", rows, rows, 1, n)
    feeds = _taps("ldp.1", places, places, 1, n) | _taps("ldp.2", places, rows, 2, n)
    for i, size in (1, len(places)), (2, len(rows)):
        tiles = np.arange(n, dtype=np.int32)
        feeds |= {f"ldp.{i}.first": tiles * size, f"ldp.{i}.count": np.full(n, size, np.int32)}
        feeds[f"ldp.{i}.tile"] = np.repeat(tiles, size)
    return feeds


def _taps(name: str, places: Array, out: Array, stride: int, n: int) -> dict[str, Array]:
    """The rows that each tap of a padded 3 × 3 convolution reads, the last + 1 beyond the edges, tap
    by tap: from rows at `places` to rows at `out`; and the taps."""
    side = 1 + places.max()
    index = np.full((side + 2, side + 2), -1)
    index[places[:, 0] + 1, places[:, 1] + 1] = np.arange(len(places))
    parts = []
    for y, x in np.ndindex(3, 3):
        of_tile = index[out[:, 0] * stride + y, out[:, 1] * stride + x]
        parts.append(np.where(of_tile < 0, n * len(places), np.arange(n)[:, None] * len(places) + of_tile))
    ids = np.stack(parts).reshape(-1).astype(np.int32)
    return {f"{name}.ids": ids, f"{name}.taps": np.repeat(np.arange(TAPS, dtype=np.int32), n * len(out))}


def _convolved(w: ProjectorWeights, name: str, x: Tensor, inputs: str, stride: int = 1) -> Tensor:
    """Depthwise convolution of rows (T, C)."""
    n, width = x.shape[0] // stride**2, x.shape[1]
    ids, taps = (feed(f"{inputs}.{part}", (TAPS * n,), "i32") for part in ("ids", "taps"))
    weight = w.transposed(f"{name}.weight", TAPS, width, in_file=(width, 1, 3, 3))
    return depthwise(x, weight, ids, taps, TAPS)


def _block(p: VisionParams, w: ProjectorWeights, i: int, x: Tensor) -> Tensor:
    """Depthwise convolution, squeeze and excitation, pointwise convolution."""
    b, stride = f"mm.model.mb_block.{i}.block.", i
    x = _convolved(w, f"{b}0.0", x, f"ldp.{i}", stride)
    x = w.layer_norm(f"{b}0.1", x, p.eps)
    x = mul(x, _hard_sigmoid(x))
    n_tiles = x.shape[0] * stride**2 // (p.image_size // p.patch_size) ** 2
    first, count = (feed(f"ldp.{i}.{name}", (n_tiles,), "i32") for name in ("first", "count"))
    gate = w.linear(f"{b}1.fc2", relu(w.linear(f"{b}1.fc1", mean_rows(x, first, count))), w.n_text)
    x = mul(x, get_rows(_hard_sigmoid(gate), feed(f"ldp.{i}.tile", x.shape[:1], "i32")))
    return w.layer_norm(f"{b}2.1", w.linear(f"{b}2.0", x, w.n_text), p.eps)


def _hard_sigmoid(x: Tensor) -> Tensor:
    return clamp(add(scale(x, factor=1 / 6), const(0.5)), low=0.0, high=1.0)

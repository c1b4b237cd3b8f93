"""MobileNet V5, the vision encoder of Gemma 3n: feature maps as rows, convolutions as gathered rows.

The stem and four stages halve a square of pixels each; the last maps of the last two stages are
joined, and become 16 × 16 rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from logitless.graph.ops.attention.encoder_attention import full_attention, mean_rows
from logitless.graph.ops.elementwise import add, gelu, mul, scale
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import pad_rows, reshape, slice_rows
from logitless.graph.ops.slicing import concat
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.media.layers import near_rows
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.mobilenet_blocks import N_STAGES, Block, Kind
from logitless.models.vision.params import SIDE, VisionParams
from logitless.models.vision.patches import Array

EPS = 1e-6
POINT = (1, 1)  # kernel of a pointwise convolution


class Map(NamedTuple):
    """A feature map of n squares: x (n · side², channels), line by line. `input`: an input of indices."""

    x: Tensor
    n: int
    side: int
    input: Callable[[str, tuple[int, ...]], Tensor]


def mobilenet_rows(p: VisionParams, w: ProjectorWeights, pixels: Tensor, n: int) -> Tensor:
    """Rows (n · 256, n_embd_text) of n squares. pixels (n · (image size / 2)², 27): the normalised
    patches of 3 × 3 of the stem."""
    x = gelu(_normed(w, "v.conv_stem.bn", w.linear("v.conv_stem.conv", pixels, 0, (3, 3))))
    m = Map(x, n, p.image_size // 2, cache(lambda name, shape: feed(name, shape, "i32")))
    last: dict[int, Map] = {}  # last map of each stage
    for block in p.blocks:
        m = _BLOCKS[block.kind](w, block, m)
        last[block.stage] = m
    large, small = last[N_STAGES - 2], last[N_STAGES - 1]
    ids = m.input("map.enlarged", large.x.shape[:1])
    joined = concat(large.x, get_rows(small.x, ids))
    x = gelu(_normed(w, "v.msfa.ffn.pw_exp.bn", w.linear("v.msfa.ffn.pw_exp.conv", joined, 0, POINT)))
    x = _normed(w, "v.msfa.ffn.pw_proj.bn", w.linear("v.msfa.ffn.pw_proj.conv", x, 0, POINT))
    if large.side > SIDE:
        first, count = (m.input(f"map.{name}", (n * SIDE**2,)) for name in ("first", "count"))
        x = mean_rows(get_rows(x, m.input("map.pooled", x.shape[:1])), first, count)
    x = scale(_normed(w, "v.msfa.norm", x), factor=float(x.shape[1]) ** 0.5)
    return rms_norm(w.linear("mm.input_projection", _normed(w, "mm.soft_emb_norm", x), w.n_text), const(1.0), eps=EPS)


def mobilenet_feeds(p: VisionParams, tiles: Sequence[Array]) -> dict[str, Array]:
    """Inputs of `mobilenet_rows` for tiles (side, side, 3) u8, and `patches` (…, 27) of pixels."""
    n, side = len(tiles), p.image_size // 2
    background = np.array(p.mean, np.float32) * np.float32(255)  # normalised to zero
    feeds = {"patches": np.concatenate([_stem_patches(tile, background) for tile in tiles])}
    for block in p.blocks:
        if block.kind is Kind.EDGE:
            taps = _taps(n, side, 3, block.stride)
            feeds[_name("near", 3, block.stride, side)] = taps.T.reshape(-1)
        for size, stride in ((block.start, 1), (block.middle, block.stride), (block.key, 2), (block.value, 2)):
            if size:
                feeds[_name("taps", size, stride, side)] = _taps(n, side, size, stride)
                feeds[f"taps.{size}"] = np.arange(size**2, dtype=np.int32)
        if block.kind is Kind.ATTENTION:
            n_visible = _n_visible(block, side)
            feeds[f"map.seen.{side}.{n_visible}"] = np.full(n, n_visible, np.int32)
            spread = np.minimum(np.arange(side**2), n_visible - 1) + np.arange(n)[:, None] * n_visible
            feeds[f"map.spread.{side}.{n_visible}"] = spread.reshape(-1).astype(np.int32)
        side = -(-side // block.stride)
        if block.stage == N_STAGES - 2:
            large = side
    tile = np.arange(n)[:, None]
    y, x = np.divmod(np.arange(large**2), large)
    feeds["map.enlarged"] = (y * side // large * side + x * side // large + tile * side**2).reshape(-1).astype(np.int32)
    if large > SIDE:
        size = large // SIDE
        cells = np.arange(large**2).reshape(SIDE, size, SIDE, size).transpose(0, 2, 1, 3).reshape(-1)
        feeds["map.pooled"] = (cells + tile * large**2).reshape(-1).astype(np.int32)
        feeds["map.first"] = np.arange(0, n * large**2, size**2, dtype=np.int32)
        feeds["map.count"] = np.full(n * SIDE**2, size**2, np.int32)
    return feeds


def _name(kind: str, size: int, stride: int, side: int) -> str:
    return f"{kind}.{size}.{stride}.{side}"


def _n_visible(block: Block, side: int) -> int:
    """Number of keys of an attention block over a map of side²."""
    return int((-(-side // 2) if block.key else side) ** 2)


def _before(side: int, size: int, stride: int) -> int:
    """Zeros before the first pixel: as many as behind the last, or one less where a map is halved."""
    return size // 2 if stride == 1 else max(0, (-(-side // stride) - 1) * stride + size - side) // 2


def _taps(n: int, side: int, size: int, stride: int) -> Array:
    """(size², rows) i32: input row of each tap of each output row; n · side²: the padding."""
    out, before = -(-side // stride), _before(side, size, stride)
    at = np.arange(out) * stride - before + np.arange(size)[:, None]  # (tap, row)
    inside = (at >= 0) & (at < side)
    ids = at[:, None, :, None] * side + at[None, :, None, :]
    whole = inside[:, None, :, None] & inside[None, :, None, :]
    ids, whole = (t.reshape(size**2, 1, out**2) for t in (ids, whole))
    of_tiles = np.where(whole, ids + np.arange(n)[None, :, None] * side**2, n * side**2)
    taps: Array = of_tiles.reshape(size**2, n * out**2).astype(np.int32)
    return taps


def _stem_patches(pixels: Array, background: Array) -> Array:
    """Patches (n, 27) f32 of 3 × 3, two pixels apart, colours first."""
    side = pixels.shape[0]
    padded = np.empty((side + 1, side + 1, 3), np.float32)
    padded[:] = background
    padded[:side, :side] = pixels
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))[::2, ::2]
    return windows.reshape(-1, 27)


def _normed(w: ProjectorWeights, name: str, x: Tensor) -> Tensor:
    return w.rms_norm(name, x, EPS)


def _row(t: Tensor, i: int) -> Tensor:
    return reshape(slice_rows(t, start=i, stop=i + 1), shape=(-1,))


def _depthwise(w: ProjectorWeights, name: str, m: Map, size: int, stride: int) -> Map:
    """A depthwise convolution, tap by tap."""
    side = -(-m.side // stride)
    ids = m.input(_name("taps", size, stride, m.side), (size**2, m.n * side**2))
    numbers, padded = m.input(f"taps.{size}", (size**2,)), pad_rows(m.x, before=0, after=1)
    width = m.x.shape[1]
    weight = w.transposed(f"{name}.weight", size**2, width, in_file=(width, 1, size, size))
    parts = (mul(get_rows(padded, _row(ids, i)), get_rows(weight, _row(numbers, i))) for i in range(size**2))
    return m._replace(x=reduce(add, parts), side=side)


def _edge(w: ProjectorWeights, block: Block, m: Map) -> Map:
    b, side = block.name, -(-m.side // block.stride)
    ids = m.input(_name("near", 3, block.stride, m.side), (9 * m.n * side**2,))
    x = gelu(_normed(w, f"{b}bn1", w.linear(f"{b}conv_exp", near_rows(m.x, ids, 9), 0, (3, 3))))
    x = _normed(w, f"{b}bn2", w.linear(f"{b}conv_pwl", x, 0, POINT))
    return _with_residual(m, m._replace(x=x, side=side))


def _inverted(w: ProjectorWeights, block: Block, m: Map) -> Map:
    b, y = block.name, m
    if block.start:
        y = _depthwise(w, f"{b}dw_start.conv", y, block.start, 1)
        y = y._replace(x=_normed(w, f"{b}dw_start.bn", y.x))
    y = y._replace(x=gelu(_normed(w, f"{b}pw_exp.bn", w.linear(f"{b}pw_exp.conv", y.x, 0, POINT))))
    if block.middle:
        y = _depthwise(w, f"{b}dw_mid.conv", y, block.middle, block.stride)
        y = y._replace(x=gelu(_normed(w, f"{b}dw_mid.bn", y.x)))
    x = _normed(w, f"{b}pw_proj.bn", w.linear(f"{b}pw_proj.conv", y.x, 0, POINT))
    return _with_residual(m, y._replace(x=_scaled(w, b, x)))


def _attention(w: ProjectorWeights, block: Block, m: Map) -> Map:
    """Multi-query attention: the heads' queries of all rows, one head of keys and values."""
    b, x = block.name, _normed(w, f"{block.name}norm", m.x)
    q = w.linear(f"{b}attn.query.proj", x, 0, POINT)
    n_visible = _n_visible(block, m.side)
    spread = m.input(f"map.spread.{m.side}.{n_visible}", x.shape[:1])  # fills a tile's keys up to its queries
    kv = []
    for name, size in (("key", block.key), ("value", block.value)):
        y = x
        if size:
            y = _depthwise(w, f"{b}attn.{name}.down_conv", m._replace(x=x), size, 2).x
            y = _normed(w, f"{b}attn.{name}.norm", y)
        d = w.shape(f"{b}attn.key.proj.weight")[0]
        y = get_rows(w.linear(f"{b}attn.{name}.proj", y, d, POINT), spread)
        kv.append(reshape(y, shape=(y.shape[0], 1, y.shape[1])))
    q, count = reshape(q, shape=(q.shape[0], -1, d)), m.input(f"map.seen.{m.side}.{n_visible}", (m.n,))
    y = full_attention(q, *kv, count, length=m.side**2, scale=d**-0.5)
    y = w.linear(f"{b}attn.output.proj", reshape(y, shape=(y.shape[0], -1)), x.shape[1], POINT)
    return m._replace(x=add(m.x, _scaled(w, b, y)))


def _scaled(w: ProjectorWeights, b: str, x: Tensor) -> Tensor:
    factors = w.optional(f"{b}layer_scale.gamma", x.shape[1])
    return x if factors is None else mul(x, factors)


def _with_residual(m: Map, y: Map) -> Map:
    return y._replace(x=add(y.x, m.x)) if m.x.shape == y.x.shape else y


_BLOCKS = {Kind.EDGE: _edge, Kind.INVERTED: _inverted, Kind.ATTENTION: _attention}

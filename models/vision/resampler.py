"""The resampler of MiniCPM-V (a perceiver; Jaegle et al., 2021): learned queries attend to a tile's patches."""

from __future__ import annotations

import numpy as np

from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor, feed
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.params import RESAMPLER_HEAD, VisionParams
from logitless.models.vision.patches import Array


def resampler_feeds(p: VisionParams, places: Array, n: int, n_text: int) -> dict[str, Array]:
    """Inputs of `resampled` for n tiles whose patches have these (row, column) places.

    Attention has as many queries as keys: of the fewer ones the last fills up the places."""
    n_keys, tiles = len(places), np.arange(n)[:, None]
    length = np.arange(max(n_keys, p.n_queries))
    lines, columns = (1 + places.max(0)).tolist()
    angles = np.arange(max(lines, columns))[:, None] * 1e4 ** (-np.arange(n_text // 4) / (n_text // 4))
    waves = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    zeros = np.zeros_like(waves)
    ids = {
        "own": np.arange(p.n_queries),
        "query": np.tile(np.minimum(length, p.n_queries - 1), n),
        "key": np.minimum(length, n_keys - 1) + tiles * n_keys,
        "row": np.arange(p.n_queries) + tiles * len(length),
        "x": np.tile(places[:, 1], n),
        "y": np.tile(places[:, 0], n),
        "count": np.full(n, n_keys),
    }
    feeds = {f"resampler.{name}": values.reshape(-1).astype(np.int32) for name, values in ids.items()}
    feeds["resampler.waves.x"] = np.concatenate([waves, zeros], 1)[:columns]
    feeds["resampler.waves.y"] = np.concatenate([zeros, waves], 1)[:lines]
    return feeds


def resampled(p: VisionParams, w: ProjectorWeights, x: Tensor, n: int, grid: tuple[int, int]) -> Tensor:
    """Rows (n · n_queries, n_text) of patch vectors x (T, n_embd) of n tiles with this grid of patches."""
    if w.n_text % RESAMPLER_HEAD:
        raise ValueError(f"a resampler has heads of {RESAMPLER_HEAD} numbers, the text model vectors of {w.n_text}")
    queries = w.read("resampler.query.weight", p.n_queries, w.n_text, source="resampler.query")
    n_text, n_keys = w.n_text, grid[0] * grid[1]
    length = max(n_keys, p.n_queries)

    def ids(name: str, size: int) -> Tensor:
        return feed(f"resampler.{name}", (size,), "i32")

    def heads(name: str, rows: Tensor, order: Tensor) -> Tensor:
        rows = get_rows(w.linear(f"resampler.attn.{name}", rows, n_text), order)
        return reshape(rows, shape=(n * length, -1, RESAMPLER_HEAD))

    def normed(name: str, rows: Tensor) -> Tensor:
        return w.layer_norm(f"resampler.ln_{name}", rows, p.eps, needs_bias=False)

    value = normed("kv", w.linear("resampler.kv", x, n_text))
    key = value
    for axis, size in zip("yx", grid, strict=True):
        waves = feed(f"resampler.waves.{axis}", (size, n_text))
        key = add(key, get_rows(waves, ids(axis, n * n_keys)))
    query = normed("q", get_rows(queries, ids("own", p.n_queries)))
    order = ids("key", n * length)
    q, k, v = heads("q", query, ids("query", n * length)), heads("k", key, order), heads("v", value, order)
    y = full_attention(q, k, v, ids("count", n), length=length, scale=RESAMPLER_HEAD**-0.5)
    y = get_rows(reshape(y, shape=(n * length, n_text)), ids("row", n * p.n_queries))
    return w.linear("resampler.proj", normed("post", w.linear("resampler.attn.out", y, n_text)), n_text)

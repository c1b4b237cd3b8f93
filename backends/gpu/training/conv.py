"""Convolution (im2col) and pooling: a thread an element, sums in a fixed order."""

from __future__ import annotations

from typing import Any

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, lower, lower_plain
from logitless.graph.tensor import Tensor

SIZES = "uint n h w c out_h out_w"
PATCH = f"{SIZES} size_h size_w stride padding"

Kernel(
    "patches",
    "f32 X, w f32 Y",
    PATCH,
    """
  FOR_EACH(i, n) {
    uint k = i % c, r = i / c, dx = r % size_w; r /= size_w;
    uint dy = r % size_h; r /= size_h;
    uint ox = r % out_w; r /= out_w;
    uint oy = r % out_h, image = r / out_h;
    uint y = oy * stride + dy, x = ox * stride + dx;
    bool inside = y >= padding && y < h + padding && x >= padding && x < w + padding;
    Y[i] = inside ? X[((image * h + (inside ? y - padding : 0u)) * w + (inside ? x - padding : 0u)) * c + k] : 0.0f;
  }""",
)
Kernel(
    "patches_back",
    "f32 G, w f32 Y",
    PATCH,
    """
  FOR_EACH(i, n) {
    uint k = i % c, r = i / c, x = r % w + padding; r /= w;
    uint y = r % h + padding, image = r / h;
    PRECISE float total = 0.0f;
    for (uint dy = 0u; dy < size_h && dy <= y; dy++) for (uint dx = 0u; dx < size_w && dx <= x; dx++) {
      uint oy = (y - dy) / stride, ox = (x - dx) / stride;
      if ((y - dy) % stride == 0u && (x - dx) % stride == 0u && oy < out_h && ox < out_w)
        total = total + G[((((image * out_h + oy) * out_w + ox) * size_h + dy) * size_w + dx) * c + k];
    }
    Y[i] = total;
  }""",
)
Kernel(
    "max_pool",
    "f32 X, w f32 Y",
    f"{SIZES} size",
    """
  FOR_EACH(i, n) {
    uint k = i % c, r = i / c, ox = r % out_w; r /= out_w;
    uint oy = r % out_h, image = r / out_h;
    float best = -INF;
    for (uint dy = 0u; dy < size; dy++) for (uint dx = 0u; dx < size; dx++)
      best = max(best, X[((image * h + oy * size + dy) * w + ox * size + dx) * c + k]);
    Y[i] = best;
  }""",
)
Kernel(
    "max_pool_back",
    "f32 G X, w f32 Y",
    f"{SIZES} size",
    """
  FOR_EACH(i, n) {
    uint k = i % c, r = i / c, x = r % w; r /= w;
    uint y = r % h, image = r / h, oy = y / size, ox = x / size;
    float g = 0.0f;
    if (oy < out_h && ox < out_w) {
      uint best_y = oy * size, best_x = ox * size;
      float best = X[((image * h + best_y) * w + best_x) * c + k];
      for (uint dy = 0u; dy < size; dy++) for (uint dx = 0u; dx < size; dx++) {
        float v = X[((image * h + oy * size + dy) * w + ox * size + dx) * c + k];
        if (v > best) { best = v; best_y = oy * size + dy; best_x = ox * size + dx; }
      }
      if (best_y == y && best_x == x) g = G[((image * out_h + oy) * out_w + ox) * c + k];
    }
    Y[i] = g;
  }""",
)


@lower("patches")
@lower("patches_back")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    image = t.attrs["shape"] if t.op == "patches_back" else t.src[0].shape
    (_, h, w, c), (size_h, size_w) = image, t.attrs["size"]
    stride, padding = t.attrs.get("stride", 1), t.attrs.get("padding", 0)
    out_h, out_w = (h + 2 * padding - size_h) // stride + 1, (w + 2 * padding - size_w) // stride + 1
    words = (t.size, h, w, c, out_h, out_w, size_h, size_w, stride, padding)
    return [dispatch(t.op, shape, (t.src[0], t), words)]


def _pool(H: int, W: int, C: int, size: int, **_: Any) -> tuple[int, ...]:
    return H, W, C, H // size, W // size, size


lower_plain(
    max_pool=lambda N, H, W, C, size, **_: (N * (H // size) * (W // size) * C, *_pool(H, W, C, size)),
    max_pool_back=lambda N, H, W, C, size, **_: (N * H * W * C, *_pool(H, W, C, size)),
)

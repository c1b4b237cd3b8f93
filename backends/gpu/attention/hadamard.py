"""Hadamard rotation of blocks: a fast Walsh-Hadamard transform in the memory of a group."""

from __future__ import annotations

import math

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, bits, dispatch, lower
from logitless.graph.ops.attention.hadamard import MAX_BLOCK, block_size
from logitless.graph.tensor import Tensor

MAX_GROUPS = 4096  # each then has several blocks
Kernel(
    "hadamard",
    "f32 X, w f32 Y",
    "uint n size, float factor",
    """
  for (uint block = GX; block < n; block += NGX) {
    for (uint i = LID; i < size; i += WG) a[i] = X[block * size + i];
    BARRIER();
    for (uint step = 1u; step < size; step *= 2u) {
      for (uint p = LID; p < size / 2u; p += WG) {
        uint i = p / step * step * 2u + p % step;
        float x = a[i], y = a[i + step];
        a[i] = x + y;
        a[i + step] = x - y;
      }
      BARRIER();
    }
    for (uint i = LID; i < size; i += WG) Y[block * size + i] = a[i] * factor;
    BARRIER();
  }""",
    wg=32,
    local=f"float a[{MAX_BLOCK}]",
)


@lower("hadamard")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    size = block_size(t.shape[-1])
    n = t.size // size
    words = (n, size, bits(1 / math.sqrt(size)))
    return [dispatch("hadamard", shape, (t.src[0], t), words, (min(n, MAX_GROUPS), 1))]

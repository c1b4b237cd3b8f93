"""Bounds of chunked attention (graph/ops/attention/paged_attention.py)."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Arg, Kernel
from logitless.backends.gpu.lowering import lower_plain

WG = 64
Kernel(
    "chunk_ends",
    [Arg("POS", "i32"), Arg("Y", "i32", "w")],
    ["uint n", "uint size"],
    """
  FOR_EACH(t, n) {
    int pos = POS[t], size_ = INT(size);
    Y[t] = pos;
    Y[n + t] = pos / size_ * size_ + size_ - 1;
  }""",
    wg=WG,
)
Kernel(
    "chunk_starts",
    [Arg("START", "i32"), Arg("Y", "i32", "w")],
    ["uint n", "uint length", "uint size"],
    "  FOR_EACH(t, n) Y[t] = START[t] + max(INT(t % length) - START[t], 0) / INT(size) * INT(size);",
    wg=WG,
)


lower_plain(
    chunk_ends=lambda T, size, **_: (T, size),
    chunk_starts=lambda T, length, size, **_: (T, length, size),
)

"""Bounds of chunked attention (graph/ops/attention/paged_attention.py)."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel
from logitless.backends.gpu.lowering import lower_plain

Kernel(
    "chunk_ends",
    "i32 POS, w i32 Y",
    "uint n size",
    """
  FOR_EACH(t, n) {
    int pos = POS[t], size_ = INT(size);
    Y[t] = pos;
    Y[n + t] = pos / size_ * size_ + size_ - 1;
  }""",
)
Kernel(
    "chunk_starts",
    "i32 START, w i32 Y",
    "uint n length size",
    "  FOR_EACH(t, n) Y[t] = START[t] + max(INT(t % length) - START[t], 0) / INT(size) * INT(size);",
)


lower_plain(chunk_ends=lambda T, size, **_: (T, size), chunk_starts=lambda T, length, size, **_: (T, length, size))

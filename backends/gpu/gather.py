"""Gather: rows of a table by id, and its gradient (scatter-add)."""

from __future__ import annotations

from typing import Any

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, dispatch, is_packed, lower, lower_plain
from logitless.backends.gpu.matmul import unpack
from logitless.graph.tensor import Tensor

Kernel(
    "get_rows",
    "f32 X, i32 IDS, w f32 Y",
    "uint n n_k",
    "  FOR_EACH(i, n) Y[i] = X[UINT(IDS[i / n_k]) * n_k + i % n_k];",
)
# A thread has a column: rows of one id are added in the order of the batch.
Kernel(
    "add_rows",
    "f32 X, i32 IDS, rw f32 Y",
    "uint n_k n_rows",
    """
  FOR_EACH(k, n_k) {
    for (uint r = 0u; r < n_rows; r++) Y[UINT(IDS[r]) * n_k + k] = Y[UINT(IDS[r]) * n_k + k] + X[r * n_k + k];
  }""",
)
Kernel("fill", "w u32 Y", "uint n value", "  FOR_EACH(i, n) Y[i] = value;")
Kernel(
    "pad_rows",
    "f32 X, w f32 Y",
    "uint n before inside",
    "  FOR_EACH(i, n) { if (i >= before && i - before < inside) Y[i] = X[i - before]; else Y[i] = 0.0f; }",
)
Kernel("token_columns", "i32 X, w f32 Y", "uint n n_columns", "  FOR_EACH(i, n) Y[i] = FLOAT(X[i / n_columns] + 1);")
# 64 bits as two words: their product modulo 2^64, and the remainder of a division by less than 2^31, bit by bit.
Kernel(
    "ngram_rows",
    "i32 X, f32 BEFORE, i32 HASHES, w i32 Y",
    "uint n n_before n_heads stop",
    """
  FOR_EACH(i, n) {
    uint t = i / n_heads, head = i % n_heads, last = head * n_before / n_heads + 1u;
    uint low = 0u, high = 0u, cut = 0u;
    for (uint j = 0u; j <= last; j++) {
      uint token = UINT(X[t]);
      if (j > 0u) {
        int own = INT(BEFORE[t * n_before + j - 1u]) - 1;
        if (own < 0 || UINT(own) == stop) cut = 1u;
        token = cut != 0u ? stop : UINT(own);
      }
      uint a = UINT(HASHES[2u * j]), b = UINT(HASHES[2u * j + 1u]);
      low ^= token * a;
      high ^= MULHI(token, a) + token * b;
    }
    uint size_ = UINT(HASHES[2u * (n_before + 1u + head)]), left = high % size_;
    for (uint bit = 0u; bit < 32u; bit++) {
      left = 2u * left + ((low >> (31u - bit)) & 1u);
      left = left >= size_ ? left - size_ : left;
    }
    Y[i] = INT(left) + HASHES[2u * (n_before + 1u + head) + 1u];
  }""",
)


Kernel(
    "get_ids",
    "i32 X IDS, w i32 Y",
    "uint n n_k limit",
    "  FOR_EACH(i, n) Y[i] = min(max(X[UINT(IDS[i / n_k]) * n_k + i % n_k], 0), INT(limit) - 1);",
)


@lower("get_rows")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    table, ids = t.src
    n, k = t.size, table.shape[1]
    if is_packed(table):
        bufs: Buffers = (ids, *unpack.buffers(table), t)
        return [dispatch(f"get_rows_{table.dtype}", shape, bufs, (n, k, int(shape.dot)))]
    if table.dtype != "f32":
        return None
    return [dispatch("get_rows", shape, (table, ids, t), (n, k))]


@lower("add_rows")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    rows, ids = t.src
    n, k = t.size, t.size // t.shape[0]
    return [dispatch("fill", shape, (t,), (n, 0)), dispatch("add_rows", shape, (rows, ids, t), (k, rows.shape[0]))]


def _padded(x: Tensor, N: int, before: int, after: int, **_: Any) -> tuple[int, ...]:
    row = x.size // N
    return (before + N + after) * row, before * row, N * row


lower_plain(
    get_ids=lambda T, K, limit, **_: (T * K, K, limit),
    pad_rows=_padded,
    token_columns=lambda T, n, **_: (T * n, n),
    ngram_rows=lambda T, M, R, stop, **_: (T * (R // 2 - M - 1), M, R // 2 - M - 1, stop),
)

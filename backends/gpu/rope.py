"""RoPE: angles once a step, rotation once a layer."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel
from logitless.backends.gpu.lowering import bits, lower_plain

Kernel(
    "rope_angles",
    "i32 P, f32 W, w f32 Y",
    "uint n half_n, float magnitude",
    """
  FOR_EACH(i, n) {
    uint t = i / half_n, j = i % half_n;
    PRECISE float angle = FLOAT(P[t]) * W[j];
    Y[2u * t * half_n + j] = COS(angle) * magnitude;
    Y[(2u * t + 1u) * half_n + j] = SIN(angle) * magnitude;
  }""",
)
Kernel(
    "mrope_angles",
    "i32 P, f32 W, i32 C, w f32 Y",
    "uint n half_n n_rows, float magnitude",
    """
  FOR_EACH(i, n) {
    uint t = i / half_n, j = i % half_n;
    PRECISE float angle = FLOAT(P[UINT(C[j]) * n_rows + t]) * W[j];
    Y[2u * t * half_n + j] = COS(angle) * magnitude;
    Y[(2u * t + 1u) * half_n + j] = SIN(angle) * magnitude;
  }""",
)
# A pair of elements at a time: the first 2 · half_n of each head are turned, the rest are copied.
Kernel(
    "rope",
    "f32 X A, w f32 Y",
    "uint n n_heads size half_n interleaved, float direction",
    """
  uint pairs = size / 2u + size % 2u;
  FOR_EACH(i, n) {
    uint head = i / pairs, p = i % pairs, t = head / n_heads, at = head * size;
    if (p < half_n) {
      uint first = at + (interleaved != 0u ? 2u * p : p), second = first + (interleaved != 0u ? 1u : half_n);
      float c = A[2u * t * half_n + p], s = A[(2u * t + 1u) * half_n + p] * direction, a = X[first], b = X[second];
      Y[first] = a * c - b * s;
      Y[second] = a * s + b * c;
    } else {
      at += 2u * p;
      Y[at] = X[at];
      if (2u * p + 1u < size) Y[at + 1u] = X[at + 1u];
    }
  }""",
)


lower_plain(
    rope_angles=lambda T, P, magnitude, **_: (T * P, P, bits(magnitude)),
    mrope_angles=lambda T, P, magnitude, **_: (T * P, P, T, bits(magnitude)),
    rope=lambda T, H, D, P, interleaved, sign, **_: (T * H * ((D + 1) // 2), H, D, P, interleaved, bits(sign)),
)

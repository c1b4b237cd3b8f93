"""Matrix products of few f32 rows: `linear` of a weight that is not constant, and its two
gradients.

c[m, n] is the sum over k of a[m·am + k·ak] · b[n·bn + k·bk], one after the other.
"""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Arg, Kernel, Shape
from logitless.backends.gpu.lowering import MAX_GROUPS, Dispatch, dispatch, lower
from logitless.backends.gpu.matmul.gemm import gemm
from logitless.graph.tensor import Tensor

WG, ROWS = 64, 8
FEW = 8  # rows; more are for gemm.py
Kernel(
    "matmul",
    [Arg("A", "f32"), Arg("B", "f32"), Arg("Y", "f32", "w")],
    ["uint n_m", "uint n_n", "uint n_k", "uint am", "uint ak", "uint bn", "uint bk"],
    """
  uint m0 = GY * ROWS;
  for (uint n = GX * WG + LID; n < n_n; n += NGX * WG) {
    PRECISE float acc[ROWS];
    for (uint m = 0u; m < ROWS; m++) acc[m] = 0.0f;
    for (uint k = 0u; k < n_k; k++) {
      float b = B[n * bn + k * bk];
      UNROLL for (uint m = 0u; m < ROWS; m++) acc[m] = FMA(A[min(m0 + m, n_m - 1u) * am + k * ak], b, acc[m]);
    }
    for (uint m = 0u; m < ROWS; m++) if (m0 + m < n_m) Y[(m0 + m) * n_n + n] = acc[m];
  }""",
    simt=[{"WG": WG, "ROWS": 1}, {"WG": WG, "ROWS": ROWS}],
    cpu=[{"WG": 1, "ROWS": 1}, {"WG": 1, "ROWS": ROWS}],
)


def product(a: Tensor, b: Tensor, t: Tensor, k: int, steps: tuple[int, int, int, int], shape: Shape) -> list[Dispatch]:
    """Launch of c (M, N) = t of a and b with strides (am, ak, bn, bk) in elements."""
    m, n = t.shape
    if m > FEW:
        return gemm(a, b, t, k, steps, shape)
    rows = ROWS if m > 1 else 1
    across = min(n, 4 * shape.units) if shape.name == "cpu" else -(-n // WG)
    groups = (min(across, MAX_GROUPS), -(-m // rows))
    return [dispatch("matmul", shape, (a, b, t), (m, n, k, *steps), groups, ROWS=rows)]


def rows_product(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    """`linear` where neither source is packed."""
    a, b = t.src
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    k = a.shape[1]
    return product(a, b, t, k, (k, 1, k, 1), shape)


@lower("matmul_tn")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    a, b = t.src
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    return product(a, b, t, a.shape[0], (1, a.shape[1], 1, b.shape[1]), shape)

"""Root-mean-square normalisation: a group a row."""

from __future__ import annotations

from backends.kernels.dialect import Arg, Kernel, Shape
from backends.kernels.lowering import MAX_GROUPS, Dispatch, bits, dispatch, lower, n_elements, rows_of
from graph.tensor import Tensor

WG = 64  # and as many partial sums (one thread has them all; lavapipe 16): they are added up one after the other
VARIANTS = {"simt": [{"WG": WG}], "cpu": [{"WG": 1}]}
Kernel(
    "rms_norm",
    [Arg("X", "f32"), Arg("W", "f32"), Arg("Y", "f32", "w")],
    ["uint n", "uint rows", "uint n_weights", "float eps"],
    """
  for (uint row = GX; row < rows; row += NGX) {
#if WG == 1
    UNROLL for (uint j = 0u; j < 64u; j++) sums[j] = 0.0f;
    uint whole = n / 64u * 64u;
    for (uint i = row * n; i < row * n + whole; i += 64u)
      for (uint j = 0u; j < 64u; j++) { float v = X[i + j]; sums[j] = FMA(v, v, sums[j]); }
    for (uint j = 0u; whole + j < n; j++) { float v = X[row * n + whole + j]; sums[j] = FMA(v, v, sums[j]); }
#else
    PRECISE float own = 0.0f;
    for (uint i = LID; i < n; i += WG) { float v = X[row * n + i]; own = FMA(v, v, own); }
    sums[LID] = own;
    BARRIER();
#endif
    PRECISE float total = 0.0f;
    for (uint j = 0u; j < PARTS; j++) total += sums[j];
    float k = 1.0f / sqrt(total / FLOAT(n) + eps);
    if (n_weights == n) {
      for (uint i = LID; i < n; i += WG) Y[row * n + i] = X[row * n + i] * k * W[i];
    } else {
      for (uint i = LID; i < n; i += WG) Y[row * n + i] = X[row * n + i] * k * W[0];
    }
    BARRIER();
  }""",
    simt=VARIANTS["simt"],
    cpu=VARIANTS["cpu"],
    soft=[{"WG": 16}],
    local=[("float", "sums", "64")],
    functions="#define PARTS (WG == 1 ? 64u : UINT(WG))\n",
)
Kernel(
    "rms_norm_back",
    [Arg("G", "f32"), Arg("X", "f32"), Arg("Y", "f32", "w")],
    ["uint n", "uint rows", "float eps"],
    """
  for (uint row = GX; row < rows; row += NGX) {
    for (uint j = LID; j < 64u; j += WG) {
      PRECISE float xx = 0.0f;
      PRECISE float gx = 0.0f;
      for (uint i = j; i < n; i += 64u) {
        float v = X[row * n + i];
        xx = FMA(v, v, xx);
        gx = FMA(G[row * n + i], v, gx);
      }
      sums[j] = xx;
      products[j] = gx;
    }
    BARRIER();
    PRECISE float total = 0.0f;
    PRECISE float product = 0.0f;
    for (uint j = 0u; j < 64u; j++) { total += sums[j]; product += products[j]; }
    float k = 1.0f / sqrt(total / FLOAT(n) + eps);
    float slope = k * k * product / FLOAT(n);
    for (uint i = LID; i < n; i += WG) Y[row * n + i] = k * (G[row * n + i] - X[row * n + i] * slope);
    BARRIER();
  }""",
    simt=VARIANTS["simt"],
    cpu=VARIANTS["cpu"],
    local=[("float", "sums", "64"), ("float", "products", "64")],
)


@lower("rms_norm")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    x, w = t.src
    rows, n = rows_of(x)
    words = (n, rows, n_elements(w), bits(t.attrs["eps"]))
    return [dispatch("rms_norm", shape, (x, w, t), words, row_groups(rows, shape))]


@lower("rms_norm_back")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    rows, n = rows_of(t)
    words = (n, rows, bits(t.attrs["eps"]))
    return [dispatch("rms_norm_back", shape, (*t.src, t), words, row_groups(rows, shape))]


def row_groups(rows: int, shape: Shape) -> int:
    """Groups of a kernel that takes rows in turn."""
    return min(rows, shape.units if shape.name == "cpu" else MAX_GROUPS)

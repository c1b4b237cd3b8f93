"""GEMM for training: `matmul`, `matmul_tn`, and `linear` of a weight that is not constant.

y[m, n] is the sum over k of a[m·am + k·ak] · b(k, n), one product after the other, whatever the
number of rows; up to 8 rows have a kernel of their own. b is f32 with strides, or a packed weight
whose rows are k: gradients pass back through the bytes that are served.

OpenCL on a CPU copies 32 columns of b into local memory, 256 k at a time, and takes all rows of its
part through them. On GPUs a group has 32 × 64 results, a thread 8 × 4 of them."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import MAX_GROUPS, Buffers, Dispatch, dispatch, is_packed, lower
from logitless.backends.gpu.matmul import layout, unpack
from logitless.graph.tensor import Tensor

WG, ROWS, COLUMNS = 64, 32, 64  # threads of a group on GPUs
CPU_ROWS, CPU_COLUMNS = 4, 32
LEAST_ROWS = 128  # rows that are worth a copy of b
FEW = 8  # rows for which the kernel "matmul" is used
SIMT = {"WG": WG, "RM": 8, "RN": 4, "TM": ROWS, "TN": COLUMNS, "KC": 16}
CPU = {"WG": 1, "RM": CPU_ROWS, "RN": 2, "TM": 0, "TN": CPU_COLUMNS, "KC": 256}
# The bytes after a row's last columns belong to another group, which may be writing them.
FUNCTIONS = """
#if WG == 1
FN float16 first_lanes(__global const float* y, uint n) {
  float lanes[16];
  for (uint l = 0u; l < 16u; l++) lanes[l] = l < n ? y[l] : 0.0f;
  return vload16(0, lanes);
}
#define OWN(at, i) ((i) + 16u <= columns ? LLD(Y, (at) + (i)) \
  : first_lanes(Y + (at) + min(i, columns), columns - min(i, columns)))
#endif
"""
WORDS = "uint rows columns depth part am ak"

BODY = """
#if WG == 1
  uint n0 = GX * TN, first = GY * part, last = min(first + part, rows), width = min(UINT(TN), columns - n0);
  if (width < TN) for (uint i = 0u; i < KC * TN; i++) b[i] = 0.0f;
  for (uint k0 = 0u; k0 < depth; k0 += KC) {
    uint count = min(UINT(KC), depth - k0);
    COPY_B
    for (uint m = first; m < last; m += RM) {
      uint at[RM];
      PRECISE LF acc[RM * RN];
      UNROLL for (uint r = 0u; r < RM; r++) {
        uint row = min(m + r, rows - 1u);
        at[r] = row * am + k0 * ak;
        UNROLL for (uint j = 0u; j < RN; j++)
          acc[r * RN + j] = k0 == 0u ? LSPLAT(0.0f) : OWN(row * columns, n0 + j * 16u);
      }
      for (uint k = 0u; k < count; k++) {
        UNROLL for (uint j = 0u; j < RN; j++) {
          LF x = LLD(b, k * TN + j * 16u);
          UNROLL for (uint r = 0u; r < RM; r++) acc[r * RN + j] = FMA(LSPLAT(A[at[r] + k * ak]), x, acc[r * RN + j]);
        }
      }
      UNROLL for (uint r = 0u; r < RM; r++) UNROLL for (uint j = 0u; j < RN; j++) {
        uint row = m + r;
        if (row < last) { LSTN(Y, row * columns + n0 + j * 16u, row * columns + columns, acc[r * RN + j]); }
      }
    }
  }
#else
  uint n0 = GX * TN, m0 = GY * TM;
  PRECISE float acc[RM * RN];
  UNROLL for (uint i = 0u; i < RM * RN; i++) acc[i] = 0.0f;
  for (uint k0 = 0u; k0 < depth; k0 += KC) {
    uint count = min(UINT(KC), depth - k0);
    for (uint i = LID; i < KC * TM; i += WG) {
      uint m = ak == 1u ? i / KC : i % TM, k = ak == 1u ? i % KC : i / TM;
      a[k * TM + m] = k < count ? A[min(m0 + m, rows - 1u) * am + (k0 + k) * ak] : 0.0f;
    }
    COPY_B
    BARRIER();
    for (uint k = 0u; k < count; k++) {
      float x[RN];
      UNROLL for (uint j = 0u; j < RN; j++) x[j] = b[k * TN + j * 16u + LANE];
      UNROLL for (uint r = 0u; r < RM; r++) {
        float v = a[k * TM + SUB * RM + r];
        UNROLL for (uint j = 0u; j < RN; j++) acc[r * RN + j] = FMA(v, x[j], acc[r * RN + j]);
      }
    }
    BARRIER();
  }
  UNROLL for (uint r = 0u; r < RM; r++) UNROLL for (uint j = 0u; j < RN; j++) {
    uint row = m0 + SUB * RM + r, n = n0 + j * 16u + LANE;
    if (row < rows && n < columns) Y[row * columns + n] = acc[r * RN + j];
  }
#endif
"""
# One thread copies contiguous elements; of many threads, neighbours copy neighbouring elements.
CPU_COPY = {
    "f32": """
    if (bn == 1u) {
      for (uint k = 0u; k < count; k++) for (uint n = 0u; n < width; n++) b[k * TN + n] = B[(k0 + k) * bk + n0 + n];
    } else {
      for (uint n = 0u; n < width; n++) for (uint k = 0u; k < count; k++)
        b[k * TN + n] = B[(n0 + n) * bn + (k0 + k) * bk];
    }""",
    "": """
    for (uint k = 0u; k < count; k++) for (uint n = 0u; n < width; n++) {
      ELEMENT(v, k0 + k, n0 + n)
      b[k * TN + n] = v;
    }""",
}
SIMT_COPY = {
    "f32": """
    for (uint i = LID; i < KC * TN; i += WG) {
      uint n = bk == 1u ? i / KC : i % TN, k = bk == 1u ? i % KC : i / TN;
      b[k * TN + n] = k < count ? B[min(n0 + n, columns - 1u) * bn + (k0 + k) * bk] : 0.0f;
    }""",
    "": """
    for (uint i = LID; i < KC * TN; i += WG) {
      uint n = i % TN, k = i / TN;
      ELEMENT(v, min(k0 + k, depth - 1u), min(n0 + n, columns - 1u))
      b[k * TN + n] = v;
    }""",
}


def _gemm(name: str, b: str, words: str, kind: str, functions: str = "") -> None:
    cpu, simt = BODY.split("#else")
    Kernel(
        name,
        f"f32 A, {b}, rw f32 Y",
        words,
        f"{cpu.replace('COPY_B', CPU_COPY[kind])}#else{simt.replace('COPY_B', SIMT_COPY[kind])}",
        simt=[SIMT],
        cpu=[CPU],
        local="float a[(TM > 0 ? KC * TM : 1)] b[KC * TN]",
        functions=FUNCTIONS + functions,
    )


Kernel(
    "matmul",
    "f32 A B, w f32 Y",
    "uint n_m n_n n_k am ak bn bk",
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
    simt=[{"WG": WG, "ROWS": 1}, {"WG": WG, "ROWS": FEW}],
    cpu=[{"WG": 1, "ROWS": 1}, {"WG": 1, "ROWS": FEW}],
)
_gemm("gemm", "f32 B", f"{WORDS} bn bk", "f32")
for _dtype in layout.PACKINGS:
    _names = f"#define n_k columns\n{unpack.element(_dtype)}"
    _gemm(f"gemm_{_dtype}", unpack.args(_dtype), f"{WORDS} wide", "", _names)


def gemm(
    a: Tensor, b: Tensor, t: Tensor, k: int, steps: tuple[int, ...], shape: Shape, dtype: str = ""
) -> list[Dispatch]:
    """Launch of t = a · b. `steps`: strides (am, ak) and, for b in f32, (bn, bk). `dtype`: of
    a packed b.
    """
    (m, n), name = t.shape, f"gemm_{dtype}" if dtype else "gemm"
    across, down, part = -(-n // COLUMNS), -(-m // ROWS), 0
    if shape.name == "cpu":
        across = -(-n // CPU_COLUMNS)
        down = max(1, min(-(-shape.units // across), m // LEAST_ROWS))
        part = -(-m // down // CPU_ROWS) * CPU_ROWS
        down = -(-m // part)
    if across > MAX_GROUPS or down > MAX_GROUPS:
        raise ValueError(f"a product of {m} rows and {n} columns is too large")
    bufs: Buffers = (a, *(unpack.buffers(b) if dtype else (b,)), t)
    words = (m, n, k, part, *steps, *([int(shape.dot)] if dtype else []))
    return [dispatch(name, shape, bufs, words, (across, down))]


def product(a: Tensor, b: Tensor, t: Tensor, k: int, steps: tuple[int, int, int, int], shape: Shape) -> list[Dispatch]:
    """Launches of c (M, N) = t of a and b with strides (am, ak, bn, bk) in elements."""
    m, n = t.shape
    if m > FEW:
        return gemm(a, b, t, k, steps, shape)
    rows = FEW if m > 1 else 1
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


@lower("matmul")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    a, b = t.src
    n, k = t.shape[1], a.shape[1]
    if is_packed(b):
        return gemm(a, b, t, k, (k, 1), shape, b.dtype)
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    return product(a, b, t, k, (k, 1, 1, n), shape)

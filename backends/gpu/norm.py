"""RMS norm, its gradient, and layer norm: one work group a row."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel
from logitless.backends.gpu.lowering import bits, lower_rows, rows_of

# Partial sums of a row: 256, then 16; one thread alone has 64; lavapipe and devices with small groups
# have 16. The last are added one by one.
WG, SMALL_WG = 256, 16
# Code that declares `k`: 1 / the root of a row's mean square. `OF_ROW(i)`: its element i; SUMMING: threads that
# have a partial sum.
SCALE = """
#if WG == 1
    UNROLL for (uint j = 0u; j < 64u; j++) sums[j] = 0.0f;
    uint whole = n / 64u * 64u;
    for (uint i = 0u; i < whole; i += 64u)
      for (uint j = 0u; j < 64u; j++) { float v = OF_ROW(i + j); sums[j] = FMA(v, v, sums[j]); }
    for (uint j = 0u; whole + j < n; j++) { float v = OF_ROW(whole + j); sums[j] = FMA(v, v, sums[j]); }
#else
    PRECISE float own = 0.0f;
    for (uint i = LID < SUMMING ? LID : n; i < n; i += 8u * SUMMING) { /* waits for eight numbers at once */
      float v[8];
      UNROLL for (uint j = 0u; j < 8u; j++) v[j] = i + j * SUMMING < n ? OF_ROW(i + j * SUMMING) : 0.0f;
      UNROLL for (uint j = 0u; j < 8u; j++) own = FMA(v[j], v[j], own);
    }
    if (LID < SUMMING) sums[LID] = own;
    BARRIER();
#if WG > 16
    own = 0.0f;
    for (uint j = LID % 16u; j < SUMMING; j += 16u) own += sums[j];
    BARRIER();
    if (LID < 16u) sums[LID] = own;
    BARRIER();
#endif
#endif
    PRECISE float total = 0.0f;
    for (uint j = 0u; j < PARTS; j++) total += sums[j];
    float k = 1.0f / sqrt(total / FLOAT(n) + eps);"""
SUMS = "float sums[(WG == 1 ? 64 : WG)]"
FUNCTIONS = "#define PARTS (WG == 1 ? 64u : 16u)\n#define SUMMING WG\n#define OF_ROW(i) X[row * n + (i)]\n"
ARGS, WORDS = "f32 X W, w f32 Y", "uint n rows n_weights, float eps"
Kernel(
    "rms_norm",
    ARGS,
    WORDS,
    f"""
  for (uint row = GX; row < rows; row += NGX) {{{SCALE}
    for (uint i = LID; i < n; i += WG) {{
      PRECISE float y = X[row * n + i] * k * W[n_weights == n ? i : 0u];
      Y[row * n + i] = y;
    }}
    BARRIER();
  }}""",
    simt=[{"WG": WG}, {"WG": SMALL_WG}],
    cpu=[{"WG": 1}],
    soft=[{"WG": SMALL_WG}],
    local=SUMS,
    functions=FUNCTIONS,
)
Kernel(
    "rms_norm_back",
    "f32 G X, w f32 Y",
    "uint n rows, float eps",
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
    local="float sums[64] products[64]",
)


Kernel(
    "layer_norm",
    "f32 X W B, w f32 Y",
    "uint n rows, float eps",
    """
  for (uint row = GX; row < rows; row += NGX) {
    for (uint j = LID; j < 64u; j += WG) {
      PRECISE float own = 0.0f;
      for (uint i = j; i < n; i += 64u) own = own + X[row * n + i];
      sums[j] = own;
    }
    BARRIER();
    PRECISE float total = 0.0f;
    for (uint j = 0u; j < 64u; j++) total = total + sums[j];
    PRECISE float mean = total / FLOAT(n);
    BARRIER();
    for (uint j = LID; j < 64u; j += WG) {
      PRECISE float own = 0.0f;
      for (uint i = j; i < n; i += 64u) { PRECISE float c = X[row * n + i] - mean; own = FMA(c, c, own); }
      sums[j] = own;
    }
    BARRIER();
    PRECISE float squares = 0.0f;
    for (uint j = 0u; j < 64u; j++) squares = squares + sums[j];
    PRECISE float k = 1.0f / sqrt(squares / FLOAT(n) + eps);
    for (uint i = LID; i < n; i += WG) Y[row * n + i] = (X[row * n + i] - mean) * k * W[i] + B[i];
    BARRIER();
  }""",
    local="float sums[64]",
)
lower_rows(
    rms_norm=lambda x, w, eps, **_: (*rows_of(x), w.size, bits(eps)),
    rms_norm_back=lambda x, eps, **_: (*rows_of(x), bits(eps)),
    layer_norm=lambda x, eps, **_: (*rows_of(x), bits(eps)),
)

"""`linear` for Vulkan GPUs with cooperative matrices (tensor cores) of bytes.

The products of 32 k are integer sums without rounding, so the device may add them in any order. All
else is as in linear_int_dot.py, in its order: the scales, the sum over the blocks of a chunk, the
sum of the chunks. So a row has the same bits there, and a device may take either kernel for any
number of rows.

A group of WG threads computes 64 outputs (of a pair 32 of each weight) of TM rows. It stages each
block of 32 k in local memory, the quants as rows of bytes; then each subgroup multiplies its tiles
of CM × CN results, CK k at a time. Scales are matrices too, loaded with a stride of 0: all rows
alike, or all columns. The device decides which results of a tile a thread holds, but alike for
matrices of one type, so they are combined element by element.
"""

from __future__ import annotations

from collections.abc import Sequence

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.matmul import launch, unpack, unpack_low
from logitless.backends.gpu.matmul.linear_int_dot import of_rounded
from logitless.backends.gpu.matmul.split_k import CHUNKS
from logitless.backends.gpu.quantize import ROUNDS, WORDS, rounding
from logitless.graph.tensor import Tensor

WG, TM, TN = 256, 128, 64
# words of 32 bytes in local memory: a multiple of 16 bytes, and no two of 8 rows in one bank
STRIDE = 12
LEAST_ROWS = 33  # for fewer `linear_dot` wastes less; each device measures where matrices begin to win
SHARED_BYTES = 32768  # that the largest variant may need
# properties of a device: rows, columns, depth, and threads a subgroup
MATRICES = {"CM": 16, "CN": 16, "CK": 32, "SG": 32}
FUNCTIONS = f"""
#define TM {TM}u
#define TN {TN}u
#define STRIDE {STRIDE}u
#define OF(kind, use, rows, columns) coopmat<kind, gl_ScopeSubgroup, rows, columns, use>
#define FLOATS OF(float, gl_MatrixUseAccumulator, CM, CN)
#define EACH_TILE UNROLL for (uint j = 0u; j < TC; j++) UNROLL for (uint i = 0u; i < TR; i++)
const uint ROW_TILES = TM / CM, TILES = TM * TN / (CM * CN) / (WG / SG); /* of the group, of a subgroup */
/* a subgroup has half of the rows or fewer, so that one without rows computes nothing */
const uint TR = ROW_TILES / 2u < TILES ? ROW_TILES / 2u : TILES, TC = TILES / TR;
const uint STEPS = (32u / HALVES + CK - 1u) / CK;
"""


def _stage(dtype: str) -> str:
    """Code that stages block b of 64 outputs and of TM rows in local memory."""
    halves = 2 if dtype in unpack.HALVES else 1
    lines = []
    for j in range(8):
        for half in range(halves):
            mine = halves == 1 or j // 4 == half
            value = unpack.quants(dtype, j) if mine else "0u"
            lines.append(f"ws[({half}u * TN + column) * STRIDE + {j}u] = {value};")
    for half, (d, low) in enumerate((("d", "low"), ("d1", "low1"))[:halves]):
        lines.append(f"ds[{half}u * TN + column] = {d};")
        if unpack.has_minimum(dtype):
            lines.append(f"lows[{half}u * TN + column] = {low};")
    rows = [f"uint r = LID - (WG - TM), at = (min(GX * TM + r, n_m - 1u) * n_blocks + b) * {WORDS // 4}u;"]
    rows.append("uvec4 x0 = X[at], x1 = X[at + 1u], x2 = X[at + 2u];")
    rows += [f"xs[r * STRIDE + {j}u] = x{j // 4}.{'xyzw'[j % 4]};" for j in range(8)]
    rows.append("xd[r] = U2F(x2.x);")
    if halves == 2:
        rows += ["xt[r] = U2F(x2.y);", "xt[TM + r] = U2F(x2.z);"]
    elif unpack.has_minimum(dtype):
        rows.append("xt[r] = U2F(x2.y) + U2F(x2.z);")
    own, of_rows = "\n        ".join([unpack.load_block(dtype, wide=True), *lines]), "\n        ".join(rows)
    return f"if (LID < TN) {{\n        {own}\n      }}\n      if (LID >= WG - TM) {{\n        {of_rows}\n      }}"


def _body(dtype: str) -> str:
    each = "ROLLED for" if dtype in unpack.HALVES else "UNROLL for"  # two products at once take too many registers
    return f"""
  uint n_blocks = n_k / 32u, column = LID % TN;
#if PAIR /* half of the columns are the first weight's, the others the same of the second */
  const uint p = 1u, width = TN / 2u;
#else
  const uint width = TN;
#endif
  {launch.begin(dtype, "GY * (width / 16u) + LID % width / 16u")}
#if PAIR
  if (column >= width) CHOOSE(1u)
#endif
  uint group = unit, g = min(group, groups - 1u);
  uint row_0 = gl_SubgroupID * TR % ROW_TILES, column_0 = gl_SubgroupID * TR / ROW_TILES * TC;
  bool busy = GX * TM + row_0 * CM < n_m;
  FLOATS tot[TILES], acc[TILES];
  UNROLL for (uint t = 0u; t < TILES; t++) tot[t] = FLOATS(0.0f);
  for (uint c = 0u; c < CHUNKS; c++) {{
    UNROLL for (uint t = 0u; t < TILES; t++) acc[t] = FLOATS(0.0f);
    for (uint b = c * n_blocks / CHUNKS; b < (c + 1u) * n_blocks / CHUNKS; b++) {{
      BARRIER();
      {_stage(dtype)}
      BARRIER();
      if (busy) UNROLL for (uint j = 0u; j < TC; j++) {each} (uint h = 0u; h < HALVES; h++) {{
        uint n = h * TN + (column_0 + j) * CN, k = h * 16u / CK;
        OF(int8_t, gl_MatrixUseB, CK, CN) w[STEPS];
        UNROLL for (uint s = 0u; s < STEPS; s++)
          coopMatLoad(w[s], ws, n * STRIDE + (k + s) * CK / 4u, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
        FLOATS d, low;
        coopMatLoad(d, ds, n, 0u, gl_CooperativeMatrixLayoutRowMajor);
#if MINIMUM
        coopMatLoad(low, lows, n, 0u, gl_CooperativeMatrixLayoutRowMajor);
#endif
        UNROLL for (uint i = 0u; i < TR; i++) {{
          uint m = (row_0 + i) * CM;
          OF(int, gl_MatrixUseAccumulator, CM, CN) sum = OF(int, gl_MatrixUseAccumulator, CM, CN)(0);
          UNROLL for (uint s = 0u; s < STEPS; s++) {{
            OF(int8_t, gl_MatrixUseA, CM, CK) x;
            coopMatLoad(x, xs, m * STRIDE + (k + s) * CK / 4u, STRIDE, gl_CooperativeMatrixLayoutRowMajor);
            sum = coopMatMulAdd(x, w[s], sum);
          }}
          FLOATS sums = FLOATS(sum), scales, totals;
          coopMatLoad(scales, xd, m, 0u, gl_CooperativeMatrixLayoutColumnMajor);
#if MINIMUM
          coopMatLoad(totals, xt, h * TM + m, 0u, gl_CooperativeMatrixLayoutColumnMajor);
#endif
          UNROLL for (uint e = 0u; e < sums.length(); e++) {{
            PRECISE float scale = d[e] * scales[e];
            PRECISE float value = FMA(sums[e], scale, acc[j * TR + i][e]);
#if MINIMUM
            value = FMA(low[e], totals[e], value);
#endif
            acc[j * TR + i][e] = value;
          }}
        }}
      }}
    }}
    UNROLL for (uint t = 0u; t < TILES; t++)
      UNROLL for (uint e = 0u; e < tot[t].length(); e++) {{
        PRECISE float value = tot[t][e] + acc[t][e];
        tot[t][e] = value;
      }}
  }}
  for (uint tile = 0u; tile < ROW_TILES; tile++) {{
    BARRIER();
    EACH_TILE if (row_0 + i == tile)
      coopMatStore(tot[j * TR + i], results, (column_0 + j) * CN, TN, gl_CooperativeMatrixLayoutRowMajor);
    BARRIER();
    for (uint r = LID / width; r < CM; r += WG / width) {{
      uint m = tile * CM + r, at = r * TN + LID % width;
#if PAIR
      {launch.end("results[at + width]", "results[at]", "group")}
#else
      {launch.end("results[at]", "", "group")}
#endif
    }}
#if PAIR
    if (extra >= 2u) {{
      BARRIER();
      {launch.rounded("CM", "width", "GX * TM + tile * CM", "GY * width", "results", "TN")}
    }}
#endif
  }}
"""


for _dtype in unpack.BLOCKS:
    _halves = 2 if _dtype in unpack.HALVES else 1
    Kernel(
        f"linear_coop_{_dtype}",
        launch.args(_dtype, wide=True),
        launch.words(_dtype),
        _body(_dtype),
        simt=[{"WG": WG, "MT": TM, "PAIR": pair, "R": 1, "CHUNKS": CHUNKS} for pair in unpack.pairs(_dtype)],
        cpu=(),
        special=MATRICES,
        local=f"uint ws[{_halves * TN * STRIDE}] xs[{TM * STRIDE}], float ds[{_halves * TN}] lows[{_halves * TN}], "
        f"float xd[{TM}] xt[{_halves * TM}] results[CM * {TN}]",
        functions=launch.MACROS
        + f"#define HALVES {_halves}u\n#define MINIMUM {int(unpack.has_minimum(_dtype))}\n"
        + FUNCTIONS
        + unpack_low.functions(_dtype),
        extensions=("GL_KHR_cooperative_matrix", "GL_KHR_memory_scope_semantics"),
    )
    ROUNDS[f"linear_coop_{_dtype}"] = launch.rounding


def coop_product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> list[Dispatch]:
    """Launches: quantisation of t's activations, and the product."""
    product = launch.launch(
        t, parts, shape, f"linear_coop_{parts[0].dtype}", launch.Tile(TM, 1, TN // (32 if launch.is_pair(t) else 16))
    )
    return of_rounded(product, rounding(t.src[0], shape))

"""`linear` for Vulkan GPUs with integer dot products of four bytes.

Activations are quantised to 8 bits first, one scale per 32 k, as the CPU backend does. A device
does so for any number of rows or for none, so that a row has the same bits whatever shares its
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from logitless.backends.gpu import norm
from logitless.backends.gpu.language.dialect import KERNELS, LANES, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.matmul import launch, split_k, unpack, unpack_low
from logitless.backends.gpu.matmul.split_k import CHUNKS, SIMT_TILES, SPLITS, UNIT, frame, tile_for
from logitless.backends.gpu.quantize import LOCAL, ROUNDS, WORDS, round_threads, rounding
from logitless.graph.tensor import Tensor

TILES = [tile | {"PAIR": 0} for tile in SIMT_TILES if tile["MT"] != 4]
# A group of a pair has whole blocks of 32 results, which it may round.
TILES += [{"WG": 2 * LANES * n, "MT": mt, "SPLIT": n, "CHUNKS": CHUNKS, "PAIR": 1} for mt in (1, 8) for n in SPLITS[:1]]
TILES += [SIMT_TILES[-1] | {"PAIR": 1}]
MOST_K = 4096  # elements of a row that a group normalises itself
MOST_NBYTES = 8 << 20  # that all groups of such a launch read of the row and the norm's weights
SUMS = "float sums[(SPLIT > 1 ? MT * CHUNKS * WG / SPLIT : MT * WG)]"
ROUND_PAIR = f"""
  if ((extra & 2u) != 0u) {{
#if SPLIT > 1
    if (split < MT) sums[split * (WG / SPLIT) + SUB / SPLIT * 16u + LANE] = kept[0];
#else
    UNROLL for (uint m = 0u; m < MT; m++) sums[m * WG + LID] = kept[m];
#endif
    BARRIER();
    {launch.rounded("MT", "(WG / SPLIT)", "GX * MT", "GY * (WG / SPLIT)", "sums")}
  }}"""
# One row may come as it is before RMS norm (norm.py) and rounding: each group does both itself.
NORM = f"""
#if MT == 1
#if PAIR
  bool norm = (extra & 4u) != 0u;
  float eps = U2F(n_1);
#else
  bool norm = extra > 2u;
  float eps = U2F(extra);
  uint extra = norm ? 0u : extra; /* nothing is added */
#endif
  if (norm) {{
    uint n = n_k;
    {norm.SCALE}
    for (uint first = 0u; first < n; first += 4u * WG) {{
      uint i = min(first + 4u * LID, n - 4u), block = i / 32u;
      bool inside = first + 4u * LID < n;
      PRECISE float x[4];
      UNROLL for (uint t = 0u; t < 4u; t++) x[t] = OF_ROW(i + t) * k * E[i + t];
      {round_threads("rounded")}
    }}
  }}
#endif
"""
NORM_LOCAL = f"{LOCAL}, uint rounded[{MOST_K // 32 * WORDS}]".replace("[", "[(MT == 1 ? ").replace("]", " : 1)]")
NORM_FUNCTIONS = f"""
#define SUMMING {norm.WG}u
#define PARTS 16u
#define OF_ROW(i) U2F(X[(i) / 4u][(i) % 4u])
"""
# OpSDotKHR of packed bytes (format 0), by SPV_KHR_integer_dot_product and its two capabilities.
FUNCTIONS = """
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(uint a, uint b, spirv_literal int format);
"""


def _loads(parts: Sequence[int], row: str) -> str:
    """Code that loads these parts of four words of a rounded block."""
    names = ", ".join(f"x{i}" for i in parts)
    loads = " ".join(f"x{i} = X[at + {i}u];" for i in parts)
    if not row:
        return f"uvec4 {names}; {loads}"
    of_row = " ".join(f"x{i} = uvec4({', '.join(f'{row}[4u * at + {4 * i + t}u]' for t in range(4))});" for i in parts)
    return f"uvec4 {names};\n#if MT == 1\n      if (norm) {{ {of_row} }} else\n#endif\n      {{ {loads} }}"


def block_step(dtype: str, row: str = "") -> str:
    """A block of 32 k: the integer sum, once per half where halves have scales of their own. `row`: array of
    a group's memory that has the row where `norm` says so.
    """
    lines = [unpack.load_block(dtype, wide=True)]
    halves = 2 if dtype in unpack.HALVES else 1
    for half in range(halves):
        d, low = ("d", "low") if half == 0 else ("d1", "low1")
        steps = " ".join(
            f"sum += dot_of_bytes({unpack.quants(dtype, j)}, x{j // 4}.{'xyzw'[j % 4]}, 0);"
            for j in range(half * 8 // halves, (half + 1) * 8 // halves)
        )
        parts = (half, 2) if halves == 2 else (0, 1, 2)
        sums = f"U2F(x2.{'yz'[half]})" if halves == 2 else "(U2F(x2.y) + U2F(x2.z))"
        minimum = f"acc[m] = FMA({low}, {sums}, acc[m]);" if unpack.has_minimum(dtype) else ""
        lines.append(
            f"UNROLL for (uint m = 0u; m < MT; m++) {{ uint at = (xr[m] / 32u + b) * {WORDS // 4}u; int sum = 0; "
            f"{_loads(parts, row)} {steps} "
            f"PRECISE float scale = {d} * U2F(x2.x); acc[m] = FMA(FLOAT(sum), scale, acc[m]); {minimum} }}"
        )
    return "\n      ".join(lines)


for _dtype in unpack.BLOCKS:
    Kernel(
        f"linear_dot_{_dtype}",
        launch.args(_dtype, wide=True),
        launch.words(_dtype),
        "  uint n_blocks = n_k / 32u;"
        + frame(NORM + launch.begin(_dtype, UNIT), block_step(_dtype, "rounded"), after_pair=ROUND_PAIR),
        simt=[
            tile | {"R": 1}
            for tile in TILES
            if tile["PAIR"] in unpack.pairs(_dtype, dots_of_a_row=tile["MT"] == 1)
            and unpack.worth(_dtype, tile, rows=(1, 8))
        ],
        cpu=(),
        local=f"{SUMS if 1 in unpack.pairs(_dtype) else split_k.SUMS}, {NORM_LOCAL}",
        functions=launch.MACROS + NORM_FUNCTIONS + FUNCTIONS + unpack_low.functions(_dtype),
        extensions=("GL_EXT_spirv_intrinsics",),
    )
    ROUNDS[f"linear_dot_{_dtype}"] = launch.rounding


def of_rounded(product: Dispatch, first: Dispatch) -> list[Dispatch]:
    """Launches: the quantisation `first`, and a product of its result."""
    return [first, replace(product, buffers=((None, 0), *product.buffers[1:]), scratch=first.scratch)]


def dot_product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> list[Dispatch]:
    """Launches: quantisation of t's activations, and the product."""
    m = t.src[0].shape[0]
    kernel = f"linear_dot_{parts[0].dtype}"
    tile, split = tile_for(m, 1 if m == 1 else 8, parts, shape, kernel, launch.is_pair(t))
    product = launch.launch(t, parts, shape, kernel, tile, SPLIT=split)
    return of_rounded(product, rounding(t.src[0], shape))


def normalised_product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> list[Dispatch] | None:
    """The launch of a product of one row after RMS norm, where it costs less than another launch."""
    m, k = t.src[0].shape
    kernel = f"linear_dot_{parts[0].dtype}"
    if m > 1 or k > MOST_K or t.src[1].shape != (k,) or t.attrs["eps"] <= 0:
        return None
    tile, split = tile_for(m, 1, parts, shape, kernel, launch.is_pair(t))
    if tile.rows > 1 or not KERNELS["rms_norm"].find(shape, WG=norm.WG):
        return None
    product = launch.launch(t, parts, shape, kernel, tile, SPLIT=split)
    return [product] if product.groups[1] * 8 * k <= MOST_NBYTES else None

"""`linear` for Vulkan GPUs with integer dot products of four bytes.

Activations are quantised to 8 bits first, one scale per 32 k, as the CPU backend does. A device
does so for any number of rows or for none, so that a row has the same bits whatever shares its
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from logitless.backends.gpu.language.dialect import LANES, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.matmul import launch, unpack
from logitless.backends.gpu.matmul.split_k import CHUNKS, SIMT_TILES, SPLITS, UNIT, frame, tile_for
from logitless.backends.gpu.quantize import ROUNDS, WORDS, rounding
from logitless.graph.tensor import Tensor

TILES = [tile | {"PAIR": 0} for tile in SIMT_TILES if tile["MT"] != 4]
# A group of a pair has whole blocks of 32 results, which it may round.
TILES += [{"WG": 2 * LANES * n, "MT": mt, "SPLIT": n, "CHUNKS": CHUNKS, "PAIR": 1} for mt in (1, 8) for n in SPLITS[:1]]
TILES += [SIMT_TILES[-1] | {"PAIR": 1}]
SUMS = ("float", "sums", "(SPLIT > 1 ? MT * CHUNKS * WG / SPLIT : MT * WG)")
ROUND_PAIR = f"""
  if (extra >= 2u) {{
#if SPLIT > 1
    if (split < MT) sums[split * (WG / SPLIT) + SUB / SPLIT * 16u + LANE] = kept[0];
#else
    UNROLL for (uint m = 0u; m < MT; m++) sums[m * WG + LID] = kept[m];
#endif
    BARRIER();
    {launch.rounded("MT", "(WG / SPLIT)", "GX * MT", "GY * (WG / SPLIT)", "sums")}
  }}"""
# OpSDotKHR of packed bytes (format 0), by SPV_KHR_integer_dot_product and its two capabilities.
FUNCTIONS = """
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_of_bytes(uint a, uint b, spirv_literal int format);
"""


def block_step(dtype: str) -> str:
    """A block of 32 k: the integer sum, once per half where halves have scales of their own."""
    lines = [unpack.load_block(dtype, wide=True)]
    halves = 2 if dtype == "q6_k" else 1
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
            f"uvec4 {', '.join(f'x{i} = X[at + {i}u]' for i in parts)}; {steps} "
            f"PRECISE float scale = {d} * U2F(x2.x); acc[m] = FMA(FLOAT(sum), scale, acc[m]); {minimum} }}"
        )
    return "\n      ".join(lines)


for _dtype in unpack.BLOCKS:
    Kernel(
        f"linear_dot_{_dtype}",
        launch.args(_dtype, wide=True),
        launch.words(_dtype),
        "  uint n_blocks = n_k / 32u;" + frame(launch.begin(_dtype, UNIT), block_step(_dtype), after_pair=ROUND_PAIR),
        simt=[tile | {"R": 1} for tile in TILES],
        cpu=(),
        local=[SUMS],
        functions=launch.MACROS + FUNCTIONS,
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
    tile, split = tile_for(m, 1 if m == 1 else 8, parts, shape, kernel, t.op == "linear_glu")
    product = launch.launch(t, parts, shape, kernel, tile, SPLIT=split)
    return of_rounded(product, rounding(t.src[0], shape))

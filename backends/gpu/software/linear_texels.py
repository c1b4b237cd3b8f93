"""`linear` of one row for Vulkan on a CPU (lavapipe), with blocks of weights read as texels.

Every other load of a lane is a gather there, which takes some 12 ns on machines that were made safe from spying on
gathers, whatever it loads, and nothing else runs meanwhile. A texel of four words is one ordinary load. So a lane has
four rows, four lanes the 16 rows of a group, and sixteen threads four groups of one weight, whose view they share.
Sums are those of linear_soft.py, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from logitless.backends.gpu.language.dialect import TEXELS, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.matmul import launch, unpack
from logitless.backends.gpu.software import linear
from logitless.graph.tensor import Tensor

WG = 16
GROUPS = 4  # of 16 rows, of a group of threads
WIDER = {"u8": "u32", "u16": TEXELS, "u32": TEXELS}
MACROS = f"""
#undef UNITS
#define UNITS(n) (((n) + {16 * GROUPS - 1}u) / {16 * GROUPS}u)
#define LANE4 (LID % 4u)
#define LANE16 LID
#define FIRST (unit * {GROUPS}u + LID / 4u)
#define LANE (4u * LANE4)
#define LF vec4
#define LU uvec4
#define LSPLAT(x) vec4(x)
#define LTOF(x) vec4(x)
#define LTOI(x) ivec4(x)
#define ITOF(x) vec4(x)
#define LU2F(x) uintBitsToFloat(x)
#define LLD(b, i) TEXEL(b, (i) / 4u + LANE4)
#define LLD8(b, i) four_bytes(b[(i) / 4u + LANE4])
#define LLDS8(b, i) ((ivec4(four_bytes(b[(i) / 4u + LANE4])) << 24) >> 24)
#define LLDH(b, i) four_halves(TEXEL(b, (i) / 8u + LANE4 / 2u))
#define LSTN(b, i, n, v) UNROLL for (uint l = 0u; l < 4u; l++) if ((i) + LANE + l < (n)) b[(i) + LANE + l] = (v)[l]
#define EACH(b, at, i, n, l) b[(at) + min((i) + LANE + l, (n) - 1u)]
#define LROW(b, at, i, n) vec4( \\
  EACH(b, at, i, n, 0u), EACH(b, at, i, n, 1u), EACH(b, at, i, n, 2u), EACH(b, at, i, n, 3u))
#define LSILU(v) vec4(SILU((v).x), SILU((v).y), SILU((v).z), SILU((v).w))
#define LGELU(v) vec4(GELU((v).x), GELU((v).y), GELU((v).z), GELU((v).w))
uvec4 four_bytes(uint x) {{ return uvec4(x & 255u, (x >> 8u) & 255u, (x >> 16u) & 255u, x >> 24u); }}
vec4 four_halves(uvec4 eight) {{
  uvec2 words = LANE4 % 2u == 0u ? eight.xy : eight.zw;
  return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
}}
"""

for _dtype in unpack.BLOCKS:
    Kernel(
        f"linear_texels_{_dtype}",
        linear.args(_dtype, WIDER),
        launch.words(_dtype),
        linear.frame(launch.begin(_dtype, "GY"), linear.blocks(_dtype, 16)),
        simt=(),
        cpu=(),
        soft=[{"WG": WG, "MT": 1, "R": 1, "PAIR": pair} for pair in (0, 1)],
        functions=launch.MACROS + linear.UNDEF + MACROS,
    )


def texels_product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> Dispatch:
    return launch.launch(t, parts, shape, f"linear_texels_{parts[0].dtype}", launch.Tile(1, GROUPS, 1))

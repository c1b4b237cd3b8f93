"""`linear` for Vulkan on a CPU (lavapipe): a variant that compiles and runs fast enough for tests.

Every load of a lane is a gather there, as slow as ten additions, and a barrier makes the kernel a
coroutine. So a thread loads 64 bits, words of two rows: its lanes are vectors of two, and eight
threads have the 16 rows of a group. A thread has R groups, which share each loaded activation;
eight threads load eight activations and broadcast them. Sums over k run from the first block to
the last, whatever the number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.matmul import launch, layout, unpack, unpack_low
from logitless.graph.tensor import Tensor

WG = 16
UNIT = "GY * (WG / 8u) + LID / 8u"
# one for any number of rows: tests spend more time compiling than running
TILE = {"WG": WG, "MT": 4, "R": 2}
WIDER = {"u8": "u16", "u16": "u32", "u32": "u64", "f32": "u64"}
LANES_ARE_THREADS = (
    "LANE",
    "LF",
    "LU",
    "LSPLAT",
    "LTOF",
    "LTOI",
    "ITOF",
    "LU2F",
    "LLD",
    "LLD8",
    "LLDS8",
    "LLD16",
    "LLDH",
)
UNDEF = "".join(f"#undef {name}\n" for name in (*LANES_ARE_THREADS, "LSTN", "LROW", "LSILU", "LGELU"))
MACROS = """
#define FIRST (unit * R)
#define LANE (2u * LANE8)
#define LF vec2
#define LU uvec2
#define LSPLAT(x) vec2(x)
#define LTOF(x) vec2(x)
#define LTOI(x) ivec2(x)
#define ITOF(x) vec2(x)
#define LU2F(x) uintBitsToFloat(x)
#define LLD(b, i) unpackUint2x32(b[(i) / 2u + LANE8])
#define LLD8(b, i) both_bytes(uint(b[(i) / 2u + LANE8]))
#define LLDS8(b, i) ((ivec2(both_bytes(uint(b[(i) / 2u + LANE8]))) << 24) >> 24)
#define LLD16(b, i) both_halves(b[(i) / 2u + LANE8])
#define LLDH(b, i) unpackHalf2x16(b[(i) / 2u + LANE8])
#define LSTN(b, i, n, v) { \\
  if ((i) + LANE < (n)) b[(i) + LANE] = (v).x; if ((i) + LANE + 1u < (n)) b[(i) + LANE + 1u] = (v).y; }
#define LROW(b, at, i, n) vec2(b[(at) + min((i) + LANE, (n) - 1u)], b[(at) + min((i) + LANE + 1u, (n) - 1u)])
#define LSILU(v) vec2(SILU((v).x), SILU((v).y))
#define LGELU(v) vec2(GELU((v).x), GELU((v).y))
uvec2 both_bytes(uint x) { return uvec2(x & 255u, x >> 8u); }
uvec2 both_halves(uint x) { return uvec2(x & 0xffffu, x >> 16u); }
"""


def wider(args: str) -> str:
    """The buffers, those of weights as words of two rows. A codebook is the same for all."""
    return re.sub(r"(\w+) ([WHFC])\b", lambda of: f"{WIDER[of[1]]} {of[2]}", args)


def frame(begin: str, steps: str, *, row: str = launch.ROW, end: Callable[[str, str, str], str] = launch.end) -> str:
    """Code of a kernel. `begin` finds a thread's weight, `steps` are those over k, `end`
    stores a row's sum.
    """
    return f"""
  {begin}
  uint first = FIRST;
  uint xr[MT];
  UNROLL for (uint m = 0u; m < MT; m++) xr[m] = {row} * n_k;
#if PAIR
  LF kept[MT * R];
  for (uint p = 0u; p < 2u; p++) {{
  if (p == 1u) CHOOSE(1u)
#endif
  PRECISE LF acc[MT * R];
  UNROLL for (uint i = 0u; i < MT * R; i++) acc[i] = LSPLAT(0.0f);
  {steps}
  UNROLL for (uint r = 0u; r < R; r++) UNROLL for (uint m = 0u; m < MT; m++) {{
    uint group = first + r;
    {end("acc[m * R + r]", "kept[m * R + r]", "group")}
  }}
#if PAIR
  }}
#endif
"""


def _floats(dtype: str) -> str:
    """Steps over k of float weights: eight k at a time, then the rest one by one."""
    value = unpack.float_lanes(dtype, "(g * n_k + k) * 16u")
    value = f"LU2F({value})" if dtype == "f32" else value  # words of two rows come as bits
    told = "LSPLAT(FROM_LANE(xv[m], {0}u))"
    steps = "".join(
        f"{{ uint k = b * 8u + {t}u; LF v = {value}; "
        f"UNROLL for (uint m = 0u; m < MT; m++) acc[m * R + r] = FMA(v, {told.format(t)}, acc[m * R + r]); }}\n"
        for t in range(8)
    )
    return f"""
  for (uint b = 0u; b < n_k / 8u; b++) {{
    float xv[MT];
    UNROLL for (uint m = 0u; m < MT; m++) xv[m] = X[xr[m] + b * 8u + LANE8];
    UNROLL for (uint r = 0u; r < R; r++) {{
      uint g = min(first + r, groups - 1u);
      {steps}
    }}
  }}
  for (uint k = n_k / 8u * 8u; k < n_k; k++) UNROLL for (uint r = 0u; r < R; r++) {{
    uint g = min(first + r, groups - 1u);
    LF v = {value};
    UNROLL for (uint m = 0u; m < MT; m++) acc[m * R + r] = FMA(v, LSPLAT(X[xr[m] + k]), acc[m * R + r]);
  }}"""


def _blocks(dtype: str) -> str:
    def x(i: int | str) -> str:
        part, lane = (i // 8, i % 8) if isinstance(i, int) else (f"({i}u) / 8", f"({i}u) % 8")
        return f"FROM_LANE(xv[m * 4u + {part}u], {lane}u)"

    body = unpack.block_step(dtype, x, "acc[m * R + r]", "LSPLAT(0.0f)")
    return f"""
  uint n_blocks = n_k / 32u;
  for (uint b = 0u; b < n_blocks; b++) {{
    float xv[MT * 4];
    UNROLL for (uint m = 0u; m < MT; m++) UNROLL for (uint i = 0u; i < 4u; i++)
      xv[m * 4u + i] = X[xr[m] + b * 32u + i * 8u + LANE8];
    UNROLL for (uint r = 0u; r < R; r++) {{
      uint g = min(first + r, groups - 1u);
      {body}
    }}
  }}"""


def steps(dtype: str) -> str:
    """All steps over k."""
    return _floats(dtype) if dtype in unpack.FLOATS else _blocks(dtype)


for _dtype in layout.PACKINGS:
    Kernel(
        f"linear_soft_{_dtype}",
        wider(launch.args(_dtype)),
        launch.words(_dtype),
        frame(launch.begin(_dtype, UNIT), steps(_dtype)),
        simt=(),
        cpu=(),
        soft=[TILE | {"PAIR": pair} for pair in unpack.pairs(_dtype)],
        functions=launch.MACROS + UNDEF + MACROS + unpack_low.functions(_dtype, soft=True),
    )


def soft_product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> Dispatch:
    return launch.launch(t, parts, shape, f"linear_soft_{parts[0].dtype}", launch.Tile(TILE["MT"], TILE["R"], WG // 8))

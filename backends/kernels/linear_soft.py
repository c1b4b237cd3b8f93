"""`linear` for Vulkan on a CPU (lavapipe), where every load of a lane is a gather and costs what ten additions do.

A thread has R rows of 16 outputs, so that an activation that was loaded serves all of them, and eight lanes load eight
activations at once and tell each other. Sums over k run from the first block to the last, for any number of rows.
"""

from __future__ import annotations

from backends.kernels import layout, weights
from backends.kernels.dialect import LANES, Arg, Kernel, Shape
from backends.kernels.lowering import Buffers, Dispatch, dispatch
from graph.tensor import Tensor

WG = 16
VARIANTS = [{"WG": WG, "MT": 1, "R": 4}, {"WG": WG, "MT": 4, "R": 2}]

FRAME = """
  uint groups = (n_n + 15u) / 16u;
  uint first = (GY * (WG / 16u) + SUB) * R;
  PRECISE float acc[MT * R];
  uint xr[MT];
  UNROLL for (uint m = 0u; m < MT; m++) xr[m] = min(GX * MT + m, n_m - 1u) * n_k;
  UNROLL for (uint i = 0u; i < MT * R; i++) acc[i] = 0.0f;
  BLOCKS
  UNROLL for (uint r = 0u; r < R; r++) UNROLL for (uint m = 0u; m < MT; m++) {
    uint row = GX * MT + m, n = (first + r) * 16u + LANE;
    if (row < n_m && n < n_n) Y[row * n_n + n] = acc[m * R + r];
  }
"""


def _floats(dtype: str) -> str:
    """Eight k at a time, and what is left one by one."""
    value = weights.float_lanes(dtype, "(g * n_k + k) * 16u")
    steps = "".join(
        f"{{ uint k = b * 8u + {t}u; float v = {value}; "
        f"UNROLL for (uint m = 0u; m < MT; m++) acc[m * R + r] = FMA(v, FROM_LANE(xv[m], {t}u), acc[m * R + r]); }}\n"
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
    float v = {value};
    UNROLL for (uint m = 0u; m < MT; m++) acc[m * R + r] = FMA(v, X[xr[m] + k], acc[m * R + r]);
  }}"""


def _blocks(dtype: str) -> str:
    """A block of 32 k: two partial sums of q · x, by the parity of k, then scale and minimum."""
    lines = [weights.load_block(dtype), "PRECISE float even[MT]; PRECISE float odd[MT]; PRECISE float xs[MT];"]
    halves = 2 if dtype == "q6_k" else 1
    minimum = weights.has_minimum(dtype)
    for half in range(halves):
        lines.append("UNROLL for (uint m = 0u; m < MT; m++) { even[m] = 0.0f; odd[m] = 0.0f; xs[m] = 0.0f; }")
        for j in range(half * 8 // halves, (half + 1) * 8 // halves):
            values = " ".join(f"float v{t} = {weights.quant(dtype, j, t)};" for t in range(4))
            xs = " ".join(f"float x{t} = FROM_LANE(xv[m * 4u + {j // 2}u], {4 * (j % 2) + t}u);" for t in range(4))
            steps = " ".join(f"{s}[m] = FMA(v{t}, x{t}, {s}[m]);" for t, s in enumerate(("even", "odd") * 2))
            total = "xs[m] = xs[m] + ((x0 + x1) + (x2 + x3));" if minimum else ""
            lines.append(f"{{ {values} UNROLL for (uint m = 0u; m < MT; m++) {{ {xs} {steps} {total} }} }}")
        scale, low = ("d", "low") if half == 0 else ("d1", "low1")
        low_term = f"acc[m * R + r] = FMA({low}, xs[m], acc[m * R + r]);" if minimum else ""
        lines.append(
            "UNROLL for (uint m = 0u; m < MT; m++) { "
            f"acc[m * R + r] = FMA(even[m] + odd[m], {scale}, acc[m * R + r]); {low_term} }}"
        )
    body = "\n      ".join(lines)
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


for _dtype in layout.PACKINGS:
    Kernel(
        f"linear_soft_{_dtype}",
        [Arg("X", "f32"), *weights.args(_dtype), Arg("Y", "f32", "w")],
        ["uint n_m", "uint n_n", "uint n_k"],
        FRAME.replace("BLOCKS", _floats(_dtype) if _dtype in weights.FLOATS else _blocks(_dtype)),
        simt=(),
        cpu=(),
        soft=VARIANTS,
    )


def linear_soft(t: Tensor, shape: Shape) -> list[Dispatch]:
    x, w = t.src
    (m, n), k = t.shape, w.shape[1]
    mt, rows = (1, 4) if m == 1 else (4, 2)
    bufs: Buffers = (x, *weights.buffers(w), t)
    groups = (-(-m // mt), -(-n // (LANES * rows * (WG // LANES))))
    return [dispatch(f"linear_soft_{w.dtype}", shape, bufs, (m, n, k), groups, MT=mt)]

"""Activations rounded to 8 bits, 32 k to a scale, for products that multiply bytes (linear_dot.py, linear_coop.py).

They are made into the scratch, by a launch of their own or by that of the norm which made the activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from backends.kernels import norm
from backends.kernels.dialect import Arg, Kernel, Shape
from backends.kernels.lowering import Dispatch, dispatch, groups_for
from graph.tensor import Tensor

WORDS = 11  # of 32 rounded activations: eight of four bytes, their scale, and the sums of each 16
# Eight threads have a block of 32, four numbers x each: number `block`, and `inside` or not to be stored.
ROUND = f"""
    uint j = LID % 8u, team = LID - j, at = block * {WORDS}u;
    float most = 0.0f;
    bool finite = true;
    UNROLL for (uint t = 0u; t < 4u; t++) {{ finite = finite && FABS(x[t]) < INF; most = max(most, FABS(x[t])); }}
    mosts[LID] = finite ? most : INF;
    BARRIER();
    UNROLL for (uint t = 0u; t < 8u; t++) most = max(most, mosts[team + t]);
    finite = most < INF;
    float inverse = finite && most > 0.0f ? 127.0f / most : 0.0f, scale = finite ? most / 127.0f : U2F(0x7fc00000u);
    uint word = 0u;
    int sum = 0;
    UNROLL for (uint t = 0u; t < 4u; t++) {{
      int q = finite ? INT(RINT(x[t] * inverse)) : 0;
      sum += q;
      word |= (UINT(q) & 255u) << (8u * t);
    }}
    quants[LID] = sum;
    BARRIER();
    if (inside) R[at + j] = word;
    if (inside && j == 0u) R[at + 8u] = F2U(scale);
    if (inside && j < 2u) {{ /* of each half */
      sum = 0;
      UNROLL for (uint t = 0u; t < 4u; t++) sum += quants[team + 4u * j + t];
      R[at + 9u + j] = F2U(FLOAT(sum) * scale);
    }}
    BARRIER();"""
LOCAL = [("float", "mosts", "WG"), ("int", "quants", "WG")]
Kernel(
    "round_rows",
    [Arg("X", "f32"), Arg("R", "u32", "w")],
    ["uint n"],
    f"""
  for (uint first = GX * (WG / 8u); first < n; first += NGX * (WG / 8u)) {{
    uint block = min(first + LID / 8u, n - 1u);
    bool inside = first + LID / 8u < n;
    float x[4];
    UNROLL for (uint t = 0u; t < 4u; t++) x[t] = X[block * 32u + LID % 8u * 4u + t];
    {ROUND}
  }}""",
    simt=[{"WG": 64}],
    cpu=(),
    local=LOCAL,
)
Kernel(
    "rms_norm_rounded",
    [*norm.ARGS, Arg("R", "u32", "w")],
    norm.WORDS,
    f"""
  for (uint row = GX; row < rows; row += NGX) {{{norm.SCALE}
    for (uint first = 0u; first < n; first += 4u * WG) {{
      uint i = min(first + 4u * LID, n - 4u), block = (row * n + i) / 32u;
      bool inside = first + 4u * LID < n;
      float x[4];
      UNROLL for (uint t = 0u; t < 4u; t++) {{
        x[t] = X[row * n + i + t] * k * W[n_weights == n ? i + t : 0u];
        if (inside) Y[row * n + i + t] = x[t];
      }}
      {ROUND}
    }}
  }}""",
    simt=[{"WG": norm.WG}],
    cpu=(),
    local=[*norm.SUMS, *LOCAL],
    functions=norm.FUNCTIONS,
)


def rounding(x: Tensor, shape: Shape) -> Dispatch:
    """The launch that rounds activations, into the scratch."""
    m, k = x.shape
    n = m * (k // 32)
    return dispatch("round_rows", shape, (x, None), (n,), groups_for(n, shape, 8), n * WORDS * 4)


def joined(work: Iterable[Dispatch], shape: Shape) -> list[Dispatch]:
    """The same launches; a norm whose result is rounded next does that, too."""
    found: list[Dispatch] = []
    for d in work:
        last = found[-1] if found else None
        if d.kernel == "round_rows" and last and last.kernel == "rms_norm" and last.buffers[2][0] is d.buffers[0][0]:
            both = dispatch("rms_norm_rounded", shape, (*last.buffers, None), last.words, 1, d.scratch)
            found[-1] = replace(both, groups=last.groups)
        else:
            found.append(d)
    return found

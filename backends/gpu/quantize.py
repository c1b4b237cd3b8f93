"""Quantization of activations to int8, one scale per 32 k, for integer dot products.

linear_int_dot.py and linear_coop_matrix.py read them from the scratch. A launch of their own makes
them, or the norm or attention that made the activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from logitless.backends.gpu import norm
from logitless.backends.gpu.attention import paged_attention
from logitless.backends.gpu.language.dialect import KERNELS, Arg, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, groups_for
from logitless.graph.tensor import ALIASES, Tensor

ALIGNMENT = 64  # bytes
# Words of 32 rounded activations: eight of four bytes, their scale, the sums of each 16, and one that
# makes three loads of 16 bytes.
WORDS = 12
# Eight threads have a block of 32, four numbers x each: number `block`, and `inside` or not to be
# stored.
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
# Attention's partial results are in the scratch, too: rounded rows come behind them.
Kernel(
    "attention_join_rounded",
    [*paged_attention.JOIN_ARGS, Arg("R", "u32", "w")],
    paged_attention.JOIN_WORDS,
    f"""
  for (uint first = GX * (WG / 8u); first < n / 32u; first += NGX * (WG / 8u)) {{
    uint block = min(first + LID / 8u, n / 32u - 1u), i = block * 32u + LID % 8u * 4u;
    bool inside = first + LID / 8u < n / 32u;
    {paged_attention.JOINED}
    UNROLL for (uint t = 0u; t < 4u; t++) {{ if (inside) Y[i + t] = x[t]; }}
    {ROUND}
  }}""",
    simt=[{"WG": 64, "WIDE": 4}],
    cpu=(),
    local=LOCAL,
)
# kernels that can round their result, and the ones that do
MAKERS = {"rms_norm": "rms_norm_rounded", "attention_join": "attention_join_rounded"}


def rounding(x: Tensor, shape: Shape) -> Dispatch:
    """The launch that quantises activations into the scratch."""
    m, k = x.shape
    n = m * (k // 32)
    return dispatch("round_rows", shape, (x, None), (n,), groups_for(n, shape, 8), n * WORDS * 4)


def _whole(t: Tensor | None) -> Tensor | None:
    """The node whose launch made all of t's bytes."""
    while t is not None and t.op in ALIASES and t.src[0].nbytes == t.nbytes:
        t = t.src[0]
    return t


def joined(work: Iterable[Dispatch], shape: Shape) -> list[Dispatch]:
    """The same launches, where a norm or attention quantises its own result if the next
    launch would.
    """
    launches: list[Dispatch] = []
    offset = 0  # in the scratch, of what was rounded last, where its product does not know yet
    for d in work:
        maker = MAKERS.get(launches[-1].kernel) if launches else None
        last = launches[-1] if maker and KERNELS[maker].find(shape) else None
        if last and d.kernel == "round_rows" and last.buffers[2][0] is _whole(d.buffers[0][0]):
            offset = -(-last.scratch // ALIGNMENT) * ALIGNMENT
            gx, gy, _ = last.groups if last.kernel == "rms_norm" else d.groups
            buffers, scratch = (*last.buffers, (None, offset)), offset + d.scratch
            launches[-1] = dispatch(MAKERS[last.kernel], shape, buffers, last.words, (gx, gy), scratch)
        elif offset and d.buffers[0][0] is None:
            launches.append(replace(d, buffers=((None, offset), *d.buffers[1:]), scratch=offset + d.scratch))
            offset = 0
        else:
            launches.append(d)
    return launches

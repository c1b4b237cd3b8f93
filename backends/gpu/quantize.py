"""Quantization of activations to int8, one scale per 32 k, for integer dot products.

linear_int_dot.py and linear_coop_matrix.py read them from the scratch. A launch of their own makes
them, or the norm or attention that made the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from logitless.backends.gpu import norm
from logitless.backends.gpu.attention import paged_attention
from logitless.backends.gpu.language.dialect import KERNELS, Kernel, Shape
from logitless.backends.gpu.lowering import At, Dispatch, dispatch, groups_for
from logitless.graph.tensor import ALIASES, Tensor

ALIGNMENT = 64  # bytes
# Words of 32 rounded activations: eight of four bytes, their scale, the sums of each 16, and one that
# makes three loads of 16 bytes.
WORDS = 12
# Scale of a block whose greatest magnitude is `most`, if all are `finite`, and an element's quant. Precise, or one
# kernel divides where another multiplies by a reciprocal.
SCALE = """PRECISE float inverse = finite && most > 0.0f ? 127.0f / most : 0.0f;
    PRECISE float scale = finite ? most / 127.0f : U2F(0x7fc00000u);"""
QUANT = "int q = finite ? INT(RINT({} * inverse)) : 0;"


def round_threads(to: str) -> str:
    """Code of eight threads that have a block of 32, four numbers x each: number `block`, and `inside` or
    not to be stored."""
    return f"""
    uint j = LID % 8u, team = LID - j, at = block * {WORDS}u;
    float most = 0.0f;
    bool finite = true;
    UNROLL for (uint t = 0u; t < 4u; t++) {{ finite = finite && FABS(x[t]) < INF; most = max(most, FABS(x[t])); }}
    mosts[LID] = finite ? most : INF;
    BARRIER();
    UNROLL for (uint t = 0u; t < 8u; t++) most = max(most, mosts[team + t]);
    finite = most < INF;
    {SCALE}
    uint word = 0u;
    int sum = 0;
    UNROLL for (uint t = 0u; t < 4u; t++) {{
      {QUANT.format("x[t]")}
      sum += q;
      word |= (UINT(q) & 255u) << (8u * t);
    }}
    quants[LID] = sum;
    BARRIER();
    if (inside) {to}[at + j] = word;
    if (inside && j == 0u) {to}[at + 8u] = F2U(scale);
    if (inside && j < 2u) {{ /* of each half */
      sum = 0;
      UNROLL for (uint t = 0u; t < 4u; t++) sum += quants[team + 4u * j + t];
      {to}[at + 9u + j] = F2U(FLOAT(sum) * scale);
    }}
    BARRIER();"""


def round_block(value: str, thread: str, to: str) -> str:
    """Code that rounds a block in a group's memory, without barriers: each of eight threads reads
    all of it. `value`: format of its element {}. The words go to the buffer `to` from `at` on."""
    return f"""uint j = {thread}, word = 0u;
        float most = 0.0f;
        bool finite = true;
        ROLLED for (uint t = 0u; t < 32u; t++) {{ /* each begins elsewhere, in a bank of its own */
          float v = FABS({value.format("(t + LID) % 32u")});
          finite = finite && v < INF;
          most = max(most, v);
        }}
        {SCALE}
        UNROLL for (uint t = 0u; t < 4u; t++) {{
          {QUANT.format(value.format("4u * j + t"))}
          word |= (UINT(q) & 255u) << (8u * t);
        }}
        {to}[at + j] = word;
        if (j == 0u) {to}[at + 8u] = F2U(scale);
        if (j < 2u) {{
          int sum = 0;
          ROLLED for (uint t = 0u; t < 16u; t++) {{ {QUANT.format(value.format("16u * j + t"))} sum += q; }}
          {to}[at + 9u + j] = F2U(FLOAT(sum) * scale);
        }}"""


LOCAL = "float mosts[WG], int quants[WG]"
Kernel(
    "round_rows",
    "f32 X, w u32 R",
    "uint n",
    f"""
  for (uint first = GX * (WG / 8u); first < n; first += NGX * (WG / 8u)) {{
    uint block = min(first + LID / 8u, n - 1u);
    bool inside = first + LID / 8u < n;
    float x[4];
    UNROLL for (uint t = 0u; t < 4u; t++) x[t] = X[block * 32u + LID % 8u * 4u + t];
    {round_threads("R")}
  }}""",
    simt=[{"WG": 64}],
    cpu=(),
    local=LOCAL,
)
Kernel(
    "rms_norm_rounded",
    f"{norm.ARGS}, w u32 R",
    norm.WORDS,
    f"""
  for (uint row = GX; row < rows; row += NGX) {{{norm.SCALE}
    for (uint first = 0u; first < n; first += 4u * WG) {{
      uint i = min(first + 4u * LID, n - 4u), block = (row * n + i) / 32u;
      bool inside = first + 4u * LID < n;
      PRECISE float x[4];
      UNROLL for (uint t = 0u; t < 4u; t++) {{
        x[t] = X[row * n + i + t] * k * W[n_weights == n ? i + t : 0u];
        if (inside) Y[row * n + i + t] = x[t];
      }}
      {round_threads("R")}
    }}
  }}""",
    simt=[{"WG": norm.WG}],
    cpu=(),
    local=f"{norm.SUMS}, {LOCAL}",
    functions=norm.FUNCTIONS,
)
# Attention's partial results are in the scratch, too: rounded rows come behind them.
Kernel(
    "attention_join_rounded",
    f"{paged_attention.JOIN_ARGS}, w u32 R",
    paged_attention.JOIN_WORDS,
    f"""
  for (uint first = GX * (WG / 8u); first < n / 32u; first += NGX * (WG / 8u)) {{
    uint block = min(first + LID / 8u, n / 32u - 1u), i = block * 32u + LID % 8u * 4u;
    bool inside = first + LID / 8u < n / 32u;
    {paged_attention.JOINED}
    UNROLL for (uint t = 0u; t < 4u; t++) {{ if (inside) Y[i + t] = x[t]; }}
    {round_threads("R")}
  }}""",
    simt=[{"WG": 64, "WIDE": 4}],
    cpu=(),
    local=LOCAL,
)
# Kernels that can round their result: the launch that does, of such a launch, the rounding and its place in
# the scratch, or None.
Rounds = Callable[[Dispatch, Dispatch, At, Shape], Dispatch | None]
ROUNDS: dict[str, Rounds] = {}


def _norm(last: Dispatch, _: Dispatch, place: At, shape: Shape) -> Dispatch | None:
    if not KERNELS["rms_norm_rounded"].find(shape):
        return None
    return dispatch("rms_norm_rounded", shape, (*last.buffers, place), last.words, last.groups[:2])


def _join(last: Dispatch, alone: Dispatch, place: At, shape: Shape) -> Dispatch | None:
    if not KERNELS["attention_join_rounded"].find(shape):
        return None
    return dispatch("attention_join_rounded", shape, (*last.buffers, place), last.words, alone.groups[:2])


ROUNDS |= {"rms_norm": _norm, "attention_join": _join}


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
    """Launches with their rounding joined: a launch rounds its own result if the next one would, and
    what is rounded already is not rounded again."""
    launches: list[Dispatch] = []
    rounded: Tensor | None = None  # what lies in the scratch, and where
    offset = 0
    for d in work:
        args = KERNELS[d.kernel].args
        if d.kernel == "round_rows":
            x = _whole(d.buffers[0][0])
            if x is rounded:
                continue
            rounded, last, offset = x, launches[-1] if launches else None, 0
            if last and last.kernel in ROUNDS and _result(last) is x:
                offset = -(-last.scratch // ALIGNMENT) * ALIGNMENT
                maker = ROUNDS[last.kernel](last, d, (None, offset), shape)
                if maker:
                    launches[-1] = replace(maker, scratch=offset + d.scratch)
                    continue
                offset = 0
            launches.append(d)
        elif args[0].dtype == "u32x4" and d.buffers[0][0] is None:
            launches.append(replace(d, buffers=((None, offset), *d.buffers[1:]), scratch=offset + d.scratch))
        else:
            launches.append(d)
            if any(t is None and a.access != "r" for a, (t, _) in zip(args, d.buffers, strict=True)):
                rounded = None
    return launches


def _result(d: Dispatch) -> Tensor | None:
    """First tensor that a launch writes."""
    return next(t for a, (t, _) in zip(KERNELS[d.kernel].args, d.buffers, strict=True) if a.access == "w")

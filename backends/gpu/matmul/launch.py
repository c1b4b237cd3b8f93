"""Arguments, epilogue and launch that all kernels of activations times packed weights share.

A launch computes `linear`, or an op of graph/ops/fused.py: several weights of one type, whose
results are concatenated; a row that is added to the result; or (`PAIR`) a GLU of two weights'
results. `extra` tells what is added (0 nothing, 1 a row for each, 2 one row for all) or which
activation gates (bit 0: silu or gelu; bit 1: the result is rounded, too). Of a normalised row (`NORM`) E are
the norm's weights; `extra`, or of a pair n_1 beside bit 2, is its epsilon.

A thread's *unit* is R groups of 16 outputs. Row m of its results is row `GX * MT + m` of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitless.backends.gpu import quantize
from logitless.backends.gpu.language.dialect import KERNELS, LANES, Shape, buffers
from logitless.backends.gpu.lowering import At, Buffers, Dispatch, bits, dispatch
from logitless.backends.gpu.matmul import unpack
from logitless.graph.tensor import Tensor

ROW = "min(GX * MT + m, n_m - 1u)"  # row of x for row m of a thread's results
ACTIVATIONS = ("silu", "gelu")  # by number
MACROS = """
#define UNITS(n) (((n) + (16u * R - 1u)) / (16u * R))
#if PAIR /* a group of the second weight follows the same of the first, and the next of the first that */
#define LAST (p == 1u)
#define WRAPS (b + AHEAD_BLOCKS >= n_blocks)
#define AHEAD_W (WRAPS ? (p == 0u ? W1 : W0) : W)
#define AHEAD_BLOCK (g * n_blocks + b + AHEAD_BLOCKS - (WRAPS && p == 0u ? n_blocks : 0u))
#else
#define LAST true
#define AHEAD_W W
#define AHEAD_BLOCK (g * n_blocks + b + AHEAD_BLOCKS)
#endif
"""


@dataclass(frozen=True)
class Tile:
    """Tile of a product: rows of x a thread, groups a unit, units a work group."""

    rows: int
    groups: int
    units: int


def is_pair(t: Tensor) -> bool:
    """True for a GLU."""
    return "activation" in t.attrs


def n_parts(dtype: str) -> int:
    """Number of weights of a type that one launch can have (room in push constants)."""
    return 3 if len(buffers(unpack.args(dtype))) < 4 else 2


def args(dtype: str, *, wide: bool = False) -> str:
    """`wide`: of kernels that read rounded activations; with `PAIR` they may round their result, to `Q`."""
    own = unpack.several(unpack.args(dtype, wide=wide), n_parts(dtype))
    return f"u32x4 X, {own}, f32 E, w f32 Y, w u32 Q" if wide else f"f32 X, {own}, f32 E, w f32 Y"


def words(dtype: str) -> str:
    return f"uint n_m n_k {' '.join(f'n_{i}' for i in range(n_parts(dtype)))} extra"


def begin(dtype: str, unit: str) -> str:
    """Code that finds a thread's weight: `n_n` its rows, `y_at` the start of its results,
    `unit` counted from there.
    """
    text = ""
    for i in reversed(range(1, n_parts(dtype))):
        step = f"unit -= UNITS(n_{i - 1}); y_at += n_m * n_{i - 1}; n_n = n_{i}; CHOOSE({i}u)"
        text = f"if (unit >= UNITS(n_{i - 1}) && n_{i} > 0u) {{ {step} {text} }}"
    return f"""
  uint n_n = n_0, y_at = 0u, unit = {unit};
  CHOOSE(0u)
#if PAIR == 0
  {text}
#endif
  uint groups = (n_n + 15u) / 16u;"""


def end(value: str, gated: str, group: str) -> str:
    """Epilogue: adds or gates row m's sums of a group, and stores them. A pair has `p`, 0 and 1."""
    return f"""{{
      uint row = GX * MT + m, first = row * n_n + {group} * 16u;
      PRECISE LF result = {value};
#if PAIR
      if (!LAST) {gated} = result;
      else {{
        PRECISE LF gate = extra % 2u == 0u ? LSILU({gated}) : LGELU({gated});
        result = gate * result;
        {gated} = result;
      }}
#endif
      if (row < n_m && {group} < groups && LAST) {{
#if PAIR == 0
        if (extra != 0u) result = LROW(E, extra == 1u ? row * n_n : 0u, {group} * 16u, n_n) + result;
#endif
        LSTN(Y, y_at + first, y_at + row * n_n + n_n, result);
      }}
    }}"""


def rounded(rows: str, columns: str, first_row: str, first_column: str, values: str, stride: str = "") -> str:
    """Code that rounds results of a pair in rows of whole blocks: `values` of a group's memory, of which a
    row has `stride`.
    """
    place = f"from / {columns} * {stride or columns} + from % {columns}"
    return f"""
    for (uint i = LID; i < {rows} * {columns} / 4u; i += WG) {{
      uint from = i / 8u * 32u, row = {first_row} + from / {columns}, at = {first_column} + from % {columns};
      from = {place};
      if (row < n_m && at < n_n) {{
        at = (row * n_n + at) / 32u * {quantize.WORDS}u;
        {quantize.round_block(f"{values}[from + {{}}]", "i % 8u", "Q")}
      }}
    }}"""


def launch(t: Tensor, weights_of: Sequence[Tensor], shape: Shape, kernel: str, tile: Tile, **how: int) -> Dispatch:
    """The dispatch of a product of t's first source. `how`: constants of the variant that
    `tile` does not set.
    """
    x, dtype = t.src[0], weights_of[0].dtype
    m, k = x.shape
    pair, added = is_pair(t), t.src[2] if t.op == "linear_add" else None
    extra = ACTIVATIONS.index(t.attrs["activation"]) if pair else 0 if added is None else 3 - len(added.shape)
    parts = n_parts(dtype)
    full = [*weights_of, *[weights_of[0]] * (parts - len(weights_of))]
    sections: list[At] = [at for of_all in zip(*(unpack.buffers(w) for w in full), strict=True) for at in of_all]
    rows = [w.shape[0] for w in weights_of] + [0] * (parts - len(weights_of))
    if "eps" in t.attrs:
        added = t.src[1]
        if pair:
            rows[1], extra = bits(t.attrs["eps"]), extra | 4
        else:
            extra = bits(t.attrs["eps"])
    units = sum(-(-n // (LANES * tile.groups)) for n in (rows[:1] if pair else rows))
    groups = (-(-m // tile.rows), -(-units // tile.units))
    result = (t,) * sum(a.access == "w" for a in KERNELS[kernel].args)
    bufs: Buffers = (x, *sections, x if added is None else added, *result)
    return dispatch(kernel, shape, bufs, (m, k, *rows, extra), groups, MT=tile.rows, PAIR=int(pair), **how)


def rounding(last: Dispatch, _: Dispatch, place: At, shape: Shape) -> Dispatch | None:
    """The launch of a pair that rounds its result."""
    if not dict(last.defines)["PAIR"]:
        return None
    return replace(last, words=(*last.words[:-1], last.words[-1] | 2), buffers=(*last.buffers[:-1], place))

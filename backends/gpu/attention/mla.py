"""Multi-head latent attention (MLA): one cached row is key and value, with an online softmax.

A group has HEADS query heads of a token and takes CELLS of its cells at a time. A thread computes
the scores of some cells, then sums some elements of the rows. The sixteen cells of a page lie side
by side for each element, so a row is read as it lies for both, and once for all heads of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS as NIBBLE_FUNCTIONS
from logitless.backends.gpu.attention.kv_nibbles import NIBBLES, family, kind_of, number
from logitless.backends.gpu.attention.kv_store import CACHE_TYPES, before_page, cache_buffers, fits, scales_of
from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, lower
from logitless.graph.tensor import Tensor

SIZES = (384, 640)  # elements of a row: the most that a variant takes
HEADS = {"simt": 4, "cpu": 1, "soft": 2}
LOCAL = "float q[HEADS * MAX_SIZE] weights[HEADS * CELLS]"
OF_HEADS = "float most_of[HEADS] total_of[HEADS] was_of[HEADS]"
FUNCTIONS = """
#define PER UINT((MAX_SIZE + WG - 1) / WG) /* elements of a thread */
#define EACH_HEAD UNROLL for (uint h = 0u; h < HEADS; h++)
#if WG > 16
#define EACH_ELEMENT UNROLL for (uint i = 0u; i < PER; i++)
#else /* too many to be written out */
#define EACH_ELEMENT for (uint i = 0u; i < PER; i++)
#endif
"""

QUERIES = """\
  for (uint x = LID; x < HEADS * size; x += WG)
    q[x] = Q[(t * n_heads + head + min(x / size, n_own - 1u)) * size + x % size];"""
# The softmax of the scores in `weights`, those of CELLS cells, joined with that of the cells before.
SOFTMAX_STEP = """\
    for (uint x = LID; x < HEADS; x += WG) {
      float most = most_of[x];
      for (uint c = 0u; c < CELLS; c++) most = max(most, weights[x * CELLS + c]);
      was_of[x] = EXP(most_of[x] - most);
      most_of[x] = most;
    }
    BARRIER();
    for (uint x = LID; x < HEADS * CELLS; x += WG)
      weights[x] = weights[x] == -INF ? 0.0f : EXP(weights[x] - most_of[x / CELLS]);
    BARRIER();
    for (uint x = LID; x < HEADS; x += WG) {
      PRECISE float total = total_of[x] * was_of[x];
      for (uint c = 0u; c < CELLS; c++) total = total + weights[x * CELLS + c];
      total_of[x] = total;
    }
    EACH_ELEMENT { EACH_HEAD { out_[i * HEADS + h] = out_[i * HEADS + h] * was_of[h]; } }"""
RESULT = """\
  EACH_ELEMENT {
    uint e = LID + i * WG;
    EACH_HEAD {
      if (h < n_own && e < size) Y[(t * n_heads + head + h) * size + e] = out_[i * HEADS + h] / total_of[h];
    }
  }"""


class _Variants(TypedDict):
    simt: list[dict[str, int]]
    cpu: list[dict[str, int]]
    soft: list[dict[str, int]]


def variants(sizes: Sequence[int]) -> _Variants:
    """Variants of a kernel of attention over rows: by kind of device, for rows of at most these sizes."""

    def of_kind(kind: str, wg: int, cells: int) -> list[dict[str, int]]:
        return [{"WG": wg, "CELLS": cells, "HEADS": HEADS[kind], "MAX_SIZE": size} for size in sizes]

    return {"simt": of_kind("simt", 128, 128), "cpu": of_kind("cpu", 1, 16), "soft": of_kind("soft", 16, 16)}


def element_of(dtype: str) -> str:
    """Expression for element e of cell c of the page that begins at `row_at`."""
    at = "row_at + e * 16u + c"
    if dtype == "q8_0":
        scale = "F16(LOAD16(KS, (row_at + size * 16u) / 2u + e / 32u * 16u + c))"
        return f"FLOAT((INT(LOAD8(K, {at})) << 24) >> 24) * {scale}"
    if dtype == NIBBLES:
        return number("K", "KS", "row_at", "c", "e", keys=True)
    return {"f32": f"K[{at}]", "f16": f"F16(LOAD16(K, {at}))", "bf16": f"U2F(LOAD16(K, {at}) << 16)"}[dtype]


def _latent(dtype: str) -> None:
    Kernel(
        f"latent_attention_{dtype}",
        f"f32 Q, {cache_buffers(dtype, 'K', 'KS')}, i32 TABLE SLOT POS, f32 S, w f32 Y",
        "uint n_heads size table_pages, float factor, uint with_sinks" + " kind" * (dtype == NIBBLES),
        f"""
  uint t = GY, head = GX * HEADS, n_own = min(UINT(HEADS), n_heads - head);
  uint pos = UINT(POS[t]), table = UINT(SLOT[t]) * table_pages;
{QUERIES}
  for (uint x = LID; x < HEADS; x += WG) {{
    most_of[x] = with_sinks != 0u ? S[head + min(x, n_own - 1u)] : -INF;
    total_of[x] = with_sinks != 0u ? 1.0f : 0.0f;
  }}
  PRECISE float out_[PER * HEADS];
  EACH_ELEMENT {{ EACH_HEAD {{ out_[i * HEADS + h] = 0.0f; }} }}
  BARRIER();
  for (uint first = 0u; first <= pos; first += CELLS) {{
    for (uint own = LID; own < CELLS; own += WG) {{
      uint cell = first + own, c = cell % 16u;
      PRECISE float s[HEADS];
      EACH_HEAD {{ s[h] = 0.0f; }}
      if (cell <= pos) {{
        uint cell_page = UINT(TABLE[table + cell / 16u]), row_at = {before_page(dtype)};
        for (uint e = 0u; e < size; e++) {{
          float x = {element_of(dtype)};
          EACH_HEAD {{ s[h] = FMA(q[h * size + e], x, s[h]); }}
        }}
      }}
      EACH_HEAD {{ weights[h * CELLS + own] = cell <= pos ? s[h] * factor : -INF; }}
    }}
    BARRIER();
{SOFTMAX_STEP}
    for (uint page = first / 16u; page <= min(pos, first + CELLS - 1u) / 16u; page++) {{
      uint cell_page = UINT(TABLE[table + page]), row_at = {before_page(dtype)};
      uint some = min(16u, pos + 1u - page * 16u), from = page * 16u - first;
      for (uint c = 0u; c < some; c++) {{
        EACH_ELEMENT {{
          uint e = min(LID + i * WG, size - 1u);
          float x = {element_of(dtype)};
          EACH_HEAD {{ out_[i * HEADS + h] = FMA(weights[h * CELLS + from + c], x, out_[i * HEADS + h]); }}
        }}
      }}
    }}
    BARRIER();
  }}
{RESULT}""",
        **variants(SIZES),
        local=f"{LOCAL}, {OF_HEADS}",
        functions=FUNCTIONS + NIBBLE_FUNCTIONS * (dtype == NIBBLES),
    )


for _dtype in CACHE_TYPES:
    _latent(_dtype)


@lower("latent_attention")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, k, tables, slot, pos, *sinks = t.src
    tokens, n_heads, size = q.shape
    if size > SIZES[-1] or not fits(size, k):
        return None
    bufs: Buffers = (q, k, *scales_of(k), tables, slot, pos, *(sinks or [q]), t)  # without them, q fills their place
    words = (n_heads, size, tables.shape[1], bits(t.attrs["scale"]), len(sinks), *kind_of(k))
    heads, room = HEADS[shape.name], next(n for n in SIZES if n >= size)
    name = f"latent_attention_{family(k.dtype)}"
    return [dispatch(name, shape, bufs, words, (-(-n_heads // heads), tokens), MAX_SIZE=room)]

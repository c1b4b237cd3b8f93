"""Sparse attention (graph/ops/attention/mla.py): the choice of cells, and attention over those.

A score is one thread's. A group makes one list: it finds the n-th greatest score bit by bit, counting those that
reach a value, and then, also bit by bit, the last place of equal scores that is chosen; its threads then write the
cells of neighbouring places each. Attention is that of latent rows (mla.py), but that cells come from the list."""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS as NIBBLE_FUNCTIONS
from logitless.backends.gpu.attention.kv_nibbles import NIBBLES, family, kind_of, number
from logitless.backends.gpu.attention.kv_store import CACHE_TYPES, before_page, cache_buffers, fits, scales_of
from logitless.backends.gpu.attention.mla import (
    FUNCTIONS,
    HEADS,
    LOCAL,
    OF_HEADS,
    QUERIES,
    RESULT,
    SIZES,
    SOFTMAX_STEP,
    element_of,
    variants,
)
from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, lower
from logitless.graph.tensor import Tensor

WG = 64
LATENT_SIZES, HEAD_SIZES = SIZES[-1:], (128, 384)  # latent rows of models that choose cells have 512 and more


def _scores(dtype: str) -> None:
    """Scores of pools (of all heads, by the key in the last cell) and of blocks (by head, the greatest of cells)."""
    page = f"uint cell_page = UINT(TABLE[UINT(SLOT[t]) * table_pages + cell / 16u]), row_at = {before_page(dtype)};"
    dot = f"""
        PRECISE float s = 0.0f;
        for (uint e = 0u; e < size; e++) {{
          float x = {element_of(dtype)};
          s = FMA(Q[(t * n_heads + h) * size + e], x, s);
        }}"""
    for name, weights, words, body in (
        (
            "pool",
            ", f32 W",
            "",
            f"""
    uint t = i / width, cell = (i % width + 1u) * pool - 1u, c = cell % 16u;
    PRECISE float total = 0.0f;
    if (cell <= UINT(POS[t])) {{
      {page}
      for (uint h = 0u; h < n_heads; h++) {{{dot}
        total = FMA(W[t * n_heads + h], max(s, 0.0f), total);
      }}
    }}
    Y[i] = total;""",
        ),
        (
            "block",
            "",
            " last",
            f"""
    uint list = i / width, t = list / n_heads, h = list % n_heads, b = i % width, pos = UINT(POS[t]);
    float most = -INF;
    if (b <= pos / pool && b + last > pos / pool) most = 1e30f;
    else if (b <= pos / pool) {{
      for (uint cell = b * pool; cell <= min(pos, b * pool + pool - 1u); cell++) {{
        uint c = cell % 16u;
        {page}{dot}
        most = max(most, s);
      }}
    }}
    Y[i] = most;""",
        ),
    ):
        Kernel(
            f"{name}_scores_{dtype}",
            f"f32 Q{weights}, {cache_buffers(dtype, 'K', 'KS')}, i32 TABLE SLOT POS, w f32 Y",
            f"uint n width n_heads size table_pages pool{words}" + " kind" * (dtype == NIBBLES),
            f"  FOR_EACH(i, n) {{{body}\n  }}",
            wg=WG,
            functions=NIBBLE_FUNCTIONS * (dtype == NIBBLES),
        )


for _dtype in CACHE_TYPES:
    _scores(_dtype)

# Code that counts the list's places for which a condition on `key` and `c` holds, in `tally`.
_COUNT = """
    {{
      uint own = 0u;
      for (uint c = LID; c < count; c += WG) {{
        uint key = KEY(F2U(S[from + c]));
        if ({condition}) own++;
      }}
      parts[LID] = own;
      BARRIER();
      tally = 0u;
      for (uint i = 0u; i < WG; i++) tally += parts[i];
      BARRIER();
    }}"""
# Code that finds the n-th greatest score, `least`, and the last place of equal scores that is chosen, `last`.
THRESHOLD = f"""\
  if (count > most) {{
    for (uint j = 0u; j < 32u; j++) {{
      uint value = least | (0x80000000u >> j);
      {_COUNT.format(condition="key >= value")}
      if (tally >= most) least = value;
    }}
    {_COUNT.format(condition="key > least")}
    uint equal = most - tally;
    for (uint j = 0u; j < 31u; j++) {{
      uint value = last | (0x40000000u >> j);
      {_COUNT.format(condition="key == least && c < value")}
      if (tally < equal) last = value;
    }}
  }}"""
CHOICE = """
#define KEY(bits) ((bits) ^ (((bits) >> 31) != 0u ? 0xffffffffu : 0x80000000u)) /* in the order of the numbers */
#define IS_CHOSEN(key, place) ((key) > least || ((key) == least && (place) <= last))
"""
Kernel(
    "choose_cells",
    "f32 S, i32 POS, w f32 Y",
    "uint width most pool length lists whole",
    f"""
  uint t = GX, list = t * lists + GY, from = list * width, to = list * length, end = UINT(POS[t]) + 1u;
  uint count = whole != 0u ? end / pool : (end + pool - 1u) / pool, least = 0u, last = 0u, tally = 0u;
{THRESHOLD}
  uint share = (count + WG - 1u) / WG, first = min(count, LID * share), stop = min(count, first + share), own = 0u;
  for (uint c = first; c < stop; c++) {{
    if (count <= most || IS_CHOSEN(KEY(F2U(S[from + c])), c)) own++;
  }}
  parts[LID] = own;
  BARRIER();
  uint at = 0u, chosen = 0u;
  for (uint i = 0u; i < WG; i++) {{
    if (i < LID) at += parts[i];
    chosen += parts[i];
  }}
  for (uint c = first; c < stop; c++) {{
    if (count <= most || IS_CHOSEN(KEY(F2U(S[from + c])), c)) {{
      for (uint e = 0u; e < pool; e++) {{
        if (c * pool + e < end) Y[to + at * pool + e] = FLOAT(c * pool + e);
      }}
      at++;
    }}
  }}
  uint lack = 0u; /* cells of the last block behind the token */
  if (count * pool > end && (count <= most || IS_CHOSEN(KEY(F2U(S[from + count - 1u])), count - 1u)))
    lack = count * pool - end;
  uint written = chosen * pool - lack, more = whole != 0u ? end - count * pool : 0u;
  for (uint i = LID; i < length - written; i += WG) Y[to + written + i] = i < more ? FLOAT(count * pool + i) : -1.0f;
""",
    simt=[{"WG": 128}],
    cpu=[{"WG": 1}],
    soft=[{"WG": 16}],
    local="uint parts[WG]",
    functions=CHOICE,
)


def _chosen(t: Tensor, shape: Shape, pool: int, *, whole: bool) -> list[Dispatch] | None:
    q, *weights, k, tables, slot, pos = t.src
    tokens, n_heads, size = q.shape
    if not fits(size, k):
        return None
    lists, length = t.shape[1:]
    width = -(-tables.shape[1] * 16 // pool)
    n = tokens * lists * width
    words = (n, width, n_heads, size, tables.shape[1], pool, *([] if whole else [t.attrs["last"]]), *kind_of(k))
    bufs: Buffers = (q, *weights, k, *scales_of(k), tables, slot, pos, None)
    name = f"{'pool' if whole else 'block'}_scores_{family(k.dtype)}"
    choice = (width, t.attrs["n"], pool, length, lists, int(whole))
    return [
        dispatch(name, shape, bufs, words, scratch=4 * n),
        dispatch("choose_cells", shape, (None, pos, t), choice, (tokens, lists), 4 * n),
    ]


@lower("chosen_cells")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    return _chosen(t, shape, t.attrs["pool"], whole=True)


@lower("chosen_blocks")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    return _chosen(t, shape, t.attrs["block"], whole=False)


def _value_of(dtype: str) -> str:
    """Expression for element e of cell c of the page of values that begins at `row_at`."""
    at = "row_at + c * size + e"
    if dtype == "q8_0":
        scale = "F16(LOAD16(VS, (row_at + size * 16u) / 2u + c * (size / 32u) + e / 32u))"
        return f"FLOAT((INT(LOAD8(V, {at})) << 24) >> 24) * {scale}"
    if dtype == NIBBLES:
        return number("V", "VS", "row_at", "c", "e", keys=False)
    return {"f32": f"V[{at}]", "f16": f"F16(LOAD16(V, {at}))", "bf16": f"U2F(LOAD16(V, {at}) << 16)"}[dtype]


def _attention(dtype: str, *, latent: bool) -> None:
    caches = cache_buffers(dtype, "K", "KS") + ("" if latent else f", {cache_buffers(dtype, 'V', 'VS')}")
    Kernel(
        f"sparse_{'latent_' * latent}attention_{dtype}",
        f"f32 Q, {caches}, i32 TABLE SLOT, f32 CELL S, w f32 Y",
        "uint n_kv group size table_pages, float factor, uint with_sinks lists length" + " kind" * (dtype == NIBBLES),
        f"""
  uint t = GY, shares = (group + HEADS - 1u) / HEADS, kv = GX / shares, in_group = GX % shares * HEADS;
  uint head = kv * group + in_group, n_heads = n_kv * group, n_own = min(UINT(HEADS), group - in_group);
  uint table = UINT(SLOT[t]) * table_pages, list = (t * lists + (lists > 1u ? kv : 0u)) * length;
{QUERIES}
  for (uint x = LID; x < HEADS; x += WG) {{
    most_of[x] = with_sinks != 0u ? S[head + min(x, n_own - 1u)] : -INF;
    total_of[x] = with_sinks != 0u ? 1.0f : 0.0f;
  }}
  PRECISE float out_[PER * HEADS];
  EACH_ELEMENT {{ EACH_HEAD {{ out_[i * HEADS + h] = 0.0f; }} }}
  BARRIER();
  for (uint first = 0u; first < length && CELL[list + first] >= 0.0f; first += CELLS) {{
    for (uint own = LID; own < CELLS; own += WG) {{
      float number = first + own < length ? CELL[list + first + own] : -1.0f;
      PRECISE float s[HEADS];
      EACH_HEAD {{ s[h] = 0.0f; }}
      page_of[own] = 0u;
      if (number >= 0.0f) {{
        uint cell = UINT(number), c = cell % 16u;
        uint cell_page = UINT(TABLE[table + cell / 16u]) * n_kv + kv, row_at = {before_page(dtype)};
        page_of[own] = cell_page * 16u + c;
        for (uint e = 0u; e < size; e++) {{
          float x = {element_of(dtype)};
          EACH_HEAD {{ s[h] = FMA(q[h * size + e], x, s[h]); }}
        }}
      }}
      EACH_HEAD {{ weights[h * CELLS + own] = number >= 0.0f ? s[h] * factor : -INF; }}
    }}
    BARRIER();
{SOFTMAX_STEP}
    for (uint own = 0u; own < min(UINT(CELLS), length - first); own++) {{
      if (CELL[list + first + own] < 0.0f) break;
      uint c = page_of[own] % 16u, cell_page = page_of[own] / 16u, row_at = {before_page(dtype)};
      EACH_ELEMENT {{
        uint e = min(LID + i * WG, size - 1u);
        float x = {element_of(dtype) if latent else _value_of(dtype)};
        EACH_HEAD {{ out_[i * HEADS + h] = FMA(weights[h * CELLS + own], x, out_[i * HEADS + h]); }}
      }}
    }}
    BARRIER();
  }}
{RESULT}""",
        **variants(LATENT_SIZES if latent else HEAD_SIZES),
        local=f"{LOCAL}, uint page_of[CELLS], {OF_HEADS}",
        functions=FUNCTIONS + NIBBLE_FUNCTIONS * (dtype == NIBBLES),
    )


for _dtype in CACHE_TYPES:
    _attention(_dtype, latent=True)
    _attention(_dtype, latent=False)


@lower("sparse_attention")
@lower("sparse_latent_attention")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    latent = t.op == "sparse_latent_attention"
    q, k, *values, tables, slot, cells = t.src[: 5 if latent else 6]
    tokens, n_heads, size = q.shape
    sizes = LATENT_SIZES if latent else HEAD_SIZES
    if size > sizes[-1] or not fits(size, k) or any(v.dtype != k.dtype for v in values):
        return None
    n_kv, sinks = k.shape[1], t.src[5 if latent else 6 :]
    caches = [part for cache in (k, *values) for part in (cache, *scales_of(cache))]
    bufs: Buffers = (q, *caches, tables, slot, cells, *(sinks or [q]), t)  # without sinks, q fills their place
    group = n_heads // n_kv
    words = (n_kv, group, size, tables.shape[1], bits(t.attrs["scale"]), len(sinks), *cells.shape[1:], *kind_of(k))
    room = next(n for n in sizes if n >= size)
    name = f"{t.op}_{family(k.dtype)}"
    return [dispatch(name, shape, bufs, words, (n_kv * -(-group // HEADS[shape.name]), tokens), MAX_SIZE=room)]

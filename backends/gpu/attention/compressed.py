"""Compressed attention over a window and rows of blocks of tokens, the choice of blocks, and their rows.

Attention is that of latent rows, whose places are found before a group reads them."""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS as NIBBLE_FUNCTIONS
from logitless.backends.gpu.attention.kv_nibbles import NIBBLES, family, kind_of, number
from logitless.backends.gpu.attention.kv_store import (
    CACHE_TYPES,
    ELEMENT,
    TO_BF16,
    block_store,
    cache_buffers,
    fits,
    scales_of,
)
from logitless.backends.gpu.attention.mla import (
    FUNCTIONS,
    HEADS,
    LOCAL,
    OF_HEADS,
    QUERIES,
    RESULT,
    SOFTMAX_STEP,
    variants,
)
from logitless.backends.gpu.attention.sparse import CHOICE, LATENT_SIZES, THRESHOLD, WG
from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, lower, lower_plain
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

# The row of a block of tokens whose last one is at this position; `table` begins the page table.
BLOCK_ROW = """
FN uint ROW_IN_PAGE(uint last, uint block_size) { return last % 16u / min(block_size, 16u); }
#define PAGE_CELLS max(1u, 16u / block_size)
"""
PART = "(size / 16u)"  # of a page that is a row (kv_nibbles.py)


def _element(buffer: str, dtype: str, row: str, e: str) -> str:
    """Expression for element e of a row; the scales of buffer K are KS."""
    if dtype == NIBBLES:
        return number(buffer, f"{buffer}S", f"{row} * ({PART} * PAGE_OF(kind))", "0u", e, keys=False, part=PART)
    at = f"{row} * size + {e}"
    if dtype == "q8_0":
        begin = f"{row} * ({PART} * 17u)"
        scale = f"F16(LOAD16({buffer}S, ({begin} + size) / 2u + {e} / 32u))"
        return f"FLOAT((INT(LOAD8({buffer}, {begin} + {e})) << 24) >> 24) * {scale}"
    return {
        "f32": f"{buffer}[{at}]",
        "f16": f"F16(LOAD16({buffer}, {at}))",
        "bf16": f"U2F(LOAD16({buffer}, {at}) << 16)",
    }[dtype]


def _attention(dtype: str) -> None:
    b, k = (_element(buffer, dtype, "row", "e") for buffer in "BK")
    element = f"((place >> 31) != 0u ? {b} : {k})"
    Kernel(
        f"compressed_attention_{dtype}",
        f"f32 Q, {cache_buffers(dtype, 'K', 'KS')}, i32 TABLE SLOT POS, f32 S, {cache_buffers(dtype, 'B', 'BS')}, "
        "i32 OTHERS, f32 CHOSEN, w f32 Y",
        "uint n_heads size table_pages, float factor, uint window block_size n_chosen" + " kind" * (dtype == NIBBLES),
        f"""
  uint t = GY, head = GX * HEADS, n_own = min(UINT(HEADS), n_heads - head);
  uint stop = UINT(POS[t]) + 1u, table = UINT(SLOT[t]) * table_pages;
  uint in_window = min(window, stop), n_blocks = block_size > 0u ? stop / block_size : 0u;
  if (n_chosen > 0u) {{
    n_blocks = 0u;
    while (n_blocks < n_chosen && CHOSEN[t * n_chosen + n_blocks] >= 0.0f) n_blocks++;
  }}
  uint n_rows = in_window + n_blocks;
{QUERIES}
  for (uint x = LID; x < HEADS; x += WG) {{
    most_of[x] = S[head + min(x, n_own - 1u)];
    total_of[x] = 1.0f;
  }}
  PRECISE float out_[PER * HEADS];
  EACH_ELEMENT {{ EACH_HEAD {{ out_[i * HEADS + h] = 0.0f; }} }}
  BARRIER();
  for (uint first = 0u; first < n_rows; first += CELLS) {{
    for (uint own = LID; own < CELLS; own += WG) {{
      uint cell = first + own, place = 0u;
      PRECISE float s[HEADS];
      EACH_HEAD {{ s[h] = 0.0f; }}
      if (cell < n_rows) {{
        if (cell < in_window) {{
          uint p = stop - in_window + cell;
          place = UINT(TABLE[table + p / 16u]) * 16u + p % 16u;
        }} else {{
          uint block = cell - in_window;
          if (n_chosen > 0u) block = UINT(CHOSEN[t * n_chosen + block]);
          uint last = block * block_size + block_size - 1u;
          place = UINT(OTHERS[table + last / 16u]) * PAGE_CELLS + ROW_IN_PAGE(last, block_size) | 0x80000000u;
        }}
        places[own] = place;
        uint row = place & 0x7fffffffu;
        for (uint e = 0u; e < size; e++) {{
          float x = {element};
          EACH_HEAD {{ s[h] = FMA(q[h * size + e], x, s[h]); }}
        }}
      }}
      EACH_HEAD {{ weights[h * CELLS + own] = cell < n_rows ? s[h] * factor : -INF; }}
    }}
    BARRIER();
{SOFTMAX_STEP}
    for (uint c = 0u; c < min(UINT(CELLS), n_rows - first); c++) {{
      uint place = places[c], row = place & 0x7fffffffu;
      EACH_ELEMENT {{
        uint e = min(LID + i * WG, size - 1u);
        float x = {element};
        EACH_HEAD {{ out_[i * HEADS + h] = FMA(weights[h * CELLS + c], x, out_[i * HEADS + h]); }}
      }}
    }}
    BARRIER();
  }}
{RESULT}""",
        **variants(LATENT_SIZES),
        local=f"{LOCAL}, uint places[CELLS], {OF_HEADS}",
        functions=FUNCTIONS + BLOCK_ROW + NIBBLE_FUNCTIONS * (dtype == NIBBLES),
    )


def _scores(dtype: str) -> None:
    Kernel(
        f"row_scores_{dtype}",
        f"f32 Q W, {cache_buffers(dtype, 'K', 'KS')}, i32 TABLE SLOT POS, w f32 Y",
        "uint n width n_heads size table_pages block_size" + " kind" * (dtype == NIBBLES),
        f"""
  FOR_EACH(i, n) {{
    uint t = i / width, last = i % width * block_size + block_size - 1u;
    PRECISE float total = 0.0f;
    if (last <= UINT(POS[t])) {{
      uint page = UINT(TABLE[UINT(SLOT[t]) * table_pages + last / 16u]);
      uint row = page * PAGE_CELLS + ROW_IN_PAGE(last, block_size);
      for (uint h = 0u; h < n_heads; h++) {{
        PRECISE float s = 0.0f;
        for (uint e = 0u; e < size; e++) {{
          float x = {_element("K", dtype, "row", "e")};
          s = FMA(Q[(t * n_heads + h) * size + e], x, s);
        }}
        total = FMA(W[t * n_heads + h], max(s, 0.0f), total);
      }}
    }}
    Y[i] = total;
  }}""",
        wg=WG,
        functions=BLOCK_ROW + NIBBLE_FUNCTIONS * (dtype == NIBBLES),
    )


def _store(dtype: str) -> None:
    if ELEMENT[dtype] == "u8":
        per_element = {"q8_0": "17u", NIBBLES: "PAGE_OF(kind)"}[dtype]
        body = f"""
  uint per_row = size / 32u, cell = 0u;
  FOR_EACH(i, n) {{
    uint row = i / per_row, j = i % per_row, at = UINT(CELLS[row]) * ({PART} * {per_element});
    {block_store(dtype, keys=False, part=PART)}
  }}"""
    else:
        value = {"f32": "C[at] = X[i]", "f16": "STORE16(C, at, TO_F16(X[i]))", "bf16": "STORE16(C, at, TO_BF16(X[i]))"}
        body = f"""
  FOR_EACH(i, n) {{
    uint at = UINT(CELLS[i / size]) * size + i % size;
    {value[dtype]};
  }}"""
    Kernel(
        f"store_blocks_{dtype}",
        f"{cache_buffers(dtype, 'C', 'S', 'rw ')}, f32 X, i32 CELLS",
        "uint n size" + " kind" * (dtype == NIBBLES),
        body,
        wg=WG,
        functions={NIBBLES: NIBBLE_FUNCTIONS, "bf16": TO_BF16}.get(dtype, ""),
    )


for _dtype in CACHE_TYPES:
    _attention(_dtype)
    _scores(_dtype)
    _store(_dtype)
# The n-th greatest score and the last chosen one of those that equal it; then each thread lists some blocks.
Kernel(
    "choose_rows",
    "i32 POS, f32 S, w f32 Y",
    "uint width most block_size",
    f"""
  uint t = GX, from = t * width, count = (UINT(POS[t]) + 1u) / block_size, least = 0u, last = 0u, tally = 0u;
{THRESHOLD}
  uint each = (count + WG - 1u) / WG, begin = min(LID * each, count), end = min(begin + each, count);
  for (uint again = 0u; again < 2u; again++) {{
    uint own = 0u, before = 0u;
    for (uint i = 0u; again > 0u && i < LID; i++) before += parts[i];
    for (uint c = begin; c < end; c++) {{
      if (count <= most || IS_CHOSEN(KEY(F2U(S[from + c])), c)) {{
        if (again > 0u) Y[t * most + before + own] = FLOAT(c);
        own++;
      }}
    }}
    if (again == 0u) parts[LID] = own;
    BARRIER();
  }}
  for (uint i = min(count, most) + LID; i < most; i += WG) Y[t * most + i] = -1.0f;""",
    simt=[{"WG": 128}],
    cpu=[{"WG": 1}],
    soft=[{"WG": 16}],
    local="uint parts[WG]",
    functions=CHOICE,
)
Kernel(
    "block_pool",
    "f32 K BIAS, i32 TABLE SLOT POS, w f32 Y",
    "uint n block_size width half_n table_pages",
    """
  FOR_EACH(i, n) {
    uint t = i / half_n, j = i % half_n, stop = UINT(POS[t]) + 1u, seen = block_size * (width / half_n);
    uint table = UINT(SLOT[t]) * table_pages;
    float top = -INF;
    PRECISE float total = 0.0f;
    PRECISE float sum = 0.0f;
    if (stop % block_size == 0u) {
      for (uint again = 0u; again < 2u; again++) {
        for (uint p = stop - min(stop, seen); p < stop; p++) {
          uint column = j + (width > half_n && p + block_size >= stop ? half_n : 0u);
          uint at = (UINT(TABLE[table + p / 16u]) * 16u + p % 16u) * 2u * width + column;
          float s = K[at + width] + BIAS[p % block_size * width + column];
          if (again == 0u) {
            top = max(top, s);
          } else {
            float weight = EXP(s - top);
            total = total + weight;
            sum = FMA(weight, K[at], sum);
          }
        }
      }
    }
    Y[i] = total > 0.0f ? sum / total : 0.0f;
  }""",
    wg=WG,
)
Kernel(
    "block_starts", "i32 POS, w i32 Y", "uint n size", "  FOR_EACH(t, n) Y[t] = POS[t] / INT(size) * INT(size);", wg=WG
)
Kernel(
    "block_cells",
    "i32 POS CELLS, w i32 Y",
    "uint n size of_page spare",
    "  FOR_EACH(t, n) Y[t] = (POS[t] + 1) % INT(size) == 0 ? CELLS[t] / INT(of_page) : INT(spare);",
    wg=WG,
)


@lower("compressed_attention")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, k, tables, slot, pos, sinks, *more = t.src
    tokens, n_heads, size = q.shape
    if size > LATENT_SIZES[-1] or not fits(size, k):
        return None
    blocks, others, chosen = [*more, *(k, tables, q)[len(more) :]]
    sizes = (t.attrs["size"] if more else 0, chosen.shape[1] if len(more) > 2 else 0, *kind_of(k))
    words = (n_heads, size, tables.shape[1], bits(t.attrs["scale"]), t.attrs["window"], *sizes)
    of_tokens, of_blocks = (k, *scales_of(k)), (blocks, *scales_of(blocks))
    bufs: Buffers = (q, *of_tokens, tables, slot, pos, sinks, *of_blocks, others, chosen, t)
    groups, room = -(-n_heads // HEADS[shape.name]), LATENT_SIZES[-1]
    return [dispatch(f"compressed_attention_{family(k.dtype)}", shape, bufs, words, (groups, tokens), MAX_SIZE=room)]


@lower("chosen_rows")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, weights, k, tables, slot, pos = t.src
    (tokens, n_heads, size), block = q.shape, t.attrs["size"]
    if not fits(size, k):
        return None
    width = tables.shape[1] * PAGE // block
    n = tokens * width
    words = (n, width, n_heads, size, tables.shape[1], block, *kind_of(k))
    bufs: Buffers = (q, weights, k, *scales_of(k), tables, slot, pos, None)
    return [
        dispatch(f"row_scores_{family(k.dtype)}", shape, bufs, words, scratch=4 * n),
        dispatch("choose_rows", shape, (pos, None, t), (width, t.attrs["n"], block), (tokens, 1), 4 * n),
    ]


@lower("store_blocks")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    cache, rows, cells = t.src
    size = rows.shape[2]
    if not fits(size, cache):
        return None
    n = rows.size // (32 if scales_of(cache) else 1)
    bufs, words = (cache, *scales_of(cache), rows, cells), (n, size, *kind_of(cache))
    return [dispatch(f"store_blocks_{family(cache.dtype)}", shape, bufs, words)]


lower_plain(
    block_pool=lambda T, B, C, P, overlap, **_: (T * C // (1 + overlap), B, C, C // (1 + overlap), P),
    block_starts=lambda T, size, **_: (T, size),
    block_cells=lambda T, size, spare, **_: (T, size, min(size, PAGE), spare),
)

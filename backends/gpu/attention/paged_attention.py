"""Paged attention on GPUs: attention scores in spans of 256 cells, in turn or parallel (Flash-Decoding).

A group of WG threads has ROWS query heads that share a key head: those of one token, or of a tile
of tokens of a prompt (`attention_tiles`, FlashAttention's blocks of queries), which read their
keys and values once. It takes 256 cells at a time, a *span* that begins at a multiple of 256: a
thread computes the attention scores of CELLS cells, then all threads sum values, a thread OWN
elements of every SLICES-th page. In a tile, a thread has half of the rows, and twice as many cells
and elements: so local memory is read half as often. The results of spans (greatest score, sum
of weights, weighted sum of values) are joined in order, as in an online softmax (Milakov and
Gimelshein, 2018).

With few rows, a group has one span and leaves its result in the scratch, and a second launch joins
them (Dao et al., 2023). A prompt has two launches: tiles whose tokens are of one sequence, and the
tokens of all other tiles one by one. All ways add the same numbers in the same order, so the bits
are the same whatever the batch and the context size. Loads come before their uses: a step of one row
waits for memory and for nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS as NIBBLE_FUNCTIONS
from logitless.backends.gpu.attention.kv_nibbles import NIBBLES, family, kind_of
from logitless.backends.gpu.attention.kv_store import CACHE_TYPES, PAIRS, before_page
from logitless.backends.gpu.language.dialect import KERNELS, Kernel, Shape
from logitless.backends.gpu.lowering import MAX_GROUPS, Buffers, Dispatch, dispatch
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

SIZES = (64, 128, 256, 512)  # elements of a head: the most that a variant takes
SPAN = 256  # cells
WG = 128
ROWS = 4  # query heads of a group that has one token
# Query heads of a group that has a tile of tokens, by MAX_SIZE; a device of narrow subgroups has no
# registers for 16 where blocks of keys have sums of their own.
TILES = {64: 16, 128: 16, 256: 8}
NARROW, NARROW_ROWS = ("q8_0", NIBBLES), 8
TILED_CACHES = tuple((t, t) for t in CACHE_TYPES)  # types of keys and values
KIND_K, KIND_V = "(kinds & 7u)", "(kinds / 8u)"
FEW_GROUPS = 256  # where whole rows make no more groups than this, spans are groups of their own
# A: angles, where half_n tells of pairs; S: sinks or biases, where there are some.
AFTER_CACHES = "i32 TABLE SLOT POS, f32 A S, w f32 Y"
# Words of a cache: type, how the one of element `at` of a buffer is loaded, and the numbers in it.
# Keys have two cells in a word, values two elements.
WORD = {
    "f32": ("f32", "float", "{b}[{at}]", ("{w}",)),
    "f16": ("u32", "uint", "{b}[({at}) / 2u]", ("F16({w})", "F16({w} >> 16)")),
    "bf16": ("u32", "uint", "{b}[({at}) / 2u]", ("U2F({w} << 16)", "U2F({w} & 0xffff0000u)")),
    NIBBLES: ("u16", "uint", "LOAD16({b}, ({at}) / 2u)", ("({w})", "({w} >> 8)")),
    "q8_0": (
        "u16",
        "uint",
        "LOAD16({b}, ({at}) / 2u)",
        ("FLOAT((INT({w}) << 24) >> 24)", "FLOAT((INT({w}) << 16) >> 24)"),
    ),
}
MOST_SCRATCH = 64 << 20
# `flags`: 1 sinks, 2 biases, 4 interleaved pairs, 8 pairs turned back; times 16: see attention_cpu.py. `n` and `tile`:
# tokens.
WORDS = "uint n_heads n_kv size table_pages window n_spans, float factor cap, uint half_n flags n tile"
LOCAL = f"""vec4 q[ROWS / 4 * MAX_SIZE] weights[ROWS / 4 * (MAX_SIZE > {SPAN} ? MAX_SIZE : {SPAN})], \
float parts[32 * ROWS] most_of[ROWS] total_of[ROWS] was_of[ROWS] comes_of[ROWS], uint first_of[ROWS] last_of[ROWS]"""
FUNCTIONS = f"""
#ifdef __OPENCL_VERSION__
typedef float4 vec4;
#define VEC4(x) ((float4)(x))
#define PART(v, k) ((__private float*)&(v))[k]
#define ONE_OF(b, i) ((__local float*)(b))[i]
#else
#define VEC4(x) vec4(x)
#define PART(v, k) v[k]
#define ONE_OF(b, i) b[(i) / 4u][(i) % 4u]
#endif
#define SPAN {SPAN}u
#define TILED (ROWS > {ROWS})
#define NV (ROWS / 4) /* rows are in vectors */
#define HALVES (TILED ? 2 : 1) /* of the rows, by thread */
#define OWN_NV (NV / HALVES) /* vectors of a thread */
#define PLACE (LID % UINT(WG / HALVES)) /* of a thread among those that have its rows */
#define CELLS (2 * HALVES) /* whose scores a thread computes */
#define OWN (WG * CELLS >= MAX_SIZE * HALVES ? CELLS : MAX_SIZE * HALVES / WG) /* elements of a thread */
#define SLICES (OWN * WG / HALVES / MAX_SIZE) /* of a span's pages: threads that have the same elements */
#define SHARE UINT(WG / ROWS) /* threads that have the same row while weights are made */
#define OUTS ((MAX_SIZE * NV + WG - 1) / WG) /* vectors of results of a thread */
#define EACH_VECTOR UNROLL for (uint v = 0u; v < OWN_NV; v++)
#define IN_FLIGHT (TILED ? 8 : 32) /* numbers that a thread loads before their uses */
#define AT_ONCE (UINT(IN_FLIGHT) / CELLS) /* elements of keys */
#define CELLS_AT_ONCE (IN_FLIGHT / OWN) /* cells of values */
#define EACH_PART UNROLL for (uint k = 0u; k < 4u; k++)
"""
# Sums so far, joined with those of one more span: `was` and `comes` are the factors of both.
JOIN = """
      float most = max(MOST, most_here);
      PRECISE float was = EXP(MOST - most);
      PRECISE float comes = EXP(most_here - most);
      PRECISE float both = total_here * comes;
      TOTAL = FMA(TOTAL, was, both);
      MOST = most;"""


def sink(head: str, most: str, total: str, scaled: str) -> str:
    """Block that joins the attention sink of a head to a row's greatest score and sum of
    weights.

    It stands after all cells, so the result does not depend on how they are cut into spans. The
    sink may be the greatest score: `scaled` is the code that multiplies the weighted sum of values
    by `was`.
    """
    return f"""{{
    float sink = S[{head}], most = max({most}, sink);
    PRECISE float was = EXP({most} - most);
    PRECISE float comes = EXP(sink - most);
    {total} = FMA({total}, was, comes);
    {scaled}
  }}"""


def _join(most: str, total: str) -> str:
    return JOIN.replace("MOST", most).replace("TOTAL", total)


def _keys(dtype: str) -> str:
    """Code that adds q · k of CELLS cells of a page from `cell` on to `scores`, for each row of a
    thread.
    """
    _, kind, load, numbers = WORD[dtype]
    n = len(numbers)
    words = f"(CELLS / {n})"

    def add(to: str, ahead: str) -> str:
        """Code for `ahead` elements from d on, whose loads come before their uses."""
        if dtype == NIBBLES:
            return add_nibbles()
        at = load.format(b="K", at=f"key_at + (d + i) * 16u + p * {n}u")
        sums = "".join(
            f"{to}[(p * {n}u + {j}u) * OWN_NV + v] = "
            f"FMA(x, VEC4({number.format(w=f'w[i * {words} + p]')}), {to}[(p * {n}u + {j}u) * OWN_NV + v]);"
            for j, number in enumerate(numbers)
        )
        return f"""
        {kind} w[{ahead} * {words}];
        UNROLL for (uint i = 0u; i < {ahead}; i++) {{
          UNROLL for (uint p = 0u; p < {words}; p++) w[i * {words} + p] = {at};
        }}
        UNROLL for (uint i = 0u; i < {ahead}; i++) {{
          EACH_VECTOR {{
            vec4 x = q[(d + i) * NV + first_v + v];
            UNROLL for (uint p = 0u; p < {words}; p++) {{ {sums} }}
          }}
        }}"""

    def add_nibbles() -> str:
        """Code that adds products of nibbles; d is a multiple of AT_ONCE. A word has two cells' d and d + 1."""
        sums = "".join(
            f"{{ float number = of_keys[(w[i / 2u * {words} + p] >> (i % 2u * 4u + {8 * j}u) & 15u)"
            f" | (fifth[p * 2u + {j}u] >> (d + i) % 16u & 1u) << 4];"
            f"sums[(p * 2u + {j}u) * OWN_NV + v] = "
            f"FMA(x, VEC4(number), sums[(p * 2u + {j}u) * OWN_NV + v]); }}"
            for j in range(2)
        )
        return f"""
        uint w[AT_ONCE / 2u * {words}];
        uint fifth[CELLS];
        UNROLL for (uint i = 0u; i < AT_ONCE / 2u; i++) {{
          UNROLL for (uint p = 0u; p < {words}; p++)
            w[i * {words} + p] = LOAD16(K, (key_at + (d / 2u + i) * 16u) / 2u + p);
        }}
        UNROLL for (uint c = 0u; c < CELLS; c++) {{
          uint fifth_at = ({before_page(dtype, KIND_K)} + size * 8u) / 2u + (j * 16u + cell + c) * 2u;
          fifth[c] = 0u;
          if ((kinds & 1u) != 0u) fifth[c] = LOAD16(K, fifth_at + d % 32u / 16u);
        }}
        UNROLL for (uint i = 0u; i < AT_ONCE; i++) {{
          EACH_VECTOR {{
            vec4 x = q[(d + i) * NV + first_v + v];
            UNROLL for (uint p = 0u; p < {words}; p++) {{ {sums} }}
          }}
        }}"""

    if dtype not in ("q8_0", NIBBLES):
        return f"""
      uint d = 0u;
      for (; d + AT_ONCE <= size; d += AT_ONCE) {{{add("scores", "AT_ONCE")}
      }}
      for (; d < size; d++) {{{add("scores", "1")}
      }}"""
    page, scales, minima = "cell_page * (size * 17u)", "16u", ""
    if dtype == NIBBLES:
        scales = f"SCALES_OF({KIND_K})"
        page = before_page(dtype, KIND_K)
        minima = """
        if ((kinds & 2u) != 0u) {
          UNROLL for (uint i = 0u; i < CELLS * OWN_NV; i++) {
            float low = F16(LOAD16(K, scales_at + size / 2u + j * 16u + i / OWN_NV));
            scores[i] = FMA(q_sums[j * NV + first_v + i % OWN_NV], VEC4(low), scores[i]);
          }
        }"""
    return f"""
      uint scales_at = ({page} + size * {scales}) / 2u + cell;
      for (uint j = 0u; j < size / 32u; j++) {{
        PRECISE vec4 sums[CELLS * OWN_NV];
        UNROLL for (uint i = 0u; i < CELLS * OWN_NV; i++) sums[i] = VEC4(0.0f);
        float scales[CELLS];
        UNROLL for (uint c = 0u; c < CELLS; c++) scales[c] = F16(LOAD16(K, scales_at + j * 16u + c));
        for (uint d = j * 32u; d < j * 32u + 32u; d += AT_ONCE) {{{add("sums", "AT_ONCE")}
        }}
        UNROLL for (uint i = 0u; i < CELLS * OWN_NV; i++) {{
          scores[i] = FMA(sums[i], VEC4(scales[i / OWN_NV]), scores[i]);
        }}{minima}
      }}"""


def _values(dtype: str, first: str, n: str) -> str:
    """Code that loads elements of n cells of a page from cell `first` on, OWN from element e on: `x`."""
    _, kind, load, numbers = WORD[dtype]
    size = len(numbers)
    words = f"(OWN / {size})"
    at = load.format(b="V", at=f"value_at + ({first} + c) * size + e + p * {size}u")
    scales = scale = ""
    if dtype == NIBBLES:
        return _nibble_values(first, n)
    if dtype == "q8_0":
        of = f"(value_at + size * 16u) / 2u + ({first} + c) * (size / 32u) + e / 32u"
        scales = f"uint scales[{n}]; UNROLL for (uint c = 0u; c < {n}; c++) scales[c] = LOAD16(V, {of});"
        scale = " * F16(scales[c])"
    values = "".join(
        f"x[c * OWN + p * {size}u + {j}u] = {number.format(w=f'w[c * {words} + p]')}{scale};"
        for j, number in enumerate(numbers)
    )
    each = f"UNROLL for (uint c = 0u; c < {n}; c++) {{ UNROLL for (uint p = 0u; p < {words}; p++)"
    return f"""
          {kind} w[{n} * {words}];
          float x[{n} * OWN];
          {each} w[c * {words} + p] = {at}; }}
          {scales}
          {each} {{ {values} }} }}"""


def _nibble_values(first: str, n: str) -> str:
    each = f"UNROLL for (uint c = 0u; c < {n}; c++) {{{{ UNROLL for (uint p = 0u; p < {{}}; p++)"
    block = f"({first} + c) * (size / 32u) + e / 32u"
    quant = (
        "(w[c * (OWN / 2) + p / 2u] >> (e % 32u / 16u * 4u + p % 2u * 8u) & 15u)"
        " | (fifth[c] >> (e % 16u + p) & 1u) << 4"
    )
    return f"""
          uint w[{n} * (OWN / 2)];
          uint fifth[{n}];
          uint scales[{n}];
          uint minima[{n}];
          float x[{n} * OWN];
          uint scales_at = (value_at + size * SCALES_OF({KIND_V})) / 2u, fifth_at = (value_at + size * 8u) / 2u;
          uint quants_at = (value_at + e / 32u * 16u + e % 16u) / 2u;
          {each.format("(OWN / 2)")}
            w[c * (OWN / 2) + p] = LOAD16(V, quants_at + ({first} + c) * (size / 4u) + p);
          }}
          UNROLL for (uint c = 0u; c < {n}; c++) {{
            scales[c] = LOAD16(V, scales_at + {block});
            fifth[c] = 0u;
            minima[c] = 0u;
            if (({KIND_V} & 1u) != 0u) fifth[c] = LOAD16(V, fifth_at + ({block}) * 2u + e % 32u / 16u);
            if (({KIND_V} & 2u) != 0u) minima[c] = LOAD16(V, scales_at + size / 2u + {block});
          }}
          {each.format("OWN")} x[c * OWN + p] = FMA(of_values[{quant}], F16(scales[c]), F16(minima[c])); }}"""


def _body(dtype_k: str, dtype_v: str) -> str:
    tables = "".join(
        f"\n  if (LID < 32u) {of}[LID] = NIBBLE(LID, {kind});"
        for of, kind, dtype in (("of_keys", KIND_K, dtype_k), ("of_values", KIND_V, dtype_v))
        if dtype == NIBBLES
    )
    q_sums = ""
    if dtype_k == NIBBLES:  # of each block of a row, for minima
        q_sums = """
  if ((kinds & 2u) != 0u) {
    for (uint i = LID; i < NV * (size / 32u); i += WG) {
      PRECISE vec4 sum = VEC4(0.0f);
      ROLLED for (uint d = 0u; d < 32u; d++) sum = sum + q[(i / NV * 32u + d) * NV + i % NV];
      q_sums[i] = sum;
    }
    BARRIER();
  }"""
    return f"""
  uint per = n_heads / n_kv, wide = min(per, UINT(ROWS)), blocks = (per + wide - 1u) / wide;
  uint unit = GX % (n_kv * blocks), kv = unit / blocks, head = kv * per + unit % blocks * wide;
  uint n_own = min(wide, kv * per + per - head), t = TILED ? GY * tile : GY, n_tokens = 1u;
  uint first_v = LID / UINT(WG / HALVES) * OWN_NV;
  {{
    uint tile_at = t - t % tile, n_tile = min(tile, n - tile_at);
    bool one = tile > 1u; /* the tile's tokens are of one sequence */
    for (uint i = 1u; i < n_tile; i++) one = one && SLOT[tile_at + i] == SLOT[tile_at];
    if (one != TILED) n_tokens = 0u;
    else if (TILED) n_tokens = n_tile;
  }}
  /* the first and last cells that some token and that all tokens see */
  uint first = 0xffffffffu, last = 0u, all_first = 0u, all_last = 0xffffffffu;
  for (uint i = 0u; i < n_tokens; i++) {{
    uint pos = UINT(POS[t + i]), own = UINT(POS[t + i + flags / 16u]);
    uint from = window > 0u && own + 1u > window ? own + 1u - window : 0u;
    first = min(first, from);
    all_first = max(all_first, from);
    last = max(last, pos);
    all_last = min(all_last, pos);
    if (LID < ROWS && LID / wide == i) {{ first_of[LID] = from; last_of[LID] = pos; }}
  }}
  uint table = UINT(SLOT[t]) * table_pages, span = first / SPAN, end = n_tokens > 0u ? last / SPAN + 1u : 0u;
  if (n_spans > 0u) {{
    uint own = GX / (n_kv * blocks);
    end = own >= span && own < end ? own + 1u : own;
    span = own;
  }}
  bool some = span < end;
  if (some) {{
    for (uint i = LID; i < NV * (size - half_n); i += WG) {{
      uint v = i % NV, p = i / NV;
      uint one = (flags & 4u) != 0u ? 2u * p : p, other = one + ((flags & 4u) != 0u ? 1u : half_n);
      vec4 x;
      vec4 y;
      EACH_PART {{
        uint token = t + min((4u * v + k) / wide, n_tokens - 1u), h = head + min((4u * v + k) % wide, n_own - 1u);
        uint from = (token * n_heads + h) * size;
        if (p < half_n) {{
          float c = A[2u * token * half_n + p], s = A[(2u * token + 1u) * half_n + p];
          if ((flags & 8u) != 0u) s = -s;
          PRECISE float left = Q[from + one] * s;
          PRECISE float right = Q[from + other] * s;
          PRECISE float turned = Q[from + one] * c;
          turned = turned - right;
          PART(x, k) = turned;
          turned = Q[from + other] * c;
          turned = left + turned;
          PART(y, k) = turned;
        }} else PART(x, k) = Q[from + p + half_n];
      }}
      if (p < half_n) {{ q[one * NV + v] = x; q[other * NV + v] = y; }}
      else q[(p + half_n) * NV + v] = x;
    }}
    if (LID < ROWS) {{
      if (LID / wide >= n_tokens || LID % wide >= n_own) {{ first_of[LID] = 0xffffffffu; last_of[LID] = 0u; }}
      most_of[LID] = -INF;
      total_of[LID] = 0.0f;
    }}
  }}
  vec4 out_[OUTS];
  UNROLL for (uint i = 0u; i < OUTS; i++) out_[i] = VEC4(0.0f);{tables}
  BARRIER();{q_sums}
  for (; span < end; span++) {{
    {{
      uint at = span * SPAN + CELLS * PLACE, page = at / 16u, cell = at % 16u;
      PRECISE vec4 scores[CELLS * OWN_NV];
      UNROLL for (uint i = 0u; i < CELLS * OWN_NV; i++) scores[i] = VEC4(0.0f);
      if (page >= first / 16u && page <= last / 16u) {{
        uint cell_page = UINT(TABLE[table + page]) * n_kv + kv, key_at = {before_page(dtype_k, KIND_K)} + cell;
        {_keys(dtype_k)}
      }}
      UNROLL for (uint c = 0u; c < CELLS; c++) {{
        EACH_VECTOR {{
          PRECISE vec4 product = scores[c * OWN_NV + v] * factor;
          weights[(CELLS * PLACE + c) * NV + first_v + v] = product;
        }}
      }}
    }}
    BARRIER();
    {{
      uint r = LID % ROWS, j = LID / ROWS, from = first_of[r], to = last_of[r];
      float most_here = -INF;
      uint own_bias = (head + min(r % wide, n_own - 1u) + 1u) * table_pages * 16u - 1u;
      for (uint c = j; c < SPAN; c += SHARE) {{
        PRECISE float x = ONE_OF(weights, c * ROWS + r);
        if (cap != 0.0f) x = cap * TANH(x / cap);
        if ((flags & 2u) != 0u) x = x + S[own_bias + min(span * SPAN + c, to) - to];
        x = span * SPAN + c >= from && span * SPAN + c <= to ? x : -INF;
        ONE_OF(weights, c * ROWS + r) = x;
        most_here = max(most_here, x);
      }}
      parts[LID] = most_here;
      BARRIER();
      for (uint i = 0u; i < SHARE; i++) most_here = max(most_here, parts[i * ROWS + r]);
      BARRIER();
      /* 32 sums, 128 where a key head has one query head, are added in order */
      uint team = per == 1u ? 128u : 32u;
      PRECISE float total_here = 0.0f;
      for (uint at = 0u; at < team; at += 32u) {{
        for (uint i = j; i < 32u; i += SHARE) {{
          PRECISE float own = 0.0f;
          for (uint c = at + i; c < SPAN; c += team) {{
            float x = ONE_OF(weights, c * ROWS + r);
            x = x == -INF ? 0.0f : EXP(x - most_here);
            ONE_OF(weights, c * ROWS + r) = x;
            own = own + x;
          }}
          parts[i * ROWS + r] = own;
        }}
        BARRIER();
        if (j == 0u) {{
          UNROLL for (uint i = 0u; i < 32u; i++) total_here = total_here + parts[i * ROWS + r];
        }}
        BARRIER();
      }}
      if (j == 0u) {{
        was_of[r] = -1.0f;
        if (span >= from / SPAN && span <= to / SPAN) {{
          {_join("most_of[r]", "total_of[r]")}
          was_of[r] = was;
          comes_of[r] = comes;
        }}
      }}
    }}
    {{
      uint slice = PLACE / UINT(MAX_SIZE / OWN), e = min(OWN * (PLACE % UINT(MAX_SIZE / OWN)), size - OWN);
      PRECISE vec4 sums[OWN * OWN_NV];
      UNROLL for (uint i = 0u; i < OWN * OWN_NV; i++) sums[i] = VEC4(0.0f);
      for (uint page = span * 16u + slice; page <= min(last / 16u, span * 16u + 15u); page += SLICES) {{
        if (page < first / 16u) continue;
        uint cell_page = UINT(TABLE[table + page]) * n_kv + kv, value_at = {before_page(dtype_v, KIND_V)};
#if TILED
        if (page * 16u < all_first || page * 16u + 15u > all_last) {{
          /* one by one: these pages are few, and the rows' limits need registers */
          ROLLED for (uint at = page * 16u; at < page * 16u + 16u; at++) {{
            {_values(dtype_v, "at % 16u", "1")}
            EACH_VECTOR {{
              vec4 weight = weights[at % SPAN * NV + first_v + v];
              EACH_PART {{
                uint r = 4u * (first_v + v) + k, from = first_of[r], to = last_of[r];
                bool sees = at >= from && at <= to;
                if (page >= from / 16u && page <= to / 16u) {{
                  UNROLL for (uint i = 0u; i < OWN; i++) {{
                    PRECISE float sum = PART(sums[i * OWN_NV + v], k);
                    sum = FMA(PART(weight, k), sees ? x[i] : 0.0f, sum);
                    PART(sums[i * OWN_NV + v], k) = sum;
                  }}
                }}
              }}
            }}
          }}
          continue;
        }}
#endif
        for (uint at = 0u; at < 16u; at += UINT(CELLS_AT_ONCE)) {{
          {_values(dtype_v, "at", "CELLS_AT_ONCE")}
          UNROLL for (uint c = 0u; c < UINT(CELLS_AT_ONCE); c++) {{
            uint cell = page * 16u + at + c;
#if !TILED
            if (!(cell >= first && cell <= last)) {{ /* nobody has written there */
              UNROLL for (uint i = 0u; i < OWN; i++) x[c * OWN + i] = 0.0f;
            }}
#endif
            EACH_VECTOR {{
              vec4 weight = weights[cell % SPAN * NV + first_v + v];
              UNROLL for (uint i = 0u; i < OWN; i++) {{
                sums[i * OWN_NV + v] = FMA(weight, VEC4(x[c * OWN + i]), sums[i * OWN_NV + v]);
              }}
            }}
          }}
        }}
      }}
      BARRIER();
      UNROLL for (uint i = 0u; i < OWN; i++) {{
        EACH_VECTOR {{ weights[(slice * MAX_SIZE + e + i) * NV + first_v + v] = sums[i * OWN_NV + v]; }}
      }}
    }}
    BARRIER();
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      uint x = min(i * WG + LID, UINT(MAX_SIZE * NV - 1));
      PRECISE vec4 sum = weights[x];
      for (uint s = 1u; s < SLICES; s++) sum = sum + weights[s * MAX_SIZE * NV + x];
      EACH_PART {{
        float was = was_of[4u * (x % NV) + k];
        PRECISE float before = PART(out_[i], k) * was;
        if (!(was < 0.0f)) PART(out_[i], k) = FMA(PART(sum, k), comes_of[4u * (x % NV) + k], before);
      }}
    }}
    BARRIER();
  }}
  if ((flags & 1u) != 0u && n_spans == 0u) {{
    if (LID < ROWS) {sink("head + min(LID % wide, n_own - 1u)", "most_of[LID]", "total_of[LID]", "was_of[LID] = was;")}
    BARRIER();
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      EACH_PART {{
        PRECISE float sum = PART(out_[i], k) * was_of[4u * (min(i * WG + LID, UINT(MAX_SIZE * NV - 1)) % NV) + k];
        PART(out_[i], k) = sum;
      }}
    }}
  }}
  if (some) {{
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      uint x = i * WG + LID, e = x / NV;
      EACH_PART {{
        uint r = 4u * (x % NV) + k, h = r % wide, row = (t + r / wide) * n_heads + head + h;
        if (r / wide < n_tokens && h < n_own && e < size) {{
          if (n_spans == 0u) Y[row * size + e] = PART(out_[i], k) / total_of[r];
          else {{
            uint to = (row * n_spans + end - 1u) * (size + 2u);
            Y[to + e] = PART(out_[i], k);
            if (e == 0u) {{ Y[to + size] = most_of[r]; Y[to + size + 1u] = total_of[r]; }}
          }}
        }}
      }}
    }}
  }}"""


def _attention(name: str, dtype_k: str, dtype_v: str, rows: Iterable[tuple[int, int]]) -> None:
    """Declare a kernel; `rows`: MAX_SIZE, and rows of a group."""
    has_nibbles = NIBBLES in (dtype_k, dtype_v)
    Kernel(
        f"attention_{name}_{dtype_k}_{dtype_v}",
        f"f32 Q, {WORD[dtype_k][0]} K, {WORD[dtype_v][0]} V, {AFTER_CACHES}",
        WORDS + ", uint kinds" * has_nibbles,
        _body(dtype_k, dtype_v),
        simt=[{"WG": WG, "ROWS": n, "MAX_SIZE": size} for size, n in rows],
        cpu=(),
        local=LOCAL
        + ", vec4 q_sums[ROWS / 4 * (MAX_SIZE / 32)]" * (dtype_k == NIBBLES)
        + ", float of_keys[32] of_values[32]" * has_nibbles,  # numbers of quants
        functions=FUNCTIONS + NIBBLE_FUNCTIONS * has_nibbles,
    )


for _k, _v in PAIRS:
    _attention("spans", _k, _v, [(size, ROWS) for size in SIZES])
for _k, _v in TILED_CACHES:
    _narrow = [(size, NARROW_ROWS) for size in TILES if _k in NARROW]
    _attention("tiles", _k, _v, dict.fromkeys([*TILES.items(), *_narrow]))
SCALED = "UNROLL for (uint t = 0u; t < WIDE; t++) sums[t] = sums[t] * was;"
# Of WIDE elements from element i: their values `x`.
JOINED = f"""
    uint row = i / size, pos = UINT(POS[row / n_heads]);
    uint own_pos = UINT(POS[row / n_heads + flags / 4u]);
    uint start = window > 0u && own_pos + 1u > window ? own_pos + 1u - window : 0u, end = pos / {SPAN}u + 1u;
    float most_of = -INF;
    PRECISE float total_of = 0.0f;
    PRECISE float sums[WIDE];
    UNROLL for (uint t = 0u; t < WIDE; t++) sums[t] = 0.0f;
    for (uint span = start / {SPAN}u; span < end; span += 8u) {{
      float parts[8 * WIDE];
      float mosts[8];
      float totals[8];
      UNROLL for (uint j = 0u; j < 8u; j++) {{
        uint from = (row * n_spans + min(span + j, end - 1u)) * (size + 2u);
        UNROLL for (uint t = 0u; t < WIDE; t++) parts[j * WIDE + t] = P[from + i % size + t];
        mosts[j] = P[from + size];
        totals[j] = P[from + size + 1u];
      }}
      UNROLL for (uint j = 0u; j < 8u; j++) {{
        if (span + j < end) {{
          float most_here = mosts[j], total_here = totals[j];
          {_join("most_of", "total_of")}
          UNROLL for (uint t = 0u; t < WIDE; t++) {{
            PRECISE float before = sums[t] * was;
            sums[t] = FMA(parts[j * WIDE + t], comes, before);
          }}
        }}
      }}
    }}
    if (flags % 2u != 0u) {sink("row % n_heads", "most_of", "total_of", SCALED)}
    float x[WIDE];
    UNROLL for (uint t = 0u; t < WIDE; t++) x[t] = sums[t] / total_of;"""
JOIN_ARGS = "f32 P, i32 POS, w f32 Y, f32 S"
JOIN_WORDS = "uint n n_heads size window n_spans flags"
Kernel(
    "attention_join",
    JOIN_ARGS,
    JOIN_WORDS,
    f"  FOR_EACH(i, n) {{{JOINED}\n    Y[i] = x[0];\n  }}",
    simt=[{"WG": 64, "WIDE": 1}],
    cpu=(),
)


def spans(
    t: Tensor, shape: Shape, words: dict[str, int], rest: tuple[Tensor, ...], *, turned_back: bool
) -> list[Dispatch] | None:
    """The launches of an attention node. `rest`: block tables, slots, positions, angles and
    sinks.
    """
    q, k, v = t.src[:3]
    tables, _, pos, _, sinks = rest
    tokens, n_heads, size = q.shape
    if size < 2 or (size % 2 and v.dtype in ("f16", "bf16")):  # a thread has two elements, which are a word
        return None
    n_kv, n_spans = k.shape[1], -(-tables.shape[1] * PAGE // SPAN)
    shared, room, types = n_heads // n_kv, next(n for n in SIZES if n >= size), f"{family(k.dtype)}_{family(v.dtype)}"
    groups = n_kv * -(-shared // ROWS)
    scratch = 4 * tokens * n_heads * n_spans * (size + 2)
    split = n_spans > 1 and tokens * groups <= FEW_GROUPS and scratch <= MOST_SCRATCH
    split = split and groups * n_spans <= MAX_GROUPS
    flags = words["flags"] % 4 + 4 * words["interleaved"] + 8 * turned_back + words["flags"] // 4 * 16
    values = words | {"flags": flags, "n_spans": n_spans if split else 0, "n": tokens}
    bufs: Buffers = (q, k, v, *rest)

    def launch(name: str, to: Tensor | None, groups: tuple[int, int], scratch: int = 0, *, tile: int = 1) -> Dispatch:
        kernel, own = f"attention_{name}_{types}", values | {"tile": tile}
        arguments = (*(own[word] for _, word in KERNELS[kernel].words if word in own), *kind_of(k, v))
        variant = {"MAX_SIZE": room, "ROWS": rows if name == "tiles" else ROWS}
        return dispatch(kernel, shape, (*bufs, to), arguments, groups, scratch, **variant)

    if split:
        n = tokens * n_heads * size
        first = launch("spans", None, (groups * n_spans, tokens), scratch)
        joined = (n, n_heads, size, words["window"], n_spans, words["flags"])
        join = dispatch("attention_join", shape, (None, pos, t, sinks), joined, scratch=scratch)
        return [first, join]
    rows = TILES.get(room, 0) if (family(k.dtype), family(v.dtype)) in TILED_CACHES and size >= 4 else 0
    if shape.narrow and family(k.dtype) in NARROW:
        rows = min(rows, NARROW_ROWS)
    tile = rows // shared
    n_tiles = -(-tokens // max(tile, 1))
    many = tile > 1 and n_kv * n_tiles >= FEW_GROUPS
    if not many or KERNELS[f"attention_tiles_{types}"].find(shape, MAX_SIZE=room, ROWS=rows) is None:
        return [launch("spans", t, (groups, tokens))]
    return [launch("tiles", t, (n_kv, n_tiles), tile=tile), launch("spans", t, (groups, tokens), tile=tile)]

"""Paged attention on GPUs: attention scores in spans of 256 cells, in turn or parallel (Flash-Decoding).

A group of WG threads has the query heads (up to HEADS) of a token that share a key head. It takes
256 cells at a time, a *span* that begins at a multiple of 256: a thread computes the attention
scores of two cells, then all threads sum values, a thread two elements (four in heads of 512) of
every SLICES-th page. The results of spans (greatest score, sum of weights, weighted sum of values)
are joined in order, as in an online softmax (Milakov and Gimelshein, 2018).

With few rows, a group has one span and leaves its result in the scratch, and a second launch joins
them (Dao et al., 2023). Both ways join with the same operations in the same order, so the bits are
the same whatever the batch and the context size. Loads come before their uses, 16 at a time: a step
of one row waits for memory and for nothing else."""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_store import CACHE_TYPES, before_page, scales_of
from logitless.backends.gpu.language.dialect import Arg, Kernel, Shape
from logitless.backends.gpu.lowering import MAX_GROUPS, Buffers, Dispatch, dispatch, groups_for
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

SIZES = (64, 128, 256, 512)  # elements of a head: the most that a variant takes
SPAN = 256  # cells
WG = 128
HEADS = (1, 4)  # query heads of a group, by variant
FEW_GROUPS = 256  # where whole rows make no more groups than this, spans are groups of their own
AFTER_CACHES = [
    Arg("TABLE", "i32"),
    Arg("SLOT", "i32"),
    Arg("POS", "i32"),
    Arg("A", "f32"),  # angles, where half_n tells of pairs
    Arg("S", "f32"),  # sinks, where there are some
    Arg("Y", "f32", "w"),
]
# keys: what two cells are loaded as, or one of f32
ELEMENT = {"f32": "f32", "f16": "u32", "q8_0": "u16"}
MOST_SCRATCH = 64 << 20
WORDS = [
    "uint n_heads",
    "uint n_kv",
    "uint size",
    "uint table_pages",
    "uint window",
    "uint n_spans",
    "float factor",
    "float cap",
    "uint half_n",
    "uint interleaved",
    "float direction",
    "uint flags",
]
FUNCTIONS = f"""
#define SPAN {SPAN}u
#define OWN (2 * WG >= MAX_SIZE ? 2 : MAX_SIZE / WG) /* elements of a thread */
#define SLICES (OWN * WG / MAX_SIZE) /* of a span's pages: threads that have the same elements */
#define PART_SIZE UINT(MAX_SIZE / OWN)
#define TEAM UINT(WG / HEADS) /* threads that have the same head while weights are made */
#define OUTS ((HEADS * MAX_SIZE + WG - 1) / WG) /* results of a thread */
#define EACH_HEAD UNROLL for (uint h = 0u; h < HEADS; h++)
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
    """Code that adds q · k of the cells `cell` and `cell + 1` of a page to s0 and s1, for
    each head.
    """
    load, w = {
        "f32": ("a[i] = K[key_at + (d + i) * 16u]; b[i] = K[key_at + (d + i) * 16u + 1u];", ""),
        "f16": ("w[i] = K[key_at / 2u + (d + i) * 8u];", "a[i] = F16(w[i]); b[i] = F16(w[i] >> 16);"),
        "q8_0": (
            "w[i] = LOAD16(K, key_at / 2u + (d + i) * 8u);",
            "a[i] = FLOAT((INT(w[i]) << 24) >> 24); b[i] = FLOAT((INT(w[i]) << 16) >> 24);",
        ),
    }[dtype]
    words = f"uint w[16]; UNROLL for (uint i = 0u; i < 16u; i++) {{ {load} }}" if w else ""
    some = f"""
        float a[16];
        float b[16];
        {words}
        UNROLL for (uint i = 0u; i < 16u; i++) {{ {w or load} }}
        UNROLL for (uint i = 0u; i < 16u; i++) {{
          EACH_HEAD {{
            float x = q[(d + i) * HEADS + h];
            s0[h] = FMA(x, a[i], s0[h]);
            s1[h] = FMA(x, b[i], s1[h]);
          }}
        }}"""
    if dtype != "q8_0":
        load = load.replace("[i]", "").replace("(d + i)", "d")
        w = w.replace("[i]", "")
        last = "EACH_HEAD { s0[h] = FMA(q[d * HEADS + h], a, s0[h]); s1[h] = FMA(q[d * HEADS + h], b, s1[h]); }"
        return f"""
      uint d = 0u;
      for (; d + 16u <= size; d += 16u) {{{some}
      }}
      for (; d < size; d++) {{ float a; float b; uint w; {load} {w} {last} }}"""
    sums = some.replace("s0[", "p0[").replace("s1[", "p1[")
    return f"""
      uint scales_at = (cell_page * (size * 17u) + size * 16u) / 2u + cell;
      for (uint j = 0u; j < size / 32u; j++) {{
        PRECISE float p0[HEADS];
        PRECISE float p1[HEADS];
        EACH_HEAD {{ p0[h] = 0.0f; p1[h] = 0.0f; }}
        float scale = F16(LOAD16(K, scales_at + j * 16u)), next = F16(LOAD16(K, scales_at + j * 16u + 1u));
        for (uint d = j * 32u; d < j * 32u + 32u; d += 16u) {{{sums}
        }}
        EACH_HEAD {{ s0[h] = FMA(p0[h], scale, s0[h]); s1[h] = FMA(p1[h], next, s1[h]); }}
      }}"""


def _value(dtype: str) -> str:
    """Expression for element e of cell c of a page's values."""
    at = "value_at + c * size + e"
    if dtype == "q8_0":
        byte = f"FLOAT((INT(LOAD8(V, {at})) << 24) >> 24)"
        return f"{byte} * F16(LOAD16(VS, (value_at + size * 16u) / 2u + c * (size / 32u) + e / 32u))"
    return {"f32": f"V[{at}]", "f16": f"F16(LOAD16(V, {at}))"}[dtype]


def _spans(dtype_k: str, dtype_v: str) -> None:
    values = Arg("V", {"f32": "f32", "f16": "u16", "q8_0": "u8"}[dtype_v])
    # keys are read as words of 16 bits, their scales too
    scales = [Arg("VS", "u16")] if dtype_v == "q8_0" else []
    Kernel(
        f"attention_spans_{dtype_k}_{dtype_v}",
        [Arg("Q", "f32"), Arg("K", ELEMENT[dtype_k]), values, *scales, *AFTER_CACHES],
        WORDS,
        f"""
  uint t = GY, per = n_heads / n_kv, blocks = (per + HEADS - 1u) / HEADS, unit = GX % (n_kv * blocks);
  uint kv = unit / blocks, head = kv * per + unit % blocks * HEADS, n_own = min(UINT(HEADS), kv * per + per - head);
  uint pos = UINT(POS[t]), table = UINT(SLOT[t]) * table_pages;
  uint own_pos = UINT(POS[t + flags / 2u]);
  uint first = window > 0u && own_pos + 1u > window ? own_pos + 1u - window : 0u;
  uint span = first / SPAN, end = pos / SPAN + 1u;
  if (n_spans > 0u) {{
    uint own = GX / (n_kv * blocks);
    end = own >= span && own < end ? own + 1u : own;
    span = own;
  }}
  bool some = span < end;
  if (some) {{
    for (uint i = LID; i < HEADS * (half_n + size - 2u * half_n); i += WG) {{
      uint h = i % HEADS, p = i / HEADS, from = (t * n_heads + head + min(h, n_own - 1u)) * size;
      if (p < half_n) {{
        uint one = interleaved != 0u ? 2u * p : p, other = one + (interleaved != 0u ? 1u : half_n);
        float c = A[2u * t * half_n + p], s = A[(2u * t + 1u) * half_n + p] * direction;
        float a = Q[from + one], b = Q[from + other];
        q[one * HEADS + h] = a * c - b * s;
        q[other * HEADS + h] = a * s + b * c;
      }} else q[(p + half_n) * HEADS + h] = Q[from + p + half_n];
    }}
    if (LID < HEADS) {{ most_of[LID] = -INF; total_of[LID] = 0.0f; }}
  }}
  float out_[OUTS];
  UNROLL for (uint i = 0u; i < OUTS; i++) out_[i] = 0.0f;
  BARRIER();
  for (; span < end; span++) {{
    {{
      uint at = span * SPAN + 2u * LID, page = at / 16u, cell = at % 16u;
      PRECISE float s0[HEADS];
      PRECISE float s1[HEADS];
      EACH_HEAD {{ s0[h] = 0.0f; s1[h] = 0.0f; }}
      if (page >= first / 16u && page <= pos / 16u) {{
        uint cell_page = UINT(TABLE[table + page]) * n_kv + kv, key_at = {before_page(dtype_k)} + cell;
        {_keys(dtype_k)}
      }}
      EACH_HEAD {{
        PRECISE float x = s0[h] * factor;
        PRECISE float y = s1[h] * factor;
        if (cap != 0.0f) {{ x = cap * TANH(x / cap); y = cap * TANH(y / cap); }}
        weights[h * SPAN + 2u * LID] = at >= first && at <= pos ? x : -INF;
        weights[h * SPAN + 2u * LID + 1u] = at + 1u >= first && at < pos ? y : -INF;
      }}
    }}
    BARRIER();
    {{
      uint h = LID / TEAM, j = LID % TEAM;
      float most_here = -INF;
      for (uint c = j; c < SPAN; c += TEAM) most_here = max(most_here, weights[h * SPAN + c]);
      parts[LID] = most_here;
      BARRIER();
      for (uint i = 0u; i < TEAM; i++) most_here = max(most_here, parts[h * TEAM + i]);
      BARRIER();
      PRECISE float own = 0.0f;
      for (uint c = j; c < SPAN; c += TEAM) {{
        float x = weights[h * SPAN + c];
        x = x == -INF ? 0.0f : EXP(x - most_here);
        weights[h * SPAN + c] = x;
        own = own + x;
      }}
      parts[LID] = own;
      BARRIER();
      PRECISE float total_here = 0.0f;
      for (uint i = 0u; i < TEAM; i++) total_here = total_here + parts[h * TEAM + i];
      if (j == 0u) {{
        {_join("most_of[h]", "total_of[h]")}
        was_of[h] = was;
        comes_of[h] = comes;
      }}
    }}
    BARRIER();
    {{
      uint slice = LID / PART_SIZE, e0 = LID % PART_SIZE;
      PRECISE float sums[OWN * HEADS];
      UNROLL for (uint i = 0u; i < OWN * HEADS; i++) sums[i] = 0.0f;
      for (uint page = span * 16u + slice; page <= min(pos / 16u, span * 16u + 15u); page += SLICES) {{
        if (page < first / 16u) continue;
        uint cell_page = UINT(TABLE[table + page]) * n_kv + kv, value_at = {before_page(dtype_v)};
        UNROLL for (uint i = 0u; i < OWN; i++) {{
          uint e = min(e0 + i * PART_SIZE, size - 1u);
          float v[16];
          UNROLL for (uint c = 0u; c < 16u; c++) {{ v[c] = {_value(dtype_v)}; }}
          UNROLL for (uint c = 0u; c < 16u; c++) {{
            if (!(page * 16u + c >= first && page * 16u + c <= pos)) v[c] = 0.0f; /* nobody has written there */
            EACH_HEAD {{
              float weight = weights[h * SPAN + page % 16u * 16u + c];
              sums[i * HEADS + h] = FMA(weight, v[c], sums[i * HEADS + h]);
            }}
          }}
        }}
      }}
      UNROLL for (uint i = 0u; i < OWN; i++) {{
        EACH_HEAD {{ parts[(slice * HEADS + h) * MAX_SIZE + e0 + i * PART_SIZE] = sums[i * HEADS + h]; }}
      }}
    }}
    BARRIER();
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      uint x = min(i * WG + LID, HEADS * MAX_SIZE - 1u), h = x / MAX_SIZE;
      PRECISE float sum = parts[x];
      for (uint s = 1u; s < SLICES; s++) sum = sum + parts[s * HEADS * MAX_SIZE + x];
      PRECISE float before = out_[i] * was_of[h];
      out_[i] = FMA(sum, comes_of[h], before);
    }}
    BARRIER();
  }}
  if (flags % 2u != 0u && n_spans == 0u) {{
    if (LID < HEADS) {sink("head + min(LID, n_own - 1u)", "most_of[LID]", "total_of[LID]", "was_of[LID] = was;")}
    BARRIER();
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      PRECISE float sum = out_[i] * was_of[min(i * WG + LID, HEADS * MAX_SIZE - 1u) / MAX_SIZE];
      out_[i] = sum;
    }}
  }}
  if (some) {{
    UNROLL for (uint i = 0u; i < OUTS; i++) {{
      uint x = i * WG + LID, h = x / MAX_SIZE, e = x % MAX_SIZE, row = t * n_heads + head + h;
      if (h < n_own && e < size) {{
        if (n_spans == 0u) Y[row * size + e] = out_[i] / total_of[h];
        else {{
          uint to = (row * n_spans + end - 1u) * (size + 2u);
          Y[to + e] = out_[i];
          if (e == 0u) {{ Y[to + size] = most_of[h]; Y[to + size + 1u] = total_of[h]; }}
        }}
      }}
    }}
  }}""",
        simt=[{"WG": WG, "HEADS": heads, "MAX_SIZE": size} for heads in HEADS for size in SIZES],
        cpu=(),
        local=[
            ("float", "q", "HEADS * MAX_SIZE"),
            ("float", "weights", f"HEADS * {SPAN}"),
            ("float", "parts", "HEADS * (2 * WG >= MAX_SIZE ? 2 * WG : MAX_SIZE)"),
            *[("float", name, "HEADS") for name in ("most_of", "total_of", "was_of", "comes_of")],
        ],
        functions=FUNCTIONS,
    )


for _k in CACHE_TYPES:
    for _v in CACHE_TYPES:
        _spans(_k, _v)
SCALED = "UNROLL for (uint t = 0u; t < WIDE; t++) sums[t] = sums[t] * was;"
# Of WIDE elements from element i: their values `x`.
JOINED = f"""
    uint row = i / size, pos = UINT(POS[row / n_heads]);
    uint own_pos = UINT(POS[row / n_heads + flags / 2u]);
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
JOIN_ARGS = [Arg("P", "f32"), Arg("POS", "i32"), Arg("Y", "f32", "w"), Arg("S", "f32")]
JOIN_WORDS = ["uint n", "uint n_heads", "uint size", "uint window", "uint n_spans", "uint flags"]
Kernel(
    "attention_join",
    JOIN_ARGS,
    JOIN_WORDS,
    f"  FOR_EACH(i, n) {{{JOINED}\n    Y[i] = x[0];\n  }}",
    simt=[{"WG": 64, "WIDE": 1}],
    cpu=(),
)


def spans(t: Tensor, shape: Shape, words: dict[str, int], rest: tuple[Tensor, ...]) -> list[Dispatch]:
    """The launches of an attention node. `rest`: block tables, slots, positions, angles and
    sinks.
    """
    q, k, v = t.src[:3]
    tables, _, pos, _, sinks = rest
    tokens, n_heads, size = q.shape
    n_kv, n_spans = k.shape[1], -(-tables.shape[1] * PAGE // SPAN)
    shared = n_heads // n_kv
    heads = next((n for n in HEADS if n >= shared), HEADS[-1])
    groups = n_kv * -(-shared // heads)
    scratch = 4 * tokens * n_heads * n_spans * (size + 2)
    split = n_spans > 1 and tokens * groups <= FEW_GROUPS and scratch <= MOST_SCRATCH
    split = split and groups * n_spans <= MAX_GROUPS
    values = words | {"n_spans": n_spans if split else 0}
    bufs: Buffers = (q, k, v, *scales_of(v), *rest)
    name, room = f"attention_spans_{k.dtype}_{v.dtype}", next(n for n in SIZES if n >= size)
    arguments = tuple(values[word.split()[1]] for word in WORDS)
    if not split:
        return [dispatch(name, shape, (*bufs, t), arguments, (groups, tokens), HEADS=heads, MAX_SIZE=room)]
    n = tokens * n_heads * size
    first = dispatch(
        name, shape, (*bufs, None), arguments, (groups * n_spans, tokens), scratch, HEADS=heads, MAX_SIZE=room
    )
    joined = (n, n_heads, size, values["window"], n_spans, values["flags"])
    return [first, dispatch("attention_join", shape, (None, pos, t, sinks), joined, groups_for(n, shape, 64), scratch)]

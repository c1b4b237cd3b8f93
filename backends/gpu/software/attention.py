"""Attention over f16 pages for Vulkan on a CPU (lavapipe), where every load is a gather, and a barrier costs more.

A subgroup has a query head of a token, and its threads never wait: a thread loads 64 bits, four cells of a key's
element or four elements of a cell's values, and what all need to know (scores, probabilities) is told by broadcasts.
Everything is written out, because a broadcast names its thread by a constant.
"""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Arg, Kernel

SIZES = (64, 128, 256)  # elements of a head: the most that a variant takes; all of it is written out
SUBGROUPS = (8, 16)  # threads
AFTER_CACHES = [
    Arg("TABLE", "i32"),
    Arg("SLOT", "i32"),
    Arg("POS", "i32"),
    Arg("A", "f32"),  # angles, where half_n tells of pairs
    Arg("S", "f32"),  # sinks, where has_sinks
    Arg("Y", "f32", "w"),
]
# These and the arguments are those of every kernel of attention, for one launch makes them all: a group for each query
# head (their number is NGX) of each token. With two q8_0 caches they are the most that push constants have room for.
WORDS = [
    "uint n_kv",
    "uint size",
    "uint table_pages",
    "uint window",
    "float factor",
    "float cap",
    "uint half_n",
    "uint interleaved",
    "float direction",
    "uint has_sinks",
]


def sink(head: str, most: str, total: str, scaled: str) -> str:
    """A block that joins the sink of a head to a row's greatest score and sum of weights.

    It comes once, after all cells, so that it does not matter into what these were cut. The sink may be the greatest:
    `scaled` is the text that multiplies the weighted sum of values by `was`.
    """
    return f"""{{
    float sink = S[{head}], most = max({most}, sink);
    PRECISE float was = EXP({most} - most);
    PRECISE float comes = EXP(sink - most);
    {total} = FMA({total}, was, comes);
    {scaled}
  }}"""


FUNCTIONS = """
uvec2 words(uint64_t x) { return unpackUint2x32(x); }
vec4 halves(uvec2 w) { return vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y)); }
"""
QUERY = """
  uint t = GY, h = GX, n_heads = NGX, kv = h / (n_heads / n_kv);
  uint pos = UINT(POS[t]), table = UINT(SLOT[t]) * table_pages;
  uint first = window > 0u && pos + 1u > window ? pos + 1u - window : 0u;
  float q[STEPS];
  UNROLL for (uint i = 0u; i < STEPS; i++) {
    uint d = i * APART + LID / 4u, from = (t * n_heads + h) * size;
    bool inside = d < size;
    d = inside ? d : 0u;
    q[i] = Q[from + d];
    if (d < 2u * half_n) {
      bool second = interleaved != 0u ? d % 2u != 0u : d >= half_n;
      uint p = interleaved != 0u ? d / 2u : second ? d - half_n : d, far = interleaved != 0u ? 1u : half_n;
      float other = Q[from + (second ? d - far : d + far)];
      float c = A[2u * t * half_n + p], s = A[(2u * t + 1u) * half_n + p] * direction;
      q[i] = second ? other * s + q[i] * c : q[i] * c - other * s;
    }
    if (!inside) q[i] = 0.0f;
  }
  precise vec4 out_[CHUNKS];
  UNROLL for (uint e = 0u; e < CHUNKS; e++) out_[e] = vec4(0.0f);
  PRECISE float top = -INF;
  PRECISE float total = 0.0f;
"""
PAGE = """
  for (uint page = first / 16u; page <= pos / 16u; page++) {
    uint cell_page = UINT(TABLE[table + page]) * n_kv + kv;
    uint value_at = cell_page * (size * 4u), key_at = value_at + LID;
    uint lo = max(first, page * 16u) - page * 16u, hi = min(pos + 1u, page * 16u + 16u) - page * 16u;
    precise vec4 part = vec4(0.0f);
    UNROLL for (uint i = 0u; i < STEPS; i++)
      part += halves(words(K[key_at + min(i * APART, size - APART) * 4u])) * q[i];
    SCORES
    if (cap != 0.0f) { OWN { own[i] = cap * TANH(own[i] / cap); } }
    OWN { own[i] = LID + i * WG >= lo && LID + i * WG < hi ? own[i] : -INF; }
    float new_top = top;
    MOST
    OWN { own[i] = own[i] == -INF ? 0.0f : EXP(own[i] - new_top); }
    float correction = EXP(top - new_top);
    top = new_top;
    total = total * correction;
    UNROLL for (uint e = 0u; e < CHUNKS; e++) out_[e] = out_[e] * correction;
    VALUES
  }
  if (has_sinks != 0u) SINK
  UNROLL for (uint e = 0u; e < CHUNKS; e++) {
    uint d = (e * WG + LID) * 4u;
    if (d < size) {
      uint at = (t * n_heads + h) * size + d;
      vec4 y = out_[e] / total;
      Y[at] = y.x; Y[at + 1u] = y.y; Y[at + 2u] = y.z; Y[at + 3u] = y.w;
    }
  }"""


def _page(threads: int) -> str:
    """The loop over pages for subgroups of so many threads; a thread has the scores of 16 / threads cells."""
    own = f"UNROLL for (uint i = 0u; i < {16 // threads}u; i++)"
    scores = [f"PRECISE float own[{16 // threads}];"]
    for cell in range(16):  # each thread has four cells' sums over every fourth part of the elements
        of = "xyzw"[cell % 4]
        parts = " + ".join(f"FROM_LANE(part.{of}, {cell // 4 + 4 * i}u)" for i in range(threads // 4))
        scores.append(f"{{ PRECISE float s = {parts}; if (LID == {cell % threads}u) own[{cell // threads}] = s; }}")
    scores.append(f"{own} own[i] = own[i] * factor;")
    told = [f"FROM_LANE(own[{cell // threads}], {cell % threads}u)" for cell in range(16)]
    most = "\n".join(f"new_top = max(new_top, {score});" for score in told)
    values = "\n".join(
        f"""{{ float p = {p}; total = total + p;
      UNROLL for (uint e = 0u; e < CHUNKS; e++) {{
        uvec2 w = words(V[value_at + {cell}u * (size / 4u) + min(e * WG + LID, size / 4u - 1u)]);
        if (!({cell}u >= lo && {cell}u < hi)) w = UVEC2(0u, 0u);
        out_[e] += halves(w) * p;
      }} }}"""
        for cell, p in enumerate(told)
    )
    scaled = "UNROLL for (uint e = 0u; e < CHUNKS; e++) out_[e] = out_[e] * was;"
    text = PAGE.replace("SCORES", "\n".join(scores)).replace("MOST", most)
    text = text.replace("SINK", sink("h", "top", "total", scaled))
    return text.replace("VALUES", values).replace("OWN", own)


for _threads in SUBGROUPS:
    Kernel(
        f"attention_soft_{_threads}",
        [Arg("Q", "f32"), Arg("K", "u64"), Arg("V", "u64"), *AFTER_CACHES],
        WORDS,
        QUERY + _page(_threads),
        simt=(),
        cpu=(),
        soft=[{"WG": _threads, "MAX_SIZE": size} for size in SIZES],
        functions="#define APART (WG / 4)\n#define STEPS (MAX_SIZE / APART)\n#define CHUNKS (MAX_SIZE / 4 / WG)\n"
        + FUNCTIONS,
    )

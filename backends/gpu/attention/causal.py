"""Causal and sliding-window attention for training: forward and gradient, from row statistics.

No matrix of weights is stored (FlashAttention). A group is a query head of a row (a key head of a
row for the gradients of keys and values). It goes through the other rows 64 at a time: first a
thread computes the score of one of them, then a thread sums an element of the head over these rows
in order. Statistics of a query row are its greatest score, the sum of exponentials, and the sum of
weight times gradient of weight.
"""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, bits, dispatch, lower
from logitless.graph.tensor import Tensor

WORDS = "uint n_heads n_kv size length window, float factor cap"
MAX_SIZE = 256
CONSTANTS = {"MAX_SIZE": MAX_SIZE}
SCORES = """
#define TILE 64u
FN float capped(float s, float cap) { return cap != 0.0f ? cap * TANH(s / cap) : s; }
FN float slope_of(float s, float cap, float factor) { /* of the capped score by the dot product */
  if (cap == 0.0f) return factor;
  float b = TANH(s / cap);
  return factor * (1.0f - b * b);
}
"""
FUNCTIONS = f"""{SCORES}
#if WG == 1
FN float dot_product(const __global float* a, const __global float* b, uint n) {{
  float16 lanes = (float16)(0.0f);
  uint d = 0u;
  for (; d + 16u <= n; d += 16u) lanes = fma(vload16(0, a + d), vload16(0, b + d), lanes);
  float8 eight = lanes.lo + lanes.hi;
  float4 four = eight.lo + eight.hi;
  float y = (four.x + four.y) + (four.z + four.w);
  for (; d < n; d++) y = fma(a[d], b[d], y);
  return y;
}}
#define DOT(y, A, at_a, B, at_b) float y = dot_product((A) + (at_a), (B) + (at_b), size);
#define ADD_ROWS(to, w, X, at) /* to[d] + the sum over j of w[j] * X[at + d] */ \\
  for (uint d = 0u; d + 16u <= size; d += 16u) {{ \\
    float16 o = vload16(0, to + d); \\
    for (uint j = 0u; j < n; j++) o = fma((float16)(w[j]), vload16(0, (X) + (at) + d), o); \\
    vstore16(o, 0, to + d); \\
  }} \\
  for (uint d = size / 16u * 16u; d < size; d++) for (uint j = 0u; j < n; j++) to[d] = fma(w[j], X[(at) + d], to[d]);
#else
#define DOT(y, A, at_a, B, at_b) \\
  PRECISE float y = 0.0f; for (uint d = 0u; d < size; d++) y = FMA(A[(at_a) + d], B[(at_b) + d], y);
#define ADD_ROWS(to, w, X, at) \\
  for (uint d = LID; d < size; d += WG) {{ \\
    PRECISE float o = to[d]; \\
    for (uint j = 0u; j < n; j++) o = FMA(w[j], X[(at) + d], o); \\
    to[d] = o; \\
  }}
#endif
#define FIRST(t) max(UINT(START[t]) + (t) / length * length, \\
    window > 0u && (t) % length + 1u > window ? (t) + 1u - window : 0u)
"""
# From the scores of a tile and its gradients of weights, the statistics of all so far.
STATISTICS = """
        float new_top = top;
        for (uint j = 0u; j < n; j++) new_top = max(new_top, scores[j]);
        float correction = EXP(top - new_top);
        top = new_top;
        total = total * correction;
        product = product * correction;
        BARRIER();
        for (uint j = LID; j < n; j += WG) scores[j] = EXP(scores[j] - top);
        BARRIER();
        for (uint j = 0u; j < n; j++) {
          total = total + scores[j];
          product = FMA(scores[j], gradients[j], product);
        }"""
OWN = "uint t = GY, h = GX, kv = h / (n_heads / n_kv), mine = (t * n_heads + h) * size, first = FIRST(t);"
Kernel(
    "causal_attention",
    "f32 Q K V, i32 START, w f32 Y",
    WORDS,
    f"""
  {OWN}
  for (uint d = LID; d < size; d += WG) sums[d] = 0.0f;
  float top = -INF;
  PRECISE float total = 0.0f;
  for (uint base = first; base <= t; base += TILE) {{
    uint n = min(TILE, t + 1u - base);
    for (uint j = LID; j < n; j += WG) {{
      DOT(s, Q, mine, K, ((base + j) * n_kv + kv) * size)
      scores[j] = capped(s * factor, cap);
    }}
    BARRIER();
    float new_top = top;
    for (uint j = 0u; j < n; j++) new_top = max(new_top, scores[j]);
    float correction = EXP(top - new_top);
    top = new_top;
    total = total * correction;
    BARRIER();
    for (uint j = LID; j < n; j += WG) scores[j] = EXP(scores[j] - top);
    for (uint d = LID; d < size; d += WG) sums[d] = sums[d] * correction;
    BARRIER();
    for (uint j = 0u; j < n; j++) total = total + scores[j];
    ADD_ROWS(sums, scores, V, ((base + j) * n_kv + kv) * size)
    BARRIER();
  }}
  for (uint d = LID; d < size; d += WG) Y[mine + d] = sums[d] / total;""",
    constants=CONSTANTS,
    local="float scores[64] sums[MAX_SIZE]",
    functions=FUNCTIONS,
)
# Gradient of q, and the statistics of its rows in S.
Kernel(
    "causal_attention_back_q",
    "f32 G Q K V, i32 START, w f32 Y S",
    WORDS,
    f"""
  {OWN}
  for (uint d = LID; d < size; d += WG) sums[d] = 0.0f;
  float top = -INF;
  PRECISE float total = 0.0f;
  PRECISE float product = 0.0f;
  for (uint pass = 0u; pass < 2u; pass++) {{
    for (uint base = first; base <= t; base += TILE) {{
      uint n = min(TILE, t + 1u - base);
      for (uint j = LID; j < n; j += WG) {{
        DOT(s, Q, mine, K, ((base + j) * n_kv + kv) * size)
        DOT(g, G, mine, V, ((base + j) * n_kv + kv) * size)
        float score = capped(s * factor, cap);
        scores[j] = score;
        gradients[j] = pass == 0u ? g : EXP(score - top) / total * (g - product) * slope_of(s * factor, cap, factor);
      }}
      BARRIER();
      if (pass == 0u) {{{STATISTICS}
      }} else {{
        ADD_ROWS(sums, gradients, K, ((base + j) * n_kv + kv) * size)
      }}
      BARRIER();
    }}
    if (pass == 0u) product = product / total;
  }}
  for (uint d = LID; d < size; d += WG) Y[mine + d] = sums[d];
  if (LID == 0u) {{
    uint at = (t * n_heads + h) * 3u;
    S[at] = top; S[at + 1u] = total; S[at + 2u] = product;
  }}""",
    constants=CONSTANTS,
    local="float scores[64] gradients[64] sums[MAX_SIZE]",
    functions=FUNCTIONS,
)
# Gradients of k (DK) and v (DV): a group is a row and a key head, and goes through the rows that
# see it.
Kernel(
    "causal_attention_back_kv",
    "f32 G Q K V, i32 START, f32 S, w f32 DK DV",
    WORDS,
    """
  uint s = GY, kv = GX, mine = (s * n_kv + kv) * size, end = s / length * length + length;
  for (uint d = LID; d < size; d += WG) { of_key[d] = 0.0f; of_value[d] = 0.0f; }
  for (uint h = kv * (n_heads / n_kv); h < (kv + 1u) * (n_heads / n_kv); h++) {
    for (uint base = s; base < end; base += TILE) {
      uint n = min(TILE, end - base);
      for (uint j = LID; j < n; j += WG) {
        uint t = base + j, at = t * n_heads + h;
        weights[j] = 0.0f;
        gradients[j] = 0.0f;
        if (FIRST(t) <= s) {
          DOT(x, Q, at * size, K, mine)
          DOT(g, G, at * size, V, mine)
          float p = EXP(capped(x * factor, cap) - S[at * 3u]) / S[at * 3u + 1u];
          weights[j] = p;
          gradients[j] = p * (g - S[at * 3u + 2u]) * slope_of(x * factor, cap, factor);
        }
      }
      BARRIER();
      ADD_ROWS(of_key, gradients, Q, ((base + j) * n_heads + h) * size)
      ADD_ROWS(of_value, weights, G, ((base + j) * n_heads + h) * size)
      BARRIER();
    }
  }
  for (uint d = LID; d < size; d += WG) { DK[mine + d] = of_key[d]; DV[mine + d] = of_value[d]; }""",
    constants=CONSTANTS,
    local="float weights[64] gradients[64] of_key[MAX_SIZE] of_value[MAX_SIZE]",
    functions=FUNCTIONS,
)


def _words(t: Tensor, q: Tensor, k: Tensor) -> tuple[int, ...]:
    a = t.attrs
    sizes = (q.shape[1], k.shape[1], q.shape[2], a["length"], a.get("window", 0))
    return (*sizes, bits(a["scale"]), bits(a.get("cap", 0.0)))


@lower("causal_attention")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, k, _, start, *sinks = t.src
    if q.shape[2] > MAX_SIZE or sinks or len(start.shape) == 2:
        return None
    return [dispatch("causal_attention", shape, (*t.src, t), _words(t, q, k), (q.shape[1], q.shape[0]))]


@lower("causal_attention_back")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    _, q, k, _, start, *sinks = t.src
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    if size > MAX_SIZE or sinks or len(start.shape) == 2:
        return None
    words, scratch = _words(t, q, k), 12 * tokens * heads
    dk = 4 * tokens * heads * size
    dv = dk + 4 * tokens * kv_heads * size
    return [
        dispatch("causal_attention_back_q", shape, (*t.src, t, None), words, (heads, tokens), scratch),
        dispatch(
            "causal_attention_back_kv", shape, (*t.src, None, (t, dk), (t, dv)), words, (kv_heads, tokens), scratch
        ),
    ]

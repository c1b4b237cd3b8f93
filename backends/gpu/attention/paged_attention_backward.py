"""Gradient of paged attention, from row statistics as in causal.py, without a matrix of weights.

The first kernel has a group for a query head of a token, which goes through the positions that the
token attends to. The second has one for a key head of a page. It owns the page's gradients, looks
for the page in the block tables of all tokens, and adds the tokens' contributions in order.
"""

from __future__ import annotations

from logitless.backends.gpu.attention.causal import CONSTANTS, MAX_SIZE, SCORES, STATISTICS
from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import MAX_GROUPS, Dispatch, bits, dispatch, lower
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

TYPES = {"f32": "f32", "f16": "u16"}
WORDS = "uint n_tokens n_heads n_kv size table_pages window, float factor cap"


def _functions(dtype: str) -> str:
    """Macros: elements of keys and values, and the two products of cell c of the page at `page`."""
    load = "{}[i]" if dtype == "f32" else "F16(LOAD16({}, i))"
    return f"""{SCORES}
#define KEY(i) {load.format("K")}
#define VALUE(i) {load.format("V")}
#define FIRST(pos) (window > 0u && (pos) + 1u > window ? (pos) + 1u - window : 0u)
#define PRODUCTS(s, g, mine, page, c) \\
  PRECISE float s = 0.0f; \\
  PRECISE float g = 0.0f; \\
  for (uint d = 0u; d < size; d++) {{ \\
    s = FMA(Q[(mine) + d], KEY((page) + d * 16u + (c)), s); \\
    g = FMA(G[(mine) + d], VALUE((page) + (c) * size + d), g); \\
  }}
"""


for _dtype, _element in TYPES.items():
    SOURCES = f"f32 G Q, {_element} K V, i32 TABLE SLOT POS"
    Kernel(
        f"attention_back_q_{_dtype}",
        f"{SOURCES}, w f32 Y S",
        WORDS,
        """
  uint t = GY, h = GX, kv = h / (n_heads / n_kv), mine = (t * n_heads + h) * size;
  uint pos = UINT(POS[t]), first = FIRST(pos), table = UINT(SLOT[t]) * table_pages;
  for (uint d = LID; d < size; d += WG) sums[d] = 0.0f;
  float top = -INF;
  PRECISE float total = 0.0f;
  PRECISE float product = 0.0f;
  for (uint pass = 0u; pass < 2u; pass++) {
    for (uint base = first; base <= pos; base += TILE) {
      uint n = min(TILE, pos + 1u - base);
      for (uint j = LID; j < n; j += WG) {
        uint page = (UINT(TABLE[table + (base + j) / 16u]) * n_kv + kv) * size * 16u;
        PRODUCTS(s, g, mine, page, (base + j) % 16u)
        float score = capped(s * factor, cap);
        scores[j] = score;
        gradients[j] = pass == 0u ? g : EXP(score - top) / total * (g - product) * slope_of(s * factor, cap, factor);
      }
      BARRIER();
      if (pass == 0u) {STATISTICS
      } else {
        for (uint d = LID; d < size; d += WG) {
          PRECISE float o = sums[d];
          for (uint j = 0u; j < n; j++) {
            uint page = (UINT(TABLE[table + (base + j) / 16u]) * n_kv + kv) * size * 16u;
            o = FMA(gradients[j], KEY(page + d * 16u + (base + j) % 16u), o);
          }
          sums[d] = o;
        }
      }
      BARRIER();
    }
    if (pass == 0u) product = product / total;
  }
  for (uint d = LID; d < size; d += WG) Y[mine + d] = sums[d];
  if (LID == 0u) {
    uint at = (t * n_heads + h) * 3u;
    S[at] = top; S[at + 1u] = total; S[at + 2u] = product;
  }""".replace("STATISTICS", STATISTICS),
        constants=CONSTANTS,
        local="float scores[64] gradients[64] sums[MAX_SIZE]",
        functions=_functions(_dtype),
    )
    Kernel(
        f"attention_back_kv_{_dtype}",
        f"{SOURCES}, f32 S, rw f32 DK DV",
        WORDS,
        """
  uint kv = GX, page = (GY * n_kv + kv) * size * 16u;
  for (uint e = LID; e < size * 16u; e += WG) { DK[page + e] = 0.0f; DV[page + e] = 0.0f; }
  for (uint t = 0u; t < n_tokens; t++) {
    uint pos = UINT(POS[t]), first = FIRST(pos), table = UINT(SLOT[t]) * table_pages;
    for (uint i = first / 16u; i <= pos / 16u; i++) {
      if (UINT(TABLE[table + i]) == GY) {
        for (uint h = kv * (n_heads / n_kv); h < (kv + 1u) * (n_heads / n_kv); h++) {
          uint mine = (t * n_heads + h) * size, at = (t * n_heads + h) * 3u;
          for (uint c = LID; c < 16u; c += WG) {
            weights[c] = 0.0f;
            gradients[c] = 0.0f;
            if (i * 16u + c >= first && i * 16u + c <= pos) {
              PRODUCTS(s, g, mine, page, c)
              float p = EXP(capped(s * factor, cap) - S[at]) / S[at + 1u];
              weights[c] = p;
              gradients[c] = p * (g - S[at + 2u]) * slope_of(s * factor, cap, factor);
            }
          }
          BARRIER();
          for (uint e = LID; e < size * 16u; e += WG) {
            DK[page + e] = FMA(gradients[e % 16u], Q[mine + e / 16u], DK[page + e]);
            DV[page + e] = FMA(weights[e / size], G[mine + e % size], DV[page + e]);
          }
          BARRIER();
        }
      }
    }
  }""",
        local="float weights[16] gradients[16]",
        functions=_functions(_dtype),
    )


@lower("attention_back")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    _, q, k, v, tables, _, _ = t.src
    (tokens, heads, size), (pages, kv_heads) = q.shape, k.shape[:2]
    if k.dtype not in TYPES or v.dtype != k.dtype or size > MAX_SIZE or pages > MAX_GROUPS:
        return None
    a = t.attrs
    sizes = (tokens, heads, kv_heads, size, tables.shape[1], a.get("window", 0))
    words, scratch = (*sizes, bits(a["scale"]), bits(a.get("cap", 0.0))), 12 * tokens * heads
    dk = 4 * tokens * heads * size
    dv = dk + 4 * pages * kv_heads * size * PAGE
    back_q = dispatch(f"attention_back_q_{k.dtype}", shape, (*t.src, t, None), words, (heads, tokens), scratch)
    places = (*t.src, None, (t, dk), (t, dv))
    return [back_q, dispatch(f"attention_back_kv_{k.dtype}", shape, places, words, (kv_heads, pages), scratch)]

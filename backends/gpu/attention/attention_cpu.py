"""Paged attention for OpenCL and Vulkan on a CPU, with an online softmax.

Sixteen lanes are a query head of a token. They walk its KV pages in position order: a lane has a
cell while attention scores are computed, and every 16th element of the head while values are
summed. Scores cross lanes in local memory. RoPE is applied to queries as they are read where
`half_n` (pairs of a head) is not 0."""

from __future__ import annotations

from logitless.backends.gpu.attention.kv_nibbles import FUNCTIONS, NIBBLES, family, kind_of, number
from logitless.backends.gpu.attention.kv_store import ELEMENT, PAIRS, before_page, fits, scales_of
from logitless.backends.gpu.attention.paged_attention import AFTER_CACHES, SIZES, sink, spans
from logitless.backends.gpu.language.dialect import KERNELS, Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, lower
from logitless.graph.tensor import Tensor

# These and the arguments are those of every kernel of attention, for one launch makes them all: a
# group for each query head (their number is NGX) of each token. With two q8_0 caches they are the
# most that push constants have room for. `interleaved` has of nibbles also twice the kinds of the caches, since no
# other word has room. `flags`: 1 sinks, 2 biases; 4 T: positions from which windows count are behind those seen as
# the last.
WORDS = "uint n_kv size table_pages window, float factor cap, uint half_n interleaved, float direction, uint flags"

# Sixteen plain numbers of a buffer, from a place.
NUMBER = {"f32": "LLD({})", "f16": "LLDH({})", "bf16": "LU2F(LLD16({}) << 16u)"}
SCALED = "UNROLL for (uint i = 0u; i < MAX_SIZE / 16; i++) out_[i] = out_[i] * was;"


def _caches(dtype_k: str, dtype_v: str) -> str:
    key, value = ELEMENT[dtype_k], ELEMENT[dtype_v]
    return f"{key} K, {value} V" + ", u16 KS" * (key == "u8") + ", u16 VS" * (value == "u8")


def _key(dtype: str) -> str:
    """Code that writes q · k · factor of a page's 16 cells to `scores`."""
    if dtype == NIBBLES:
        return f"""
      for (uint c = LANE; c < 16u; c += WG) {{
        PRECISE float sum = 0.0f;
        for (uint d = 0u; d < size; d++) {{
          float x = {number("K", "KS", "key_at", "c", "d", keys=True, kind="(kinds & 7u)")};
          sum = FMA(q[d], x, sum);
        }}
        scores[c] = sum * factor;
      }}"""
    return f"""
      PRECISE LF score = LSPLAT(0.0f);
      {_plain_key(dtype)}
      LST_LOCAL(scores, 0u, score * factor);"""


def _plain_key(dtype: str) -> str:
    """Code that adds q · k of a page's 16 cells to `score`."""
    if dtype == "q8_0":
        return """
      for (uint j = 0u; j < size / 32u; j++) {
        PRECISE LF part = LSPLAT(0.0f);
        for (uint d = j * 32u; d < j * 32u + 32u; d++)
          part = FMA(LSPLAT(q[d]), ITOF(LLDS8(K, key_at + d * 16u)), part);
        score = FMA(part, LLDH(KS, (key_at + size * 16u) / 2u + j * 16u), score);
      }"""
    load = NUMBER[dtype].format("K, key_at + d * 16u")
    return f"""
      PRECISE LF odd = LSPLAT(0.0f);
      for (uint d = 0u; d + 1u < size; d += 2u) {{
        score = FMA(LSPLAT(q[d]), {load}, score);
        odd = FMA(LSPLAT(q[d + 1u]), {load.replace("d * 16u", "d * 16u + 16u")}, odd);
      }}
      if (size % 2u != 0u) {{
        uint d = size - 1u;
        score = FMA(LSPLAT(q[d]), {load}, score);
      }}
      score = score + odd;"""


def _value(dtype: str) -> str:
    """Code that adds 16 elements of a cell's weighted values, from element e, to `sum`."""
    if dtype == NIBBLES:
        at = number("V", "VS", "value_at", "c", "(e + l)", keys=False, kind="(kinds / 8u)")
        lanes = f"for (uint l = LANE; l < 16u; l += WG) row[l] = {at};"
        return f"{{ {lanes} sum = FMA(LSPLAT(scores[c]), LLD(row, 0u), sum); }}"
    return f"sum = FMA(LSPLAT(scores[c]), {_plain_value(dtype)}, sum);"


def _plain_value(dtype: str) -> str:
    """Expression for 16 elements of a cell's values, from element e."""
    at = "value_at + c * size + LCLAMP(e, size)"
    if dtype == "q8_0":
        scale = "F16(LOAD16(VS, (value_at + size * 16u) / 2u + c * (size / 32u) + e / 32u))"
        return f"ITOF(LLDS8(V, {at})) * {scale}"
    return NUMBER[dtype].format(f"V, {at}")


def _attention(dtype_k: str, dtype_v: str) -> None:
    has_nibbles = NIBBLES in (dtype_k, dtype_v)
    kinds = "\n  uint kinds = interleaved / 2u;" * has_nibbles
    interleaves = "interleaved % 2u" if has_nibbles else "interleaved"
    Kernel(
        f"attention_{dtype_k}_{dtype_v}",
        f"f32 Q, {_caches(dtype_k, dtype_v)}, {AFTER_CACHES}",
        WORDS,
        f"""
  uint t = GY, h = GX, n_heads = NGX, kv = h / (n_heads / n_kv);
  uint pos = UINT(POS[t]), table = UINT(SLOT[t]) * table_pages;
  uint own = UINT(POS[t + flags / 4u]), first = window > 0u && own + 1u > window ? own + 1u - window : 0u;
  uint chunks = (size + 15u) / 16u;{kinds}
  uint from = (t * n_heads + h) * size;
  for (uint p = LANE; p < half_n; p += WG) {{
    uint first = {interleaves} != 0u ? 2u * p : p, second = first + ({interleaves} != 0u ? 1u : half_n);
    float c = A[2u * t * half_n + p], s = A[(2u * t + 1u) * half_n + p] * direction;
    float a = Q[from + first], b = Q[from + second];
    q[first] = a * c - b * s;
    q[second] = a * s + b * c;
  }}
  for (uint d = 2u * half_n + LANE; d < size; d += WG) q[d] = Q[from + d];
  PRECISE LF out_[MAX_SIZE / 16];
  UNROLL for (uint e = 0u; e < MAX_SIZE / 16; e++) out_[e] = LSPLAT(0.0f);
  PRECISE float top = -INF;
  PRECISE float total = 0.0f;
  BARRIER();
  for (uint page = first / 16u; page <= pos / 16u; page++) {{
    uint cell_page = UINT(TABLE[table + page]) * n_kv + kv;
    uint key_at = {before_page(dtype_k, "(kinds & 7u)")}, value_at = {before_page(dtype_v, "(kinds / 8u)")};
    {{
      {_key(dtype_k)}
    }}
    BARRIER();
    uint lo = max(first, page * 16u) - page * 16u, hi = min(pos + 1u, page * 16u + 16u) - page * 16u;
    if (cap != 0.0f) {{
      for (uint c = LANE; c < 16u; c += WG) scores[c] = cap * TANH(scores[c] / cap);
      BARRIER();
    }}
    if ((flags & 2u) != 0u) {{
      uint last = (h + 1u) * table_pages * 16u - 1u; /* the token's own bias */
      for (uint c = LANE; c < 16u; c += WG) scores[c] = scores[c] + S[last + min(page * 16u + c, pos) - pos];
      BARRIER();
    }}
    float new_top = top;
    for (uint c = lo; c < hi; c++) new_top = max(new_top, scores[c]);
    BARRIER();
    for (uint c = LANE; c < 16u; c += WG)
      scores[c] = c >= lo && c < hi ? EXP(scores[c] - new_top) : 0.0f;
    BARRIER();
    float correction = EXP(top - new_top);
    top = new_top;
    total = total * correction;
    for (uint c = lo; c < hi; c++) total = total + scores[c];
    UNROLL for (uint i = 0u; i < MAX_SIZE / 16; i++) {{
      if (i < chunks) {{
        uint e = i * 16u;
        PRECISE LF sum = out_[i] * correction;
        for (uint c = lo; c < hi; c++) {_value(dtype_v)}
        out_[i] = sum;
      }}
    }}
    BARRIER();
  }}
  if (flags % 2u != 0u) {sink("h", "top", "total", SCALED)}
  for (uint i = 0u; i < chunks; i++) {{ LSTN(Y, from + i * 16u, from + size, out_[i] / total); }}""",
        simt=(),
        cpu=[{"WG": 1, "MAX_SIZE": size} for size in SIZES],
        soft=[{"WG": 16, "MAX_SIZE": size} for size in SIZES],
        local="float q[MAX_SIZE] scores[16]" + " row[16]" * has_nibbles,
        functions=FUNCTIONS * has_nibbles,
    )


for _k, _v in PAIRS:
    _attention(_k, _v)


@lower("attention")
@lower("attention_rope")
@lower("biased_attention")
def _attend(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    q, k, v, tables, slot, pos = t.src[:6]
    more = list(t.src[6:])
    turned = more.pop() if t.op == "attention_rope" else None
    of_heads = more[0] if more else None  # sinks or biases
    has_bias = t.op == "biased_attention"
    tokens, heads, size = q.shape
    types = family(k.dtype), family(v.dtype)
    if types not in PAIRS or size > SIZES[-1] or not fits(size, k, v):
        return None
    words = {
        "n_heads": heads,
        "n_kv": k.shape[1],
        "size": size,
        "table_pages": tables.shape[1],
        "window": t.attrs.get("window", 0),
        "factor": bits(t.attrs["scale"]),
        "cap": bits(t.attrs.get("cap", 0.0)),
        "half_n": 0 if turned is None else turned.shape[2],
        "interleaved": int(t.attrs.get("interleaved", False)),
        "direction": bits(t.attrs.get("sign", 1.0)),
        "flags": (len(more) << has_bias) + (4 * tokens if len(pos.shape) == 2 else 0),
    }
    # q fills the place of a buffer that the kernel does not read
    rest = (tables, slot, pos, turned or q, of_heads or q)
    if shape.name == "simt":
        return spans(t, shape, words, rest, turned_back=t.attrs.get("sign", 1.0) < 0)
    bufs: Buffers = (q, k, v, *scales_of(k, v), *rest, t)
    words["interleaved"] += 2 * sum(kind_of(k, v))
    room, name = next(n for n in SIZES if n >= size), f"attention_{'_'.join(types)}"
    arguments = tuple(words[word] for _, word in KERNELS[name].words)
    return [dispatch(name, shape, bufs, arguments, (heads, tokens), MAX_SIZE=room)]

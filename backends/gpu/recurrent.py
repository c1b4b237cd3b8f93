"""Recurrent layers: short convolutions and linear attention (graph/ops/linear_attention.py)."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, lower, lower_plain
from logitless.graph.tensor import Tensor

# the most rows of a head's state; columns of a group, and threads of each
SIZE, COLUMNS, PARTS = 256, 16, 8

Kernel(
    "text_begins",
    "i32 START, w i32 Y",
    "uint n length",
    "  FOR_EACH(t, n) Y[t] = START[t] == INT(t % length) ? 0 : -1;",
)
# Row t − d of a sequence, d at most `size` − 1: of x where it is not older than the sequence's
# first row here.
SEEN = """
#define OLDER(d) S[((state + 1u) * (size - 1u) - ((d) - back)) * n_columns + c]
#define SEEN(d) ((d) <= back ? X[(t - (d)) * n_columns + c] : OLDER(d))
"""
Kernel(
    "causal_conv",
    "f32 X W, rw f32 S, i32 BEGIN END, w f32 Y",
    "uint n n_columns size keeps",
    """
  FOR_EACH(i, n) {
    uint t = i / n_columns, c = i % n_columns, back = 0u, state = 0u;
    while (BEGIN[t - back] < 0 && back < size - 1u) back++;
    if (BEGIN[t - back] >= 0) state = UINT(BEGIN[t - back]);
    PRECISE float sum = 0.0f;
    for (uint j = 0u; j < size; j++) { uint d = size - 1u - j; sum = FMA(W[c * size + j], SEEN(d), sum); }
    Y[i] = sum;
    if (keeps != 0u && END[t] >= 0)
      for (uint j = 0u; j + 1u < size; j++) {
        uint d = size - 2u - j;
        S[(UINT(END[t]) * (size - 1u) + j) * n_columns + c] = SEEN(d);
      }
  }""",
    functions=SEEN,
)
# The decay of element (d, c) of a head's state: one a head, one a row, or one an element (`axes` 2 to 4).
RULES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}  # sum, delta, RWKV's bonus and keys
DECAYS = """
#define FADES(d, c) (axes == 2u ? fades : DECAY[axes == 3u ? own * size + (d) : (own * size + (d)) * width + (c)])
"""
# A group has 16 columns of a head, from the first row of a sequence to its last. Its state is in
# the group's memory.
Kernel(
    "linear_attention",
    "f32 Q K V DECAY BETA, rw f32 S, i32 BEGIN END, w f32 Y",
    "uint n rows n_heads k_heads size width, float factor, uint keeps rule grouped axes",
    """
  uint n_parts = (width + 15u) / 16u;
  for (uint g = GX; g < n; g += NGX) {
    uint t = g / (n_heads * n_parts), h = g / n_parts % n_heads, c0 = g % n_parts * 16u;
    bool going = BEGIN[t] >= 0;
    if (going) {
      uint from = UINT(BEGIN[t]);
      for (uint i = LID; i < size * 16u; i += WG) {
        uint c = c0 + i % 16u;
        s[i] = c < width ? S[((from * n_heads + h) * size + i / 16u) * width + c] : 0.0f;
      }
    }
    while (going) {
      uint kept = grouped != 0u ? h / (n_heads / k_heads) : h % k_heads;
      uint at = (t * k_heads + kept) * size, own = t * n_heads + h;
      for (uint d = LID; d < size; d += WG) { keys[d] = K[at + d]; queries[d] = Q[at + d]; }
      BARRIER();
      float fades = axes == 2u ? DECAY[own] : 1.0f;
      for (uint i = rule != 0u ? LID : 128u; i < 128u; i += WG) {
        uint c = i % 16u, last = min(c0 + c, width - 1u);
        PRECISE float sum = 0.0f;
        for (uint d = i / 16u; d < size; d += 8u) {
          PRECISE float faded = axes == 2u ? keys[d] : keys[d] * FADES(d, last);
          if (rule > 1u) faded = rule == 2u ? queries[d] : BETA[2u * own * size + d];
          sum = FMA(s[d * 16u + c], faded, sum);
        }
        sums[i] = sum;
      }
      BARRIER();
      for (uint c = LID; c < 16u; c += WG) {
        PRECISE float known = 0.0f;
        if (rule != 0u)
          for (uint p = 0u; p < 8u; p++) known = known + sums[p * 16u + c];
        float value = c0 + c < width ? V[own * width + c0 + c] : 0.0f;
        if (rule < 2u) value = c0 + c < width ? BETA[own] * FMA(-fades, known, value) : 0.0f;
        missing[c] = value;
        recalled[c] = known;
        if (rule == 2u && c0 + c < width) {
          PRECISE float bonus = 0.0f;
          for (uint d = 0u; d < size; d++) {
            PRECISE float weight = BETA[own * size + d] * queries[d];
            bonus = FMA(weight, keys[d], bonus);
          }
          Y[own * width + c0 + c] = factor * FMA(bonus, value, known);
        }
      }
      BARRIER();
      for (uint i = LID; i < 128u; i += WG) {
        uint c = i % 16u, last = min(c0 + c, width - 1u);
        PRECISE float sum = 0.0f;
        for (uint d = i / 16u; d < size; d += 8u) {
          PRECISE float faded = FADES(d, last) * s[d * 16u + c];
          float new_one = FMA(keys[d], missing[c], faded);
          if (rule == 3u) new_one = FMA(BETA[(2u * own + 1u) * size + d], recalled[c], new_one);
          s[d * 16u + c] = new_one;
          sum = FMA(new_one, queries[d], sum);
        }
        sums[i] = sum;
      }
      BARRIER();
      for (uint c = LID; c < 16u; c += WG) {
        PRECISE float found = 0.0f;
        for (uint p = 0u; p < 8u; p++) found = found + sums[p * 16u + c];
        if (rule != 2u && c0 + c < width) Y[own * width + c0 + c] = factor * found;
      }
      if (keeps != 0u && END[t] >= 0)
        for (uint i = LID; i < size * 16u; i += WG) {
          uint c = c0 + i % 16u;
          if (c < width) S[((UINT(END[t]) * n_heads + h) * size + i / 16u) * width + c] = s[i];
        }
      t++;
      going = false;
      if (t < rows) going = BEGIN[t] < 0;
      BARRIER();
    }
  }""",
    wg=128,
    functions=DECAYS,
    local=f"float s[{SIZE * COLUMNS}] keys[{SIZE}] queries[{SIZE}] sums[{PARTS * COLUMNS}], "
    f"float missing[{COLUMNS}] recalled[{COLUMNS}]",
)


lower_plain(text_begins=lambda T, length, **_: (T, length))


def _updates(t: Tensor) -> bool:
    return t.op.endswith("_update")


def _buffers(t: Tensor) -> Buffers:
    """Buffers of a launch; without `end`, `begin` fills its place and is not read there."""
    return (*t.src, t) if _updates(t) else (*t.src, t.src[-1], t)


def _conv(t: Tensor, shape: Shape) -> list[Dispatch]:
    n, columns, size = t.size, t.shape[1], t.src[1].shape[2]
    words = (n, columns, size, int(_updates(t)))
    return [dispatch("causal_conv", shape, _buffers(t), words)]


def _attention(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    (rows, heads, width), (_, k_heads, size) = t.shape, t.src[0].shape
    if size > SIZE:
        return None
    n = rows * heads * -(-width // COLUMNS)
    rule = RULES[t.attrs["delta"], len(t.src[4].shape) > 2]
    forms = int(_updates(t)), rule, int(t.attrs["grouped"]), len(t.src[3].shape)
    words = (n, rows, heads, k_heads, size, width, bits(t.attrs["scale"]), *forms)
    groups = min(n, shape.units if shape.name == "cpu" else 16384)
    return [dispatch("linear_attention", shape, _buffers(t), words, groups)]


for _form in ("", "_update"):
    lower(f"causal_conv{_form}")(_conv)
    lower(f"linear_attention{_form}")(_attention)

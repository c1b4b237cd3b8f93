"""Encoder kernels: full attention, mean pooling, argmax and casts."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, bits, dispatch, groups_for, is_packed, lower, lower_plain
from logitless.backends.gpu.matmul import layout, unpack
from logitless.graph.tensor import Tensor

WG = 64

# A thread has a row of a head, and takes its window's keys in order with an online softmax.
Kernel(
    "full_attention",
    "f32 Q K V, i32 COUNT, f32 B, rw f32 Y",
    "uint n n_heads n_kv size length, float factor, uint reach n_bias",
    """
  FOR_EACH(i, n) {
    uint t = i / n_heads, h = i % n_heads / (n_heads / n_kv), first = t / length * length;
    uint last = min(first + UINT(COUNT[t / length]), t + reach + 1u);
    uint bias_at = i % n_heads * n_bias + n_bias / 2u - t; /* of key 0, wraps around */
    first = max(first + reach, t) - reach;
    PRECISE float top = -INF;
    PRECISE float total = 0.0f;
    for (uint d = 0u; d < size; d++) Y[i * size + d] = 0.0f;
    for (uint s = first; s < last; s++) {
      uint at = (s * n_kv + h) * size;
      PRECISE float score = 0.0f;
      for (uint d = 0u; d < size; d++) score = FMA(Q[i * size + d], K[at + d], score);
      score = score * factor;
      if (n_bias > 0u) score = score + B[bias_at + s];
      float new_top = max(top, score), correction = EXP(top - new_top), e = EXP(score - new_top);
      total = FMA(total, correction, e);
      for (uint d = 0u; d < size; d++) Y[i * size + d] = FMA(e, V[at + d], Y[i * size + d] * correction);
      top = new_top;
    }
    for (uint d = 0u; d < size; d++) Y[i * size + d] = Y[i * size + d] / (last > first ? total : 1.0f);
  }""",
)
Kernel(
    "mean_rows",
    "f32 X, i32 FIRST COUNT, w f32 Y",
    "uint n n_k",
    """
  FOR_EACH(i, n) {
    uint r = i / n_k, k = i % n_k, first = UINT(FIRST[r]), count = UINT(COUNT[r]);
    PRECISE float total = 0.0f;
    for (uint j = first; j < first + count; j++) total = total + X[j * n_k + k];
    Y[i] = total / FLOAT(count);
  }""",
)
Kernel(
    "argmax",
    "f32 X, w i32 Y",
    "uint rows n",
    """
  FOR_EACH(row, rows) {
    uint best = 0u;
    for (uint i = 1u; i < n; i++) if (X[row * n + i] > X[row * n + best]) best = i;
    Y[row] = INT(best);
  }""",
)
for _name, _from, _to, _formula in (
    ("f32_f32", "f32", "f32", "Y[i] = X[i];"),
    ("f32_f16", "f32", "u16", "STORE16(Y, i, TO_F16(X[i]));"),
    ("f16_f32", "u16", "f32", "Y[i] = F16(LOAD16(X, i));"),
):
    Kernel(f"cast_{_name}", f"{_from} X, w {_to} Y", "uint n", f"  FOR_EACH(i, n) {{ {_formula} }}")
for _dtype in layout.PACKINGS:
    Kernel(
        f"unpack_{_dtype}",
        f"{unpack.args(_dtype)}, w f32 Y",
        "uint n n_k wide",
        "  FOR_EACH(i, n) { uint row = i / n_k, k = i % n_k; ELEMENT(y, row, k) Y[i] = y; }",
        functions=unpack.element(_dtype),
    )


@lower("full_attention")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    (tokens, heads, size), kv_heads = t.shape, t.src[1].shape[1]
    n = tokens * heads
    length, scale = t.attrs["length"], bits(t.attrs["scale"])
    reach = t.attrs.get("reach", -1)
    bias = t.src[4] if len(t.src) > 4 else None
    n_bias = bias.shape[0] // heads if bias else 0
    words = (n, heads, kv_heads, size, length, scale, reach if reach >= 0 else length, n_bias)
    bufs: Buffers = (*t.src[:4], bias or t.src[0], t)  # a buffer that the kernel does not read fills the place
    return [dispatch("full_attention", shape, bufs, words, groups_for(n * size, shape, size * WG))]


lower_plain(mean_rows=lambda R, K, **_: (R * K, K), argmax=lambda R, K, **_: (R, K))


@lower("cast")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    x, n = t.src[0], t.size
    if is_packed(x):
        if t.dtype != "f32":
            return None
        bufs: Buffers = (*unpack.buffers(x), t)
        return [dispatch(f"unpack_{x.dtype}", shape, bufs, (n, t.shape[1], int(shape.dot)))]
    if (x.dtype, t.dtype) not in (("f32", "f32"), ("f32", "f16"), ("f16", "f32")):
        return None
    return [dispatch(f"cast_{x.dtype}_{t.dtype}", shape, (x, t), (n,))]

"""Mixture-of-experts routing: top-k experts, their weights, and rows sorted by expert and back.

graph/ops/moe.py defines `order`; matmul/moe_linear.py has the products. Every thread writes numbers
of its own and finds them without other threads, so no result depends on their order."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, groups_for, lower, lower_plain
from logitless.graph.tensor import Tensor

WG = 64


# An expert's rank is how many others are before it; of equal ones the first is. NaN is below
# everything.
Kernel(
    "top_experts",
    "f32 LOGITS, w i32 Y",
    "uint n n_experts n_top",
    """
  FOR_EACH(i, n) {
    uint row = i / n_experts * n_experts, rank = 0u;
    float own = number(LOGITS[i]);
    for (uint j = row; j < row + n_experts && rank < n_top; j++) {
      float other = number(LOGITS[j]);
      rank += other > own || (other == own && j < i) ? 1u : 0u;
    }
    if (rank < n_top) Y[row / n_experts * n_top + rank] = INT(i - row);
  }""",
    functions="FN float number(float x) { return ISNAN(x) ? -INF : x; }\n",
)
Kernel(
    "expert_weights",
    "f32 LOGITS, i32 IDS, w f32 Y",
    "uint n n_experts n_top",
    """
  FOR_EACH(i, n) {
    uint row = i / n_top * n_experts, first = i / n_top * n_top;
    float top = LOGITS[row + UINT(IDS[first])];
    for (uint j = 1u; j < n_top; j++) top = max(top, LOGITS[row + UINT(IDS[first + j])]);
    PRECISE float total = 0.0f;
    for (uint j = 0u; j < n_top; j++) total = total + EXP(LOGITS[row + UINT(IDS[first + j])] - top);
    Y[i] = EXP(LOGITS[row + UINT(IDS[i])] - top) / total;
  }""",
)
Kernel(
    "expert_gather",
    "f32 X, i32 IDS, w f32 Y",
    "uint n n_experts n_top",
    """
  FOR_EACH(i, n) Y[i] = X[i / n_top * n_experts + UINT(IDS[i])];""",
)
Kernel(
    "expert_scatter",
    "f32 X, i32 IDS, w f32 Y",
    "uint n n_experts n_top",
    """
  FOR_EACH(i, n) {
    uint first = i / n_experts * n_top;
    float x = 0.0f;
    for (uint j = first; j < first + n_top; j++) x = UINT(IDS[j]) == i % n_experts ? X[j] : x;
    Y[i] = x;
  }""",
)
# A thread has an expert: it counts the rows of those before, and then gives its own rows their
# places, in order.
Kernel(
    "expert_order",
    "i32 IDS, w i32 ORDER",
    "uint n_rows n_experts",
    """
  FOR_EACH(expert, n_experts) {
    uint place = 0u;
    for (uint r = 0u; r < n_rows; r += 8u) {
      IDS_OF_8_ROWS
      UNROLL for (uint j = 0u; j < 8u; j++) place += ids[j] < expert ? 1u : 0u;
    }
    for (uint r = 0u; r < n_rows; r += 8u) {
      IDS_OF_8_ROWS
      UNROLL for (uint j = 0u; j < 8u; j++) if (ids[j] == expert) {
        ORDER[place] = INT(r + j);
        ORDER[n_rows + r + j] = INT(place);
        ORDER[2u * n_rows + place] = INT(expert);
        place++;
      }
    }
  }""",
    functions="""
#define IDS_OF_8_ROWS uint ids[8]; /* asked of memory together; none is no expert */ \\
  UNROLL for (uint j = 0u; j < 8u; j++) ids[j] = r + j < n_rows ? UINT(IDS[r + j]) : n_experts;
""",
)
Kernel(
    "expert_rows",
    "f32 X, i32 ORDER, w f32 Y",
    "uint n n_k per_row",
    "  FOR_EACH(i, n) Y[i] = X[UINT(ORDER[i / n_k]) / per_row * n_k + i % n_k];",
)
Kernel(
    "expert_sum",
    "f32 X W, i32 ORDER, w f32 Y",
    "uint n n_n per_row n_rows",
    """
  FOR_EACH(i, n) {
    uint first = i / n_n * per_row;
    PRECISE float total = 0.0f;
    for (uint r = first; r < first + per_row; r++)
      total = FMA(W[r], X[UINT(ORDER[n_rows + r]) * n_n + i % n_n], total);
    Y[i] = total;
  }""",
)


lower_plain(
    top_experts=lambda T, E, n, **_: (T * E, E, n),
    expert_weights=lambda T, E, k, **_: (T * k, E, k),
    expert_gather=lambda T, E, k, **_: (T * k, E, k),
    expert_scatter=lambda T, k, n, **_: (T * n, n, k),
    expert_rows=lambda T, K, R, **_: (R * K, K, R // T),
    expert_sum=lambda R, N, T, k, **_: (T * N, N, k, R),
)


@lower("expert_order")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    rows, n = t.shape[1], t.attrs["n"]
    return [dispatch("expert_order", shape, (*t.src, t), (rows, n), groups_for(n, shape, WG))]

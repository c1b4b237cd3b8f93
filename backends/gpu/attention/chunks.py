"""Bounds of chunked attention (graph/ops/attention/chunks.py)."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Arg, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, groups_for, lower
from logitless.graph.tensor import Tensor

WG = 64
Kernel(
    "chunk_ends",
    [Arg("POS", "i32"), Arg("Y", "i32", "w")],
    ["uint n", "uint size"],
    """
  FOR_EACH(t, n) {
    int pos = POS[t], size_ = INT(size);
    Y[t] = pos;
    Y[n + t] = pos / size_ * size_ + size_ - 1;
  }""",
    wg=WG,
)
Kernel(
    "chunk_starts",
    [Arg("START", "i32"), Arg("Y", "i32", "w")],
    ["uint n", "uint length", "uint size"],
    "  FOR_EACH(t, n) Y[t] = START[t] + max(INT(t % length) - START[t], 0) / INT(size) * INT(size);",
    wg=WG,
)


@lower("chunk_ends")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    n = t.shape[1]
    return [dispatch("chunk_ends", shape, (t.src[0], t), (n, t.attrs["size"]), groups_for(n, shape, WG))]


@lower("chunk_starts")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    n, a = t.shape[0], t.attrs
    return [dispatch("chunk_starts", shape, (t.src[0], t), (n, a["length"], a["size"]), groups_for(n, shape, WG))]

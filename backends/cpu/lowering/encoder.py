"""Lowering of encoder (embedding model) ops: layer norm, bidirectional attention, mean pooling."""

from __future__ import annotations

from logitless.backends.cpu.kernels.matmul.layout import gemm_tile
from logitless.backends.cpu.lowering.elementwise_attention import rows_of
from logitless.backends.cpu.lowering.registry import At, lower
from logitless.backends.cpu.lowering.training import ATTENTION_BLOCK
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.backends.host import isa
from logitless.graph.tensor import Tensor


@lower("layer_norm")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    args = (*map(at, t.src), at(t), n, bits(t.attrs["eps"]))
    return [Task("layer_norm", args, rows, max(1, grain // 4))]


@lower("full_attention")
def _(t: Tensor, at: At) -> list[Task]:
    q, k, _, count = t.src
    length = t.attrs["length"]
    args = (*map(at, t.src), at(t), length, q.shape[1], k.shape[1], q.shape[2], bits(t.attrs["scale"]))
    args = (*args, reach if (reach := t.attrs.get("reach", -1)) >= 0 else length)
    mt, nr, kc = gemm_tile(isa())
    tiles = -(-ATTENTION_BLOCK // mt) * mt * (kc + 2)
    scratch = 4 * (ATTENTION_BLOCK * length + nr * kc + tiles + 64)
    return [Task("full_attention", args, count.shape[0] * q.shape[1], 1, scratch)]


@lower("mean_rows")
def _(t: Tensor, at: At) -> list[Task]:
    return [Task("mean_rows", (*map(at, t.src), at(t), t.shape[1]), t.shape[0])]

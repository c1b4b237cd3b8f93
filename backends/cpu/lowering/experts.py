"""Lowering of mixture-of-experts ops: each row meets the packed weights of its expert."""

from __future__ import annotations

from logitless.backends.cores import cores
from logitless.backends.cpu.fusion.packing import packed, takes_bf16
from logitless.backends.cpu.kernels.matmul.layout import LANES, LAYOUTS, expanded_tile, tiles
from logitless.backends.cpu.lowering.linear import k_block_size
from logitless.backends.cpu.lowering.registry import At, lower, lower_plain, rewrite
from logitless.backends.cpu.threads.pool import Task
from logitless.backends.host import isa
from logitless.graph.dtype import DTYPES
from logitless.graph.ops.moe import expert_linear_act, pack_experts, quantize_experts, round_experts
from logitless.graph.tensor import Tensor

UNITS = 16  # units of a product per core


@rewrite("expert_linear")
def _(t: Tensor) -> Tensor:
    x, w, order = t.src
    if not _whole_groups(w, t.attrs["n"]):
        return t
    gather = x.op == "expert_rows" and x.src[1] is order
    source = x.src[0] if gather else x
    if DTYPES[w.dtype].quantised:
        act = quantize_experts(source, order, gather=gather, group=DTYPES[w.dtype].act_group)
    else:
        act = (round_experts if takes_bf16(w) else pack_experts)(source, order, gather=gather)
    return expert_linear_act(act, w, order, n=t.attrs["n"], name=t.name)


def _whole_groups(w: Tensor, n: int) -> bool:
    """True when each expert's weights are whole groups of 16 rows."""
    return packed(w) and w.shape[0] // n % LANES == 0


lower_plain(
    top_experts=lambda T, E, n, **_: ((E, n), T, 4),
    expert_weights=lambda T, E, k, **_: ((E, k), T, 32),
    expert_gather=lambda T, E, k, **_: ((E, k), T, 32),
    expert_scatter=lambda T, k, n, **_: ((k, n), T, 32),
    expert_rows=lambda T, K, R, **_: ((K, R // T), R, max(1, 8192 // K)),
    expert_products=lambda R, M, K, n, **_: ((R, M, K, -(-M // 16)), n * -(-M // 16), max(1, 1024 // K)),
    expert_sum=lambda R, N, T, k, **_: ((R, k, N), T, max(1, 8192 // (N * k))),
)


@lower("expert_order")
def _(t: Tensor, at: At) -> list[Task]:
    args = (at(t.src[0]), at(t), t.shape[1], t.attrs["n"])
    return [Task("expert_order", args, 1, 1, 4 * (t.attrs["n"] + 1))]


def _rows_per_token(t: Tensor) -> int:
    """Experts per token: rows gathered out of each row of x; 0 where x is sorted already."""
    return t.shape[0] // t.src[0].shape[0] if t.attrs["gather"] else 0


@lower("quantize_experts")
def _(t: Tensor, at: At) -> list[Task]:
    rows, k = t.shape
    args = (*map(at, t.src), at(t), rows, k // 32, _rows_per_token(t))
    return [Task(f"quantize_experts:{t.attrs['group']}", args, rows, max(1, 4096 // k))]


def _panels(t: Tensor, at: At) -> list[Task]:
    (rows, k), interleave = t.shape, 2 if t.op == "round_experts" else 1
    return [Task(t.op, (*map(at, t.src), at(t), rows, k // interleave, _rows_per_token(t)), rows, 4)]


lower("pack_experts")(_panels)
lower("round_experts")(_panels)


@lower("expert_linear_act")
def _(t: Tensor, at: At) -> list[Task]:
    x, w, order = t.src
    (rows, n), k, layout = t.shape, w.shape[1], LAYOUTS[w.dtype]
    # a row chooses an expert at most once
    most = order.src[0].shape[0] if order.op == "expert_order" else rows
    bf16 = x.dtype == "bf16_act"
    count, group = k // (2 if bf16 else min(32, layout.block)), layout.group_nbytes(k)
    shapes = [s for s in tiles(w.dtype, isa()) if s[0] <= most and (s[1] == 1 or s != expanded_tile(w.dtype, isa()))]
    units = UNITS * cores()
    tasks: list[Task] = []
    for i, (mt, nt) in enumerate(shapes):
        upto = shapes[i + 1][0] - 1 if i + 1 < len(shapes) else most
        k_block = count if upto <= mt else k_block_size(count, nt * group, upto, layout.k_multiple)
        args = (at(w), at(x), at(t), at(order), rows, n, count, k_block, group, units, mt, upto)
        kernel, scratch = f"expert_linear:{w.dtype}:{mt}x{nt}" + ":bf16" * bf16, (2 * upto + mt) * nt * LANES * 4
        tasks.append(Task(kernel, args, units, 1, scratch, no_barrier=i > 0))
    return tasks


@lower("expert_matmul")
def _(t: Tensor, at: At) -> list[Task] | None:
    x, w, order = t.src
    (rows, n), k = x.shape, w.shape[1]
    if not packed(w):
        return _of_rows("plain_expert_matmul", t, at, n) if w.dtype == "f32" else None
    args = (at(x), at(w), at(t), at(order), rows, n, k, LAYOUTS[w.dtype].group_nbytes(k))
    return [Task(f"expert_matmul:{w.dtype}", args, -(-k // 32), 1, 128)]


@lower("expert_linear")
def _(t: Tensor, at: At) -> list[Task] | None:
    _, w, _ = t.src
    return _of_rows("plain_expert_linear", t, at, t.shape[1]) if w.dtype == "f32" and not packed(w) else None


def _of_rows(kernel: str, t: Tensor, at: At, n: int) -> list[Task]:
    """A product of each row with its expert's weights (n · N, K), which training changes."""
    x, w, order = t.src
    rows, k = t.shape[0], w.shape[1]
    return [Task(kernel, (at(x), at(w), at(t), at(order), rows, n, k), rows, max(1, 65536 // (n * k)))]

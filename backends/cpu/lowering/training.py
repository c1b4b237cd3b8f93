"""Lowering of losses, gradients and optimizer steps."""

from __future__ import annotations

from logitless.backends.cpu.lowering.elementwise import by_rows, rows_of, short_rows
from logitless.backends.cpu.lowering.gemm import fused_sum
from logitless.backends.cpu.lowering.registry import At, lower, lower_plain, rewrite
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.graph.ops.gather import add_rows_to
from logitless.graph.tensor import Tensor

CHUNK = 4096  # kernels/training/optimizer.py: CHUNK
TABLE_ROWS = 64  # kernels/broadcast.py: TABLE_ROWS


def _chunks(t: Tensor) -> int:
    return -(-t.size // CHUNK)


lower_plain(
    softmax=lambda x, **_: by_rows(x),
    softmax_back=lambda y, **_: by_rows(y),
    cross_entropy=lambda logits, **_: by_rows(logits, part=8),
    cross_entropy_back=lambda logits, **_: by_rows(logits),
    soft_cross_entropy=lambda logits, **_: by_rows(logits, part=8),
    soft_cross_entropy_back=lambda logits, **_: by_rows(logits),
    rms_norm_back=lambda x, eps, **_: by_rows(x, bits(eps)),
    square_sums=lambda x, **_: ((x.size,), _chunks(x), 8),
    add_rows=lambda rows, T, n, **_: ((T, rows.size // T, n), -(-n // TABLE_ROWS), 4),
    add_rows_to=lambda rows, T, n, **_: ((T, rows.size // T, n), -(-n // TABLE_ROWS), 4),
)


@lower("adamw_step")
def _(t: Tensor, at: At) -> list[Task]:
    args = (*map(at, t.src), t.size, int(t.attrs.get("decays", True)))
    return [Task("adamw_step", args, _chunks(t), 4)]


@lower("sgd_step")
def _(t: Tensor, at: At) -> list[Task]:
    args = (*map(at, t.src), t.size, int(t.attrs.get("decays", True)))
    return [Task("sgd_step", args, _chunks(t), 8)]


@lower("accumulate")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    total, x = map(at, t.src)
    return [Task("binary:add", (total, x, total, n, 4 * n), rows, grain)]


@lower("clear")
def _(t: Tensor, at: At) -> list[Task]:
    return [Task("clear", (at(t.src[0]), t.size), _chunks(t), 8)]


@lower("norm_of_sums")
def _(t: Tensor, at: At) -> list[Task]:
    args = [word for s in t.src for word in (at(s), s.size)]
    return [Task("norm_of_sums", (at(t), len(t.src), *args), 1)]


@rewrite("add")
def _(t: Tensor) -> Tensor:
    """A weight gradient of two parts: embedding rows or a product are added in place."""
    a, b = t.src
    if b.op == "add_rows" and a.shape == b.shape:
        return add_rows_to(a, *b.src)
    return fused_sum(a, b) or short_rows(t)


@lower("pad_rows")
def _(t: Tensor, at: At) -> list[Task]:
    x, row = t.src[0], t.nbytes // t.shape[0]
    args = (at(x), at(t), t.attrs["before"] * row, x.nbytes, t.nbytes)
    return [Task("copy_block", args, _chunks(t), 4)]

"""Lowering of losses, gradients and optimizer steps."""

from __future__ import annotations

import math

from logitless.backends.cpu.lowering.elementwise import rows_of, short_rows
from logitless.backends.cpu.lowering.gemm import fused_sum
from logitless.backends.cpu.lowering.registry import At, lower, rewrite
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.graph.ops.gather import add_rows_to
from logitless.graph.tensor import Tensor

CHUNK = 4096  # kernels/training/optimizer.py: CHUNK
TABLE_ROWS = 64  # kernels/broadcast.py: TABLE_ROWS


def _size(t: Tensor) -> int:
    return math.prod(t.shape)


def _chunks(t: Tensor) -> int:
    return -(-_size(t) // CHUNK)


def _by_rows(name: str, n_addresses: int) -> None:
    """Register an op whose kernel takes the sources, the result and the row length."""

    @lower(name)
    def _(t: Tensor, at: At) -> list[Task] | None:
        x = t.src[min(1, n_addresses - 1)]
        rows, n, grain = rows_of(x)
        return [Task(name, (*map(at, t.src), at(t), n), rows, max(1, grain // 4))]


for _name, _n in (
    ("softmax", 1),
    ("softmax_back", 2),
    ("cross_entropy_back", 3),
    ("soft_cross_entropy_back", 3),
):
    _by_rows(_name, _n)


@lower("cross_entropy")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t.src[0])
    return [Task("cross_entropy", (*map(at, t.src), at(t), n), rows, max(1, grain // 8))]


@lower("soft_cross_entropy")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t.src[0])
    return [Task("soft_cross_entropy", (*map(at, t.src), at(t), n), rows, max(1, grain // 8))]


@lower("rms_norm_back")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    return [Task("rms_norm_back", (*map(at, t.src), at(t), n, bits(t.attrs["eps"])), rows, max(1, grain // 4))]


@lower("adamw_step")
def _(t: Tensor, at: At) -> list[Task]:
    args = (*map(at, t.src), _size(t), int(t.attrs.get("decays", True)))
    return [Task("adamw_step", args, _chunks(t), 4)]


@lower("sgd_step")
def _(t: Tensor, at: At) -> list[Task]:
    args = (*map(at, t.src), _size(t), int(t.attrs.get("decays", True)))
    return [Task("sgd_step", args, _chunks(t), 8)]


@lower("accumulate")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    total, x = map(at, t.src)
    return [Task("binary:add", (total, x, total, n, 4 * n), rows, grain)]


@lower("clear")
def _(t: Tensor, at: At) -> list[Task]:
    return [Task("clear", (at(t.src[0]), _size(t)), _chunks(t), 8)]


@lower("square_sums")
def _(t: Tensor, at: At) -> list[Task]:
    x = t.src[0]
    return [Task("square_sums", (at(x), at(t), _size(x)), _chunks(x), 8)]


@lower("norm_of_sums")
def _(t: Tensor, at: At) -> list[Task]:
    args = [word for s in t.src for word in (at(s), _size(s))]
    return [Task("norm_of_sums", (at(t), len(t.src), *args), 1)]


@lower("add_rows")
def _(t: Tensor, at: At) -> list[Task]:
    rows, ids = t.src
    n, k = t.shape[0], _size(t) // t.shape[0]
    return [Task("add_rows", (at(rows), at(ids), at(t), ids.shape[0], k, n), -(-n // TABLE_ROWS), 4)]


@lower("add_rows_to")
def _(t: Tensor, at: At) -> list[Task]:
    n, k = t.shape[0], _size(t) // t.shape[0]
    args = (*map(at, t.src), at(t), t.src[2].shape[0], k, n)
    return [Task("add_rows_to", args, -(-n // TABLE_ROWS), 4)]


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

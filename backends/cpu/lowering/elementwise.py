"""Lowering of elementwise ops, broadcasts, sums over axes, norms and mean pooling."""

from __future__ import annotations

import math

from logitless.backends.cpu.lowering.registry import At, Work, lower, lower_plain, rewrite
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.graph import scalar
from logitless.graph.op import OPS
from logitless.graph.ops import pointwise  # noqa: F401  (declares formulas)
from logitless.graph.ops.elementwise import broadcast_to, gated, sum_to
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.training import optimizer  # noqa: F401  (declares formulas)
from logitless.graph.tensor import Shape, Tensor, broadcast_strides

CHUNK = 8192  # elements of a chunk of elementwise work
MIN_ROW = 64  # elements
BROADCAST_CHUNK = 4096  # elements of a chunk of broadcast work
SLOW = {"exp", "tanh", "div", "log", "sin", "cos", "gelu", "silu", "sigmoid", "times_sigmoid"}
COLUMNS = 256  # kernels/broadcast.py: COLUMNS
TALL = 4096  # rows from which on short rows are grouped
GROUP = 2**5 * 3**2 * 5  # rows of a group, or a divisor of it
SHORT = 64  # elements of a short row


def rows_of(t: Tensor) -> tuple[int, int, int]:
    """Rows of the last axis, their length, and rows of a chunk."""
    n = t.shape[-1] if t.shape else 1
    rows = 1
    for size in t.shape[:-1]:
        rows *= size
    return rows, n, max(1, CHUNK // max(n, 1))


def by_rows(t: Tensor, *numbers: int, part: int = 4) -> Work:
    """Work on the rows of a tensor, whose length comes before the numbers; chunks are a `part` of usual ones."""
    rows, n, grain = rows_of(t)
    return (n, *numbers), rows, max(1, grain // part)


def flat(t: Tensor) -> tuple[int, int, int]:
    """The same for purely elementwise work: short axes are merged into longer rows."""
    rows, n, _ = rows_of(t)
    for size in reversed(t.shape[:-1]):
        if n >= MIN_ROW or rows == 1:
            break
        rows, n = rows // size, n * size
    return rows, n, max(1, CHUNK // max(n, 1))


def binary_stride(a: Tensor, b: Tensor) -> int | None:
    """Bytes between rows of b, as the kernel expects; None where the shapes must be broadcast."""
    if a.dtype != "f32" or b.dtype != "f32":
        return None
    if b.shape == a.shape:
        return 4 * (a.shape[-1] if a.shape else 1)
    if b.shape == a.shape[-1:]:
        return 0
    return -1 if b.nbytes == 4 else None


def _binary(t: Tensor, at: At) -> list[Task] | None:
    a, b = t.src
    stride = binary_stride(a, b)
    if stride is None or t.shape != a.shape:
        return broadcast(t.op, t, a, b, at) if a.dtype == b.dtype == "f32" else None
    rows, n, grain = rows_of(t) if stride == 0 else flat(t)
    stride = 4 * n if stride > 0 else stride
    return [Task(f"binary:{t.op}", (at(a), at(b), at(t), n, stride), rows, grain)]


lower("add")(_binary)
lower("sub")(_binary)
lower("div")(_binary)
lower("mul")(_binary)
rewrite("mul")(gated)


def _elementwise(t: Tensor, at: At) -> list[Task] | None:
    """An op with a formula, whose sources have one shape."""
    if any(s.shape != t.shape for s in t.src):
        return None
    rows, n, grain = flat(t)
    key = scalar.key(t)
    tree = scalar.tree(key)
    args = (*map(at, t.src), at(t), n, *(bits(t.attrs[name]) for name in tree.attributes))
    return [Task(f"map:{key}", args, rows, max(1, grain // 4) if tree.operators() & SLOW else grain)]


for _name in scalar.FORMULAS:
    if _name not in ("add", "sub", "mul", "div"):
        lower(_name)(_elementwise)


@lower("rms_norm")
def _(t: Tensor, at: At) -> list[Task]:
    x, w = t.src
    rows, n, grain = rows_of(t)
    if w.shape == ():
        args = (at(x), at(t), n, bits(t.attrs["eps"]), at(w))
        return [Task("rms_norm_plain", args, rows, max(1, grain // 4))]
    return [Task("rms_norm", (at(x), at(w), at(t), n, bits(t.attrs["eps"])), rows, max(1, grain // 4))]


lower_plain(layer_norm=lambda x, eps, **_: by_rows(x, bits(eps)), mean_rows=lambda R, K, **_: ((K,), R, 1))


def grouped(x: Shape, y: Shape) -> list[tuple[bool, int]] | None:
    """Axes of x as runs of (y keeps them, length).

    None where y is not x with some axes removed or of length 1."""
    full = (1,) * (len(x) - len(y)) + y
    runs: list[tuple[bool, int]] = []
    for n, m in zip(x, full, strict=True):
        if n == 1:
            continue
        keeps = n == m
        if runs and runs[-1][0] == keeps:
            runs[-1] = keeps, runs[-1][1] * n
        else:
            runs.append((keeps, n))
    return runs


@rewrite("sum_to")
def _(t: Tensor) -> Tensor:
    """Short columns of a tall array: several rows are summed as one, then their parts."""
    x = t.src[0]
    n = t.shape[-1] if t.shape else 1
    rows = x.size // n
    if t.size != n or x.shape[-1:] != (n,) or n >= COLUMNS or rows < TALL:
        return t
    group = math.gcd(rows, GROUP)
    if group == 1:
        return t
    wide = sum_to(reshape(x, shape=(rows // group, group * n)), shape=(group * n,))
    return reshape(sum_to(reshape(wide, shape=(group, n)), shape=(n,)), shape=t.shape)


def short_rows(t: Tensor) -> Tensor:
    """Arithmetic of a tall array and one short row: the row is repeated, and rows are grouped."""
    a, b = t.src
    n, rows = b.shape[-1] if b.shape else 0, math.prod(a.shape[:-1])
    group = math.gcd(rows, GROUP)
    if t.shape != a.shape or b.shape != a.shape[-1:] or not 0 < n < SHORT or rows < TALL or group == 1:
        return t
    again = reshape(broadcast_to(b, shape=(group, n)), shape=(group * n,))
    both = OPS[t.op](reshape(a, shape=(rows // group, group * n)), again)
    return reshape(both, shape=t.shape)


@lower("sum_to")
def _(t: Tensor, at: At) -> list[Task] | None:
    """Sum of (R0, K0, R1, K1) over R0 and R1."""
    runs = grouped(t.src[0].shape, t.shape)
    sizes, place = [1, 1, 1, 1], 0
    for keeps, n in runs or ():
        place += place % 2 != keeps
        if place > 3:
            return None
        sizes[place] = n
        place += 1
    r0, k0, r1, k1 = sizes
    if k0 > 1 and r1 == k1 == 1:  # columns: (R0, 1, 1, K0)
        r0, k0, r1, k1 = 1, 1, r0, k0
    elif r0 > 1 and k0 == r1 == k1 == 1:  # everything: one row
        r0, r1 = 1, r0
    units = k0 * -(-k1 // COLUMNS)
    return [
        Task(
            "sum_to", (at(t.src[0]), at(t), r0, k0, r1, k1), units, max(1, BROADCAST_CHUNK // (r0 * r1 * min(k1, 256)))
        )
    ]


def broadcast(name: str, t: Tensor, a: Tensor, b: Tensor, at: At) -> list[Task] | None:
    """Arithmetic of two arrays of any shapes.

    Axes with a common stride are merged. None when more than four remain."""
    axes: list[list[int]] = []  # length, stride of a, stride of b
    for n, sa, sb in zip(
        t.shape, broadcast_strides(a.shape, t.shape), broadcast_strides(b.shape, t.shape), strict=True
    ):
        if n == 1:
            continue
        if axes and axes[-1][1] == sa * n and axes[-1][2] == sb * n:
            axes[-1] = [axes[-1][0] * n, sa, sb]
        else:
            axes.append([n, sa, sb])
    if len(axes) > 4:
        return None
    axes = [[1, 0, 0]] * (4 - len(axes)) + axes
    n = axes[3][0]
    args = (at(a), at(b), at(t), n, axes[1][0], axes[2][0], *(x[1] for x in axes), *(x[2] for x in axes))
    rows = axes[0][0] * axes[1][0] * axes[2][0]
    return [Task(f"broadcast:{name}", args, rows, max(1, 2 * BROADCAST_CHUNK // n), scratch=64)]


@lower("broadcast_to")
def _(t: Tensor, at: At) -> list[Task] | None:
    x = t.src[0]
    return broadcast("copy", t, x, x, at)

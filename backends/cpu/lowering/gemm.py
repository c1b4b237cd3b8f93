"""Lowering of f32 GEMM: prefill with float weights, trainable weights, gradients."""

from __future__ import annotations

import math

from logitless.backends.cpu.fusion.packing import packed
from logitless.backends.cpu.kernels.matmul.layout import LAYOUTS, STRIPS, gemm_tile
from logitless.backends.cpu.lowering.registry import At, lower, rewrite
from logitless.backends.cpu.threads.pool import Task
from logitless.backends.host import isa
from logitless.graph.ops.elementwise import sum_to
from logitless.graph.ops.linear import add_product, pack_tiles, product_parts, tiled_product
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor

MAX_ROWS = 528  # rows of A in a block; with 288 k they take half of the L2 cache
COLUMNS = 48  # columns of a block
MAX_PACKED_NBYTES = 16 << 20  # bytes of A up to which a node of its own packs it once
UNITS = 12  # units that a product should have at least
SKINNY = 24  # rows or columns of a skinny matrix
MIN_PART_K = 1024  # least K of a part of a split-K product
LONG_K = 1 << 14  # K above which a product is summed in parts
MAX_MACS = 1 << 26  # multiply-adds of such a part: half a millisecond on two cores
UNIT_MACS = 1 << 26  # multiply-adds of a unit of another product: one or two milliseconds of a core


def _with_packed_a(t: Tensor, transposed: bool) -> Tensor:
    """A product whose A is packed once, by a node that other products of A share."""
    a, b = t.src
    if a.shape[0] < gemm_tile(isa())[0] or a.nbytes > MAX_PACKED_NBYTES or _is_skinny(t):
        return t
    tiles = pack_tiles(a, rows=gemm_tile(isa())[0], transposed=False)
    return tiled_product(tiles, b, m=a.shape[0], transposed=transposed, name=t.name)


def _is_skinny(t: Tensor) -> bool:
    """True when A (M, K) is better read in place: few columns, or short rows."""
    (m, n), k = t.shape, t.src[0].shape[1]
    return m >= gemm_tile(isa())[0] and (n <= SKINNY or k <= SKINNY) and not packed(t.src[1]) and m * k < 1 << 28


def tiled_linear(t: Tensor) -> Tensor:
    """Lower `linear` of many rows to a GEMM, with a float weight or a trainable one."""
    return _with_packed_a(t, transposed=True)


@rewrite("matmul")
def _(t: Tensor) -> Tensor:
    return _with_packed_a(t, transposed=False)


@rewrite("matmul_tn")
def _(t: Tensor) -> Tensor:
    """A skinny product over a long K is split along K, for all threads; others get a packed A."""
    a, b = t.src
    (m, n), k = t.shape, a.shape[0]
    if min(m, n) <= SKINNY:
        steps = -(-k // max(1, min(k // MIN_PART_K, -(-UNITS * 4 // _skinny_blocks(m, n)))))
        parts = product_parts(a, b, steps=steps)
        return sum_to(parts, shape=(m, n)) if parts.shape[0] > 1 else reshape(parts, shape=(m, n))
    if a.nbytes > MAX_PACKED_NBYTES:
        return t
    tiles = pack_tiles(a, rows=gemm_tile(isa())[0], transposed=True)
    return tiled_product(tiles, b, m=m, transposed=False, name=t.name)


def _skinny_blocks(m: int, n: int) -> int:
    mt, nr, _ = gemm_tile(isa())
    return -(-m // (4 * mt)) * -(-n // nr)  # kernels/matmul/skinny_gemm.py: ROWS, COLUMNS


@lower("product_parts")
def _(t: Tensor, at: At) -> list[Task]:
    parts, m, n = t.shape
    args = (*map(at, t.src), at(t), t.src[0].shape[0], m, n, t.attrs["steps"])
    return [Task("skinny_split_k", args, parts * _skinny_blocks(m, n))]


@lower("pack_tiles")
def _(t: Tensor, at: At) -> list[Task]:
    n_tiles, k, _ = t.shape
    x, transposed = t.src[0], t.attrs.get("transposed", False)
    m = x.shape[1 if transposed else 0]
    args = (at(x), at(t), m, k)
    if transposed:
        # kernels/matmul/gemm.py: PACK_STEPS
        return [Task("pack_tiles:k", args, -(-k // 16), max(1, 1024 // m))]
    return [Task("pack_tiles:m", args, n_tiles, max(1, 4096 // k))]


def fused_sum(x: Tensor, g: Tensor) -> Tensor | None:
    """x + g in one pass, if g is the product of a weight gradient; otherwise None.

    Sums over micro-batches are not fused: their additions are those of gradients that other
    processes computed."""
    gradient = g.op == "matmul_tn" or (g.op == "tiled_product" and g.src[0].attrs.get("transposed"))
    return add_product(x, *g.src) if gradient and x.shape == g.shape else None


@lower("add_product")
def _(t: Tensor, at: At) -> list[Task] | None:
    x, n = t.src[0], t.size
    first = [] if at(x) == at(t) else [Task("copy", (at(x), at(t), n), -(-n // 4096), 8)]
    a = t.src[1]
    tiled = len(a.shape) == 3
    product = _tiled_gemm(t, a, "k", at, accumulate=True) if tiled else _gemm("k", "k", t, a.shape[0], at, True)
    return product and [*first, *product]


@lower("tiled_product")
def _(t: Tensor, at: At) -> list[Task] | None:
    return _tiled_gemm(t, t.src[0], "n" if t.attrs["transposed"] else "k", at)


def _tiled_gemm(t: Tensor, a: Tensor, b_layout: str, at: At, accumulate: bool = False) -> list[Task] | None:
    """None for tiles that were packed for another instruction set, which have no kernel."""
    _, k, rows = a.shape
    return _gemm("tiles", b_layout, t, k, at, accumulate) if rows == gemm_tile(isa())[0] else None


@lower("linear")
def _(t: Tensor, at: At) -> list[Task]:
    return [_skinny("n", t, at)] if _is_skinny(t) else _gemm("m", "n", t, t.src[0].shape[1], at)


@lower("matmul")
def _(t: Tensor, at: At) -> list[Task]:
    return [_skinny("k", t, at)] if _is_skinny(t) else _gemm("m", "k", t, t.src[0].shape[1], at)


def _skinny(b_layout: str, t: Tensor, at: At) -> Task:
    (m, n), k = t.shape, t.src[0].shape[1]
    mt, nr, kc = gemm_tile(isa())
    rows = max(mt, min(-(-m // UNITS), (1 << 18) // (n + k)) // mt * mt)
    return Task(f"skinny_gemm:{b_layout}", (*map(at, t.src), at(t), m, n, k, rows), -(-m // rows), 1, 4 * nr * kc)


@lower("matmul_tn")
def _(t: Tensor, at: At) -> list[Task]:
    return _gemm("k", "k", t, t.src[0].shape[0], at)


def bf16_gemm(t: Tensor, at: At) -> list[Task]:
    """Tasks of `linear_bf16` with many rows."""
    return _gemm("tiles", "n", t, t.src[1].shape[1] // 2, at, how=":bf16")


def _gemm(
    a_layout: str, b_layout: str, t: Tensor, k: int, at: At, accumulate: bool = False, how: str = ""
) -> list[Task]:
    """Tasks of a GEMM. K is summed in consecutive parts where units would be long, with the same bits.

    The parts let requests preempt a training step, or the encoding of an image."""
    a, b = t.src[-2:]
    (m, n), group = t.shape, 0
    if packed(b):
        b_layout, group = f"{b_layout}:{b.dtype}{how}", LAYOUTS[b.dtype].group_nbytes(b.shape[1])
    rows, columns = blocks(a_layout, m, n, k)
    mt, nr, kc = gemm_tile(isa())
    tiles = 0 if a_layout == "tiles" else -(-rows // mt) * kc + 2
    scratch = 4 * (STRIPS * nr * kc + mt * tiles) + 64
    args = (at(a), at(b), at(t), m, n, k, rows, columns, group, int(accumulate))
    kernel, n_units = f"gemm:{a_layout}:{b_layout}", -(-m // rows) * -(-n // columns)
    most = MAX_MACS // (m * n * kc) if k > LONG_K else UNIT_MACS // (rows * columns * kc)
    part = max(1, most) * kc
    return [Task(kernel, (*args, k0, min(k, k0 + part)), n_units, 1, scratch) for k0 in range(0, k, part)]


def blocks(a_layout: str, m: int, n: int, k: int) -> tuple[int, int]:
    """Rows and columns of a unit's block of C: whole tiles, and enough blocks for all threads.

    B is packed once per block of rows, and A, if not packed already, once per block of columns."""
    mt, nr, _ = gemm_tile(isa())
    if k > LONG_K:
        rows, columns = _equal_parts(m, 96, mt), _equal_parts(n, 96, nr)
    elif a_layout == "tiles":
        rows, columns = _equal_parts(m, MAX_ROWS, mt), COLUMNS // nr * nr
    else:
        rows = _equal_parts(m, 144, mt)
        # rows of (M, K) are far apart, so packing them costs more
        least = 96 if a_layout == "k" else 288
        columns = _equal_parts(n, max(least, min(2048, n * -(-m // rows) // UNITS)), nr)
    return rows, columns


def _equal_parts(n: int, most: int, step: int) -> int:
    """n in equal parts of at most `most`, rounded up to whole steps."""
    n_parts = math.ceil(n / max(step, most))
    return -(-math.ceil(n / n_parts) // step) * step

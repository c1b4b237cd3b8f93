"""Matrix products in f32: prompts through weights of floats, weights that change, gradients, and products back through
packed weights."""

from __future__ import annotations

import math

from backends.cpu.isa import isa
from backends.cpu.kernels.layout import LAYOUTS
from backends.cpu.lowering import At, lower, rewrite
from backends.cpu.packing import packed, packed_act
from backends.cpu.pool import Instruction
from graph.ops.linear import pack_tiles, tiled_product
from graph.tensor import Tensor

MOST_ROWS = 516  # of A in a block: with 256 k they fit the second-level cache
MOST_COLUMNS = 160
PACKED_APART = 32 << 20  # bytes of A up to which it is packed once, into memory of its own
UNITS = 12  # that a product should have


def tile_shape() -> tuple[int, int, int]:
    """Rows, columns and k of kernels/gemm.py's tiles: that module cannot be imported without numba."""
    return (12, 32, 288) if isa() == "avx512_vnni" else (6, 16, 288)


def _tiled(t: Tensor, transposed: bool) -> Tensor:
    """A product with A packed once, by a node of its own that other products of it share."""
    a, b = t.src
    if a.shape[0] < tile_shape()[0] or a.nbytes > PACKED_APART:
        return t
    tiles = packed_act(a, pack_tiles, rows=tile_shape()[0])
    return tiled_product(tiles, b, m=a.shape[0], transposed=transposed, name=t.name)


def tiled_linear(t: Tensor) -> Tensor:
    """`linear` of many rows, with a weight of floats or one that may change."""
    return _tiled(t, transposed=True)


@rewrite("matmul")
def _(t: Tensor) -> Tensor:
    return _tiled(t, transposed=False)


@lower("pack_tiles")
def _(t: Tensor, at: At) -> list[Instruction]:
    m, k = t.src[0].shape
    return [Instruction("pack_tiles", (at(t.src[0]), at(t), m, k), t.shape[0], max(1, 4096 // k))]


@lower("tiled_product")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [_product("tiles", "n" if t.attrs["transposed"] else "k", t, t.src[0].shape[1], at)]


@lower("linear")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [_product("m", "n", t, t.src[0].shape[1], at)]


@lower("matmul")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [_product("m", "k", t, t.src[0].shape[1], at)]


@lower("matmul_tn")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [_product("k", "k", t, t.src[0].shape[0], at)]


def _product(a_layout: str, b_layout: str, t: Tensor, k: int, at: At) -> Instruction:
    a, b = t.src
    (m, n), group = t.shape, 0
    if packed(b):
        b_layout, group = f"{b_layout}:{b.dtype}", LAYOUTS[b.dtype].group_nbytes(b.shape[1])
    rows, columns = blocks(a_layout, m, n)
    mt, nr, kc = tile_shape()
    tiles = 0 if a_layout == "tiles" else -(-rows // mt) * kc + 2
    scratch = 4 * (nr * kc + mt * nr + mt * tiles) + 64
    args = (at(a), at(b), at(t), m, n, k, rows, columns, group)
    return Instruction(f"gemm:{a_layout}:{b_layout}", args, -(-m // rows) * -(-n // columns), 1, scratch)


def blocks(a_layout: str, m: int, n: int) -> tuple[int, int]:
    """Rows and columns of a unit's block: multiples of the tile's, and enough of them for a few threads.

    B is packed once for each block of rows, and A, where it is not packed already, once for each block of columns.
    """
    mt, nr, _ = tile_shape()
    if a_layout == "tiles":
        rows = _part(m, MOST_ROWS, mt)
        columns = _part(n, max(nr, min(MOST_COLUMNS, n * -(-m // rows) // UNITS)), nr)
    else:
        rows = _part(m, 144, mt)
        least = 96 if a_layout == "k" else 288  # (M, K) costs more to pack: its rows are far apart
        columns = _part(n, max(least, min(2048, n * -(-m // rows) // UNITS)), nr)
    return rows, columns


def _part(n: int, most: int, step: int) -> int:
    """n in equal parts of at most `most`, rounded up to whole steps."""
    n_parts = math.ceil(n / max(step, most))
    return -(-math.ceil(n / n_parts) // step) * step

"""Weights times activations, from node to instructions.

A constant 2-D state is packed (weights.py). With a quantised one, activations are quantised too: `linear` becomes
`linear_q8(quantize_act(x), w)`, and several weights that read the same x share one `quantize_act`.
"""

from __future__ import annotations

from collections import OrderedDict

from backends.cpu.isa import isa
from backends.cpu.kernels.layout import ACT_BLOCK, LANES, LAYOUTS, tile_for
from backends.cpu.lowering import At, lower, rewrite
from backends.cpu.pool import Instruction
from graph.dtype import DTYPES
from graph.ops.linear import linear_q8, quantize_act
from graph.tensor import Tensor

CHUNK_BYTES = 1 << 16  # of weights: what a thread takes at a time when there are few rows
CHUNK_MACS = 1 << 22  # the same for many rows, 10 to 20 µs
ROWS_BYTES = 384 << 10  # activations that stay in the second-level cache while weights stream past them
ROWS_OF_PLAIN = 8  # the tile for weights that are not packed
_quantised: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()  # id(x): x (kept, so the id stays its), result


def packed(t: Tensor) -> bool:
    """Whether a source's bytes are a packed weight."""
    return t.op == "state" and bool(t.attrs.get("constant")) and len(t.shape) == 2


@rewrite("linear")
def _(t: Tensor) -> Tensor:
    x, w = t.src
    if not packed(w) or not DTYPES[w.dtype].quantised:
        return t
    if id(x) not in _quantised:
        _quantised[id(x)] = (x, quantize_act(x))
        if len(_quantised) > 8:
            _quantised.popitem(last=False)
    return linear_q8(_quantised[id(x)][1], w, name=t.name)


@lower("quantize_act")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [Instruction("quantize_act", (at(t.src[0]), at(t)), t.nbytes // ACT_BLOCK, 64)]


@lower("linear_q8")
def _(t: Tensor, at: At) -> list[Instruction]:
    x, w = t.src
    k = w.shape[1]
    return matmul(w.dtype, (at(w), at(x), at(t)), t.shape, k, k // 32, k // 32 * ACT_BLOCK)


@lower("linear")
def _(t: Tensor, at: At) -> list[Instruction]:
    x, w = t.src
    if packed(w):
        return matmul(w.dtype, (at(w), at(x), at(t)), t.shape, w.shape[1], w.shape[1], 4 * w.shape[1])
    m, (n, k) = t.shape[0], w.shape
    rows = ROWS_OF_PLAIN if m >= ROWS_OF_PLAIN else 1
    scratch = LANES * 4 * (k + rows)
    return [Instruction(f"linear_rows:{rows}", (at(w), at(x), at(t), m, n, k), -(-n // LANES), 1, scratch)]


def matmul(
    dtype: str, addresses: tuple[int, int, int], shape: tuple[int, ...], k: int, count: int, row_nbytes: int
) -> list[Instruction]:
    """Weight, activations and result → the kernel's tile for so many rows, and units that keep every thread busy."""
    m, n = shape
    mt, nt = tile_for(dtype, isa(), m)
    group = LAYOUTS[dtype].group_nbytes(k)
    row_block = max(mt, ROWS_BYTES // row_nbytes // mt * mt)
    row_blocks = -(-m // row_block)
    groups = -(-n // LANES)
    strips = -(-groups // nt)
    unit_macs = min(m, row_block) * nt * LANES * k
    grain = max(1, min(CHUNK_BYTES // (nt * group), CHUNK_MACS // unit_macs))
    args = (*addresses, m, n, count, group, row_nbytes, row_block)
    return [Instruction(f"linear:{dtype}:{mt}x{nt}", args, row_blocks * strips, grain, scratch=mt * nt * LANES * 4)]


@lower("get_rows")
def _(t: Tensor, at: At) -> list[Instruction]:
    table, ids = t.src
    k = table.shape[1]
    if packed(table):
        args = (at(table), at(ids), at(t), k, LAYOUTS[table.dtype].group_nbytes(k))
        return [Instruction(f"get_rows:{table.dtype}", args, t.shape[0], 1)]
    return [Instruction("get_rows:rows", (at(table), at(ids), at(t), k, 0), t.shape[0], 1)]

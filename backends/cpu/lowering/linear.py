"""Lowering of `linear`: activations times weights.

A constant 2-D state is a packed weight (fusion/packing.py), and activations are packed to match
(kernels/matmul/layout.py). `linear` with a quantised weight becomes `linear_q8(quantize_act(x),
w)`. With a float weight it becomes `linear_f32(pack_act(x), w)`, or a GEMM (gemm.py) for many rows.
With a bf16 weight and bf16 activations (packing.takes_bf16) it becomes `linear_bf16(round_act(x),
w)`. Weights that read the same x share its packed form."""

from __future__ import annotations

from dataclasses import replace

from logitless.backends.cpu.fusion.packing import MANY_ROWS, packed, packed_nbytes, takes_bf16
from logitless.backends.cpu.kernels.matmul.layout import (
    ACT_BLOCK,
    LANES,
    LAYOUTS,
    MAX_TILE,
    act_panels,
    expanded_nbytes,
    expanded_tile,
    gemm_tile,
    rows_per_pass,
    tile_for,
)
from logitless.backends.cpu.lowering.elementwise import rows_of
from logitless.backends.cpu.lowering.gemm import bf16_gemm, tiled_linear
from logitless.backends.cpu.lowering.registry import At, lower, lower_plain, rewrite
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.backends.host import cache_nbytes, isa
from logitless.graph.dtype import DTYPES
from logitless.graph.ops.linear import linear_bf16, linear_f32, linear_q8, pack_act, quantize_act, round_act
from logitless.graph.tensor import Tensor

CHUNK_BYTES = 1 << 16  # bytes of weights in a chunk, with few rows
# chunk whose results are buffered (kernels/matmul/packed_matmul.py)
BUFFERED_CHUNK_BYTES, MIN_CHUNKS = 1 << 19, 16
# results are few next to such groups of weights; non-temporal stores are read again
BUFFERED_GROUP_BYTES = 1 << 14
CHUNK_MACS = 1 << 22  # multiply-adds of a chunk with many rows, 10 to 20 µs
K_CHUNK = 64  # kernels/matmul/quantize_activations.py: K_CHUNK
GLU_ROW_GRAIN = 3  # units of 32 columns of gate and up in a chunk of one row
GLU_CHUNK = 1024  # elements of a unit, a multiple of every scale group
PLAIN_TILE_ROWS = 8  # rows of a tile of unpacked weights


@rewrite("linear")
def _(t: Tensor) -> Tensor:
    x, w = t.src
    if packed(w) and DTYPES[w.dtype].quantised:
        return linear_q8(quantize_act(x, group=DTYPES[w.dtype].act_group), w, name=t.name)
    rows, _, _ = gemm_tile(isa())
    in_tiles = x.shape[0] >= (MANY_ROWS if packed(w) else rows)
    if takes_bf16(w):
        return linear_bf16(round_act(x, rows=rows if in_tiles else 1), w, m=x.shape[0], name=t.name)
    if in_tiles:
        return tiled_linear(t)
    return linear_f32(pack_act(x), w, name=t.name)


@rewrite("linear_parts")
def _(t: Tensor) -> Tensor:
    x, *ws = t.src
    if x.dtype != "f32" or not all(map(packed, ws)):
        return t
    groups = {DTYPES[w.dtype].act_group for w in ws if DTYPES[w.dtype].quantised}
    if len(groups) > 1 or (groups and not all(DTYPES[w.dtype].quantised for w in ws)):
        return t
    if groups:
        act = quantize_act(x, group=groups.pop())
    else:
        act = (round_act if all(map(takes_bf16, ws)) else pack_act)(x)
    return replace(t, src=(act, *ws))


@lower("quantize_act")
def _(t: Tensor, at: At) -> list[Task]:
    m, k = t.shape
    group = t.attrs.get("group", 32)
    args = (at(t.src[0]), at(t), m, k // 32, *act_panels(m, isa(), group))
    # rows are 52 bytes apart: two threads share a cache line at each seam
    grain = max(1, 4096 // k) if m < MANY_ROWS else 32
    return [Task(f"quantize_act:{group}", args, m, grain)]


@lower("rms_norm_act")
def _(t: Tensor, at: At) -> list[Task]:
    m, k = t.shape
    args = (*map(at, t.src), at(t), m, k // 32, *act_panels(m, isa(), t.attrs["group"]), bits(t.attrs["eps"]))
    return [Task(f"rms_norm_act:{t.attrs['group']}", args, m, 32, scratch=4 * k)]


@lower("glu_act")
def _(t: Tensor, at: At) -> list[Task]:
    m, k = t.shape
    units = m * -(-k // GLU_CHUNK)
    args = (*map(at, t.src), at(t), m, k // 32, GLU_CHUNK // 32, *act_panels(m, isa(), t.attrs["group"]))
    kernel = f"glu_act:{t.attrs['activation']}:{t.attrs['group']}"
    return [Task(kernel, args, units, 2 if m < MANY_ROWS else 16, scratch=4 * GLU_CHUNK)]


lower_plain(
    pack_act=lambda T, K, **_: ((T, K), -(-K // K_CHUNK), max(1, 256 // T)),
    get_ids=lambda T, K, limit, **_: ((K, limit), T, 256),
    token_columns=lambda T, n, **_: ((n,), T, 4096),
    ngram_rows=lambda T, M, R, stop, **_: ((M, R // 2 - M - 1, stop), T, 256),
)


@lower("round_act")
def _(t: Tensor, at: At) -> list[Task]:
    (m, k), rows = t.src[0].shape, t.attrs.get("rows", 1)
    args = (at(t.src[0]), at(t), m, k)
    if rows > 1:
        return [Task("round_act:tiles", args, -(-m // rows), max(1, 4096 // k), rows * k * 2)]
    return [Task("round_act:k", args, -(-k // 2 // K_CHUNK), max(1, 1024 // m))]


@lower("linear_bf16")
def _(t: Tensor, at: At) -> list[Task]:
    x, w = t.src
    if x.attrs.get("rows", 1) > 1:
        return bf16_gemm(t, at)
    return matmul(w.dtype, (at(w), at(x), at(t)), t.shape, w.shape[1], bf16=True)


@lower("linear_q8")
def _(t: Tensor, at: At) -> list[Task]:
    x, w = t.src
    return matmul(w.dtype, (at(w), at(x), at(t)), t.shape, w.shape[1])


@lower("linear_q8_add")
def _(t: Tensor, at: At) -> list[Task]:
    x, w, y = t.src
    n = t.shape[0] * t.shape[1]
    first = [] if at(y) == at(t) else [Task("copy", (at(y), at(t), n), -(-n // 4096), 8)]
    (product,) = matmul(w.dtype, (at(w), at(x), at(t)), t.shape, w.shape[1])
    return [*first, replace(product, kernel=f"{product.kernel}:add")]


@lower("linear_parts")
def _(t: Tensor, at: At) -> list[Task] | None:
    x, *ws = t.src
    if x.dtype == "f32":
        return None
    tasks: list[Task] = []
    y, m, bf16 = at(t), x.shape[0], x.dtype == "bf16_act"
    nbytes = sum(packed_nbytes(w.dtype, *w.shape) for w in ws)
    for w in ws:
        n, k = w.shape
        tasks += matmul(w.dtype, (at(w), at(x), y), (m, n), k, nbytes, no_barrier=bool(tasks), bf16=bf16)
        y += 4 * m * n
    return tasks


@lower("linear_f32")
def _(t: Tensor, at: At) -> list[Task]:
    x, w = t.src
    if packed(w):
        return matmul(w.dtype, (at(w), at(x), at(t)), t.shape, w.shape[1])
    (m, n), k = t.shape, w.shape[1]
    rows = PLAIN_TILE_ROWS if m >= PLAIN_TILE_ROWS else 1
    args = (at(w), at(x), at(t), m, n, k)
    return [Task(f"linear_rows:{rows}", args, -(-n // LANES), 1, scratch=LANES * 4 * (k + rows))]


def matmul(
    dtype: str,
    addresses: tuple[int, int, int],
    shape: tuple[int, ...],
    k: int,
    nbytes: int = 0,
    *,
    no_barrier: bool = False,
    bf16: bool = False,
) -> list[Task]:
    """Task of a GEMM with a packed weight: its tile for m rows, and units for all threads.

    `nbytes`: of all weights of the phase, if there are several. `bf16`: activations are bf16, as
    the weight is."""
    m, n = shape
    layout = LAYOUTS[dtype]
    mt, nt = tile_for(dtype, isa(), m)
    count = k // (2 if bf16 else min(32, layout.block))
    group = layout.group_nbytes(k)
    strips = -(-n // (nt * LANES))
    args: tuple[int, ...] = (*addresses, m, n, count)
    if (mt, nt) == expanded_tile(dtype, isa()):
        pass_rows, n_passes = rows_per_pass(m, count * ACT_BLOCK)
        rows = m if n_passes == 1 else pass_rows + MAX_TILE
        k_block = k_block_size(count, nt * expanded_nbytes(layout, isa()) * count, m, layout.scale_blocks)
        args = (*args, k_block, group, pass_rows, n_passes, *act_panels(m, isa(), 32 * layout.scale_blocks))
        grain = max(1, min(CHUNK_BYTES // (nt * group), CHUNK_MACS // (min(m, pass_rows) * nt * LANES * k)))
        scratch = (rows + mt) * nt * LANES * 4 + nt * k_block * expanded_nbytes(layout, isa())
    else:
        n_passes, nbytes = 1, max(nbytes, nt * group * strips)
        buffered = layout.block > 1 and m > 1 and nbytes >= cache_nbytes(2) and group >= BUFFERED_GROUP_BYTES
        chunk = min(BUFFERED_CHUNK_BYTES, nt * group * strips // MIN_CHUNKS) if buffered else CHUNK_BYTES
        grain = max(1, chunk // (nt * group))
        n_buffered = grain if buffered else 0
        args = (*args, count if m <= mt else k_block_size(count, nt * group, m, layout.k_multiple), group, n_buffered)
        scratch = (m + mt + m * max(1, n_buffered)) * nt * LANES * 4
    prefetch = (addresses[0], nt * group) if n_passes == 1 else (0, 0)
    kernel = f"linear:{dtype}:{mt}x{nt}" + ":bf16" * bf16
    return [Task(kernel, args, n_passes * strips, grain, scratch, prefetch, no_barrier)]


@lower("linear_glu_act")
def _(t: Tensor, at: At) -> list[Task]:
    x, gate, _ = t.src
    (m, n), k, layout = t.shape, gate.shape[1], LAYOUTS[gate.dtype]
    kernel, group = f"linear_glu:{gate.dtype}:{t.attrs['activation']}", layout.group_nbytes(k)
    if m == 1:
        args = (*map(at, t.src[1:]), at(x), at(t), m, n, k // 32, k // 32, group)
        grain = max(1, min(GLU_ROW_GRAIN, n // 32 // 8))
        return [Task(f"{kernel}:1", args, n // 32, grain, 2 * 4 * 32 * grain, (at(gate), 2 * group))]
    pass_rows, n_passes = rows_per_pass(m, k // 32 * ACT_BLOCK)
    rows = m if n_passes == 1 else pass_rows + MAX_TILE
    k_block = k_block_size(k // 32, 2 * expanded_nbytes(layout, isa()) * (k // 32), m, layout.scale_blocks)
    args = (*map(at, t.src[1:]), at(x), at(t), m, n, k // 32, k_block, group, pass_rows, n_passes)
    args = (*args, *act_panels(m, isa(), 32 * layout.scale_blocks))
    scratch = (2 * rows + MAX_TILE) * 128 + 2 * k_block * expanded_nbytes(layout, isa())
    return [Task(kernel, args, n_passes * (n // 32), 1, scratch)]


def k_block_size(count: int, nbytes: int, m: int, multiple: int) -> int:
    """Steps of k, out of `count`, in a K block, which meets all m rows before the next block.

    `nbytes`: of the weights of all steps. Blocks are equal multiples of `whole` and take at most
    half of the L1 cache. While tiles run, the next weights are prefetched; with few rows the block
    is small, because a core has few cache misses in flight."""
    parts = -(-nbytes // min(cache_nbytes(1) // 2, max(5 << 10, 250 * m)))
    return -(-count // multiple // parts) * multiple


@lower("get_rows")
def _(t: Tensor, at: At) -> list[Task]:
    table, ids = t.src
    k = table.shape[1]
    if packed(table):
        args = (at(table), at(ids), at(t), k, LAYOUTS[table.dtype].group_nbytes(k))
        return [Task(f"get_rows:{table.dtype}", args, t.shape[0], 1)]
    return [Task("get_rows:rows", (at(table), at(ids), at(t), k, 0), t.shape[0], rows_of(t)[2])]

"""Lowering of attention, RoPE and the KV cache; also of attention's gradients."""

from __future__ import annotations

from logitless.backends.cores import cores
from logitless.backends.cpu.fusion.packing import MANY_ROWS
from logitless.backends.cpu.kernels.matmul.layout import (
    ATTENTION_SPAN,
    ENCODER_KEYS,
    ENCODER_ROWS,
    LIST_TOKENS,
    act_panels,
    gemm_tile,
)
from logitless.backends.cpu.lowering.elementwise import CHUNK
from logitless.backends.cpu.lowering.registry import At, lower, lower_plain
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.backends.host import isa
from logitless.graph.dtype import KV_TYPES
from logitless.graph.ops.attention.hadamard import block_size
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.tensor import Tensor

MAX_UNIT_ROWS = 512  # most rows of a unit of attention, whose states are walked block by block
UNITS_PER_CORE = 3  # units of attention per core, given enough tokens
MAX_IDLE = 0.15  # part of the cores' time; above it, attention is split along the KV cache
MAX_SHARED_NBYTES = 32 << 20  # bytes of shared memory for the partial results
MAX_LIST_ROWS = 128  # most query heads of a unit of sparse attention, which share its keys
ATTENTION_BLOCK = 48  # kernels/attention/causal.py: BLOCK


lower_plain(
    block_starts=lambda T, size, **_: ((size,), T, 4096),
    block_cells=lambda T, size, spare, **_: ((size, spare), T, 4096),
    chunk_ends=lambda T, size, **_: ((T, size), T, 4096),
    chunk_starts=lambda T, length, size, **_: ((length, size), T, 4096),
    rope_angles=lambda T, P, magnitude, **_: ((P, bits(magnitude)), T, 8),
    mrope_angles=lambda T, P, magnitude, **_: ((P, T, bits(magnitude)), T, 8),
)


@lower("rope")
def _(t: Tensor, at: At) -> list[Task]:
    x, angles = t.src
    kind = "interleaved" if t.attrs["interleaved"] else "halves"
    args = (at(x), at(angles), at(t), x.shape[1], x.shape[2], angles.shape[2], bits(t.attrs.get("sign", 1.0)))
    return [Task(f"rope:{kind}", args, x.shape[0], max(1, CHUNK // 4 // (x.shape[1] * x.shape[2])))]


@lower("hadamard")
def _(t: Tensor, at: At) -> list[Task]:
    size = block_size(t.shape[-1])
    return [Task(f"hadamard:{size}", (at(t.src[0]), at(t)), t.size // size, CHUNK // 4 // size)]


def _fits(cache: Tensor, size: int) -> bool:
    """True for a KV cache whose heads are whole blocks of its type."""
    return cache.dtype in KV_TYPES and (not KV_TYPES[cache.dtype].bits or size % 32 == 0)


def _store(t: Tensor, at: At) -> list[Task] | None:
    cache, x, cells = t.src
    if not _fits(cache, x.shape[2]):
        return None
    args = (at(cache), at(x), at(cells), x.shape[1], x.shape[2], cache.shape[0] * PAGE)
    # prefill: its tokens share a page, and neighbouring keys share cache lines
    grain = 4 if x.shape[0] < MANY_ROWS else 16
    return [Task(f"{t.op}:{cache.dtype}", args, x.shape[0], grain)]


lower("store_k")(_store)
lower("store_v")(_store)


def _load(t: Tensor, at: At) -> list[Task] | None:
    cache, cells = t.src
    if not _fits(cache, t.shape[2]):
        return None
    args = (at(cache), at(t), at(cells), t.shape[1], t.shape[2], cache.shape[0] * PAGE)
    return [Task(f"{t.op}:{cache.dtype}", args, t.shape[0], 4)]


lower("load_k")(_load)
lower("load_v")(_load)


@lower("copy_pages")
def _(t: Tensor, at: At) -> list[Task]:
    cache, pairs = t.src
    args = (at(cache), at(pairs), pairs.shape[0], cache.nbytes // cache.shape[0], cache.shape[0])
    return [Task("copy_pages", args, 1)]


def _attention(t: Tensor, at: At) -> list[Task] | None:
    latent = "latent" in t.op
    q, k, v, tables, slot, pos = (*t.src[:2], t.src[1], *t.src[2:5]) if latent else t.src[:6]
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    if not _fits(k, size) or not _fits(v, size) or size % 2:
        return None
    group = heads // kv_heads
    args = (*map(at, (q, k, v, tables, slot, pos)), at(t), n, kv_heads, tables.shape[1], t.attrs.get("window", 0))
    args = (*args, bits(t.attrs["scale"]), bits(t.attrs.get("cap", 0.0)))
    fit = n * kv_heads // (UNITS_PER_CORE * cores())
    tokens = 32 if min(n, fit) >= 32 else max(1, min(16, n, fit))
    # neighbours of a sequence share their reads of the KV cache
    tokens = min(tokens, max(1, MAX_UNIT_ROWS // group))
    units = -(-n // tokens) * kv_heads
    parts, shared = _parts(units), _state_nbytes(-(-tables.shape[1] * PAGE // ATTENTION_SPAN) * n * heads, size)
    if shared > MAX_SHARED_NBYTES:
        parts = 1
    rows = max(tokens, kv_heads) * group
    scratch = 32 * size * 4 + rows * (32 + size + 2) * 4 + 64 + _state_nbytes(2 * rows, size)
    args = (*args, tokens, parts, cores(), n if len(pos.shape) == 2 else 0)
    if quantised := t.op == "attention_act":
        args = (*args, *act_panels(n, isa(), 32))
    if sinks := len(t.src) == 7 - latent:
        args = (*args, at(t.src[-1]))
    variant = ":act" * quantised + (":bias" if t.op == "biased_attention" else ":sinks") * sinks
    kernel = f"attention:{k.dtype}:{'keys' if latent else v.dtype}:{size}:{group}{variant}"
    if parts == 1:
        return [Task(kernel, args, units, 1, scratch)]
    joining = Task(f"attention_join:{size}:{group}{variant}", args, n, 1, _state_nbytes(group, size))
    return [Task(kernel, args, units * parts, 1, scratch, shared=shared), joining]


def _parts(units: int) -> int:
    """Parts that each of `units` units is split into, so that all cores have equal work."""
    idle = -units % cores() / (units + -units % cores())
    return -(-UNITS_PER_CORE * cores() // units) if idle > MAX_IDLE else 1


def _state_nbytes(rows: int, size: int) -> int:
    """Bytes of attention states of `rows` rows (kernels/attention/paged_attention.py)."""
    return rows * (size + PAGE + 1) * 4 + 64


lower("attention")(_attention)
lower("attention_act")(_attention)
lower("biased_attention")(_attention)
lower("latent_attention")(_attention)


@lower("sparse_attention")
@lower("sparse_latent_attention")
def _(t: Tensor, at: At) -> list[Task] | None:
    latent = t.op == "sparse_latent_attention"
    q, k, v, tables, slot, cells, *sinks = (*t.src[:2], t.src[1], *t.src[2:]) if latent else t.src
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    if not _fits(k, size) or not _fits(v, size) or size % 2:
        return None
    group = heads // kv_heads
    rows = min(group, MAX_LIST_ROWS)
    while rows > 8 and n * kv_heads * -(-group // rows) < cores():  # few tokens: heads are divided
        rows = -(-rows // 16) * 8
    units = n * kv_heads * -(-group // rows)
    args = (*map(at, (q, k, v, tables, slot, cells)), at(t), kv_heads, tables.shape[1], *cells.shape[1:], rows)
    args = (*args, bits(t.attrs["scale"]), *map(at, sinks))
    scratch = 4 * (5 * 16 * size + rows * (2 * size + 32 + 16 + 1) + 16 + 64)
    kernel = f"sparse_attention:{k.dtype}:{'keys' if latent else v.dtype}:{size}:{group}{':sinks' * bool(sinks)}"
    return [Task(kernel, args, units, 1, scratch)]


@lower("chosen_cells")
def _(t: Tensor, at: At) -> list[Task] | None:
    q, _, k, tables, *_ = t.src
    rows, heads, size = q.shape
    if not _fits(k, size) or size % 2:
        return None
    pool = t.attrs["pool"]
    args = (*map(at, t.src), at(t), tables.shape[1], t.attrs["n"], pool)
    scratch = 4 * (tables.shape[1] * PAGE // pool + 64 + 5 * 16 * size + 8 * 32) + 64
    return [Task(f"chosen_cells:{k.dtype}:{size}:{heads}", args, rows, 1, scratch)]


@lower("chosen_blocks")
def _(t: Tensor, at: At) -> list[Task] | None:
    q, k, tables, *_ = t.src
    rows, heads, size = q.shape
    if not _fits(k, size) or size % 2:
        return None
    block = t.attrs["block"]
    args = (*map(at, t.src), at(t), heads, tables.shape[1], t.attrs["n"], block, t.attrs["last"])
    scratch = 4 * (tables.shape[1] * PAGE // block + 64 + 2 * 16 * size) + 64
    return [Task(f"chosen_blocks:{k.dtype}:{size}", args, rows * heads, 1, scratch)]


HEADS_OF_UNIT = 32  # of compressed attention, whose units convert rows for themselves


@lower("compressed_attention")
def _(t: Tensor, at: At) -> list[Task] | None:
    q, k, tables, slot, pos, sinks, *more = t.src
    n, heads, size = q.shape
    if not _fits(k, size) or size % 2:
        return None
    group = min(HEADS_OF_UNIT, max(8, -(-n * heads // (UNITS_PER_CORE * cores()))), heads)
    blocks, block_tables, chosen = [*more, *(k, tables, q)[len(more) :]]
    args = (*map(at, (q, k, tables, slot, pos, sinks, blocks, block_tables, chosen)), at(t), heads, group)
    args = (*args, tables.shape[1], t.attrs["window"], t.attrs.get("size", 1), blocks.shape[1] if more else 0)
    args = (*args, chosen.shape[1] if len(more) == 3 else 0, bits(t.attrs["scale"]))
    scratch = 4 * (64 * size + group * (32 + 2 * size + 2 + PAGE + 1)) + 192
    return [Task(f"compressed_attention:{k.dtype}:{size}", args, n * -(-heads // group), 1, scratch)]


@lower("chosen_rows")
def _(t: Tensor, at: At) -> list[Task] | None:
    q, _, k, tables, *_ = t.src
    rows, heads, size = q.shape
    if not _fits(k, size) or size % 2:
        return None
    block = t.attrs["size"]
    args = (*map(at, t.src), at(t), tables.shape[1], t.attrs["n"], block, k.shape[1])
    scratch = 4 * (LIST_TOKENS * (tables.shape[1] * PAGE // block + 32) + 33 * size + 8 * 32) + 64
    tokens = max(1, min(LIST_TOKENS, rows // (UNITS_PER_CORE * cores())))
    return [Task(f"chosen_rows:{k.dtype}:{size}:{heads}", args, rows, tokens, scratch)]


@lower("block_pool")
def _(t: Tensor, at: At) -> list[Task]:
    (size, _, width), half = t.src[1].shape, t.shape[1]
    args = (*map(at, t.src), at(t), size, width, half, t.src[2].shape[1])
    return [Task("block_pool", args, t.shape[0], 1, 8 * half + 64)]


@lower("store_blocks")
def _(t: Tensor, at: At) -> list[Task] | None:
    cache, rows, cells = t.src
    if not _fits(cache, rows.shape[2]):
        return None
    args = (at(cache), at(rows), at(cells), rows.shape[2], cache.shape[0] * cache.shape[1])
    return [Task(f"store_blocks:{cache.dtype}", args, rows.shape[0], 4)]


CAUSAL, BOUNDS, FULL = range(3)  # kernels/attention/ranges.py


def _range_attention(
    t: Tensor, kind: int, reach_back: int, reach_ahead: int, at: At, bias: tuple[Tensor, ...] = ()
) -> list[Task]:
    q, k, v, seen = t.src[:4]
    length, size, n = t.attrs["length"], q.shape[2], q.shape[0]
    biases = (at(bias[0]), bias[0].shape[0] // q.shape[1]) if bias else (at(seen), 0)
    addresses = (at(q), at(k), at(v), at(seen), at(t), at(seen), *biases)
    sizes = (n, kind, length, q.shape[1], k.shape[1], size)
    attrs = (bits(t.attrs["scale"]), bits(t.attrs.get("cap", 0.0)), reach_back, reach_ahead)
    mt, nr, _ = gemm_tile(isa())
    rows = -(-ENCODER_ROWS // nr) * nr
    scratch = 4 * (2 * rows * (size + 2) + ENCODER_KEYS * (nr + size + -(-size // mt) * mt) + 64)
    args = (*addresses, *sizes, *attrs)
    return [Task("range_attention", args, n // length * q.shape[1] * -(-length // ENCODER_ROWS), 1, scratch)]


@lower("full_attention")
def _(t: Tensor, at: At) -> list[Task]:
    reach = t.attrs.get("reach", -1)
    reach = reach if reach >= 0 else t.attrs["length"]
    return _range_attention(t, FULL, reach, reach, at, t.src[4:])


@lower("causal_attention")
def _(t: Tensor, at: At) -> list[Task] | None:
    if len(t.src) > 4:  # sinks
        return None
    return _range_attention(t, BOUNDS if len(t.src[3].shape) == 2 else CAUSAL, t.attrs.get("window", 0) - 1, 0, at)


@lower("causal_attention_back")
def _(t: Tensor, at: At) -> list[Task] | None:
    _, q, k, _, start, *sinks = t.src
    if sinks:
        return None
    n, length = q.shape[0], t.attrs["length"]
    sizes = (n // length, length, q.shape[1], k.shape[1], q.shape[2])
    to_last = n if len(start.shape) == 2 else 0
    attrs = (bits(t.attrs["scale"]), t.attrs.get("window", 0), bits(t.attrs.get("cap", 0.0)), to_last)
    mt, nr, kc = gemm_tile(isa())
    tiles = max(-(-ATTENTION_BLOCK // mt) * mt * (kc + 2), (length + mt) * (ATTENTION_BLOCK + 2))
    scratch = 4 * (3 * ATTENTION_BLOCK * length + nr * kc + tiles + 64)
    args = (*map(at, t.src), at(t), *sizes, *attrs)
    return [Task("causal_attention_back", args, n // length * k.shape[1], 1, scratch)]


@lower("attention_back")
def _(t: Tensor, at: At) -> list[Task] | None:
    _, q, k, v, tables, _, _ = t.src
    if k.dtype != v.dtype or k.dtype not in ("f32", "f16"):
        return None
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[0], tables.shape[1], t.attrs.get("window", 0))
    args = (*map(at, t.src), at(t), *sizes, bits(t.attrs["scale"]), bits(t.attrs.get("cap", 0.0)))
    return [Task(f"attention_back:{k.dtype}", args, k.shape[1], 1, 12 * 16 * tables.shape[1] + 64)]

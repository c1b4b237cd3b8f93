"""Lowering of elementwise ops, norms, RoPE, the KV cache and attention."""

from __future__ import annotations

from logitless.backends.cpu.fusion.packing import MANY_ROWS
from logitless.backends.cpu.kernels.matmul.layout import ATTENTION_SPAN, act_panels
from logitless.backends.cpu.lowering.broadcast import broadcast
from logitless.backends.cpu.lowering.registry import At, lower, rewrite
from logitless.backends.cpu.threads.pool import Task, bits
from logitless.backends.host import cores, isa
from logitless.graph.ops.attention.paged_attention import PAGE
from logitless.graph.ops.elementwise import gated
from logitless.graph.tensor import Tensor

CHUNK = 8192  # elements of a chunk of elementwise work
MIN_ROW = 64  # elements
MAX_UNIT_ROWS = 512  # most rows of a unit of attention, whose states are walked block by block
UNITS_PER_CORE = 3  # units of attention per core, given enough tokens
MAX_IDLE = 0.15  # part of the cores' time; above it, attention is split along the KV cache
MAX_SHARED_NBYTES = 32 << 20  # bytes of shared memory for the partial results


def rows_of(t: Tensor) -> tuple[int, int, int]:
    """Rows of the last axis, their length, and rows of a chunk."""
    n = t.shape[-1] if t.shape else 1
    rows = 1
    for size in t.shape[:-1]:
        rows *= size
    return rows, n, max(1, CHUNK // max(n, 1))


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
lower("gate")(_binary)


rewrite("mul")(gated)


def _unary(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = flat(t)
    return [Task(f"unary:{t.op}", (at(t.src[0]), at(t), n), rows, grain)]


lower("silu")(_unary)
lower("gelu")(_unary)


@lower("glu")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    args = (at(t.src[0]), at(t.src[1]), at(t), n)
    return [Task(f"glu:{t.attrs['activation']}", args, rows, max(1, grain // 4))]


@lower("glu_clamped")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    args = (*map(at, t.src), at(t), n, bits(t.attrs["alpha"]), bits(t.attrs["limit"]))
    return [Task("glu_clamped", args, rows, max(1, grain // 4))]


@lower("scale")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    return [Task("scale", (at(t.src[0]), at(t), n, bits(t.attrs["factor"])), rows, grain)]


@lower("softcap")
def _(t: Tensor, at: At) -> list[Task]:
    rows, n, grain = rows_of(t)
    return [Task("softcap", (at(t.src[0]), at(t), n, bits(t.attrs["cap"])), rows, max(1, grain // 4))]


@lower("rms_norm")
def _(t: Tensor, at: At) -> list[Task]:
    x, w = t.src
    rows, n, grain = rows_of(t)
    if w.shape == ():
        args = (at(x), at(t), n, bits(t.attrs["eps"]), at(w))
        return [Task("rms_norm_plain", args, rows, max(1, grain // 4))]
    return [Task("rms_norm", (at(x), at(w), at(t), n, bits(t.attrs["eps"])), rows, max(1, grain // 4))]


@lower("rope_angles")
def _(t: Tensor, at: At) -> list[Task]:
    pos, frequency = t.src
    args = (at(pos), at(frequency), at(t), frequency.shape[0], bits(t.attrs["magnitude"]))
    return [Task("rope_angles", args, pos.shape[0], 8)]


@lower("rope")
def _(t: Tensor, at: At) -> list[Task]:
    x, angles = t.src
    kind = "interleaved" if t.attrs["interleaved"] else "halves"
    args = (at(x), at(angles), at(t), x.shape[1], x.shape[2], angles.shape[2], bits(t.attrs.get("sign", 1.0)))
    return [Task(f"rope:{kind}", args, x.shape[0], max(1, CHUNK // 4 // (x.shape[1] * x.shape[2])))]


def _store(t: Tensor, at: At) -> list[Task] | None:
    cache, x, cells = t.src
    if cache.dtype not in ("f32", "f16", "q8_0"):
        return None
    args = (at(cache), at(x), at(cells), x.shape[1], x.shape[2], cache.shape[0] * PAGE)
    # prefill: its tokens share a page, and neighbouring keys share cache lines
    grain = 4 if x.shape[0] < MANY_ROWS else 16
    return [Task(f"{t.op}:{cache.dtype}", args, x.shape[0], grain)]


lower("store_k")(_store)
lower("store_v")(_store)


def _load(t: Tensor, at: At) -> list[Task] | None:
    cache, cells = t.src
    if cache.dtype not in ("f32", "f16", "q8_0"):
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
    latent = t.op == "latent_attention"
    q, k, v, tables, slot, pos = (*t.src[:2], t.src[1], *t.src[2:]) if latent else t.src[:6]
    n, heads, size = q.shape
    kv_heads = k.shape[1]
    if any(cache.dtype not in ("f32", "f16", "q8_0") for cache in (k, v)) or size % 2:
        return None
    group = heads // kv_heads
    args = (*map(at, (q, k, v, tables, slot, pos)), at(t), n, kv_heads, tables.shape[1], t.attrs.get("window", 0))
    args = (*args, bits(t.attrs["scale"]), bits(t.attrs.get("cap", 0.0)))
    fit = n * kv_heads // (UNITS_PER_CORE * cores())
    tokens = 32 if min(n, fit) >= 32 else max(1, min(16, n, fit))
    # neighbours of a sequence share what is read
    tokens = min(tokens, max(1, MAX_UNIT_ROWS // group))
    units = -(-n // tokens) * kv_heads
    parts, shared = _parts(units), _state_nbytes(-(-tables.shape[1] * PAGE // ATTENTION_SPAN) * n * heads, size)
    if shared > MAX_SHARED_NBYTES:
        parts = 1
    rows = max(tokens, kv_heads) * group
    scratch = 32 * size * 4 + rows * (32 + size + 2) * 4 + 64 + _state_nbytes(2 * rows, size)
    args = (*args, tokens, parts, cores())
    if rounded := t.op == "attention_act":
        args = (*args, *act_panels(n, isa(), 32))
    if sinks := t.op == "attention_sinks":
        args = (*args, at(t.src[6]))
    then = ":act" * rounded + ":sinks" * sinks
    kernel = f"attention:{k.dtype}:{'keys' if latent else v.dtype}:{size}:{group}{then}"
    if parts == 1:
        return [Task(kernel, args, units, 1, scratch)]
    joining = Task(f"attention_join:{size}:{group}{then}", args, n, 1, _state_nbytes(group, size))
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
lower("attention_sinks")(_attention)
lower("latent_attention")(_attention)

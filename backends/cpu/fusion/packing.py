"""Packing for the GEMM kernels: constant weights, and activations that several products share.

`kernels/matmul/layout.py` describes every byte. Packing keeps every bit of a weight and about its
size. The source bytes are the GGUF file's, aligned or not:

    memory = allocate(packed_nbytes("q8_0", n, k))                     # 64-byte aligned is best
    pool.run(TaskList(pack_tasks("q8_0", gguf_address, memory_address, n, k)))"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

from logitless.backends.cpu.kernels.matmul.layout import LANES, LAYOUTS
from logitless.backends.cpu.threads.pool import Task
from logitless.backends.host import casts_to_bf16
from logitless.graph.ops.pointwise import cast
from logitless.graph.tensor import Tensor

# Ops that pack activations for a product's kernel: one node serves all products of them.
PACKS = {"quantize_act", "pack_act", "round_act", "pack_tiles", "quantize_experts", "round_experts", "pack_experts"}
# Sources that kernels read packed, by op. Every other source is unpacked before its op.
WEIGHTS = {
    "get_rows": slice(0, 1),
    "linear": slice(1, 2),
    "linear_add": slice(1, 2),
    "linear_glu": slice(1, 3),
    "linear_parts": slice(1, None),
    "matmul": slice(1, 2),
    "expert_linear": slice(1, 2),
    "expert_matmul": slice(1, 2),
    "expert_parts": slice(2, None),
}
RECENT = 8
PACK_NBYTES = 1 << 18  # bytes of weights in a chunk
UNPACK_CHUNK = 4096  # elements of a chunk

# Rows of activations from which on work is handed out in larger chunks, because fewer rows stay in
# the L2 cache. Packed float weights then go to the GEMM kernel (kernels/matmul/gemm.py), which has
# to recoup their conversion to f32.
MANY_ROWS = 64


def packed(t: Tensor) -> bool:
    """True for a constant matrix, whose bytes are a packed weight."""
    return t.op == "variable" and bool(t.attrs.get("constant")) and len(t.shape) == 2


def unpack_sources(t: Tensor) -> Tensor:
    """The node with packed weights unpacked to f32 where its kernel reads rows of elements."""
    if not any(map(packed, t.src)) or (t.op == "cast" and t.dtype == "f32"):  # such a cast unpacks
        return t
    positions = range(len(t.src))[WEIGHTS.get(t.op, slice(0))]
    src = tuple(cast(s, dtype="f32") if packed(s) and i not in positions else s for i, s in enumerate(t.src))
    return replace(t, src=src)


def takes_bf16(t: Tensor) -> bool:
    """True for a packed weight whose activations are cast to bf16."""
    return packed(t) and t.dtype == "bf16" and t.shape[1] % 2 == 0 and casts_to_bf16()


def duplicates(order: Iterable[Tensor], is_ours: Callable[[Tensor], bool]) -> dict[Tensor, Tensor]:
    """Nodes of PACKS that repeat an earlier one on this backend: {node: earlier one}.

    They have the same op, sources and attributes. Only the last RECENT packed forms are shared:
    keeping one from the forward to the backward pass costs more memory than packing it again costs
    time."""
    first: dict[Hashable, Tensor] = {}
    repeated: dict[Tensor, Tensor] = {}
    for t in order:
        if t.op in PACKS and is_ours(t):
            original = first.setdefault((t.op, t.src, *t.attrs.values()), t)
            if original is not t:
                repeated[t] = original
            elif len(first) > RECENT:
                del first[next(iter(first))]
    return repeated


def packed_nbytes(dtype: str, n: int, k: int) -> int:
    """Bytes of a packed weight of n rows and k columns.

    ValueError for a dtype or a row length that cannot be packed."""
    layout = LAYOUTS.get(dtype)
    if layout is None:
        raise ValueError(f"weights of type {dtype} cannot be packed; supported: {', '.join(LAYOUTS)}")
    if k % layout.block or k < 1 or n < 1:
        raise ValueError(f"{dtype} packs blocks of {layout.block} elements, which {n} rows of {k} do not fit")
    return -(-n // LANES) * layout.group_nbytes(k)


def pack_tasks(dtype: str, src_address: int, dst_address: int, n: int, k: int) -> list[Task]:
    """Tasks that pack n rows of GGUF blocks at one address into a packed weight at the other."""
    packed_nbytes(dtype, n, k)
    group = LAYOUTS[dtype].group_nbytes(k)
    grain = max(1, PACK_NBYTES // group)
    return [Task(f"pack:{dtype}", (src_address, dst_address, n, k, group), -(-n // LANES), grain)]


def unpack_task(dtype: str, src_address: int, dst_address: int, n: int, k: int) -> Task:
    """Task that unpacks a packed weight into n rows of k f32."""
    args = (src_address, dst_address, k, LAYOUTS[dtype].group_nbytes(k))
    return Task(f"unpack:{dtype}", args, n, max(1, UNPACK_CHUNK // k))

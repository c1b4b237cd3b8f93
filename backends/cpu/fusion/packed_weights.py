"""Packed weights: constant 2-D states in the layout that the GEMM kernels read.

`kernels/matmul/layout.py` describes every byte.

    memory = allocate(packed_nbytes("q8_0", n, k))                     # 64-byte aligned is best
    pool.run(TaskList(pack_tasks("q8_0", gguf_address, memory_address, n, k)))

Packing keeps every bit of a weight and about its size. The source bytes are the GGUF file's,
aligned or not.
"""

from __future__ import annotations

from logitless.backends.cpu.kernels.matmul.layout import LANES, LAYOUTS
from logitless.backends.cpu.threads.pool import Task

PACK_BYTES = 1 << 18  # bytes of a chunk
UNPACKED = 4096  # elements of a chunk


def packed_nbytes(dtype: str, n: int, k: int) -> int:
    """Bytes of a packed weight of n rows and k columns.

    ValueError for a dtype or a row length that cannot be packed.
    """
    layout = LAYOUTS.get(dtype)
    if layout is None:
        raise ValueError(f"weights of type {dtype} cannot be packed; known are {', '.join(LAYOUTS)}")
    if k % layout.block or k < 1 or n < 1:
        raise ValueError(f"{dtype} packs {layout.block} elements of a row, which {n} rows of {k} do not fit")
    return -(-n // LANES) * layout.group_nbytes(k)


def pack_tasks(dtype: str, src_address: int, dst_address: int, n: int, k: int) -> list[Task]:
    """Tasks that pack n rows of GGUF blocks at one address into a packed weight at the other."""
    packed_nbytes(dtype, n, k)
    group = LAYOUTS[dtype].group_nbytes(k)
    grain = max(1, PACK_BYTES // group)
    return [Task(f"pack:{dtype}", (src_address, dst_address, n, k, group), -(-n // LANES), grain)]


def unpack_task(dtype: str, src_address: int, dst_address: int, n: int, k: int) -> Task:
    """Task that unpacks a packed weight into n rows of k f32."""
    args = (src_address, dst_address, k, LAYOUTS[dtype].group_nbytes(k))
    return Task(f"unpack:{dtype}", args, n, max(1, UNPACKED // k))

"""Element types: numbers in a block, bytes of a block, numpy's type.

Block types keep the names and layouts of GGUF (`gguf.GGML_QUANT_SIZES`); plain types are numpy's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DType:
    """An element type: `block` elements along the last axis take `nbytes` bytes.

    `numpy` is None for block types and bf16. `codes`: the codebook of types whose quants are
    indices; an element is its code times the block's scale."""

    name: str
    block: int
    nbytes: int
    numpy: npt.DTypeLike | None = None
    codes: tuple[int, ...] = ()

    @property
    def quantised(self) -> bool:
        return self.block > 1


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", 1, 4, np.float32),
        DType("f16", 1, 2, np.float16),
        DType("bf16", 1, 2),
        DType("i32", 1, 4, np.int32),
        DType("u32", 1, 4, np.uint32),
        DType("q8_0", 32, 34),
        DType("q4_0", 32, 18),
        DType("q4_1", 32, 20),
        DType("q5_0", 32, 22),
        DType("q5_1", 32, 24),
        DType("iq4_nl", 32, 18, codes=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
        # OCP's E2M1, in units of 0.5. A block stores the exponent e of its scale 2^(e − 127) in 8
        # bits.
        DType("mxfp4", 32, 17, codes=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
        DType("q4_k", 256, 144),
        DType("q5_k", 256, 176),
        DType("q6_k", 256, 210),
        # Results of `quantize_act`, `pack_act` and `round_act`, in an order private to the backend
        # (backends/cpu/kernels/matmul/layout.py): 32 int8 values with their scale and forms of
        # their sum; f32 values; bf16.
        DType("q8_act", 32, 52),
        DType("f32_act", 1, 4),
        DType("bf16_act", 1, 2),
    )
}


@functools.lru_cache(1 << 16)
def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor.

    ValueError when its rows (of a KV cache: its blocks) are not whole blocks of the type."""
    d = DTYPES[dtype]
    row = math.prod(shape[1:] if len(shape) > 2 else shape[-1:])
    if d.block > 1 and (not shape or row % d.block):
        raise ValueError(f"{dtype} packs {d.block} elements, but the rows of {shape} are not a multiple of that")
    return math.prod(shape) // d.block * d.nbytes

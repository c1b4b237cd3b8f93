"""Element types: numbers in a block, bytes of a block, numpy's type, codebooks.

Block types keep the names and layouts of GGUF; plain types are numpy's. A row here makes a type
known to graphs, to the reference (`dequantize`) and to the conformance cases; each backend's table of
packed layouts has a row, too (backends/cpu/kernels/matmul/layout.py, backends/gpu/matmul/layout.py)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # --help reads this module, and numpy takes its time
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class DType:
    """An element type: `block` elements along the last axis take `nbytes` bytes.

    `numpy` is the name of numpy's type, None for block types and bf16. `codes`: the codebook of types
    whose quants are indices; an element is its code times the block's scale. `grid`: name of the
    codebook of groups of 4 or 8 elements (`grid_of`). `scales`: byte offsets of the f16 numbers of a
    block."""

    name: str
    block: int
    nbytes: int
    numpy: str | None = None
    codes: tuple[int, ...] = ()
    grid: str = ""
    scales: tuple[int, ...] = (0,)

    @property
    def quantised(self) -> bool:
        return self.block > 1

    @property
    def act_group(self) -> int:
        """Elements of an activation that share a scale in products with this type."""
        return 256 if self.block == 256 else 32


IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # OCP's, in units of 0.5

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", 1, 4, "float32"),
        DType("f16", 1, 2, "float16"),
        DType("bf16", 1, 2),
        DType("i32", 1, 4, "int32"),
        DType("u32", 1, 4, "uint32"),
        DType("q8_0", 32, 34),
        DType("q4_0", 32, 18),
        DType("q4_1", 32, 20, scales=(0, 2)),
        DType("q5_0", 32, 22),
        DType("q5_1", 32, 24, scales=(0, 2)),
        DType("q1_0", 128, 18),  # bits: −1 and 1
        DType("q2_0", 64, 18),  # quants 0 to 3 are −1 to 2
        DType("iq4_nl", 32, 18, codes=IQ4_CODES),
        # A block stores the exponent e of its scale 2^(e − 127) in 8 bits.
        DType("mxfp4", 32, 17, codes=E2M1_CODES, scales=()),
        # Four scales in 8 bits (unsigned E4M3), of 16 elements each.
        DType("nvfp4", 64, 36, codes=E2M1_CODES, scales=()),
        DType("q2_k", 256, 84, scales=(80, 82)),
        DType("q3_k", 256, 110, scales=(108,)),
        DType("q4_k", 256, 144, scales=(0, 2)),
        DType("q5_k", 256, 176, scales=(0, 2)),
        DType("q6_k", 256, 210, scales=(208,)),
        DType("iq4_xs", 256, 136, codes=IQ4_CODES),
        DType("tq1_0", 256, 54, scales=(52,)),
        DType("tq2_0", 256, 66, scales=(64,)),
        DType("iq1_s", 256, 50, grid="IQ1_S"),
        DType("iq1_m", 256, 56, grid="IQ1_S", scales=()),  # its scale is in four parts
        DType("iq2_xxs", 256, 66, grid="IQ2_XXS"),
        DType("iq2_xs", 256, 74, grid="IQ2_XS"),
        DType("iq2_s", 256, 82, grid="IQ2_S"),
        DType("iq3_xxs", 256, 98, grid="IQ3_XXS"),
        DType("iq3_s", 256, 110, grid="IQ3_S"),
        # Results of `quantize_act`, `pack_act` and `round_act`, in an order private to the backend
        # (backends/cpu/kernels/matmul/layout.py): 32 int8 values with their scale and forms of
        # their sum; f32 values; bf16.
        DType("q8_act", 32, 52),
        DType("f32_act", 1, 4),
        DType("bf16_act", 1, 2),
    )
}
BLOCK_TYPES = tuple(name for name, d in DTYPES.items() if d.quantised and not name.endswith("_act"))


@functools.cache
def grid_of(dtype: str) -> npt.NDArray[np.int8]:
    """The codebook (places, 8 or 4) of a type with a grid, which the package gguf has."""
    import numpy as np
    from gguf import quants

    kind = getattr(quants, DTYPES[dtype].grid)
    kind.init_grid()
    return np.ascontiguousarray(kind.grid[0, 0].astype(np.int8))


def dequantize(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Rows (…, bytes of a row) of a block type or bf16 as float32 (…, elements); NaN and infinity stay."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        if dtype not in ("q1_0", "q2_0"):
            from gguf import GGMLQuantizationType, quants

            return np.asarray(quants.dequantize(raw, GGMLQuantizationType[dtype.upper()]), np.float32)
        bits = 1 if dtype == "q1_0" else 2  # the package gguf has no code for these
        blocks = np.ascontiguousarray(raw).reshape(-1, DTYPES[dtype].nbytes)
        quants_of = blocks[:, 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
        values = quants_of.reshape(len(blocks), -1).astype(np.float32)
        values = 2 * values - 1 if bits == 1 else values - 1
        return (values * blocks[:, :2].copy().view(np.float16).astype(np.float32)).reshape(*raw.shape[:-1], -1)


@dataclass(frozen=True)
class KVType:
    """Layout of a page of one head in the KV cache: 16 cells of D elements.

    Plain numbers (`bits` 0): keys [D][16], values [16][D]. Of blocks of 32 elements with quants of
    `bits` bits, a page has these parts, one behind the other:

        quants   8 bits: keys [D][16] · values [16][D]. Else two in a byte: keys [D/2][16], elements
                 2i and 2i + 1 · values [16][D/2], of each block elements i and i + 16
        fifth bits of the quants of 5 bits, u32: keys [D/32][16] · values [16][D/32]
        scales f16, then minima f16 with `mins`: keys [D/32][16] · values [16][D/32]

    Rows of compressed attention (graph/ops/attention/compressed.py) are values in pages of one cell."""

    bits: int = 0
    mins: bool = False
    codes: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        """The quant of the value 0; 0 of types with minima, codes or signed quants."""
        return 0 if self.mins or self.codes or self.bits == 8 else 1 << self.bits - 1

    @property
    def scales_at(self) -> int:
        """Bytes before the scales, for each element of the head."""
        return {4: 8, 5: 10, 8: 16}[self.bits]

    @property
    def page(self) -> int:
        """Bytes of a page of blocks, for each element of the head; 0 of plain numbers."""
        return self.scales_at + 1 + self.mins if self.bits else 0

    @property
    def rotated(self) -> bool:
        """True for types of 4 and 5 bits, in which models rotate keys and values so that an outlier
        spreads over its block (graph/ops/attention/hadamard.py)."""
        return 0 < self.bits < 8


KV_TYPES: dict[str, KVType] = {
    "f32": KVType(),
    "f16": KVType(),
    "bf16": KVType(),
    "q8_0": KVType(8),
    "q5_1": KVType(5, mins=True),
    "q5_0": KVType(5),
    "q4_1": KVType(4, mins=True),
    "q4_0": KVType(4),
    "iq4_nl": KVType(4, codes=DTYPES["iq4_nl"].codes),
}


def dtype_of(numbers: npt.NDArray[Any]) -> str:
    """The type of a constant with the numbers of an array: i32, or f32."""
    return "i32" if numbers.dtype.name == "int32" else "f32"


@functools.lru_cache(1 << 16)
def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor.

    ValueError when its rows (of a KV cache: its blocks) are not whole blocks of the type."""
    d = DTYPES[dtype]
    row = math.prod(shape[1:] if len(shape) > 2 else shape[-1:])
    if d.block > 1 and (not shape or row % d.block):
        raise ValueError(f"{dtype} packs {d.block} elements, but the rows of {shape} are not a multiple of that")
    return math.prod(shape) // d.block * d.nbytes

"""`linear` for GPUs and OpenCL on a CPU: y (M, N) = x (M, K) · w (N, K)ᵀ with packed weights.

16 outputs are the lanes. The sum over k has one order for any number of rows (split_k.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from logitless.backends.gpu.language.dialect import KERNELS, Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, is_packed, lower
from logitless.backends.gpu.matmul import launch, layout, unpack, unpack_low
from logitless.backends.gpu.matmul.gemm import rows_product
from logitless.backends.gpu.matmul.linear_coop_matrix import coop_product
from logitless.backends.gpu.matmul.linear_int_dot import dot_product, normalised_product
from logitless.backends.gpu.matmul.linear_software import soft_product
from logitless.backends.gpu.matmul.split_k import SIMT_TILES, SUMS, UNIT, frame, tile_for
from logitless.graph.tensor import Tensor

CPU_TILES = [{"WG": 1, "MT": mt, "SPLIT": 1, "CHUNKS": 1} for mt in (1, 4)]


def _float_step(dtype: str) -> str:
    return f"""LF v = {unpack.float_lanes(dtype, "(g * n_k + b) * 16u")};
      UNROLL for (uint m = 0u; m < MT; m++) acc[m] = FMA(v, LSPLAT(X[xr[m] + b]), acc[m]);"""


def n_blocks(dtype: str) -> str:
    """Code that declares the number of steps over k."""
    return f"  uint n_blocks = {'n_k' if dtype in unpack.FLOATS else 'n_k / 32u'};"


def step(dtype: str) -> str:
    """One step over k, for `split_k.frame`."""
    if dtype in unpack.FLOATS:
        return _float_step(dtype)
    return unpack.block_step(dtype, lambda i: f"X[xr[m] + b * 32u + {i}u]", "acc[m]", "even[m]")


for _dtype in layout.PACKINGS:
    Kernel(
        f"linear_{_dtype}",
        launch.args(_dtype),
        launch.words(_dtype),
        n_blocks(_dtype) + frame(launch.begin(_dtype, UNIT), step(_dtype)),
        simt=[
            tile | {"PAIR": pair, "R": 1}
            for tile in SIMT_TILES
            for pair in unpack.pairs(_dtype)
            if unpack.worth(_dtype, tile, rows=(1, 4)) and (tile["MT"], tile["SPLIT"]) != (8, 32)
        ],
        cpu=[tile | {"PAIR": pair, "R": 1} for tile in CPU_TILES for pair in unpack.pairs(_dtype)],
        local=SUMS,
        functions=launch.MACROS + unpack_low.functions(_dtype),
    )
    Kernel(
        f"get_rows_{_dtype}",
        f"i32 IDS, {unpack.args(_dtype)}, w f32 Y",
        "uint n n_k wide",
        "  FOR_EACH(i, n) { uint row = UINT(IDS[i / n_k]), k = i % n_k; ELEMENT(y, row, k) Y[i] = y; }",
        functions=unpack.element(_dtype),
    )


@lower("linear")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    return _product(t, shape, t.src[1:]) if is_packed(t.src[1]) else rows_product(t, shape)


@lower("linear_parts")
@lower("linear_glu")
def _several(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    return _product(t, shape, t.src[1:])


@lower("norm_parts")
@lower("norm_glu")
def _normalised(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    parts = t.src[2:]
    dtype = parts[0].dtype
    dots = shape.dot and dtype in unpack.BLOCKS and _one_launch(parts) and has_pair(t, dtype, shape)
    return normalised_product(t, shape, parts) if dots else None


@lower("linear_add")
def _added(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    return _product(t, shape, t.src[1:2])


def _one_launch(parts: Sequence[Tensor]) -> bool:
    dtype = parts[0].dtype
    return all(is_packed(w) and w.dtype == dtype for w in parts) and len(parts) <= launch.n_parts(dtype)


def has_pair(t: Tensor, dtype: str, shape: Shape) -> bool:
    """False for a GLU whose type has no kernel of two weights for its rows."""
    if not launch.is_pair(t) or 1 in unpack.pairs(dtype):
        return True
    dots_of_a_row = shape.dot and shape.coop != 1 and t.shape[0] == 1
    return dots_of_a_row and KERNELS[f"linear_dot_{dtype}"].find(shape, MT=1, PAIR=1) is not None


def _product(t: Tensor, shape: Shape, parts: Sequence[Tensor]) -> list[Dispatch] | None:
    dtype = parts[0].dtype
    if not _one_launch(parts) or not has_pair(t, dtype, shape):
        return None
    if shape.name == "soft":
        return [soft_product(t, shape, parts)]
    if shape.dot and dtype in unpack.BLOCKS:
        many = 0 < shape.coop <= t.src[0].shape[0]
        return coop_product(t, shape, parts) if many else dot_product(t, shape, parts)
    m = t.src[0].shape[0]
    mt = 1 if m == 1 else 4 if m <= 4 or shape.name == "cpu" else shape.rows
    kernel = f"linear_{dtype}"
    if shape.name == "cpu":
        return [launch.launch(t, parts, shape, kernel, launch.Tile(mt, 1, 1), SPLIT=1)]
    tile, split = tile_for(m, mt, parts, shape, kernel, launch.is_pair(t))
    return [launch.launch(t, parts, shape, kernel, tile, SPLIT=split)]

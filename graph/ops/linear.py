"""Matrix products: y = x · wᵀ. A weight has its output rows first, as in GGUF."""

from __future__ import annotations

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES
from logitless.graph.op import Array, Case, Weight, op

ACT_BLOCK = 32  # activations that share a scale in `q8_act`


WHOLE_GROUPS = f"group > 0 and group % {ACT_BLOCK} == 0 and K % group == 0"


@op("x f32 (T, K)", "w weight (N, K)", gives="f32 (T, N)")
def linear(x: Array, w: Array) -> Array:
    """x (T, K) · w (N, K) transposed."""
    return x @ w.T


# A backend may round the activations of a quantised weight to 8 bits per group of 32 or 256: an
# error of up to max|x| / 254 each. That is 0.5 to 0.7 % of a typical result, and up to four times
# as much of the largest of few.
linear.tolerance_quantised = 3e-2


@op("a f32 (M, K)", "b weight (K, N)", gives="f32 (M, N)")
def matmul(a: Array, b: Array) -> Array:
    """a (M, K) · b (K, N)."""
    return a @ b


@op("a f32 (K, M)", "b f32 (K, N)", gives="f32 (M, N)")
def matmul_tn(a: Array, b: Array) -> Array:
    """a (K, M) transposed · b (K, N)."""
    return a.T @ b


linear.vjp(lambda g, y, x, w: (matmul(g, w), matmul_tn(g, x)))
matmul.vjp(lambda g, y, a, b: (linear(g, b), matmul_tn(a, g)))
matmul_tn.vjp(lambda g, y, a, b: (linear(b, g), matmul(a, g)))


@op("x f32 (…, K)", gives="q8_act x.shape", needs=WHOLE_GROUPS)
def quantize_act(x: Array, *, group: int = ACT_BLOCK) -> Array:
    """x (T, K) rounded to 127 steps of the largest magnitude in each `group` consecutive elements
    of a row.

    llama.cpp rounds in groups of 32 for weights in blocks of 32 (its q8_0) and of 256 for the K
    types (its q8_K)."""
    blocks = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


@op("xq q8_act (T, K)", "w blocks (N, K)", gives="f32 (T, N)")
def linear_q8(xq: Array, w: Array) -> Array:
    """`linear` of activations that are already quantised and a quantised weight."""
    return xq @ w.T


@op("x f32 (T, K)", gives="f32_act (T, K)")
def pack_act(x: Array) -> Array:
    """x (T, K) in the order that a backend's matmul reads."""
    return x


@op("xp f32_act (T, K)", "w weight (N, K)", gives="f32 (T, N)")
def linear_f32(xp: Array, w: Array) -> Array:
    """`linear` of packed activations and a weight of floats."""
    return xp @ w.T


@op("x f32 (T, K)", gives="bf16_act (-(-T // rows) * rows, K)", needs="K % 2 == 0 and rows > 0")
def round_act(x: Array, *, rows: int = 1) -> Array:
    """x (T, K), K even, rounded to bf16: to 8 significant bits, of two equally near the even one;
    with rows of zeros up to a multiple of `rows`, for a backend's tiles of so many."""
    size, exponent = np.frexp(np.concatenate([x, np.zeros((-len(x) % rows, x.shape[1]), x.dtype)]))
    rounded: Array = np.ldexp(np.rint(size * 256) / 256, exponent).astype(x.dtype)
    return rounded


@op("xr bf16_act (T, K)", "w bf16 (N, K)", gives="f32 (m, N)", needs="0 < m <= T")
def linear_bf16(xr: Array, w: Array, *, m: int) -> Array:
    """`linear` of the m rows that `round_act` was given and a weight of bf16."""
    return xr[:m] @ w.T


@op("x f32 (M, K)", gives="f32 (-(-(K if transposed else M) // rows), M if transposed else K, rows)", needs="rows > 0")
def pack_tiles(x: Array, *, rows: int, transposed: bool = False) -> Array:
    """x (M, K) as (⌈M / rows⌉, K, rows): what a tile of a matrix product reads at each k, one after
    the other.

    `transposed`: x is (K, M)."""
    x = x.T if transposed else x
    m, k = x.shape
    padded = np.concatenate([x, np.zeros((-m % rows, k), x.dtype)])
    return padded.reshape(-1, rows, k).transpose(0, 2, 1)


@op("a f32 (K, M)", "b f32 (K, N)", gives="f32 (-(-K // steps), M, N)", needs="steps > 0")
def product_parts(a: Array, b: Array, *, steps: int) -> Array:
    """`matmul_tn` of every `steps` rows of a (K, M) and b (K, N) by themselves: (⌈K / steps⌉, M, N)."""
    return np.stack([a[i : i + steps].T @ b[i : i + steps] for i in range(0, len(a), steps)])


@op(
    "tiles f32 (P, K, R)",
    "b weight (_, _)",
    gives="f32 (m, b.shape[0 if transposed else 1])",
    needs="K == b.shape[1 if transposed else 0] and m <= P * R",
)
def tiled_product(tiles: Array, b: Array, *, m: int, transposed: bool) -> Array:
    """`matmul` (or with `transposed` `linear`) of the m rows that `pack_tiles` was given."""
    a = tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])[:m]
    return a @ (b.T if transposed else b)


@op(
    "x f32 (M, N)",
    "a f32 (K, M)|(_, K, _)",
    "b f32 (K, N)",
    gives="x",
    needs="len(a.shape) == 2 or M <= a.shape[0] * a.shape[2]",
)
def add_product(x: Array, a: Array, b: Array) -> Array:
    """x (M, N) + `matmul_tn` of a (K, M), or what `pack_tiles` made of it, and b (K, N), in one pass."""
    return x + (matmul_tn.reference(a, b) if a.ndim == 2 else tiled_product.reference(a, b, m=len(x), transposed=False))


add_product.inplace = (0,)


def _case(r: np.random.Generator, dtype: str, t: int, n: int, k: int) -> Case:
    return ([r.normal(size=(t, k)), Weight(r.normal(size=(n, k)), dtype)], {})


for _dtype, _k in {"f32": 37, "f16": 50, "bf16": 65}.items():
    for _t, _n in ((1, 33), (3, 16), (8, 5), (17, 100), (67, 50)):
        linear.case(_case, _dtype, _t, _n, _k)
for _dtype in BLOCK_TYPES:
    for _t, _n in ((1, 33), (2, 16), (5, 7), (9, 48), (33, 20)):
        linear.case(_case, _dtype, _t, _n, 512)


@linear.case
def _(r: np.random.Generator) -> Case:
    return [r.normal(size=(4, 12)), r.normal(size=(21, 12))], {}  # a weight that is not a constant


matmul.case(lambda r: ([r.normal(size=(4, 6)), r.normal(size=(6, 5))], {}))


@matmul.case
def _(r: np.random.Generator) -> Case:
    # back through a weight
    return [r.normal(size=(3, 17)), Weight(r.normal(size=(17, 64)), "q8_0")], {}


matmul_tn.case(lambda r: ([r.normal(size=(6, 4)), r.normal(size=(6, 5))], {}))


# whole tiles, edges, long sums, few columns, few rows
for _m, _n, _k in ((1, 33, 20), (25, 64, 300), (40, 70, 17), (530, 9, 34), (30, 120, 300), (14, 7, 2100), (300, 20, 5)):
    linear.case(lambda r, m, n, k: ([r.normal(size=(m, k)), r.normal(size=(n, k))], {}), _m, _n, _k)
    matmul.case(lambda r, m, n, k: ([r.normal(size=(m, k)), r.normal(size=(k, n))], {}), _m, _n, _k)
    matmul_tn.case(lambda r, m, n, k: ([r.normal(size=(k, m)), r.normal(size=(k, n))], {}), _m, _n, _k)
for _dtype in ("f32", "f16", "bf16", *BLOCK_TYPES):
    matmul.case(lambda r, d: ([r.normal(size=(14, 50)), Weight(r.normal(size=(50, 512)), d)], {}), _dtype)


# A as it is, and packed for tiles of the processors that have such
for _make in (
    lambda r: [r.normal(size=(300, 31)), r.normal(size=(300, 70))],
    lambda r: [r.normal(size=(4, 300, 8)), r.normal(size=(300, 70))],
    lambda r: [r.normal(size=(6, 300, 6)), r.normal(size=(300, 70))],
):
    add_product.case(lambda r, make: ([r.normal(size=(31, 70)), *make(r)], {}), _make)

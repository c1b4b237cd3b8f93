"""Matrix products: y = x · wᵀ. A weight has its output rows first, as in GGUF."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES, DTYPES
from logitless.graph.op import Array, Case, Weight, op, require
from logitless.graph.tensor import Shape, Tensor

ACT_BLOCK = 32  # activations that share a scale in `q8_act`


def _product_shape(name: str, x: Tensor, w: Tensor) -> Shape:
    """The shape of `linear` of x (T, K) and w (N, K): (T, N)."""
    require(len(x.shape) == 2 and len(w.shape) == 2, name, "expected x (T, K) and w (N, K)", x, w)
    require(x.shape[1] == w.shape[1], name, "rows of x and of w differ in length", x, w)
    return x.shape[0], w.shape[0]


@op
def linear(x: Array, w: Array) -> Array:
    """x (T, K) · w (N, K) transposed."""
    return x @ w.T


linear.takes("x f32 (T, K)", "w weight (N, K)")


@linear.shape
def _(x: Tensor, w: Tensor) -> tuple[Shape, str]:
    shape = _product_shape("linear", x, w)
    require(x.dtype == "f32", "linear", "x must be f32", x, w)
    return shape, x.dtype


# A backend may round the activations of a quantised weight to 8 bits per group of 32 or 256: an
# error of up to max|x| / 254 each. That is 0.5 to 0.7 % of a typical result, and up to four times
# as much of the largest of few.
linear.tolerance_quantised = 3e-2


@linear.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, ...]:
    return matmul(g, w), matmul_tn(g, x)


@op
def matmul(a: Array, b: Array) -> Array:
    """a (M, K) · b (K, N)."""
    return a @ b


matmul.takes("a f32 (M, K)", "b weight (K, N)")


@matmul.shape
def _(a: Tensor, b: Tensor) -> tuple[Shape, str]:
    require(len(a.shape) == 2 and len(b.shape) == 2, "matmul", "expected a (M, K) and b (K, N)", a, b)
    require(a.shape[1] == b.shape[0], "matmul", "columns of a and rows of b differ in number", a, b)
    return (a.shape[0], b.shape[1]), a.dtype


@matmul.vjp
def _(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    return linear(g, b), matmul_tn(a, g)


@op
def matmul_tn(a: Array, b: Array) -> Array:
    """a (K, M) transposed · b (K, N)."""
    return a.T @ b


matmul_tn.takes("a f32 (K, M)", "b f32 (K, N)")


@matmul_tn.shape
def _(a: Tensor, b: Tensor) -> tuple[Shape, str]:
    require(len(a.shape) == 2 and len(b.shape) == 2, "matmul_tn", "expected a (K, M) and b (K, N)", a, b)
    require(a.shape[0] == b.shape[0], "matmul_tn", "a and b differ in rows", a, b)
    return (a.shape[1], b.shape[1]), a.dtype


@matmul_tn.vjp
def _(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    return linear(b, g), matmul(a, g)


@op
def quantize_act(x: Array, *, group: int = ACT_BLOCK) -> Array:
    """x (T, K) rounded to 127 steps of the largest magnitude in each `group` consecutive elements
    of a row.

    llama.cpp rounds in groups of 32 for weights in blocks of 32 (its q8_0) and of 256 for the K
    types (its q8_K)."""
    blocks = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


quantize_act.takes("x f32 (…, K)")


@quantize_act.shape
def _(x: Tensor, group: int = ACT_BLOCK) -> tuple[Shape, str]:
    require(x.dtype == "f32", "quantize_act", "x must be f32", x)
    require(group > 0 and group % ACT_BLOCK == 0, "quantize_act", f"groups must be a multiple of {ACT_BLOCK} long", x)
    require(x.shape[-1] % group == 0, "quantize_act", f"rows must be a multiple of {group} long", x)
    return x.shape, "q8_act"


@op
def linear_q8(xq: Array, w: Array) -> Array:
    """`linear` of activations that are already quantised and a quantised weight."""
    return xq @ w.T


linear_q8.takes("xq q8_act (T, K)", "w weight (N, K)")


@linear_q8.shape
def _(xq: Tensor, w: Tensor) -> tuple[Shape, str]:
    shape = _product_shape("linear_q8", xq, w)
    require(xq.dtype == "q8_act", "linear_q8", "x must be q8_act", xq, w)
    require(DTYPES[w.dtype].quantised, "linear_q8", "w must be quantised", xq, w)
    return shape, "f32"


@op
def pack_act(x: Array) -> Array:
    """x (T, K) in the order that a backend's matmul reads."""
    return x


pack_act.takes("x f32 (T, K)")


@pack_act.shape
def _(x: Tensor) -> tuple[Shape, str]:
    require(x.dtype == "f32", "pack_act", "x must be f32", x)
    return x.shape, "f32_act"


@op
def linear_f32(xp: Array, w: Array) -> Array:
    """`linear` of packed activations and a weight of floats."""
    return xp @ w.T


linear_f32.takes("xp f32_act (T, K)", "w weight (N, K)")


@linear_f32.shape
def _(xp: Tensor, w: Tensor) -> tuple[Shape, str]:
    shape = _product_shape("linear_f32", xp, w)
    require(xp.dtype == "f32_act", "linear_f32", "x must be f32_act", xp, w)
    return shape, "f32"


@op
def round_act(x: Array, *, rows: int = 1) -> Array:
    """x (T, K), K even, rounded to bf16: to 8 significant bits, of two equally near the even one;
    with rows of zeros up to a multiple of `rows`, for a backend's tiles of so many."""
    size, exponent = np.frexp(np.concatenate([x, np.zeros((-len(x) % rows, x.shape[1]), x.dtype)]))
    rounded: Array = np.ldexp(np.rint(size * 256) / 256, exponent).astype(x.dtype)
    return rounded


round_act.takes("x f32 (T, K)")


@round_act.shape
def _(x: Tensor, rows: int = 1) -> tuple[Shape, str]:
    require(len(x.shape) == 2 and x.dtype == "f32", "round_act", "expected x (T, K) of f32", x)
    require(x.shape[1] % 2 == 0, "round_act", "rows must be an even number long", x)
    require(rows > 0, "round_act", f"rows must be positive, not {rows}", x)
    return (-(-x.shape[0] // rows) * rows, x.shape[1]), "bf16_act"


@op
def linear_bf16(xr: Array, w: Array, *, m: int) -> Array:
    """`linear` of the m rows that `round_act` was given and a weight of bf16."""
    return xr[:m] @ w.T


linear_bf16.takes("xr bf16_act (T, K)", "w bf16 (N, K)")


@linear_bf16.shape
def _(xr: Tensor, w: Tensor, m: int) -> tuple[Shape, str]:
    _product_shape("linear_bf16", xr, w)
    require(0 < m <= xr.shape[0], "linear_bf16", f"x has not {m} rows", xr, w)
    require((xr.dtype, w.dtype) == ("bf16_act", "bf16"), "linear_bf16", "x must be bf16_act, w bf16", xr, w)
    return (m, w.shape[0]), "f32"


@op
def pack_tiles(x: Array, *, rows: int, transposed: bool = False) -> Array:
    """x (M, K) as (⌈M / rows⌉, K, rows): what a tile of a matrix product reads at each k, one after
    the other.

    `transposed`: x is (K, M)."""
    x = x.T if transposed else x
    m, k = x.shape
    padded = np.concatenate([x, np.zeros((-m % rows, k), x.dtype)])
    return padded.reshape(-1, rows, k).transpose(0, 2, 1)


pack_tiles.takes("x f32 (M, K)")


@pack_tiles.shape
def _(x: Tensor, rows: int, transposed: bool = False) -> tuple[Shape, str]:
    require(rows > 0, "pack_tiles", f"rows must be positive, not {rows}", x)
    m, k = reversed(x.shape) if transposed else x.shape
    return (-(-m // rows), k, rows), x.dtype


@op
def product_parts(a: Array, b: Array, *, steps: int) -> Array:
    """`matmul_tn` of every `steps` rows of a (K, M) and b (K, N) by themselves: (⌈K / steps⌉, M, N)."""
    return np.stack([a[i : i + steps].T @ b[i : i + steps] for i in range(0, len(a), steps)])


product_parts.takes("a f32 (K, M)", "b f32 (K, N)")


@product_parts.shape
def _(a: Tensor, b: Tensor, steps: int) -> tuple[Shape, str]:
    require(len(a.shape) == 2 and len(b.shape) == 2, "product_parts", "expected a (K, M) and b (K, N)", a, b)
    require(a.shape[0] == b.shape[0], "product_parts", "a and b differ in rows", a, b)
    require(steps > 0, "product_parts", f"steps must be positive, not {steps}", a, b)
    return (-(-a.shape[0] // steps), a.shape[1], b.shape[1]), a.dtype


@op
def tiled_product(tiles: Array, b: Array, *, m: int, transposed: bool) -> Array:
    """`matmul` (or with `transposed` `linear`) of the m rows that `pack_tiles` was given."""
    a = tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])[:m]
    return a @ (b.T if transposed else b)


tiled_product.takes("tiles f32 (P, K, R)", "b weight (_, _)")


@tiled_product.shape
def _(tiles: Tensor, b: Tensor, m: int, transposed: bool) -> tuple[Shape, str]:
    inner, n = (1, 0) if transposed else (0, 1)
    require(len(b.shape) == 2 and tiles.shape[1] == b.shape[inner], "tiled_product", "shapes disagree", tiles, b)
    require(m <= tiles.shape[0] * tiles.shape[2], "tiled_product", f"tiles have not {m} rows", tiles, b)
    return (m, b.shape[n]), tiles.dtype


@op
def add_product(x: Array, a: Array, b: Array) -> Array:
    """x (M, N) + `matmul_tn` of a (K, M), or what `pack_tiles` made of it, and b (K, N), in one pass."""
    return x + (matmul_tn.reference(a, b) if a.ndim == 2 else tiled_product.reference(a, b, m=len(x), transposed=False))


add_product.takes("x f32 (M, N)", "a f32 (…, K, _)", "b f32 (K, N)")


def _sum_shape(x: Tensor, a: Tensor, b: Tensor) -> tuple[Shape, str]:
    require(len(a.shape) in (2, 3), "add_product", "a must be a matrix or tiles", x, a, b)
    n_rows = a.shape[1] if len(a.shape) == 2 else x.shape[0]
    require(len(x.shape) == len(b.shape) == 2 and x.shape == (n_rows, b.shape[1]), "add_product", "shapes", x, a, b)
    require(a.shape[len(a.shape) - 2] == b.shape[0], "add_product", "a and b differ in k", x, a, b)
    return x.shape, x.dtype


add_product.shape(_sum_shape)
add_product.inplace = (0,)


def _case(dtype: str, t: int, n: int, k: int) -> Callable[[np.random.Generator], Case]:
    return lambda r: ([r.normal(size=(t, k)), Weight(r.normal(size=(n, k)), dtype)], {})


for _dtype, _k in {"f32": 37, "f16": 50, "bf16": 65}.items():
    for _t, _n in ((1, 33), (3, 16), (8, 5), (17, 100), (67, 50)):
        linear.case(_case(_dtype, _t, _n, _k))
for _dtype in BLOCK_TYPES:
    for _t, _n in ((1, 33), (2, 16), (5, 7), (9, 48), (33, 20)):
        linear.case(_case(_dtype, _t, _n, 512))


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
    linear.case(lambda r, m=_m, n=_n, k=_k: ([r.normal(size=(m, k)), r.normal(size=(n, k))], {}))  # type: ignore[misc]
    matmul.case(lambda r, m=_m, n=_n, k=_k: ([r.normal(size=(m, k)), r.normal(size=(k, n))], {}))  # type: ignore[misc]
    matmul_tn.case(lambda r, m=_m, n=_n, k=_k: ([r.normal(size=(k, m)), r.normal(size=(k, n))], {}))  # type: ignore[misc]
for _dtype in ("f32", "f16", "bf16", *BLOCK_TYPES):
    matmul.case(lambda r, d=_dtype: ([r.normal(size=(14, 50)), Weight(r.normal(size=(50, 512)), d)], {}))  # type: ignore[misc]


# A as it is, and packed for tiles of the processors that have such
for _make in (
    lambda r: [r.normal(size=(300, 31)), r.normal(size=(300, 70))],
    lambda r: [r.normal(size=(4, 300, 8)), r.normal(size=(300, 70))],
    lambda r: [r.normal(size=(6, 300, 6)), r.normal(size=(300, 70))],
):
    add_product.case(lambda r, make=_make: ([r.normal(size=(31, 70)), *make(r)], {}))  # type: ignore[misc]

"""Mixture of experts (Shazeer et al., 2017): routing, and rows times the weights of their experts.

A row that has k experts becomes k rows, and these are brought together by expert, so that an
expert's weights are read once for all rows that it has. `order` (3, R), for R = T · k such rows,
says how:
    order[0]  which row (t · k + j: the j-th expert of row t) stands at each place
    order[1]  the place of each row
    order[2]  the expert at each place; never falling
The experts' weights are one matrix (E · N, K), an expert's N rows after the other's."""

from __future__ import annotations

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES, DTYPES
from logitless.graph.op import Array, Case, Weight, op
from logitless.graph.ops.elementwise import broadcast_to, mul, sub, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import WHOLE_GROUPS, linear, quantize_act, round_act
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import Tensor, const

ORDER, ORDER_OF_N = "order i32 (3, R) in :R, :R, …", "order i32 (3, R) in :R, :R, :n"


@op("logits f32 (T, E)", gives="i32 (T, n) in :E", needs="0 < n <= E")
def top_experts(logits: Array, *, n: int) -> Array:
    """The n greatest of each row of logits (T, E), the greatest first: (T, n) i32. Of equal ones the first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :n]


@op("logits f32 (T, E)", "ids i32 (T, k) in :E", gives="f32 (T, k)")
def expert_weights(logits: Array, ids: Array) -> Array:
    """Weights of each row's experts: softmax over logits (T, E) at ids (T, k)."""
    chosen = np.take_along_axis(logits, ids.astype(np.int64), 1)
    e = np.exp(chosen - chosen.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@expert_weights.vjp
def _(g: Tensor, y: Tensor, logits: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
    mean = sum_to(mul(g, y), shape=(y.shape[0], 1))
    return expert_scatter(mul(y, sub(g, mean)), ids, n=logits.shape[1]), None


@op("x f32 (T, k)", "ids i32 (T, k) in :n", gives="f32 (T, n)")
def expert_scatter(x: Array, ids: Array, *, n: int) -> Array:
    """(T, n) of zeros with x (T, k) at ids (T, k)."""
    out = np.zeros((len(x), n), x.dtype)
    np.put_along_axis(out, ids.astype(np.int64), x, 1)
    return out


@op("x f32 (T, E)", "ids i32 (T, k) in :E", gives="f32 (T, k)")
def expert_gather(x: Array, ids: Array) -> Array:
    """(T, k): x (T, E) at ids (T, k)."""
    return np.take_along_axis(x, ids.astype(np.int64), 1)


expert_scatter.vjp(lambda g, y, x, ids, n: (expert_gather(g, ids), None))
expert_gather.vjp(lambda g, y, x, ids: (expert_scatter(g, ids, n=x.shape[1]), None))


@op("ids i32 (T, k) in :n", gives="i32 (3, T * k) in :T * k, :T * k, :n", needs="n > 0")
def expert_order(ids: Array, *, n: int) -> Array:
    """`order` (3, T · k) of ids (T, k), which are below n; rows of an expert stay in order."""
    flat = ids.reshape(-1)
    places = np.argsort(flat, kind="stable")
    return np.stack([places, np.argsort(places), flat[places]])


@op("x f32 (T, K)", ORDER, gives="f32 (R, K)", needs="R % T == 0")
def expert_rows(x: Array, order: Array) -> Array:
    """x (T, K) → (R, K): at each place the row whose expert it is."""
    return x[order[0] // (order.shape[1] // len(x))]


@expert_rows.vjp
def _(g: Tensor, y: Tensor, x: Tensor, order: Tensor) -> tuple[Tensor | None, ...]:
    ones = broadcast_to(const(1.0), shape=(x.shape[0], y.shape[0] // x.shape[0]))
    return expert_sum(g, ones, order), None


@op("x f32 (R, K)", "w weight (W, K)", ORDER_OF_N, gives="f32 (R, W // n)", needs="n > 0 and W % n == 0")
def expert_linear(x: Array, w: Array, order: Array, *, n: int) -> Array:
    """x (R, K), at each place times its expert's part of w (n · N, K), transposed: (R, N)."""
    out = np.empty((len(x), len(w) // n), np.result_type(x, w))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[rows] = x[rows] @ w.reshape(n, -1, w.shape[1])[expert].T
    return out


expert_linear.tolerance_quantised = linear.tolerance_quantised


@expert_linear.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return expert_matmul(g, w, order, n=n), expert_products(g, x, order, n=n), None


@op("x f32 (R, N)", "w weight (W, K)", ORDER_OF_N, gives="f32 (R, K)", needs="W == n * N")
def expert_matmul(x: Array, w: Array, order: Array, *, n: int) -> Array:
    """x (R, N), at each place times its expert's part of w (n · N, K): (R, K)."""
    out = np.empty((len(x), w.shape[1]), np.result_type(x, w))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[rows] = x[rows] @ w.reshape(n, -1, w.shape[1])[expert]
    return out


@expert_matmul.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return expert_linear(g, w, order, n=n), expert_products(x, g, order, n=n), None


@op("a f32 (R, M)", "b f32 (R, K)", ORDER_OF_N, gives="f32 (n * M, K)")
def expert_products(a: Array, b: Array, order: Array, *, n: int) -> Array:
    """(n · M, K): for each expert a (R, M) transposed times b (R, K), of its rows."""
    out = np.zeros((n, a.shape[1], b.shape[1]), np.result_type(a, b))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[expert] = a[rows].T @ b[rows]
    return out.reshape(-1, b.shape[1])


@op("y f32 (R, N)", "weights f32 (T, k)", ORDER, gives="f32 (T, N)", needs="T * k == R")
def expert_sum(y: Array, weights: Array, order: Array) -> Array:
    """(T, N): each row's sum over its experts of weights (T, k) times what they made of it, y (R, N)."""
    return (y[order[1]].reshape(*weights.shape, -1) * weights[..., None]).sum(1)


@expert_sum.vjp
def _(g: Tensor, out: Tensor, y: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor | None, ...]:
    rows, n = expert_rows(g, order), y.shape[0]
    rows_at, places = (reshape(slice_rows(order, start=i, stop=i + 1), shape=(n,)) for i in range(2))
    of_weights = get_rows(sum_to(mul(rows, y), shape=(n, 1)), places)
    placed = get_rows(reshape(weights, shape=(n, 1)), rows_at)
    return mul(rows, placed), reshape(of_weights, shape=weights.shape), None


_GATHERED = "(R % T == 0 if gather else R == T)"


def packed_types(dtype: str) -> set[str]:
    """Types of packed activations of a weight of this type."""
    if DTYPES[dtype].quantised:
        return {"q8_act"}
    return {"f32_act", "bf16_act"} if dtype == "bf16" else {"f32_act"}


@op("x f32 (T, K)", ORDER, gives="q8_act (R, K)", needs=f"{_GATHERED} and {WHOLE_GROUPS}")
def quantize_experts(x: Array, order: Array, *, gather: bool, group: int = 32) -> Array:
    """`quantize_act` of x (R, K) or, with `gather`, of `expert_rows` of x (T, K), for `expert_linear_act`."""
    return quantize_act.reference(expert_rows.reference(x, order) if gather else x, group=group)


@op("x f32 (T, K)", ORDER, gives="f32_act (R, K)", needs=_GATHERED)
def pack_experts(x: Array, order: Array, *, gather: bool) -> Array:
    """x (R, K) or, with `gather`, `expert_rows` of x (T, K), in the order that `expert_linear_act` likes."""
    return expert_rows.reference(x, order) if gather else x


@op("x f32 (T, K)", ORDER, gives="bf16_act (R, K)", needs=f"{_GATHERED} and K % 2 == 0")
def round_experts(x: Array, order: Array, *, gather: bool) -> Array:
    """`round_act` of the same."""
    return round_act.reference(expert_rows.reference(x, order) if gather else x)


@op(
    "xp f32_act|q8_act|bf16_act (R, K)",
    "w weight (W, K)",
    ORDER_OF_N,
    gives="f32 (R, W // n)",
    needs="n > 0 and W % n == 0 and xp.dtype in packed_types(w.dtype)",
)
def expert_linear_act(xp: Array, w: Array, order: Array, *, n: int) -> Array:
    """`expert_linear` of activations that are packed already."""
    return expert_linear.reference(xp, w, order, n=n)


def _ordered(ids: list[list[int]]) -> np.ndarray:
    order: np.ndarray = expert_order.reference(np.array(ids), n=5).astype(np.int32)
    return order


_FEW = [[3, 0], [0, 3], [3, 1], [0, 2], [3, 2]]  # of 5: one has four rows, one none


def _linear_case(r: np.random.Generator, dtype: str, t: int, n: int, k: int, chosen: int) -> Case:
    ids = np.stack([r.permutation(4)[:chosen] for _ in range(t)]).tolist()
    return [r.normal(size=(t * chosen, k)), Weight(r.normal(size=(4 * n, k)), dtype), _ordered(ids)], {"n": 4}


_ROWS = ((1, 2), (3, 1), (11, 2), (40, 3))  # (tokens, experts of one); of an expert: 1, 2, 4, 8, 16 and between
for _i, _dtype in enumerate(("f32", "f16", "bf16", *BLOCK_TYPES)):
    # all rows for one type of each kind, each of which the CPU compiles: `linear` has every tile of the others
    for _t, _chosen in _ROWS if _dtype in ("f32", "bf16", "q8_0", "q4_k", "mxfp4") else _ROWS[_i % 2 :][:1]:
        expert_linear.case(_linear_case, _dtype, _t, 48, 512 if _dtype in BLOCK_TYPES else 37, _chosen)
    expert_matmul.case(
        lambda r, d: ([r.normal(size=(10, 16)), Weight(r.normal(size=(80, 512)), d), _ordered(_FEW)], {"n": 5}), _dtype
    )


@expert_linear.case
def _(r: np.random.Generator) -> Case:
    # no constant weights
    return [r.normal(size=(10, 12)), r.normal(size=(5 * 7, 12)), _ordered(_FEW)], {"n": 5}


expert_matmul.case(lambda r: ([r.normal(size=(10, 7)), r.normal(size=(5 * 7, 12)), _ordered(_FEW)], {"n": 5}))
expert_products.case(lambda r: ([r.normal(size=(10, 7)), r.normal(size=(10, 12)), _ordered(_FEW)], {"n": 5}))
expert_rows.case(lambda r: ([r.normal(size=(5, 33)), _ordered(_FEW)], {}))
expert_sum.case(lambda r: ([r.normal(size=(10, 33)), r.normal(size=(5, 2)), _ordered(_FEW)], {}))
expert_order.case(lambda r: ([np.array(_FEW, np.int32)], {"n": 5}))


expert_order.case(lambda r: ([np.stack([r.permutation(128)[:8] for _ in range(70)]).astype(np.int32)], {"n": 128}))


expert_scatter.case(lambda r: ([r.normal(size=(5, 2)), np.array(_FEW, np.int32)], {"n": 5}))
expert_gather.case(lambda r: ([r.normal(size=(5, 6)), np.array(_FEW, np.int32)], {}))
expert_weights.case(lambda r: ([3 * r.normal(size=(5, 6)), np.array(_FEW, np.int32)], {}))
top_experts.case(lambda r: ([r.normal(size=(9, 60))], {"n": 8}))
top_experts.case(lambda r: ([np.round(2 * r.normal(size=(30, 20)))], {"n": 5}))  # many are equal

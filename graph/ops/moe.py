"""Mixture of experts (Shazeer et al., 2017): routing, and rows times the weights of their experts.

A row that has k experts becomes k rows, and these are brought together by expert, so that an
expert's weights are read once for all rows that it has. `order` (3, R), for R = T · k such rows,
says how:
    order[0]  which row (t · k + j: the j-th expert of row t) stands at each place
    order[1]  the place of each row
    order[2]  the expert at each place; never falling
The experts' weights are one matrix (E · N, K), an expert's N rows after the other's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES, DTYPES
from logitless.graph.op import Array, Case, Weight, op, require
from logitless.graph.ops.elementwise import broadcast_to, mul, sub, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear, quantize_act, round_act
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.tensor import Shape, Tensor, const


@op
def top_experts(logits: Array, *, n: int) -> Array:
    """The n greatest of each row of logits (T, E), the greatest first: (T, n) i32. Of equal ones the first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :n]


top_experts.takes("logits f32 (T, E)")


@top_experts.shape
def _(logits: Tensor, n: int) -> tuple[Shape, str]:
    require(len(logits.shape) == 2 and 0 < n <= logits.shape[1], "top_experts", f"has no {n} of", logits)
    return (logits.shape[0], n), "i32"


@op
def expert_weights(logits: Array, ids: Array) -> Array:
    """Weights of each row's experts: softmax over logits (T, E) at ids (T, k)."""
    chosen = np.take_along_axis(logits, ids.astype(np.int64), 1)
    e = np.exp(chosen - chosen.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


expert_weights.takes("logits f32 (T, E)", "ids i32 (T, k)")


@expert_weights.shape
def _(logits: Tensor, ids: Tensor) -> tuple[Shape, str]:
    ok = len(logits.shape) == len(ids.shape) == 2 and logits.shape[0] == ids.shape[0] and ids.dtype == "i32"
    require(ok, "expert_weights", "expected logits (T, E) and ids (T, k)", logits, ids)
    return ids.shape, logits.dtype


@expert_weights.vjp
def _(g: Tensor, y: Tensor, logits: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
    mean = sum_to(mul(g, y), shape=(y.shape[0], 1))
    return expert_scatter(mul(y, sub(g, mean)), ids, n=logits.shape[1]), None


@op
def expert_scatter(x: Array, ids: Array, *, n: int) -> Array:
    """(T, n) of zeros with x (T, k) at ids (T, k)."""
    out = np.zeros((len(x), n), x.dtype)
    np.put_along_axis(out, ids.astype(np.int64), x, 1)
    return out


expert_scatter.takes("x f32 (T, k)", "ids i32 (T, k)")


@expert_scatter.shape
def _(x: Tensor, ids: Tensor, n: int) -> tuple[Shape, str]:
    require(x.shape == ids.shape and ids.dtype == "i32", "expert_scatter", "expected x and ids (T, k)", x, ids)
    return (x.shape[0], n), x.dtype


@expert_scatter.vjp
def _(g: Tensor, y: Tensor, x: Tensor, ids: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return expert_gather(g, ids), None


@op
def expert_gather(x: Array, ids: Array) -> Array:
    """(T, k): x (T, E) at ids (T, k)."""
    return np.take_along_axis(x, ids.astype(np.int64), 1)


expert_gather.takes("x f32 (T, E)", "ids i32 (T, k)")


@expert_gather.shape
def _(x: Tensor, ids: Tensor) -> tuple[Shape, str]:
    return expert_weights.shape_rule(x, ids)


@expert_gather.vjp
def _(g: Tensor, y: Tensor, x: Tensor, ids: Tensor) -> tuple[Tensor | None, ...]:
    return expert_scatter(g, ids, n=x.shape[1]), None


@op
def expert_order(ids: Array, *, n: int) -> Array:
    """`order` (3, T · k) of ids (T, k), which are below n; rows of an expert stay in order."""
    flat = ids.reshape(-1)
    places = np.argsort(flat, kind="stable")
    return np.stack([places, np.argsort(places), flat[places]])


expert_order.takes("ids i32 (T, k)")


@expert_order.shape
def _(ids: Tensor, n: int) -> tuple[Shape, str]:
    require(n > 0, "expert_order", f"n must be positive, not {n}", ids)
    return (3, ids.shape[0] * ids.shape[1]), "i32"


@op
def expert_rows(x: Array, order: Array) -> Array:
    """x (T, K) → (R, K): at each place the row whose expert it is."""
    return x[order[0] // (order.shape[1] // len(x))]


expert_rows.takes("x f32 (T, K)", "order i32 (3, R)")


@expert_rows.shape
def _(x: Tensor, order: Tensor) -> tuple[Shape, str]:
    ok = len(x.shape) == 2 and _is_order(order) and order.shape[1] % x.shape[0] == 0
    require(ok, "expert_rows", "expected x (T, K) and order (3, T · k)", x, order)
    return (order.shape[1], x.shape[1]), x.dtype


@expert_rows.vjp
def _(g: Tensor, y: Tensor, x: Tensor, order: Tensor) -> tuple[Tensor | None, ...]:
    ones = broadcast_to(const(1.0), shape=(x.shape[0], y.shape[0] // x.shape[0]))
    return expert_sum(g, ones, order), None


@op
def expert_linear(x: Array, w: Array, order: Array, *, n: int) -> Array:
    """x (R, K), at each place times its expert's part of w (n · N, K), transposed: (R, N)."""
    out = np.empty((len(x), len(w) // n), np.result_type(x, w))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[rows] = x[rows] @ w.reshape(n, -1, w.shape[1])[expert].T
    return out


expert_linear.takes("x f32 (R, K)", "w weight (_, K)", "order i32 (3, R)")


@expert_linear.shape
def _(x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Shape, str]:
    linear.shape_rule(x, w)
    ok = n > 0 and _is_order(order) and order.shape[1] == x.shape[0] and w.shape[0] % n == 0
    require(ok, "expert_linear", f"expected x (R, K), w ({n} · N, K) and order (3, R)", x, w, order)
    return (x.shape[0], w.shape[0] // n), x.dtype


expert_linear.tolerance_quantised = linear.tolerance_quantised


@expert_linear.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return expert_matmul(g, w, order, n=n), expert_products(g, x, order, n=n), None


@op
def expert_matmul(x: Array, w: Array, order: Array, *, n: int) -> Array:
    """x (R, N), at each place times its expert's part of w (n · N, K): (R, K)."""
    out = np.empty((len(x), w.shape[1]), np.result_type(x, w))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[rows] = x[rows] @ w.reshape(n, -1, w.shape[1])[expert]
    return out


expert_matmul.takes("x f32 (R, N)", "w weight (_, K)", "order i32 (3, R)")


@expert_matmul.shape
def _(x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Shape, str]:
    ok = _is_order(order) and order.shape[1] == x.shape[0] and w.shape[0] == n * x.shape[1]
    require(ok, "expert_matmul", f"expected x (R, N), w ({n} · N, K) and order (3, R)", x, w, order)
    return (x.shape[0], w.shape[1]), x.dtype


@expert_matmul.vjp
def _(g: Tensor, y: Tensor, x: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Tensor | None, ...]:
    return expert_linear(g, w, order, n=n), expert_products(x, g, order, n=n), None


@op
def expert_products(a: Array, b: Array, order: Array, *, n: int) -> Array:
    """(n · M, K): for each expert a (R, M) transposed times b (R, K), of its rows."""
    out = np.zeros((n, a.shape[1], b.shape[1]), np.result_type(a, b))
    for expert in np.unique(order[2]):
        rows = order[2] == expert
        out[expert] = a[rows].T @ b[rows]
    return out.reshape(-1, b.shape[1])


expert_products.takes("a f32 (R, M)", "b f32 (R, K)", "order i32 (3, R)")


@expert_products.shape
def _(a: Tensor, b: Tensor, order: Tensor, n: int) -> tuple[Shape, str]:
    ok = _is_order(order) and order.shape[1] == a.shape[0] == b.shape[0]
    require(ok, "expert_products", "expected a (R, M), b (R, K) and order (3, R)", a, b, order)
    return (n * a.shape[1], b.shape[1]), a.dtype


@op
def expert_sum(y: Array, weights: Array, order: Array) -> Array:
    """(T, N): each row's sum over its experts of weights (T, k) times what they made of it, y (R, N)."""
    return (y[order[1]].reshape(*weights.shape, -1) * weights[..., None]).sum(1)


expert_sum.takes("y f32 (R, N)", "weights f32 (T, k)", "order i32 (3, R)")


@expert_sum.shape
def _(y: Tensor, weights: Tensor, order: Tensor) -> tuple[Shape, str]:
    ok = _is_order(order) and len(weights.shape) == 2 and order.shape[1] == y.shape[0]
    ok = ok and weights.shape[0] * weights.shape[1] == y.shape[0]
    require(ok, "expert_sum", "expected y (T · k, N), weights (T, k) and order (3, T · k)", y, weights, order)
    return (weights.shape[0], y.shape[1]), y.dtype


@expert_sum.vjp
def _(g: Tensor, out: Tensor, y: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor | None, ...]:
    rows, n = expert_rows(g, order), y.shape[0]
    rows_at, places = (reshape(slice_rows(order, start=i, stop=i + 1), shape=(n,)) for i in range(2))
    of_weights = get_rows(sum_to(mul(rows, y), shape=(n, 1)), places)
    placed = get_rows(reshape(weights, shape=(n, 1)), rows_at)
    return mul(rows, placed), reshape(of_weights, shape=weights.shape), None


@op
def quantize_experts(x: Array, order: Array, *, gather: bool, group: int = 32) -> Array:
    """`quantize_act` of x (R, K) or, with `gather`, of `expert_rows` of x (T, K), for `expert_linear_act`."""
    return quantize_act.reference(expert_rows.reference(x, order) if gather else x, group=group)


quantize_experts.takes("x f32 (_, K)", "order i32 (3, R)")


@quantize_experts.shape
def _(x: Tensor, order: Tensor, gather: bool, group: int = 32) -> tuple[Shape, str]:
    _require_rows("quantize_experts", x, order, gather)
    (_, k), dtype = quantize_act.shape_rule(x, group=group)
    return (order.shape[1], k), dtype


@op
def pack_experts(x: Array, order: Array, *, gather: bool) -> Array:
    """x (R, K) or, with `gather`, `expert_rows` of x (T, K), in the order that `expert_linear_act` likes."""
    return expert_rows.reference(x, order) if gather else x


pack_experts.takes("x f32 (_, K)", "order i32 (3, R)")


@pack_experts.shape
def _(x: Tensor, order: Tensor, gather: bool) -> tuple[Shape, str]:
    _require_rows("pack_experts", x, order, gather)
    return (order.shape[1], x.shape[1]), "f32_act"


@op
def round_experts(x: Array, order: Array, *, gather: bool) -> Array:
    """`round_act` of the same."""
    return round_act.reference(expert_rows.reference(x, order) if gather else x)


round_experts.takes("x f32 (_, K)", "order i32 (3, R)")


@round_experts.shape
def _(x: Tensor, order: Tensor, gather: bool) -> tuple[Shape, str]:
    _require_rows("round_experts", x, order, gather)
    (_, k), dtype = round_act.shape_rule(x)
    return (order.shape[1], k), dtype


@op
def expert_linear_act(xp: Array, w: Array, order: Array, *, n: int) -> Array:
    """`expert_linear` of activations that are packed already."""
    return expert_linear.reference(xp, w, order, n=n)


expert_linear_act.takes("xp f32_act|q8_act|bf16_act (R, K)", "w weight (_, K)", "order i32 (3, R)")


@expert_linear_act.shape
def _(xp: Tensor, w: Tensor, order: Tensor, n: int) -> tuple[Shape, str]:
    types = {"q8_act"} if DTYPES[w.dtype].quantised else {"f32_act"} | ({"bf16_act"} if w.dtype == "bf16" else set())
    require(xp.dtype in types, "expert_linear_act", f"x must be {' or '.join(sorted(types))}", xp, w)
    require(n > 0 and w.shape[0] % n == 0, "expert_linear_act", f"w has not the rows of {n} experts", xp, w)
    return (xp.shape[0], w.shape[0] // n), "f32"


def _require_rows(name: str, x: Tensor, order: Tensor, gather: bool) -> None:
    """Raise ValueError unless x has the rows that are gathered, or a row for each place of the order."""
    rows = order.shape[1]
    ok = rows % x.shape[0] == 0 if gather else rows == x.shape[0]
    require(ok, name, f"x has not the rows of an order of {rows}", x, order)


def _is_order(t: Tensor) -> bool:
    return len(t.shape) == 2 and t.shape[0] == 3 and t.dtype == "i32"


def _ordered(ids: list[list[int]]) -> np.ndarray:
    order: np.ndarray = expert_order.reference(np.array(ids), n=5).astype(np.int32)
    return order


_FEW = [[3, 0], [0, 3], [3, 1], [0, 2], [3, 2]]  # of 5: one has four rows, one none


def _linear_case(dtype: str, t: int, n: int, k: int, chosen: int) -> Callable[[np.random.Generator], Case]:
    def make(r: np.random.Generator) -> Case:
        ids = np.stack([r.permutation(4)[:chosen] for _ in range(t)]).tolist()
        return [r.normal(size=(t * chosen, k)), Weight(r.normal(size=(4 * n, k)), dtype), _ordered(ids)], {"n": 4}

    return make


_ROWS = ((1, 2), (3, 1), (11, 2), (40, 3))  # (tokens, experts of one); of an expert: 1, 2, 4, 8, 16 and between
for _i, _dtype in enumerate(("f32", "f16", "bf16", *BLOCK_TYPES)):
    # all rows for one type of each kind, each of which the CPU compiles: `linear` has every tile of the others
    for _t, _chosen in _ROWS if _dtype in ("f32", "bf16", "q8_0", "q4_k", "mxfp4") else _ROWS[_i % 2 :][:1]:
        expert_linear.case(_linear_case(_dtype, _t, 48, 512 if _dtype in BLOCK_TYPES else 37, _chosen))
    expert_matmul.case(
        lambda r, d=_dtype: ([r.normal(size=(10, 16)), Weight(r.normal(size=(80, 512)), d), _ordered(_FEW)], {"n": 5})  # type: ignore[misc]
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


@expert_order.case
def _(r: np.random.Generator) -> Case:
    return [np.stack([r.permutation(128)[:8] for _ in range(70)]).astype(np.int32)], {"n": 128}


expert_scatter.case(lambda r: ([r.normal(size=(5, 2)), np.array(_FEW, np.int32)], {"n": 5}))
expert_gather.case(lambda r: ([r.normal(size=(5, 6)), np.array(_FEW, np.int32)], {}))
expert_weights.case(lambda r: ([3 * r.normal(size=(5, 6)), np.array(_FEW, np.int32)], {}))
top_experts.case(lambda r: ([r.normal(size=(9, 60))], {"n": 8}))
top_experts.case(lambda r: ([np.round(2 * r.normal(size=(30, 20)))], {"n": 5}))  # many are equal

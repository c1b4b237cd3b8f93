"""Roofline cost of a node: the bytes that it must move and the multiply-adds that it must do.

Every source is read once and the result written once, unless the op's rule here says otherwise.
Elementwise work (a norm, a rotation) counts as no multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.backend import Rules
from logitless.graph.dtype import DTYPES, nbytes
from logitless.graph.op import OPS, Array, destination
from logitless.graph.tensor import Tensor

Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Cost:
    """Bytes moved, and multiply-adds by the type that they can be done in.

    Products with quantised weights can be done in int8, those of rows rounded to bf16 in bf16, all
    others in f32."""

    nbytes: float = 0
    int8_macs: float = 0
    f32_macs: float = 0
    bf16_macs: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, n: float) -> Cost:
        return Cost(*(n * a for a in astuple(self)))

    def seconds(self, machine: Mapping[str, float]) -> tuple[float, float]:
        """Seconds for bytes and for multiply-adds at a machine's peaks (billions a second)."""
        computing = self.int8_macs / machine["int8_gmac_s"] + self.f32_macs / machine["f32_gmac_s"]
        computing += self.bf16_macs / machine["bf16_gmac_s"] if self.bf16_macs else 0
        return self.nbytes / machine["read_gb_s"] / 1e9, computing / 1e9


def macs_of(n: float, dtype: str, *, rounded: bool = False) -> Cost:
    """Cost of n multiply-adds with a weight of this type; `rounded`: of rows rounded to bf16, as it is."""
    if rounded:
        return Cost(bf16_macs=n)
    return Cost(int8_macs=n) if DTYPES[dtype].quantised else Cost(f32_macs=n)


COSTS = Rules[Callable[[Tensor, Feeds], Cost]]()


def cost(t: Tensor, feeds: Feeds) -> Cost:
    """The cost of a node in a run with these feeds (attention depends on their positions)."""
    rule = COSTS.get(t.op)
    return rule(t, feeds) if rule else Cost(_moved(t))


def _moved(t: Tensor) -> int:
    written = destination(t)
    return t.nbytes * (written is None) + sum(s.nbytes for s in t.src if s is not written)


# Sources that are matrices: each of their elements is multiplied with each row.
MATRICES = {
    **dict.fromkeys(
        ("linear", "linear_q8", "linear_f32", "linear_bf16", "linear_add", "linear_q8_add", "matmul", "tiled_product"),
        slice(1, 2),
    ),
    **dict.fromkeys(("linear_glu", "linear_glu_act"), slice(1, 3)),
    "linear_parts": slice(1, None),
    "norm_parts": slice(2, None),
    "norm_glu": slice(2, 4),
}


def _product(t: Tensor, _: Feeds) -> Cost:
    rows = t.shape[0] if len(t.shape) == 2 else t.src[0].shape[0]
    rounded = t.src[0].dtype == "bf16_act"
    met = (macs_of(rows * w.size, w.dtype, rounded=rounded) for w in t.src[MATRICES[t.op]])
    return sum(met, Cost(_moved(t)))


COSTS.update(dict.fromkeys(MATRICES, _product))


def expected_expert_fraction(n: int, n_used: int, n_rows: int) -> float:
    """Expected fraction of n experts in use when each row routes to `n_used` of them at random."""
    return 1 - (1 - n_used / n) ** n_rows


def _expert_product(t: Tensor, _: Feeds) -> Cost:
    """A product with experts' weights; only those of experts in use (routed at random) are read."""
    n, several = t.attrs["n"], t.op == "expert_parts"
    weights, rows = (t.src[2:], t.src[1].shape[1]) if several else (t.src[1:2], t.src[2].shape[1])
    macs = rows * sum(w.size for w in weights) // n
    order = t.src[1 if several else 2]
    n_used = order.src[0].shape[1] if order.op == "expert_order" else 1
    unread = (1 - expected_expert_fraction(n, n_used, rows // n_used)) * sum(w.nbytes for w in weights)
    return Cost(_moved(t) - unread) + macs_of(macs, weights[0].dtype, rounded=t.src[0].dtype == "bf16_act")


COSTS.update(dict.fromkeys(("expert_linear", "expert_linear_act", "expert_parts"), _expert_product))


@COSTS.of("get_rows")
def _(t: Tensor, _: Feeds) -> Cost:
    table, ids = t.src
    return Cost(nbytes(table.dtype, t.shape) + ids.nbytes + t.nbytes)


def _store(t: Tensor, _: Feeds) -> Cost:
    cache, *others = t.src
    return Cost(sum(s.nbytes for s in others) + math.prod(others[0].shape) * _element(cache))


COSTS.update(dict.fromkeys(("store_k", "store_v", "store_k_rope"), _store))


def _value(t: Tensor, feeds: Feeds) -> Array:
    """Indices that are an input, or computed from one."""
    if t.op == "feed":
        return feeds[t.name]
    return np.asarray(OPS[t.op].reference(*(_value(s, feeds) for s in t.src), **t.attrs))


def _attention(t: Tensor, feeds: Feeds) -> Cost:
    """Attention reads the cells visible to its tokens; tokens of a sequence share one read."""
    caches = t.src[1:2] if t.op == "latent_attention" else t.src[1:3]
    q, k, slot, pos = *t.src[:2], *t.src[len(caches) + 2 : len(caches) + 4]
    seen, window = _value(pos, feeds).astype(np.int64), t.attrs.get("window") or np.iinfo(np.int64).max
    last, own = seen if seen.ndim == 2 else (seen, seen)
    first = np.maximum(own - window, -1)  # the cell before its visible cells
    slots = feeds[slot.name]
    read = sum(int(last[slots == s].max() - first[slots == s].min()) for s in np.unique(slots))
    cell = k.shape[1] * k.shape[2] * sum(map(_element, caches))
    return Cost(q.nbytes + t.nbytes + read * cell, f32_macs=2 * math.prod(q.shape[1:]) * int((last - first).sum()))


_PAGED = ("attention", "attention_act", "attention_rope", "biased_attention", "latent_attention")
COSTS.update(dict.fromkeys(_PAGED, _attention))


def _sparse_attention(t: Tensor, feeds: Feeds) -> Cost:
    """Each token reads the cells of its lists, which count as full."""
    n_caches = 2 if t.op == "sparse_attention" else 1
    q, caches, chosen = t.src[0], t.src[1 : 1 + n_caches], t.src[3 + n_caches]
    cell, n = caches[0].shape[1] * caches[0].shape[2] * sum(map(_element, caches)), chosen.shape[2]
    return Cost(q.nbytes + t.nbytes + chosen.nbytes + q.shape[0] * n * cell, f32_macs=2 * q.size * n)


COSTS.update(dict.fromkeys(("sparse_attention", "sparse_latent_attention"), _sparse_attention))


@COSTS.of("full_attention")
def _(t: Tensor, _: Feeds) -> Cost:
    reach, length = t.attrs.get("reach", -1), t.attrs["length"]
    seen = min(length, 2 * reach + 1) if reach >= 0 else length
    return Cost(_moved(t), f32_macs=2 * t.size * seen)


def cost_without_feeds(t: Tensor) -> Cost:
    """The cost of a node before a run: attention over a KV cache counts as its bytes."""
    rule = COSTS.get(t.op)
    return Cost(_moved(t)) if rule is None or rule is _attention else rule(t, {})


def _element(t: Tensor) -> float:
    return t.nbytes / t.size

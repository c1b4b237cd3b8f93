"""Operator fusion on GPUs (graph/fusion.py): nodes that one launch computes together.

A launch costs thousands of multiplications. A fused node has the bits of the nodes alone: the same
sums in the same order, for any number of rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from logitless.backends.gpu.lowering import is_packed
from logitless.backends.gpu.matmul import launch, layout, moe_linear
from logitless.graph.fusion import FusionRules, IsOurs, Sole, fuse_patterns, join_products
from logitless.graph.ops.fused import (
    attention_rope,
    expert_parts,
    linear_add,
    linear_glu,
    linear_parts,
    store_k_rope,
)
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor

FUSIONS = FusionRules()
fusion = FUSIONS.of


def fuse(fetches: Sequence[Tensor], is_ours: IsOurs, refused: set[str]) -> tuple[Tensor, ...]:
    """The same values from fewer nodes. `is_ours`: true for nodes that run on this device;
    `refused`: ops that must not.
    """
    # A product that no pattern contains is a part of its siblings' launch.
    fetches, is_ours = fuse_patterns(fetches, toposort(fetches), FUSIONS, is_ours, refused=refused)
    order = toposort(fetches)
    return join_products(fetches, order, _siblings(order, is_ours, refused), _join)


def _is_packed_product(t: Tensor) -> bool:
    return t.op == "linear" and is_packed(t.src[1]) and layout.packs(t.src[1])


@fusion("glu")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """GLU with its two products."""
    gate, up = t.src
    if gate is up or not all(sole(s, "linear") and _is_packed_product(s) for s in t.src):
        return None
    if gate.src[0] is not up.src[0] or gate.src[1].dtype != up.src[1].dtype or gate.shape != up.shape:
        return None
    return linear_glu(*gate.src, up.src[1], activation=t.attrs["activation"], name=t.name)


@fusion("add")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """A product with a sum; the other operand has its shape, or is one row."""
    for product, other in (t.src, t.src[::-1]):
        fits = t.shape == product.shape and other.dtype == "f32" and other.shape in (product.shape, product.shape[1:])
        if fits and product is not other and sole(product, "linear") and _is_packed_product(product):
            return linear_add(*product.src, other, name=t.name)
    return None


@fusion("store_k")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    cache, keys, cells = t.src
    if not sole(keys, "rope") or t.dtype == "q8_0":
        return None
    return store_k_rope(cache, keys.src[0], cells, keys.src[1], **keys.attrs)


@fusion("attention")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """Attention with RoPE of its queries."""
    q, *others = t.src
    if not sole(q, "rope"):
        return None
    return attention_rope(q.src[0], *others, q.src[1], **q.attrs, **t.attrs, name=t.name)


def _siblings(order: Sequence[Tensor], is_ours: IsOurs, refused: set[str]) -> dict[Tensor, list[Tensor]]:
    """Groups of products of the same activations by weights of one type, as many as a launch
    takes.

    Expert products gain alone, too: the launch sorts the rows by expert itself.
    """
    families: dict[tuple[str, Tensor, str], list[Tensor]] = defaultdict(list)
    for t in order:
        whole = "linear_parts" if t.op == "linear" else "expert_parts"
        if is_ours(t) and whole not in refused and (_is_packed_product(t) or _gathers(t, is_ours)):
            families[whole, t.src[0], t.src[1].dtype].append(t)
    groups: dict[Tensor, list[Tensor]] = {}
    for (whole, _, dtype), members in families.items():
        n = launch.n_parts(dtype) if whole == "linear_parts" else moe_linear.PARTS
        for i in range(0, len(members), n):
            if len(group := members[i : i + n]) > 1 or whole == "expert_parts":
                groups.update((t, group) for t in group)
    return groups


def _gathers(t: Tensor, is_ours: IsOurs) -> bool:
    """True if an expert product's rows are sorted by expert for such products alone."""
    if t.op != "expert_linear" or t.src[0].op != "expert_rows" or not moe_linear.whole_groups(t.src[1], t.attrs["n"]):
        return False
    return is_ours(t.src[0]) and t.src[0].src[1] is t.src[2]


def _join(first: Tensor, group: Sequence[Tensor]) -> Tensor:
    x, weights = first.src[0], [s.src[1] for s in group]
    return linear_parts(x, *weights) if first.op == "linear" else expert_parts(*x.src, *weights, n=first.attrs["n"])

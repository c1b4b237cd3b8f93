"""Operator fusion on GPUs (graph/fusion.py): nodes that one launch computes together.

A launch costs thousands of multiplications. A fused node has the bits of the nodes alone: the same
sums in the same order, for any number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from logitless.backends.gpu.language.dialect import SIMT, Shape
from logitless.backends.gpu.lowering import LOWERINGS, is_packed
from logitless.backends.gpu.matmul import launch, layout, moe_linear
from logitless.backends.gpu.matmul.linear import has_pair
from logitless.graph.fusion import FusionRules, IsOurs, Sole, fuse_patterns, join_products
from logitless.graph.ops.attention.paged_attention import attention
from logitless.graph.ops.fused import (
    attention_rope,
    expert_parts,
    linear_add,
    linear_glu,
    linear_parts,
    norm_glu,
    norm_parts,
    store_k_rope,
)
from logitless.graph.ops.shape import after
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor

FUSIONS = FusionRules()
fusion = FUSIONS.of


def fuse(fetches: Sequence[Tensor], is_ours: IsOurs, refused: set[str], shape: Shape = SIMT) -> tuple[Tensor, ...]:
    """The same values from fewer nodes. `is_ours`: true for nodes that run on this device;
    `refused`: ops that must not."""
    rules = FusionRules({**FUSIONS, "glu": lambda t, sole: _glu_of_products(t, sole, shape)})
    fetches, is_ours = fuse_patterns(fetches, toposort(fetches), rules, is_ours, refused=refused)
    rules = FusionRules({"linear_glu": lambda t, sole: _glu_of_norm(t, sole, shape)})
    fetches, is_ours = fuse_patterns(fetches, toposort(fetches), rules, is_ours, refused=refused)
    order = toposort(fetches)
    norms = set() if "norm_parts" in refused else _norms_of_products(order, fetches, is_ours, shape)

    def join(first: Tensor, group: Sequence[Tensor]) -> Tensor:
        x, weights = first.src[0], [s.src[1] for s in group]
        if first.op != "linear":
            return expert_parts(*x.src, *weights, n=first.attrs["n"])
        if group[0].src[0] in norms:
            normalised = norm_parts(*x.src, *weights, **x.attrs)
            if _has_kernel(normalised, shape):
                return normalised
        return linear_parts(x, *weights)

    # A product that no pattern contains is a part of its siblings' launch.
    return join_products(fetches, order, _siblings(order, is_ours, refused, norms), join)


def _norms_of_products(
    order: Sequence[Tensor], fetches: Sequence[Tensor], is_ours: IsOurs, shape: Shape
) -> set[Tensor]:
    """Norms that nothing reads but products whose launches can contain them."""
    readers: dict[Tensor, list[Tensor]] = defaultdict(list)
    for t in order:
        for s in t.src:
            readers[s].append(t)

    def contains(t: Tensor, x: Tensor) -> bool:
        return t.op == "linear" and is_ours(t) and _has_kernel(norm_parts(*x.src, t.src[1], **x.attrs), shape)

    ours = [x for x in order if x.op == "rms_norm" and _has_weights(x) and is_ours(x) and x not in fetches]
    return {x for x in ours if all(contains(t, x) for t in readers[x])}


def _has_weights(norm: Tensor) -> bool:
    """True unless one number stands for the norm's weights."""
    return norm.src[1].shape == norm.shape[-1:]


def _has_kernel(t: Tensor, shape: Shape) -> bool:
    return LOWERINGS[t.op](t, shape) is not None


def _glu_of_norm(t: Tensor, sole: Sole, shape: Shape) -> Tensor | None:
    x, *weights = t.src
    if not sole(x, "rms_norm") or not _has_weights(x):
        return None
    normalised = norm_glu(*x.src, *weights, **x.attrs, **t.attrs, name=t.name)
    return normalised if _has_kernel(normalised, shape) else None


def _is_packed_product(t: Tensor) -> bool:
    return t.op == "linear" and is_packed(t.src[1]) and layout.packs(t.src[1])


def _glu_of_products(t: Tensor, sole: Sole, shape: Shape) -> Tensor | None:
    """GLU with its two products."""
    gate, up = t.src
    if gate is up or not all(sole(s, "linear") and _is_packed_product(s) for s in t.src):
        return None
    dtype = gate.src[1].dtype
    if gate.src[0] is not up.src[0] or dtype != up.src[1].dtype or gate.shape != up.shape:
        return None
    gated = linear_glu(*gate.src, up.src[1], activation=t.attrs["activation"], name=t.name)
    return gated if has_pair(gated, dtype, shape) else None


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
    if not sole(keys, "rope") or t.dtype not in ("f32", "f16"):
        return None
    return store_k_rope(cache, keys.src[0], cells, keys.src[1], **keys.attrs)


@fusion("attention")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """Attention with RoPE of its queries. Its keys are stored when their values are there, too: in one launch."""
    q, k, v, *others = t.src
    if sole(k, "store_k_rope") and sole(v, "store_v"):
        cache, keys, *places = k.src
        k = store_k_rope(cache, after(keys, v.src[1]), *places, **k.attrs)
    if sole(q, "rope"):
        return attention_rope(q.src[0], k, v, *others, q.src[1], **q.attrs, **t.attrs, name=t.name)
    return attention(q, k, v, *others, **t.attrs, name=t.name) if k is not t.src[1] else None


def _siblings(
    order: Sequence[Tensor], is_ours: IsOurs, refused: set[str], norms: set[Tensor]
) -> dict[Tensor, list[Tensor]]:
    """Groups of products of the same activations by weights of one type, as many as a launch
    takes.

    Some gain alone, too: launches that sort rows by expert, or contain one of these norms."""
    families: dict[tuple[str, Tensor, str], list[Tensor]] = defaultdict(list)
    for t in order:
        whole = "linear_parts" if t.op == "linear" else "expert_parts"
        if is_ours(t) and whole not in refused and (_is_packed_product(t) or _gathers(t, is_ours)):
            families[whole, t.src[0], t.src[1].dtype].append(t)
    groups: dict[Tensor, list[Tensor]] = {}
    for (whole, _, dtype), members in families.items():
        n = launch.n_parts(dtype) if whole == "linear_parts" else moe_linear.PARTS
        for i in range(0, len(members), n):
            if len(group := members[i : i + n]) > 1 or whole == "expert_parts" or group[0].src[0] in norms:
                groups.update((t, group) for t in group)
    return groups


def _gathers(t: Tensor, is_ours: IsOurs) -> bool:
    """True if an expert product's rows are sorted by expert for such products alone."""
    if t.op != "expert_linear" or t.src[0].op != "expert_rows" or not moe_linear.whole_groups(t.src[1], t.attrs["n"]):
        return False
    return is_ours(t.src[0]) and t.src[0].src[1] is t.src[2]

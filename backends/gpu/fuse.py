"""Node fusion: nodes that one launch computes together. A launch costs thousands of
multiplications.

A fused node has the bits of the nodes alone: the same sums in the same order, for any number of
rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from logitless.backends.gpu.lowering import is_packed
from logitless.backends.gpu.matmul import launch, layout, moe_linear
from logitless.graph.ops.fused import (
    attention_rope,
    attention_sinks_rope,
    expert_parts,
    linear_add,
    linear_glu,
    linear_parts,
    slice_of_product,
    store_k_rope,
)
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, with_sources

Mine = Callable[[Tensor], bool]
TURNING = {"attention": attention_rope, "attention_sinks": attention_sinks_rope}  # what turns its queries, too


def fuse(fetches: Sequence[Tensor], mine: Mine, refused: set[str]) -> tuple[Tensor, ...]:
    """The same values from fewer nodes. `mine`: whether a node runs on this device;
    `refused`: ops that must not.
    """
    order = toposort(fetches)
    readers = Counter(s for t in order for s in t.src)
    readers.update(f for f in fetches)

    def alone(t: Tensor, op: str) -> bool:
        """True if t is such a node of this device with a single reader."""
        return t.op == op and mine(t) and readers[t] == 1

    def product_alone(t: Tensor) -> bool:
        return alone(t, "linear") and is_packed(t.src[1]) and layout.packs(t.src[1])

    replacements: dict[Tensor, Tensor] = {}  # by the old node
    inside: set[Tensor] = set()  # products that another node contains

    def now(t: Tensor) -> Tensor:
        return replacements.get(t, t)

    for t in order:  # first what takes a product in, because a product that stays is a part of its siblings' launch
        if not mine(t):
            continue
        if t.op == "glu" and "linear_glu" not in refused and all(map(product_alone, t.src)) and _alike(*t.src):
            inside.update(t.src)
        elif t.op == "add" and "linear_add" not in refused and (product := _added(t, product_alone)) is not None:
            inside.add(product)
    siblings = _siblings(order, mine, inside, refused)
    for t in order:
        src = tuple(map(now, t.src))
        node = with_sources(t, src)
        if not mine(t) or t in inside:
            pass
        elif t.op == "glu" and t.src[0] in inside:
            x, gate, up = (*src[0].src, src[1].src[1])
            node = linear_glu(x, gate, up, activation=t.attrs["activation"], name=t.name)
        elif t.op == "add" and (product := next((s for s in t.src if s in inside), None)) is not None:
            other = now(next(s for s in t.src if s is not product))
            node = linear_add(*now(product).src, other, name=t.name)
        elif t in siblings:
            node = _part(t, siblings[t], now, replacements)
        elif t.op == "store_k" and alone(t.src[1], "rope") and "store_k_rope" not in refused and t.dtype != "q8_0":
            turned = src[1]
            node = store_k_rope(src[0], turned.src[0], src[2], turned.src[1], **turned.attrs)
        elif t.op in TURNING and alone(t.src[0], "rope") and TURNING[t.op].name not in refused:
            x, angles = src[0].src
            node = TURNING[t.op](x, *src[1:], angles, **src[0].attrs, **t.attrs, name=t.name)
        replacements[t] = node
    return tuple(map(now, fetches))


def _alike(a: Tensor, b: Tensor) -> bool:
    """True if two products have the same activations, type and shape."""
    return a.src[0] is b.src[0] and a.src[1].dtype == b.src[1].dtype and a.shape == b.shape and a is not b


def _added(t: Tensor, product_alone: Callable[[Tensor], bool]) -> Tensor | None:
    """The product that an `add` can contain; the other operand has its shape, or is one row."""
    for mine, other in (t.src, t.src[::-1]):
        fits = t.shape == mine.shape and other.dtype == "f32" and other.shape in (mine.shape, mine.shape[1:])
        if fits and product_alone(mine) and mine is not other:
            return mine
    return None


def _siblings(
    order: Sequence[Tensor], mine: Mine, inside: set[Tensor], refused: set[str]
) -> dict[Tensor, list[Tensor]]:
    """Groups of products of the same activations by weights of one type, as many as a launch
    takes.

    Expert products gain alone, too: the launch sorts the rows by expert itself.
    """
    families: dict[tuple[str, Tensor, str], list[Tensor]] = defaultdict(list)
    for t in order:
        whole = "linear_parts" if t.op == "linear" else "expert_parts"
        fits = t.op == "linear" and is_packed(t.src[1]) and layout.packs(t.src[1])
        if mine(t) and t not in inside and whole not in refused and (fits or _gathers(t, mine)):
            families[whole, t.src[0], t.src[1].dtype].append(t)
    groups: dict[Tensor, list[Tensor]] = {}
    for (whole, _, dtype), members in families.items():
        n = launch.n_parts(dtype) if whole == "linear_parts" else moe_linear.PARTS
        for i in range(0, len(members), n):
            if len(group := members[i : i + n]) > 1 or whole == "expert_parts":
                groups.update((t, group) for t in group)
    return groups


def _gathers(t: Tensor, mine: Mine) -> bool:
    """True if an expert product's rows are sorted by expert for such products alone."""
    if t.op != "expert_linear" or t.src[0].op != "expert_rows" or not moe_linear.whole_groups(t.src[1], t.attrs["n"]):
        return False
    return mine(t.src[0]) and t.src[0].src[1] is t.src[2]


def _part(
    t: Tensor, group: list[Tensor], now: Callable[[Tensor], Tensor], replacements: dict[Tensor, Tensor]
) -> Tensor:
    """A product as a slice of its group's results."""
    first = group[0]
    if t is not first:
        whole = replacements[first].src[0].src[0]
    elif t.op == "linear":
        whole = linear_parts(now(t.src[0]), *(s.src[1] for s in group))
    else:
        rows = now(t.src[0])
        whole = expert_parts(*rows.src, *(s.src[1] for s in group), n=t.attrs["n"])
    return slice_of_product(whole, group, t)

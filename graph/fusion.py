"""Operator fusion: patterns of nodes become one node with one kernel, and the same bits.

A backend has a table of rules, each for the op of a pattern's last node. A rule sees nodes as the
rules before it left them. It returns the fused node, or None:

    @RULES.of("quantize_act")
    def _(t, sole): ...                 # sole(s, "glu"): s is a glu that only this pattern reads"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from logitless.graph.backend import Rules
from logitless.graph.ops.fused import slice_of_product
from logitless.graph.order import rebuild
from logitless.graph.tensor import Tensor

IsOurs = Callable[[Tensor], bool]  # true for nodes that run on the backend that fuses
Sole = Callable[[Tensor, str], bool]
FusionRules = Rules[Callable[[Tensor, Sole], Tensor | None]]
NONE: Mapping[Tensor, Tensor] = MappingProxyType({})


def fuse_patterns(
    fetches: Sequence[Tensor],
    order: Iterable[Tensor],
    rules: FusionRules,
    is_ours: IsOurs,
    *,
    refused: Collection[str] = (),
    repeated: Mapping[Tensor, Tensor] = NONE,
) -> tuple[tuple[Tensor, ...], IsOurs]:
    """Apply the rules to a sorted graph: the new fetches, and which of the new nodes are ours.

    `refused`: fused ops that may not be used. `repeated`: nodes to drop, and the equal ones to
    read instead."""
    readers = Counter([repeated.get(s, s) for t in order if t not in repeated for s in t.src])
    readers.update([repeated.get(f, f) for f in fetches])
    origins: dict[Tensor, Tensor] = {}  # new node → old node
    new: dict[Tensor, Tensor] = {}

    def origin(t: Tensor) -> Tensor:
        return origins.get(t, t)

    def sole(t: Tensor, op: str) -> bool:
        return t.op == op and is_ours(origin(t)) and readers[origin(t)] == 1

    def replace(t: Tensor, node: Tensor) -> Tensor:
        if t in repeated:
            return new[repeated[t]]
        rule = rules.get(t.op)
        if rule is not None and is_ours(t):
            fused = rule(node, sole)
            node = node if fused is None or fused.op in refused else fused
        if node is not t:
            origins[node] = t
        return node

    rebuild(order, replace, new)
    return tuple([new[f] for f in fetches]), lambda t: is_ours(origin(t))


def join_products(
    fetches: Sequence[Tensor],
    order: Iterable[Tensor],
    group_of: Mapping[Tensor, Sequence[Tensor]],
    join: Callable[[Tensor, Sequence[Tensor]], Tensor],
) -> tuple[Tensor, ...]:
    """Replace groups of products by slices of one node each; the new fetches.

    `join(node, group)` makes that node; `node` is the group's first one with its new sources."""
    joined: dict[Tensor, Tensor] = {}  # first of a group → its node

    def replace(t: Tensor, node: Tensor) -> Tensor:
        group = group_of.get(t)
        if group is None:
            return node
        if t is group[0]:
            joined[t] = join(node, group)
        return slice_of_product(joined[group[0]], group, t)

    new = rebuild(order, replace)
    return tuple([new[f] for f in fetches])

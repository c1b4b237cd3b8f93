"""Products of the same few activations as one node (`linear_parts`): their instructions need not wait for each other.

With many rows each of them keeps all threads busy for long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from logitless.backends.cpu.fusion.packing import MANY_ROWS, packed
from logitless.graph.ops.fused import slice_of_product
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, with_sources

FUSED = ("linear_q8", "linear_f32", "linear_bf16")


def fuse(fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> tuple[Tensor, ...]:
    """The same values, bit by bit. `mine`: whether a node runs on this backend."""
    order = toposort(fetches)
    families: dict[Tensor, list[Tensor]] = defaultdict(list)  # by their activations
    for t in order:
        if t.op in FUSED and packed(t.src[1]) and t.shape[0] < MANY_ROWS and mine(t):
            families[t.src[0]].append(t)
    family_of = {t: family for family in families.values() if len(family) > 1 for t in family}
    if not family_of:
        return tuple(fetches)
    made: dict[Tensor, Tensor] = {}  # by the old node
    wholes: dict[Tensor, Tensor] = {}  # by the old first of a family
    for t in order:
        node = with_sources(t, tuple([made[s] for s in t.src]))
        if (family := family_of.get(t)) is not None:
            if t is family[0]:
                size = sum(s.shape[0] * s.shape[1] for s in family)
                wholes[t] = Tensor("linear_parts", (node.src[0], *(s.src[1] for s in family)), (size,), t.dtype)
            node = slice_of_product(wholes[family[0]], family, t)
        made[t] = node
    return tuple(made[f] for f in fetches)

"""Nodes that are one: rounded activations and what makes them, products and the sums that they go to. Of prompts, for
what lies between would go to memory and back; of one row, where each node is a stage that threads wait for.

A rule is for the last of its nodes, as this backend's rewriting left them. What is fused gets the bits that it gets
alone, for any number of rows (batch invariance), so a rule is free to look at how many there are.

    @fusion("quantize_act")
    def _(t, alone): return the node in its place, or None; `alone(s, "glu")`: s is a glu that nobody else reads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from logitless.backends.cpu.fusion.packing import MANY_ROWS, duplicates
from logitless.backends.cpu.kernels.matmul.layout import LANES, expanded_tile, tile_for
from logitless.backends.host import isa
from logitless.graph.backend import Rules
from logitless.graph.ops.fused import attention_act, glu_act, linear_glu_act, linear_q8_add, rms_norm_act
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, with_sources

Alone = Callable[[Tensor, str], bool]
Mine = Callable[[Tensor], bool]
FUSIONS = Rules[Callable[[Tensor, Alone], Tensor | None]]()
fusion = FUSIONS.of


@fusion("quantize_act")
def _(t: Tensor, alone: Alone) -> Tensor | None:
    """A norm, attention, or what joins gate and up of a feed-forward block, with the rounding of what they give; of
    one row and of many gate and up, too."""
    (y,), group = t.src, t.attrs.get("group", 32)
    if alone(y, "glu") and y.src[0].shape == y.src[1].shape:
        return _gated(t, y, group, alone)
    if t.shape[0] < MANY_ROWS:
        return None
    if alone(y, "rms_norm") and len(y.shape) == 2 and y.src[1].shape:
        return rms_norm_act(*y.src, eps=y.attrs["eps"], group=group, name=t.name)
    if group == 32 and alone(y, "reshape") and alone(y.src[0], "attention"):
        q, k = y.src[0].src[:2]
        in_blocks = q.shape[1] // k.shape[1] * q.shape[2] % 32 == 0  # of each key head
        can = in_blocks and q.shape[2] % 2 == 0  # what has no kernel has no rounding either
        return attention_act(*y.src[0].src, **y.src[0].attrs, name=t.name) if can else None
    return None


def _gated(t: Tensor, y: Tensor, group: int, alone: Alone) -> Tensor:
    (gate, up), activation = y.src, y.attrs["activation"]
    products = gate is not up and alone(gate, "linear_q8") and alone(up, "linear_q8") and gate.src[0] is up.src[0]
    alike = products and gate.src[1].dtype == up.src[1].dtype
    whole = t.shape[0] == 1 or (t.shape[0] >= MANY_ROWS and alike and _tiles_of_two(gate))
    if alike and group == 32 and whole:
        return linear_glu_act(gate.src[0], gate.src[1], up.src[1], activation=activation, name=t.name)
    return glu_act(gate, up, activation=activation, group=group, name=t.name)


@fusion("add")
def _(t: Tensor, alone: Alone) -> Tensor | None:
    """A product that is added to what went past it."""
    x, y = t.src
    if x.shape != y.shape or x is y or t.shape[0] < MANY_ROWS or not alone(y, "linear_q8"):
        return None
    return linear_q8_add(*y.src, x, name=t.name) if _tiles_of_two(y) and t.shape[1] % (2 * LANES) == 0 else None


def _tiles_of_two(product: Tensor) -> bool:
    """Whether it is made in tiles of two groups of its expanded weight."""
    dtype = product.src[1].dtype
    tile = tile_for(dtype, isa(), product.shape[0])
    return tile[1] == 2 and tile == expanded_tile(dtype, isa())


def fuse_rounding(fetches: Sequence[Tensor], mine: Mine) -> tuple[Sequence[Tensor], Mine]:
    """The same values from fewer nodes, and which of these run on this backend."""
    order = toposort(fetches)
    repeated = duplicates(order, mine)
    if not repeated and not any(t.op == "quantize_act" for t in order):
        return fetches, mine
    readers = Counter([repeated.get(s, s) for t in order if t not in repeated for s in t.src])
    readers.update([repeated.get(f, f) for f in fetches])
    made: dict[Tensor, Tensor] = {}  # old node → new node
    old: dict[Tensor, Tensor] = {}  # new node → old node

    def before(t: Tensor) -> Tensor:
        return old.get(t, t)

    def alone(t: Tensor, op: str) -> bool:
        return t.op == op and mine(before(t)) and readers[before(t)] == 1

    for t in order:
        if t in repeated:
            made[t] = made[repeated[t]]
            continue
        node = with_sources(t, tuple([made[s] for s in t.src]))
        rule = FUSIONS.get(t.op)
        if rule is not None and mine(t):
            node = rule(node, alone) or node
        made[t] = node
        if node is not t:
            old[node] = t
    return tuple(made[f] for f in fetches), lambda t: mine(before(t))

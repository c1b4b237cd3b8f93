"""Nodes of prompts that are one, for what lies between would go to memory and back: rounded activations and what makes
them, products and the sums that they go to.

A rule is for the last of its nodes, as this backend's rewriting left them. What is fused gets the bits that it gets
alone, for any number of rows (rule 6), so a rule is free to look at how many there are.

    @fusion("quantize_act")
    def _(t, alone): return the node in its place, or None; `alone(s, "glu")`: s is a glu that nobody else reads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from backends.cpu.isa import isa
from backends.cpu.kernels.layout import LANES, expanded_tile, tile_for
from graph.backend import Rules
from graph.ops.fused import attention_act, linear_glu_act, linear_q8_add, rms_norm_act
from graph.tensor import Tensor, toposort, with_sources

Alone = Callable[[Tensor, str], bool]
FUSIONS = Rules[Callable[[Tensor, Alone], Tensor | None]]()
fusion = FUSIONS.of
MANY_ROWS = 64  # fewer leave what lies between in the second-level cache


@fusion("quantize_act")
def _(t: Tensor, alone: Alone) -> Tensor | None:
    """A norm, attention, or the gated part of a feed-forward block (gate, up and what joins them), and its rounding."""
    (y,), group = t.src, t.attrs.get("group", 32)
    if t.shape[0] < MANY_ROWS:
        return None
    if alone(y, "rms_norm") and len(y.shape) == 2 and y.src[1].shape:
        return rms_norm_act(*y.src, eps=y.attrs["eps"], group=group, name=t.name)
    if group == 32 and alone(y, "reshape") and alone(y.src[0], "attention"):
        q, k = y.src[0].src[:2]
        in_blocks = q.shape[1] // k.shape[1] * q.shape[2] % 32 == 0  # of each key head
        can = in_blocks and q.shape[2] % 2 == 0  # what has no kernel has no rounding either
        return attention_act(*y.src[0].src, **y.src[0].attrs, name=t.name) if can else None
    if group != 32 or not alone(y, "glu"):
        return None
    gate, up = y.src
    if gate is up or not (alone(gate, "linear_q8") and alone(up, "linear_q8")) or gate.src[0] is not up.src[0]:
        return None
    if gate.src[1].dtype != up.src[1].dtype or not _tiles_of_two(gate):
        return None
    return linear_glu_act(gate.src[0], gate.src[1], up.src[1], activation=y.attrs["activation"], name=t.name)


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


def fuse_rounding(fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
    """The same values from fewer nodes."""
    order = toposort(fetches)
    if not any(t.op in FUSIONS and len(t.shape) == 2 and t.shape[0] >= MANY_ROWS for t in order):
        return fetches
    readers = Counter(id(s) for t in order for s in t.src)
    readers.update(id(f) for f in fetches)
    made: dict[int, Tensor] = {}  # by the old node
    old: dict[int, Tensor] = {}  # by what was made

    def alone(t: Tensor, op: str) -> bool:
        before = old.get(id(t), t)
        return t.op == op and mine(before) and readers[id(before)] == 1

    for t in order:
        node = with_sources(t, tuple([made[id(s)] for s in t.src]))
        rule = FUSIONS.get(t.op) if mine(t) else None
        node = rule(node, alone) or node if rule else node
        made[id(t)], old[id(node)] = node, t
    return tuple(made[id(f)] for f in fetches)

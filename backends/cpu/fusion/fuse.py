"""Operator fusion: patterns of nodes become one node with one kernel, and the same bits.

A prefill saves the trip of intermediate results to memory and back; a decode step of one row saves
a phase, and with it a barrier, per fused node. Batch invariance: a fused node gives the bits of its
parts for any number of rows, so a rule may look at that number.

A rule belongs to the op of the pattern's last node and sees nodes as this backend's rewrites left
them. It returns the fused node, or None:

    @fusion("quantize_act")
    def _(t, sole): ...                 # sole(s, "glu"): s is a glu that only this pattern reads
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from logitless.backends.cpu.fusion.packing import MANY_ROWS, duplicates, packed
from logitless.backends.cpu.kernels.matmul.layout import LANES, expanded_tile, tile_for
from logitless.backends.host import isa
from logitless.graph.backend import Rules
from logitless.graph.ops.fused import (
    attention_act,
    glu_act,
    linear_glu_act,
    linear_q8_add,
    rms_norm_act,
    slice_of_product,
)
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, with_sources

Sole = Callable[[Tensor, str], bool]
IsOurs = Callable[[Tensor], bool]
FUSIONS = Rules[Callable[[Tensor, Sole], Tensor | None]]()
fusion = FUSIONS.of
LINEARS = ("linear_q8", "linear_f32", "linear_bf16")


def fuse(fetches: Sequence[Tensor], is_ours: IsOurs) -> Sequence[Tensor]:
    """The same values from fewer nodes. `is_ours`: true for nodes that run on this backend."""
    return _fuse_siblings(*_fuse_patterns(fetches, is_ours))


@fusion("quantize_act")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """GLU, RMS norm or attention with the quantisation of its result; GLU with its GEMMs, too."""
    (y,), group = t.src, t.attrs.get("group", 32)
    if sole(y, "glu") and y.src[0].shape == y.src[1].shape:
        return _fuse_glu(t, y, group, sole)
    if t.shape[0] < MANY_ROWS:
        return None
    if sole(y, "rms_norm") and len(y.shape) == 2 and y.src[1].shape:
        return rms_norm_act(*y.src, eps=y.attrs["eps"], group=group, name=t.name)
    if group == 32 and sole(y, "reshape") and sole(y.src[0], "attention"):
        q, k = y.src[0].src[:2]
        whole_blocks = q.shape[1] // k.shape[1] * q.shape[2] % 32 == 0  # per KV head
        has_kernel = whole_blocks and q.shape[2] % 2 == 0
        return attention_act(*y.src[0].src, **y.src[0].attrs, name=t.name) if has_kernel else None
    return None


def _fuse_glu(t: Tensor, y: Tensor, group: int, sole: Sole) -> Tensor:
    (gate, up), activation = y.src, y.attrs["activation"]
    siblings = gate is not up and sole(gate, "linear_q8") and sole(up, "linear_q8") and gate.src[0] is up.src[0]
    same_dtype = siblings and gate.src[1].dtype == up.src[1].dtype
    has_kernel = t.shape[0] == 1 or (t.shape[0] >= MANY_ROWS and same_dtype and _has_tile_of_two(gate))
    if same_dtype and group == 32 and has_kernel:
        return linear_glu_act(gate.src[0], gate.src[1], up.src[1], activation=activation, name=t.name)
    return glu_act(gate, up, activation=activation, group=group, name=t.name)


@fusion("add")
def _(t: Tensor, sole: Sole) -> Tensor | None:
    """A GEMM with the addition of its residual."""
    x, y = t.src
    if x.shape != y.shape or x is y or t.shape[0] < MANY_ROWS or not sole(y, "linear_q8"):
        return None
    return linear_q8_add(*y.src, x, name=t.name) if _has_tile_of_two(y) and t.shape[1] % (2 * LANES) == 0 else None


def _has_tile_of_two(product: Tensor) -> bool:
    """True if the product's tile has two groups of an expanded weight."""
    dtype = product.src[1].dtype
    tile = tile_for(dtype, isa(), product.shape[0])
    return tile[1] == 2 and tile == expanded_tile(dtype, isa())


def _fuse_patterns(fetches: Sequence[Tensor], is_ours: IsOurs) -> tuple[Sequence[Tensor], IsOurs]:
    """Share packed activations, then apply the rules; returns also which new nodes are ours."""
    order = toposort(fetches)
    repeated = duplicates(order, is_ours)
    if not repeated and not any(t.op == "quantize_act" for t in order):
        return fetches, is_ours
    readers = Counter([repeated.get(s, s) for t in order if t not in repeated for s in t.src])
    readers.update([repeated.get(f, f) for f in fetches])
    origins: dict[Tensor, Tensor] = {}  # new node → old node

    def origin(t: Tensor) -> Tensor:
        return origins.get(t, t)

    def sole(t: Tensor, op: str) -> bool:
        return t.op == op and is_ours(origin(t)) and readers[origin(t)] == 1

    def replace(t: Tensor, node: Tensor) -> Tensor:
        rule = FUSIONS.get(t.op)
        if rule is not None and is_ours(t):
            node = rule(node, sole) or node
        if node is not t:
            origins[node] = t
        return node

    return _rebuild(fetches, order, replace, repeated), lambda t: is_ours(origin(t))


def _fuse_siblings(fetches: Sequence[Tensor], is_ours: IsOurs) -> Sequence[Tensor]:
    """Products of the same activations as one `linear_parts`: no barrier between their tasks.

    With many rows each product keeps all threads busy for long.
    """
    order = toposort(fetches)
    families: dict[Tensor, list[Tensor]] = defaultdict(list)  # by their activations
    for t in order:
        if t.op in LINEARS and packed(t.src[1]) and t.shape[0] < MANY_ROWS and is_ours(t):
            families[t.src[0]].append(t)
    family_of = {t: family for family in families.values() if len(family) > 1 for t in family}
    if not family_of:
        return fetches
    parts: dict[Tensor, Tensor] = {}  # first of a family → its linear_parts

    def replace(t: Tensor, node: Tensor) -> Tensor:
        family = family_of.get(t)
        if family is None:
            return node
        if t is family[0]:
            size = sum(s.shape[0] * s.shape[1] for s in family)
            parts[t] = Tensor("linear_parts", (node.src[0], *(s.src[1] for s in family)), (size,), t.dtype)
        return slice_of_product(parts[family[0]], family, t)

    return _rebuild(fetches, order, replace, {})


def _rebuild(
    fetches: Iterable[Tensor],
    order: Iterable[Tensor],
    replace: Callable[[Tensor, Tensor], Tensor],
    repeated: dict[Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """The fetches after replace(t, t with new sources) of every node; a repeated node is dropped."""
    new: dict[Tensor, Tensor] = {}
    for t in order:
        original = repeated.get(t)
        if original is None:
            new[t] = replace(t, with_sources(t, tuple([new[s] for s in t.src])))
        else:
            new[t] = new[original]
    return tuple([new[f] for f in fetches])

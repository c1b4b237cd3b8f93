"""Operator fusion on the CPU (graph/fusion.py).

A prefill saves the trip of intermediate results to memory and back; a decode step of one row saves
a phase, and with it a barrier, per fused node. Batch invariance: a fused node gives the bits of its
parts for any number of rows, so a rule may look at that number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from logitless.backends.cpu.fusion.packing import MANY_ROWS, duplicates, packed
from logitless.backends.cpu.kernels.matmul.layout import LANES, expanded_tile, tile_for
from logitless.backends.host import isa
from logitless.graph.fusion import FusionRules, IsOurs, Sole, fuse_patterns, join_products
from logitless.graph.ops.fused import attention_act, glu_act, linear_glu_act, linear_q8_add, rms_norm_act
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor

FUSIONS = FusionRules()
fusion = FUSIONS.of
LINEARS = ("linear_q8", "linear_f32", "linear_bf16")


def fuse(fetches: Sequence[Tensor], is_ours: IsOurs) -> Sequence[Tensor]:
    """The same values from fewer nodes. `is_ours`: true for nodes that run on this backend."""
    order = toposort(fetches)
    repeated = duplicates(order, is_ours)
    if repeated or any(t.op == "quantize_act" for t in order):
        fetches, is_ours = fuse_patterns(fetches, order, FUSIONS, is_ours, repeated=repeated)
    return _join_siblings(fetches, is_ours)


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
        q, k, *others = y.src[0].src
        whole_blocks = q.shape[1] // k.shape[1] * q.shape[2] % 32 == 0  # per KV head
        has_kernel = whole_blocks and q.shape[2] % 2 == 0 and len(others) == 4  # none with sinks
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


def _join_siblings(fetches: Sequence[Tensor], is_ours: IsOurs) -> Sequence[Tensor]:
    """Products of the same activations as one `linear_parts`: no barrier between their tasks.

    With many rows each product keeps all threads busy for long."""
    order = toposort(fetches)
    families: dict[Tensor, list[Tensor]] = defaultdict(list)  # by their activations
    for t in order:
        if t.op in LINEARS and packed(t.src[1]) and t.shape[0] < MANY_ROWS and is_ours(t):
            families[t.src[0]].append(t)
    family_of = {t: family for family in families.values() if len(family) > 1 for t in family}
    return join_products(fetches, order, family_of, _linear_parts) if family_of else fetches


def _linear_parts(first: Tensor, family: Sequence[Tensor]) -> Tensor:
    size = sum(s.shape[0] * s.shape[1] for s in family)
    return Tensor("linear_parts", (first.src[0], *(s.src[1] for s in family)), (size,), first.dtype)

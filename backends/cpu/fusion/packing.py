"""Which constants are packed, and the packed forms of activations that several products share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from logitless.backends.host import casts_to_bf16
from logitless.graph.tensor import Tensor

# Ops that bring activations into the form of a product's kernel: one node serves all products of them.
PACKS = {"quantize_act", "pack_act", "round_act", "pack_tiles", "quantize_experts", "round_experts", "pack_experts"}
RECENT = 8

# Of activations: their work is handed out in larger parts, for fewer stay in the second-level cache, and they meet
# packed weights of floats in the tiles of kernels/gemm.py, which have to pay for weights made f32 beforehand.
MANY_ROWS = 64


def packed(t: Tensor) -> bool:
    """Whether a source's bytes are a packed weight."""
    return t.op == "variable" and bool(t.attrs.get("constant")) and len(t.shape) == 2


def rounded(t: Tensor) -> bool:
    """Whether rows that meet this weight are rounded to bf16."""
    return packed(t) and t.dtype == "bf16" and t.shape[1] % 2 == 0 and casts_to_bf16()


def duplicates(order: Iterable[Tensor], mine: Callable[[Tensor], bool]) -> dict[Tensor, Tensor]:
    """Nodes of PACKS with the sources and attributes of an earlier one on this backend: {node: that one}.

    Only the last RECENT packed forms are shared: one that is kept from the forward to the backward
    pass takes more memory than packing it again takes time.
    """
    first: dict[Hashable, Tensor] = {}
    repeated: dict[Tensor, Tensor] = {}
    for t in order:
        if t.op in PACKS and mine(t):
            original = first.setdefault((t.op, t.src, *t.attrs.values()), t)
            if original is not t:
                repeated[t] = original
            elif len(first) > RECENT:
                del first[next(iter(first))]
    return repeated

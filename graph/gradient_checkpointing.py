"""Gradient checkpointing (Chen et al., 2016): keep some activations, compute the others again when they are needed.

With n layers, u bytes of a checkpoint and v bytes that a layer keeps for its gradient, a checkpoints cost a·u and the
layers between two of them n/a·v; the sum is least at a = √(n·v/u).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from logitless.graph.op import writes_of
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, with_sources

SUFFIX = " (clone)"


@dataclass(frozen=True)
class Choice:
    """Which layer outputs are kept, by the measured bytes `u` of one and `v` of what a layer keeps; a = √(n·v/u)."""

    checkpoints: tuple[Tensor, ...]
    u: float
    v: float
    a: float


def choose(
    loss: Tensor,
    gradients: Mapping[Tensor, Tensor],
    layers: Sequence[Tensor],
    segment: int = 0,
    beside: int | None = None,
) -> Choice:
    """Checkpoints after every `segment` of the layers, whose outputs are given in order; 0: n / a, rounded.

    `loss`, or the hidden states that losses are made of. The last segment's activations are kept as they were, unless
    what follows the layers has a tensor (the logits; of `beside` bytes) that is larger than v: then they would lie
    beside it, and the last segment ends in a checkpoint as well.
    """
    n = len(layers)
    if n == 0:
        return Choice((), 0.0, 0.0, 0.0)
    u = sum(t.nbytes for t in layers) / n
    v = max(0.0, saved_bytes(loss, gradients) / n - u)
    a = max(1.0, math.sqrt(n * v / u))
    segment = segment or max(1, round(n / a))
    ends = [*range(segment, n, segment)]
    if beside is None:
        below = set(toposort([layers[-1]]))
        beside = max((t.nbytes for t in toposort([loss]) if t not in below and not t.is_leaf), default=0)
    if beside > v:
        ends.append(n)
    return Choice(tuple(layers[i - 1] for i in ends), u, v, a)


def saved_bytes(loss: Tensor, gradients: Mapping[Tensor, Tensor]) -> int:
    """Bytes of what the forward graph computes and the gradients read."""
    forward = set(toposort([loss]))
    read: set[Tensor] = set()
    for t in toposort(gradients.values()):
        if t in forward:
            continue
        for s in t.src:
            while s.op in ALIASES:
                s = s.src[0]
            if s in forward and not s.is_leaf:
                read.add(s)
    return sum(s.nbytes for s in read)


def recompute(loss: Tensor, gradients: Mapping[Tensor, Tensor], checkpoints: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The same gradients, bit for bit, from checkpoints: other activations are cloned where a gradient reads them.

    Leaves, the checkpoints, and whatever comes after the last of them are not cloned. A clone has its node's name and
    " (clone)". ValueError names a node that writes: it cannot run twice.
    """
    forward = toposort([loss])
    in_forward = set(forward)
    kept = set(checkpoints)
    repeated = [t for t in toposort(checkpoints) if t not in kept and not t.is_leaf]
    now: dict[Tensor, Tensor] = {}  # what stands for a node in the new graph
    for t in repeated:
        if writes_of(t):
            raise ValueError(f"{t!r} writes, so it cannot be computed again from a checkpoint")
        now[t] = replace(t, src=tuple(now.get(s, s) for s in t.src), name=(t.name or t.op) + SUFFIX)
    for t in toposort(gradients.values()):
        if t not in in_forward:
            now[t] = with_sources(t, tuple(now.get(s, s) for s in t.src))
    return {p: now.get(g, g) for p, g in gradients.items()}


def layers_of(loss: Tensor) -> list[Tensor]:
    """The outputs of a model's layers, which its forward function has named `blk.0`, `blk.1`…"""
    return [t for t in toposort([loss]) if t.name.startswith("blk.") and t.name[4:].isdigit() and not t.is_leaf]

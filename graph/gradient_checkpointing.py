"""Gradient checkpointing (Chen et al., 2016): keep some activations, recompute the others.

With n layers, u bytes of a checkpoint and v bytes that a layer keeps for its gradient, a
checkpoints cost a·u and the layers between two of them n/a·v; the sum is least at a = √(n·v/u)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from logitless.graph.op import writes_of
from logitless.graph.order import rebuild, toposort
from logitless.graph.tensor import ALIASES, Tensor

SUFFIX = " (clone)"


@dataclass(frozen=True)
class CheckpointChoice:
    """The layer outputs to keep, and the measured sizes that decided it.

    `u`: bytes of a layer's output; `v`: bytes that a layer keeps for its gradient; a = √(n·v/u)."""

    checkpoints: tuple[Tensor, ...]
    u: float
    v: float
    a: float


def choose(
    loss: Tensor,
    gradients: Mapping[Tensor, Tensor],
    layers: Sequence[Tensor],
    segment: int = 0,
    head_nbytes: int | None = None,
) -> CheckpointChoice:
    """Choose a checkpoint after every `segment` layers; 0: after n / a of them, rounded.

    `loss`: it, or the hidden states that losses are made of. `layers`: the layers' outputs in
    order. The last segment is not recomputed, unless a tensor after the layers (the logits:
    `head_nbytes` bytes, None: measured) is larger than v and would lie beside its activations."""
    n = len(layers)
    if n == 0:
        return CheckpointChoice((), 0.0, 0.0, 0.0)
    u = sum(t.nbytes for t in layers) / n
    v = max(0.0, saved_bytes(loss, gradients) / n - u)
    a = max(1.0, math.sqrt(n * v / u))
    segment = segment or max(1, round(n / a))
    ends = [*range(segment, n, segment)]
    if head_nbytes is None:
        below = set(toposort([layers[-1]]))
        head_nbytes = max((t.nbytes for t in toposort([loss]) if t not in below and not t.is_leaf), default=0)
    if head_nbytes > v:
        ends.append(n)
    return CheckpointChoice(tuple(layers[i - 1] for i in ends), u, v, a)


def saved_bytes(loss: Tensor, gradients: Mapping[Tensor, Tensor]) -> int:
    """Bytes of activations: results of the forward graph that gradients read."""
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
    """Rebuild gradients so that they recompute activations from checkpoints: the same bits.

    A node that a gradient reads is cloned, named as it is with " (clone)", unless it is a leaf, a
    checkpoint, or comes after the last checkpoint. ValueError names a node that writes: it cannot
    run twice."""
    forward = toposort([loss])
    in_forward = set(forward)
    stored = set(checkpoints)
    repeated = [t for t in toposort(checkpoints) if t not in stored and not t.is_leaf]

    def clone(t: Tensor, node: Tensor) -> Tensor:
        if writes_of(t):
            raise ValueError(f"{t!r} writes, so it cannot be computed again from a checkpoint")
        return replace(node, name=(t.name or t.op) + SUFFIX)

    replacement = rebuild(repeated, clone)
    backward = (t for t in toposort(gradients.values()) if t not in in_forward)
    rebuild(backward, lambda _, node: node, replacement)
    return {p: replacement.get(g, g) for p, g in gradients.items()}


def layers_of(loss: Tensor) -> list[Tensor]:
    """The outputs of a model's layers: nodes named `blk.0`, `blk.1`…"""
    return [t for t in toposort([loss]) if t.name.startswith("blk.") and t.name[4:].isdigit() and not t.is_leaf]

"""Gradients as graphs: `backward` walks the graph once, from the loss to the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, const


def backward(
    loss: Tensor | Mapping[Tensor, Tensor], params: Sequence[Tensor], *, given: Sequence[Tensor] = ()
) -> dict[Tensor, Tensor]:
    """The gradient of a scalar for each parameter (any nodes of the graph); one that has no influence has no entry.

    Instead of the scalar: nodes and the gradients that they have already, to go on from there. No gradient goes on
    from a node that is `given`: a graph can be taken in two parts.

    Linear in the graph's size. A gradient that is zero is no node at all: the first contribution starts a sum.
    ValueError names an op that has no gradient, or one whose rule gives a wrong shape.
    """
    from logitless.graph.ops.elementwise import add

    if isinstance(loss, Tensor):
        if loss.shape != ():
            raise ValueError(f"the loss must be a scalar, not {loss!r}")
        loss = {loss: const(1.0)}
    order = toposort(loss)
    wanted = set(params)
    depends = set(wanted)  # on a parameter
    ends = set(given)
    for t in order:
        if t not in ends and any(s in depends for s in t.src):
            depends.add(t)
    gradient = dict(loss)
    for t in reversed(order):
        if t not in gradient or t in ends or not any(s in depends for s in t.src):
            continue
        rule = OPS[t.op].vjp_rule
        if rule is None:
            raise ValueError(f"{t!r} has no gradient rule")
        g = gradient[t] if t in wanted else gradient.pop(t)
        for s, part in zip(t.src, rule(g, t, *t.src, **t.attrs), strict=True):
            if part is None or s not in depends:
                continue
            if part.shape != s.shape:
                raise ValueError(f"the gradient of {t.op} for its source {s!r} has shape {part.shape}")
            gradient[s] = add(gradient[s], part) if s in gradient else part
    return {p: gradient[p] for p in params if p in gradient}

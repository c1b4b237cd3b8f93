"""Gradients as graphs: `backward` walks the graph once, from the loss to the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from graph.op import OPS
from graph.tensor import Tensor, const, toposort


def backward(loss: Tensor, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The gradient of a scalar for each parameter (any nodes of the graph); one that has no influence has no entry.

    Linear in the graph's size. A gradient that is zero is no node at all: the first contribution starts a sum.
    ValueError names an op that has no gradient, or one whose rule gives a wrong shape.
    """
    from graph.ops.elementwise import add

    if loss.shape != ():
        raise ValueError(f"the loss must be a scalar, not {loss!r}")
    order = toposort([loss])
    wanted = {id(p) for p in params}
    depends = set(wanted)  # on a parameter
    for t in order:
        if any(id(s) in depends for s in t.src):
            depends.add(id(t))
    gradient: dict[int, Tensor] = {id(loss): const(1.0)}
    for t in reversed(order):
        if id(t) not in gradient or not any(id(s) in depends for s in t.src):
            continue
        rule = OPS[t.op].vjp_rule
        if rule is None:
            raise ValueError(f"{t!r} has no gradient rule")
        g = gradient[id(t)] if id(t) in wanted else gradient.pop(id(t))
        for s, part in zip(t.src, rule(g, t, *t.src, **t.attrs), strict=True):
            if part is None or id(s) not in depends:
                continue
            if part.shape != s.shape:
                raise ValueError(f"the gradient of {t.op} for its source {s!r} has shape {part.shape}")
            gradient[id(s)] = add(gradient[id(s)], part) if id(s) in gradient else part
    return {p: gradient[id(p)] for p in params if id(p) in gradient}

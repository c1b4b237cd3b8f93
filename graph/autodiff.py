"""Reverse-mode differentiation: `backward` adds the nodes of gradients to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, const, tensors


def backward(
    loss: Tensor | Mapping[Tensor, Tensor], params: Sequence[Tensor], *, stop_at: Sequence[Tensor] = ()
) -> dict[Tensor, Tensor]:
    """Differentiate a scalar: {parameter: gradient}, each gradient of its parameter's shape.

    `loss`: a tensor of shape (), or {node: its gradient} to continue from known gradients.
    `params`: any nodes of the graph; one without influence on the loss has no entry.
    `stop_at`: nodes that no gradient passes, so that a graph can be differentiated in two parts.
    Linear in the graph's size; a gradient that is zero is no node at all.
    ValueError names an op without a gradient rule, or a loss or gradient of a wrong shape."""
    from logitless.graph.ops.elementwise import add

    if isinstance(loss, Tensor):
        if loss.shape != ():
            raise ValueError(f"the loss must be a scalar, not {loss!r}")
        loss = {loss: const(1.0)}
    order = toposort(tensors("loss", loss))
    params = tensors("params", params)
    targets = set(params)
    dependent = set(targets)  # on a parameter
    stops = set(stop_at)
    for t in order:
        if t not in stops and any(s in dependent for s in t.src):
            dependent.add(t)
    gradient = dict(loss)
    for t in reversed(order):
        if t not in gradient or t in stops or not any(s in dependent for s in t.src):
            continue
        rule = OPS[t.op].vjp_rule
        if rule is None:
            raise ValueError(f"{t!r} has no gradient rule")
        g = gradient[t] if t in targets else gradient.pop(t)
        for s, part in zip(t.src, rule(g, t, *t.src, **t.attrs), strict=True):
            if part is None or s not in dependent:
                continue
            if part.shape != s.shape:
                raise ValueError(f"the gradient of {t.op} for its source {s!r} has shape {part.shape}")
            gradient[s] = add(gradient[s], part) if s in gradient else part
    return {p: gradient[p] for p in params if p in gradient}

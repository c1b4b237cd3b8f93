"""What mixes low-rank adapters by row."""

from __future__ import annotations

import numpy as np

from logitless.graph.op import Array, Case, op, require
from logitless.graph.tensor import Shape, Tensor


@op
def gate(x: Array, factor: Array) -> Array:
    """x times factor, element by element; a factor of 0 gives 0 whatever x is, so that an adapter whose products
    overflow cannot disturb rows that do not use it."""
    return np.where(factor == 0, np.zeros_like(x), x * np.where(factor == 0, np.ones_like(factor), factor))


@gate.shape
def _(x: Tensor, factor: Tensor) -> tuple[Shape, str]:
    require(x.shape == factor.shape and x.dtype == factor.dtype == "f32", "gate", "wants two f32 alike", x, factor)
    return x.shape, x.dtype


@gate.vjp
def _(g: Tensor, y: Tensor, x: Tensor, factor: Tensor) -> tuple[Tensor | None, ...]:
    return gate(g, factor), None


gate.inplace = (0,)


@gate.case
def _(r: np.random.Generator) -> Case:
    factor = r.normal(size=(5, 37)) * (r.random((5, 37)) < 0.5)
    return [r.normal(size=(5, 37)), factor], {}

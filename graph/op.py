"""One op, one declaration: what it computes (numpy), its shape, its gradient, its test cases.

    @op
    def silu(x): return x / (1 + np.exp(-x))            # the reference: any float precision, float64 is the oracle
    @silu.vjp
    def _(g, y, x): return (silu_back(g, x),)           # one gradient (or None) per source, built from ops
    @silu.case
    def _(rng): return [rng.normal(size=(4, 6))], {}    # sources and attributes of a conformance test

Without a shape rule the result has the broadcast shape and the dtype of the first source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from logitless.graph.tensor import Shape, Tensor

Array = Any  # ndarray inside a reference, Tensor while a graph is being built
Case = tuple[list[Any], dict[str, Any]]
OPS: dict[str, Op] = {}


class Weight:
    """In a case: a source that is a constant state of this block type (the values are what the type can hold)."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype


class Variable:
    """In a case: a source that is a mutable state of this type, so that writes and reads of it can be tested."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype


class Op:
    def __init__(
        self, reference: Callable[..., Array], writes: tuple[int, ...] = (), returns_destination: bool = True
    ) -> None:
        self.name, self.reference, self.writes = reference.__name__, reference, writes
        self.returns_destination = returns_destination  # False: an op that also keeps a state (sample)
        self.shape_rule: Callable[..., tuple[Shape, str]] = self.broadcast
        self.vjp_rule: Callable[..., tuple[Tensor | None, ...]] | None = None
        self.cases: list[Callable[[np.random.Generator], Case]] = []
        self.inplace: tuple[int, ...] = ()  # sources whose memory the result may take over, element by element
        self.tolerance = 1e-5  # of a backend against the float64 reference, relative to the largest magnitude
        self.tolerance_quantised = 0.0  # the same where a source is of a block type, if that is more
        if self.name in OPS:
            raise ValueError(f"op {self.name} declared twice")
        OPS[self.name] = self

    def __call__(self, *src: Tensor, name: str = "", **attrs: Any) -> Tensor:
        shape, dtype = self.shape_rule(*src, **attrs)
        return Tensor(self.name, src, shape, dtype, attrs, name)

    def broadcast(self, *src: Tensor, **_: Any) -> tuple[Shape, str]:
        """The shape rule of an op that declares none."""
        try:
            return tuple(np.broadcast_shapes(*(s.shape for s in src))), src[0].dtype
        except ValueError:
            raise ValueError(f"{self.name}: shapes cannot be broadcast (got {', '.join(map(repr, src))})") from None

    def shape(self, rule: Callable[..., tuple[Shape, str]]) -> None:
        self.shape_rule = rule

    def vjp(self, rule: Callable[..., tuple[Tensor | None, ...]]) -> None:
        self.vjp_rule = rule

    def case(self, make: Callable[[np.random.Generator], Case]) -> None:
        self.cases.append(make)


def op(reference: Callable[..., Array]) -> Op:
    return Op(reference)


def writing(*index: int, returns_destination: bool = True) -> Callable[[Callable[..., Array]], Op]:
    """An op that overwrites the given sources and returns the first of them (or, if told so, a result of its own)."""
    return lambda reference: Op(reference, index, returns_destination)


def writes_of(t: Tensor) -> tuple[int, ...]:
    declared = OPS.get(t.op)
    return declared.writes if declared else ()


def require(condition: bool, op_name: str, message: str, *src: Tensor) -> None:
    """Shape rules call this: a wrong graph fails where it is built, naming op and shapes."""
    if not condition:
        raise ValueError(f"{op_name}: {message} (got {', '.join(map(repr, src))})")


def destination(t: Tensor) -> Tensor | None:
    """The source whose bytes t is: a write returns its destination."""
    declared = OPS.get(t.op)
    return t.src[declared.writes[0]] if declared and declared.writes and declared.returns_destination else None

"""Op declarations: numpy reference, shape rule, gradient rule and test cases of one op.

    @op
    def silu(x): return x / (1 + np.exp(-x))            # reference, in any float type
    silu.takes("x f32")                                 # see graph/declaration.py
    @silu.vjp
    def _(g, y, x): return (silu_back(g, x),)           # a gradient (or None) a source
    @silu.case
    def _(rng): return [rng.normal(size=(4, 6))], {}    # sources, attributes

Without `takes` all sources are f32 of any shape; without a shape rule they are alike, and so is the
result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from logitless.graph.declaration import Signature, Source, is_constant
from logitless.graph.tensor import Shape, Tensor

Array = Any  # ndarray inside a reference, Tensor while a graph is being built
Case = tuple[list[Any], dict[str, Any]]
OPS: dict[str, Op] = {}


class Weight:
    """A source of a test case: a constant of this block type, which rounds the values."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype


class Variable:
    """A source of a test case: a mutable variable of this type, whose writes are compared too."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype


class Op:
    """A declared op. Calling it with tensors builds a node; ValueError names what does not fit."""

    def __init__(
        self, reference: Callable[..., Array], writes: tuple[int, ...] = (), returns_destination: bool = True
    ) -> None:
        self.name, self.reference, self.writes = reference.__name__, reference, writes
        self.__name__, self.__module__, self.__doc__ = self.name, reference.__module__, reference.__doc__
        self.returns_destination = returns_destination  # False: the result is another tensor
        self._sources: tuple[str, ...] = ()
        self._like: Op | None = None
        self.shape_rule: Callable[..., tuple[Shape, str]] = self.alike
        self.vjp_rule: Callable[..., tuple[Tensor | None, ...]] | None = None
        self.cases: list[Callable[[np.random.Generator], Case]] = []
        # sources whose memory the result may take over, element by element
        self.inplace: tuple[int, ...] = ()
        # a backend's largest error against the float64 reference, relative to the largest magnitude
        self.tolerance = 1e-5
        # used instead, if larger, where a source is of a block type
        self.tolerance_quantised = 0.0
        if self.name in OPS:
            raise ValueError(f"op {self.name} declared twice")
        OPS[self.name] = self

    def __call__(self, *src: Tensor, name: str = "", **attrs: Any) -> Tensor:
        signature = self.signature
        key = tuple([(t.dtype, t.shape, is_constant(t)) if isinstance(t, Tensor) else None for t in src])
        if key not in signature.accepted:
            signature.check_sources(self.name, src)
        attrs = signature.attributes(self.name, attrs)
        try:
            shape, dtype = self.shape_rule(*src, **attrs)
        except ValueError as error:  # of another op's rule, which this one follows
            named = str(error).startswith(f"{self.name}: ")
            raise ValueError(str(error) if named else f"{self.name}: {error}") from None
        if key not in signature.accepted:
            signature.check_axes(self.name, src)
            signature.accepted.add(key)
        require(isinstance(name, str), self.name, f"a name is a text, not {name!r}", *src)
        require(all(n > 0 for n in shape), self.name, f"the result would have the shape {shape}", *src)
        return Tensor(self.name, src, shape, dtype, attrs, name)

    def __repr__(self) -> str:
        return f"<op {self.name}({self.signature})>"

    @property
    def __signature__(self) -> inspect.Signature:
        return self.signature.as_python()

    def takes(self, *sources: str, like: Op | None = None) -> None:
        """Declare the sources, as graph/declaration.py says. `like`: this op has its attributes, too."""
        self._sources, self._like = sources, like
        self.__doc__ = f"{inspect.getdoc(self.reference)}\n\nSources: {'; '.join(sources)}."

    @functools.cached_property
    def signature(self) -> Signature:
        like = self._like.signature if self._like is not None else None
        return Signature(self.reference, self.shape_rule, [Source.parse(s) for s in self._sources], like)

    def alike(self, *src: Tensor, **_: Any) -> tuple[Shape, str]:
        """The default shape rule: sources of one shape, the type of the first."""
        require(all(s.shape == src[0].shape for s in src), self.name, "the sources differ in shape", *src)
        return src[0].shape, src[0].dtype

    def broadcast(self, *src: Tensor, **_: Any) -> tuple[Shape, str]:
        """A shape rule: numpy's broadcasting, the type of the first source."""
        try:
            return tuple(np.broadcast_shapes(*(s.shape for s in src))), src[0].dtype
        except ValueError:
            raise ValueError(f"{self.name}: shapes cannot be broadcast (got {', '.join(map(repr, src))})") from None

    def shape(self, rule: Callable[..., tuple[Shape, str]]) -> None:
        """Decorator: the rule takes sources and attributes and returns (shape, type)."""
        self.shape_rule = rule

    def vjp(self, rule: Callable[..., tuple[Tensor | None, ...]]) -> None:
        """Decorator: the rule takes (gradient, result, *sources, **attributes).

        It returns the gradient of each source, None for one that gets none."""
        self.vjp_rule = rule

    def case(self, make: Callable[[np.random.Generator], Case]) -> None:
        """Decorator: the function makes (sources, attributes) of a conformance test."""
        self.cases.append(make)


def op(reference: Callable[..., Array]) -> Op:
    """Declare an op by its numpy reference."""
    return Op(reference)


def writing(*index: int, returns_destination: bool = True) -> Callable[[Callable[..., Array]], Op]:
    """Declare an op that overwrites the sources at these indices and returns the first of them.

    `returns_destination` False: it returns a result of its own."""
    return lambda reference: Op(reference, index, returns_destination)


def writes_of(t: Tensor) -> tuple[int, ...]:
    """Indices of the sources that a node overwrites."""
    declared = OPS.get(t.op)
    return declared.writes if declared else ()


def require(condition: bool, op_name: str, message: str, *src: Tensor) -> None:
    """Raise ValueError with op, message and sources unless the condition holds; for shape rules."""
    if not condition:
        raise ValueError(f"{op_name}: {message} (got {', '.join(map(repr, src))})")


def destination(t: Tensor) -> Tensor | None:
    """The source that t overwrites and returns; None for ops with a result of their own."""
    declared = OPS.get(t.op)
    return t.src[declared.writes[0]] if declared and declared.writes and declared.returns_destination else None

"""Op declarations: sources and result, numpy reference, gradient rule and test cases of one op.

    @op("x f32 (T, E)", gives="i32 (T, n) in :E", needs="0 < n <= E") # see graph/declaration.py
    def top_experts(x, *, n): return np.argsort(-x)[:, :n]             # reference, in any float type
    @top_experts.vjp
    def _(g, y, x, n): return (None,)                                  # a gradient (or None) a source
    @top_experts.case
    def _(rng): return [rng.normal(size=(4, 6))], {"n": 2}             # sources, attributes

Without sources all are f32 of any shape; without `gives` or a shape rule they are alike, and so is
the result."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from logitless.graph.declaration import Signature, Source, module_of, split_bounds
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


class Variants(NamedTuple):
    """Variants of an op's kernels, each of which does what those before it do, and more.

    A device may compile each at its first use."""

    n: int
    source: int  # its values tell which one a run needs
    number: Callable[[np.ndarray[Any, Any]], int]


class Op:
    """A declared op. Calling it with tensors builds a node; ValueError names what does not fit."""

    def __init__(
        self, reference: Callable[..., Array], writes: tuple[int, ...] = (), returns_destination: bool = True
    ) -> None:
        self.name, self.reference, self.writes = reference.__name__, reference, writes
        self.__name__, self.__module__, self.__doc__ = self.name, reference.__module__, reference.__doc__
        self.returns_destination = returns_destination  # False: the result is another tensor
        self._sources: tuple[str, ...] = ()
        self._like: Op | Callable[..., Any] | None = None
        self.needs = ""  # the condition of a call
        self._gives = ""
        self.shape_rule: Callable[..., tuple[Shape, str]] = self.alike
        self.vjp_rule: Callable[..., tuple[Tensor | None, ...]] | None = None
        self.cases: list[Callable[[np.random.Generator], Case]] = []
        # sources whose memory the result may take over, element by element
        self.inplace: tuple[int, ...] = ()
        self.variants: Variants | None = None
        # a backend's largest error against the float64 reference, relative to the largest magnitude
        self.tolerance = 1e-5
        # used instead, if larger, where a source is of a block type
        self.tolerance_quantised = 0.0
        if self.name in OPS:
            raise ValueError(f"op {self.name} declared twice")
        OPS[self.name] = self

    def __call__(self, *src: Tensor, name: str = "", **attrs: Any) -> Tensor:
        self.signature.lengths(self.name, src)
        attrs = self.signature.attributes(self.name, attrs)
        try:
            shape, dtype = self.result(*src, **attrs)
        except ValueError as error:  # of another op's rule, which this one follows
            named = str(error).startswith(f"{self.name}: ")
            raise ValueError(str(error) if named else f"{self.name}: {error}") from None
        require(isinstance(name, str), self.name, f"a name is a text, not {name!r}", *src)
        require(all(n > 0 for n in shape), self.name, f"the result would have the shape {shape}", *src)
        return Tensor(self.name, src, shape, dtype, attrs, name)

    def result(self, *src: Tensor, **attrs: Any) -> tuple[Shape, str]:
        """Shape and type of the result. ValueError: the sources do not fit."""
        if self.needs and not self.value(self.needs, src, attrs):
            known = self.signature.names(self.name, src, attrs)
            numbers = known.keys() - {source.name for source in self.signature.sources}
            words = [word for word in dict.fromkeys(re.findall(r"\w+", self.needs)) if word in numbers]
            values = ", ".join(f"{word} = {known[word]!r}" for word in words)
            require(False, self.name, f"needs {self.needs}; {values}" if values else f"needs {self.needs}", *src)
        return self.shape_rule(*src, **attrs)

    def declared(self, *src: Tensor, **attrs: Any) -> tuple[Shape, str]:
        """The shape rule of an op with `gives`."""
        i, dtype, shape = self._result
        of = None if i is None else src[i]
        return self.value(shape, src, attrs) if shape or of is None else of.shape, of.dtype if of else dtype

    @functools.cached_property
    def _result(self) -> tuple[int | None, str, str]:
        """Index of the source that the result is like, or its type; its shape."""
        kind, _, shape = split_bounds(self._gives)[0].partition(" ")
        return next((i for i, s in enumerate(self.signature.sources) if s.name == kind), None), kind, shape

    @functools.cached_property
    def result_bounds(self) -> tuple[str, ...]:
        """Bounds of the indices that the op computes, as expressions."""
        return split_bounds(self._gives)[1]

    @functools.cached_property
    def _module(self) -> dict[str, Any]:
        return module_of(self.reference)

    def value(self, expression: str, src: tuple[Tensor, ...], attrs: Mapping[str, Any]) -> Any:
        """The value of an expression of the declaration."""
        return eval(_compiled(expression), self._module, self.signature.names(self.name, src, attrs))

    def __repr__(self) -> str:
        return f"<op {self.name}({self.signature})>"

    @property
    def __signature__(self) -> inspect.Signature:
        return self.signature.as_python()

    def takes(
        self, *sources: str, gives: str = "", needs: str = "", like: Op | Callable[..., Any] | None = None
    ) -> None:
        """Declare sources and result, as graph/declaration.py says. `like`: an op, or a function, whose
        attributes this one has, too."""
        self._sources, self._gives, self.needs, self._like = sources, gives, needs, like
        self.shape_rule = self.declared if gives else self.alike
        if sources:
            self.__doc__ = f"{inspect.getdoc(self.reference)}\n\nSources: {'; '.join(sources)}."

    @functools.cached_property
    def signature(self) -> Signature:
        like, rule = self._like, self.shape_rule
        functions = [f for f in (like, rule) if f is not None and not isinstance(f, Op) and f != self.declared]
        sources = [Source.parse(s) for s in self._sources]
        return Signature(self.reference, sources, functions, like.signature if isinstance(like, Op) else None)

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

    def case(self, make: Callable[..., Case], *args: Any, **kwargs: Any) -> None:
        """Decorator: the function makes (sources, attributes) of a conformance test, of a generator of random
        numbers and these arguments."""
        self.cases.append(lambda r: make(r, *args, **kwargs))


def op(
    *sources: str,
    gives: str = "",
    needs: str = "",
    writes: tuple[int, ...] = (),
    returns_destination: bool = True,
    like: Op | Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Array]], Op]:
    """Declare an op by its numpy reference.

    `writes`: indices of the sources that it overwrites, of which it returns the first; `returns_destination`
    False: it returns a result of its own. The others: `Op.takes`."""

    def declare(reference: Callable[..., Array]) -> Op:
        declared = Op(reference, writes, returns_destination)
        declared.takes(*sources, gives=gives, needs=needs, like=like)
        return declared

    return declare


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<declaration>", "eval")


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

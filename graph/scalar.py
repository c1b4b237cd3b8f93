"""Scalar formulas of elementwise ops: numpy evaluates one as the reference, backends print its tree.

    @elementwise
    def elu_back(g, y):
        "g · (1 where y, the result of `elu`, is positive, else y + 1)."
        return where(y > 0, g, g * (y + 1))

Called with arrays, a formula computes; called with `Expr`, it is the tree that the CPU backend emits
as LLVM vectors (backends/cpu/kernels/elementwise.py) and the GPUs as C text
(backends/gpu/elementwise.py). A tree has one order of operations, and every printer keeps it.
`fma(x, y, z)` is x · y + z, rounded once on the CPU; C text and numpy round twice."""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from logitless.graph.op import OPS, Array, Op, op
from logitless.graph.tensor import Tensor

T = TypeVar("T")
GELU_SCALE = (2 / np.pi) ** 0.5


def node(operator: str, *args: Any) -> Expr:
    return Expr(operator, tuple(a if isinstance(a, Expr) else Expr("number", leaf=float(a)) for a in args))


def _infix(operator: str) -> tuple[Any, Any]:
    return lambda a, b: node(operator, a, b), lambda a, b: node(operator, b, a)


@dataclass(frozen=True)
class Expr:
    """A node of a tree: an operator with arguments, a number, or a name (a source, an attribute)."""

    operator: str
    args: tuple[Expr, ...] = ()
    leaf: float | str = 0.0

    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __lt__, __gt__ = _infix("less")

    def __neg__(self) -> Expr:
        return node("neg", self)

    def __abs__(self) -> Expr:
        return node("abs", self)


def name(text: str) -> Expr:
    return Expr("name", leaf=text)


def operator(compute: Callable[..., Array]) -> Callable[..., Any]:
    """Decorator: a function of arrays that becomes a node where an argument is one."""

    @functools.wraps(compute)
    def call(*args: Any) -> Any:
        return node(compute.__name__, *args) if any(isinstance(a, Expr) for a in args) else compute(*args)

    return call


def _function(label: str, doc: str, compute: Callable[[Array], Array]) -> Callable[..., Any]:
    def function(x: Array) -> Array:
        return compute(x)

    function.__name__, function.__doc__ = label, doc
    return operator(function)


sqrt = _function("sqrt", "The square root.", np.sqrt)
log = _function("log", "The natural logarithm.", np.log)
log1p = _function("log1p", "ln(1 + x).", np.log1p)
exp = _function("exp", "eˣ.", np.exp)
tanh = _function("tanh", "The hyperbolic tangent.", np.tanh)
sin = _function("sin", "The sine of x in radians.", np.sin)
cos = _function("cos", "The cosine of x in radians.", np.cos)
sigmoid = _function("sigmoid", "1 / (1 + e⁻ˣ).", lambda x: 1 / (1 + exp(-x)))
silu = _function("silu", "x / (1 + e⁻ˣ).", lambda x: x / (1 + exp(-x)))
gelu = _function(
    "gelu",
    "GELU by its tanh approximation, as GGUF's architectures use it.",
    lambda x: 0.5 * x * (1 + tanh(GELU_SCALE * (x + 0.044715 * x * x * x))),
)


@operator
def times_sigmoid(x: Array, z: Array) -> Array:
    """x · sigmoid(z), one division on the CPU."""
    return x / (1 + exp(-z))


@operator
def fma(x: Array, y: Array, z: Array) -> Array:
    return x * y + z


@operator
def equal(x: Array, y: Array) -> Array:
    return x == y


@operator
def where(condition: Array, x: Array, y: Array) -> Array:
    return np.where(condition, x, y)


FORMULAS: dict[str, Callable[..., Any]] = {}


def elementwise(formula: Callable[..., Array]) -> Op:
    """Declare an op by its formula. Its result may take over the memory of any source."""

    @functools.wraps(formula)
    def reference(*sources: Array, **attributes: Any) -> Array:
        with np.errstate(all="ignore"):  # both sides of `where` are computed
            return np.asarray(formula(*sources, **attributes), np.result_type(*sources))

    declared = op()(reference)
    declared.inplace = tuple(range(len(_names(formula, "POSITIONAL_OR_KEYWORD"))))
    FORMULAS[declared.name] = formula
    return declared


def _names(formula: Callable[..., Array], kind: str) -> list[str]:
    return [p.name for p in inspect.signature(formula).parameters.values() if p.kind.name == kind]


@dataclass(frozen=True)
class Tree:
    """The tree of an op: its sources, its attributes that are numbers, and the result."""

    sources: tuple[str, ...]
    attributes: tuple[str, ...]
    result: Expr

    def operators(self) -> set[str]:
        return {e.operator for e in _all(self.result)}


def _all(e: Expr) -> Iterator[Expr]:
    yield e
    for a in e.args:
        yield from _all(a)


def key(t: Tensor) -> str:
    """The tree of a node's op and choices (attributes that are texts): `glu:silu`."""
    return ":".join([t.op, *(t.attrs[c] for c in _choices(t.op))])


def keys(op_name: str) -> list[str]:
    """All trees of an op."""
    return [":".join([op_name, *values]) for values in itertools.product(*_choices(op_name).values())]


@functools.cache
def _choices(op_name: str) -> dict[str, tuple[str, ...]]:
    hints = OPS[op_name].signature.attribute_types
    return {name: typing.get_args(hint) for name, hint in hints.items() if hint is not float}


@functools.cache
def tree(tree_key: str) -> Tree:
    op_name, *values = tree_key.split(":")
    formula = FORMULAS[op_name]
    choices = dict(zip(_choices(op_name), values, strict=True))
    sources = _names(formula, "POSITIONAL_OR_KEYWORD")
    attributes = [a for a in _names(formula, "KEYWORD_ONLY") if a not in choices]
    result = formula(*map(name, sources), **{a: name(a) for a in attributes}, **choices)
    return Tree(tuple(sources), tuple(attributes), result)


def fold(e: Expr, table: Mapping[str, Callable[..., T]], names: Mapping[str, T], number: Callable[[float], T]) -> T:
    """The value of a tree with these operators. A part that occurs twice is computed once."""
    values: dict[Expr, T] = {}

    def value(e: Expr) -> T:
        if isinstance(e.leaf, str):
            return names[e.leaf]
        if e not in values:
            values[e] = number(e.leaf) if e.operator == "number" else table[e.operator](*map(value, e.args))
        return values[e]

    return value(e)


# Text of an operator, how tightly it binds, and how tightly each argument has to bind.
Form = tuple[str, int, tuple[int, ...]]


def text(e: Expr, forms: Mapping[str, Form], number: Callable[[float], str]) -> tuple[list[tuple[str, str]], str]:
    """A tree as text: (name, expression) of each part that occurs more than once, and the whole."""
    counts = Counter(a for part in set(_all(e)) for a in part.args)
    shared: dict[Expr, str] = {}
    parts: list[tuple[str, str]] = []

    def written(e: Expr, least: int) -> str:
        if not e.args:
            return e.leaf if isinstance(e.leaf, str) else number(e.leaf)
        if e in shared:
            return shared[e]
        form, binds, arguments = forms[e.operator]
        expression = form.format(*(written(a, n) for a, n in zip(e.args, arguments, strict=False)))
        if counts[e] > 1 and e.operator != "neg":
            shared[e] = f"t{len(parts)}"
            parts.append((shared[e], expression))
            return shared[e]
        return expression if binds >= least else f"({expression})"

    whole = written(e, 0)
    return parts, whole

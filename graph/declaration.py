"""Signatures of ops: types and axes of the sources, types of the attributes; each call is checked.

A source is declared as `ids i32 (T)`: name, type, axes. Types: a name of `DTYPES`, several with |,
or a kind (`weight`, `blocks`, `cache`, `word`, `any`). Axes: a letter has one length throughout an op,
`_` any length, a number that length, `…` any number of axes; `(T)|(2, T)` are two forms; without
parentheses every shape will do. `*weights weight (N, K)` stands for any number of sources,
`sinks f32 (H)?` for one or none. A source of indices ends in its bounds: `ids i32 (T) in :N` has 0 to
N − 1, `begin i32 (T) in -1:N` −1, too; of equal parts each has its own (`in :R, :R, :n`; … is any).

The result is declared as `f32 (T, n)`: a type, or a source that has it, and the shape; a source alone
stands for both; bounds of indices that an op computes follow. Its shape, bounds and what a call needs
(`0 < n <= E`) are expressions of Python, whose names are axes, attributes, sources (None: not there), and
those of the op's module."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from logitless.graph.dtype import BLOCK_TYPES, DTYPES, KV_TYPES
from logitless.graph.tensor import Shape, Tensor

_ACTS = frozenset(name for name in DTYPES if name.endswith("_act"))
_WORDS = frozenset(("f32", "i32", "u32"))
KINDS = {
    # floats and blocks, and constant unless they are f32 (or f16, where they are only read)
    "weight": frozenset(DTYPES) - _ACTS - {"i32", "u32"},
    "stored": frozenset(DTYPES) - _ACTS - {"i32", "u32"},
    "blocks": frozenset(BLOCK_TYPES),  # and constant
    "cache": frozenset(KV_TYPES),  # of keys or values
    "word": _WORDS,  # of four bytes, which are copied as they are
    "any": frozenset(DTYPES),
}
_FREE = {"weight": ("f32",), "stored": ("f32", "f16"), "blocks": ()}  # types that need not be constant
_SOURCE = re.compile(r"(\*?)(\w+) ([\w|]+)(?: (\([^)]*\)(?:\|\([^)]*\))*))?(\??)")
_BOUNDS = re.compile(r"(.*?)(?: in (?=[^(]*:)(.+))?")
INT_LIMIT, FLOAT_LIMIT = 2**31, float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Source:
    """A declared source of an op. `forms`: axes that it may have; (): any shape. `bounds`: those of indices, as
    expressions."""

    name: str
    kind: str
    forms: tuple[tuple[str, ...], ...] = ()
    repeated: bool = False
    optional: bool = False
    bounds: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse a declaration; ValueError for one that is not of the module's form."""
        text, bounds = split_bounds(text)
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} does not declare a source")
        star, name, kind, forms, optional = match.groups()
        axes = [form.strip("()").split(",") for form in forms.split("|")] if forms else []
        parts = tuple(tuple(a.strip() for a in form if a.strip()) for form in axes)
        return cls(name, kind, parts, bool(star), bool(optional), bounds)

    @property
    def types(self) -> frozenset[str]:
        return KINDS[self.kind] if self.kind in KINDS else frozenset(self.kind.split("|"))

    def __str__(self) -> str:
        forms = " or ".join(f"({', '.join(axes)})" for axes in self.forms)
        return f"{'*' if self.repeated else ''}{self.name}{' ' if forms else ''}{forms}"

    def matches(self, shape: Shape, lengths: dict[str, int]) -> bool:
        """True if the shape has one of the forms; `lengths` gets those of new letters."""
        for form in self.forms:
            own = lengths.copy()
            if _matches(form, shape, own):
                lengths.update(own)
                return True
        return not self.forms


def split_bounds(text: str) -> tuple[str, tuple[str, ...]]:
    """A declaration without its bounds, and these: expressions of (smallest, one more than the largest)."""
    match = _BOUNDS.fullmatch(text)
    assert match is not None
    parts = (match[2] or "").replace("…", f"{-INT_LIMIT}:{INT_LIMIT}").split(", ")
    return match[1], tuple(f"({low or 0}, {high})" for low, _, high in (p.partition(":") for p in parts) if high)


def _matches(form: tuple[str, ...], shape: Shape, lengths: dict[str, int]) -> bool:
    axes = list(form)
    if "…" in axes:
        i = axes.index("…")
        axes[i : i + 1] = ["_"] * (len(shape) - len(axes) + 1)
    if len(axes) != len(shape):
        return False
    for axis, n in zip(axes, shape, strict=True):
        expected = int(axis) if axis.isdigit() else n if axis == "_" else lengths.setdefault(axis, n)
        if n != expected:
            return False
    return True


def is_constant(t: Tensor) -> bool:
    """True for a variable that is never written."""
    return t.op == "variable" and bool(t.attrs["constant"])


class Signature:
    """Sources and attributes of an op, and its attributes with their types and defaults."""

    def __init__(
        self,
        reference: Callable[..., Any],
        sources: Sequence[Source] = (),
        keywords_of: Sequence[Callable[..., Any]] = (),
        like: Signature | None = None,
    ) -> None:
        """`sources`: as declared; without any, all are f32 of any shape. Attributes are the keywords
        of the reference and of the other functions, and those of `like`."""
        declared = inspect.signature(reference).parameters.values()
        self.sources = tuple(sources) or tuple(
            Source(p.name, "f32", (), p.kind is p.VAR_POSITIONAL, p.default is not p.empty)
            for p in declared
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        )
        # lengths of axes by (type, shape) of sources: a graph has hundreds of equal nodes
        self._accepted: dict[tuple[object, ...], dict[str, int]] = {}
        self._parameters: dict[str, inspect.Parameter] = dict(like._parameters) if like is not None else {}
        self._hints: dict[str, Any] = dict(like._hints) if like is not None else {}
        for function in (*keywords_of, reference):
            own = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
            self._parameters |= own
            self._hints |= _hints(function, own)
        self._absent = {source.name: None for source in self.sources}
        self._defaults = {name: p.default for name, p in self._parameters.items()}

    @property
    def attribute_types(self) -> Mapping[str, Any]:
        return self._hints

    def lengths(self, op_name: str, src: Sequence[Any]) -> dict[str, int]:
        """The lengths of the axes. ValueError for a wrong number of sources, or one that is no tensor of its
        type and shape."""
        key = tuple([(t.dtype, t.shape, is_constant(t)) if isinstance(t, Tensor) else None for t in src])
        if key not in self._accepted:
            self._check_sources(op_name, src)
            lengths: dict[str, int] = {}
            for source, t in self.pairs(src):
                if not source.matches(t.shape, dict(lengths) if source.repeated else lengths):
                    self._refuse(op_name, src)
            self._accepted[key] = lengths
        return self._accepted[key]

    def names(self, op_name: str, src: Sequence[Tensor], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Names of the expressions of a declaration: sources, attributes with their defaults, lengths."""
        sources: dict[str, Any] = dict(zip(self._absent, src, strict=False))
        if self.sources[-1].repeated:
            sources[self.sources[-1].name] = src[len(self.sources) - 1 :]
        return {**self._absent, **sources, **self._defaults, **attrs, **self.lengths(op_name, src)}

    def _check_sources(self, op_name: str, src: Sequence[Any]) -> None:
        repeated = any(s.repeated for s in self.sources)
        least = max(1, sum(not s.optional and not s.repeated for s in self.sources))
        if len(src) < least or (len(src) > len(self.sources) and not repeated):
            takes = ", ".join(map(str, self.sources))
            raise ValueError(f"{op_name}: takes {takes}, not {_count(len(src), 'tensor')}")
        for source, t in self.pairs(src):
            if not isinstance(t, Tensor):
                cure = ": const(…) makes one of a number" if isinstance(t, numbers.Number) else ""
                raise ValueError(f"{op_name}: {source.name} must be a tensor, not {_brief(t)}{cure}")
            if t.dtype not in source.types:
                raise ValueError(f"{op_name}: {source.name} must be {_types(source)} (got {_list(src)})")
            if t.dtype not in _FREE.get(source.kind, source.types) and not is_constant(t):
                raise ValueError(f"{op_name}: {source.name} of {t.dtype} must be a constant (got {_list(src)})")

    def _refuse(self, op_name: str, src: Sequence[Tensor]) -> None:
        expected = ", ".join(str(s) for s in self.sources if s.forms)
        raise ValueError(f"{op_name}: expected {expected} (got {_list(src)})")

    def pairs(self, src: Sequence[Any]) -> Iterable[tuple[Source, Any]]:
        """The declared source of each tensor."""
        last = self.sources[-1] if self.sources else None
        for i, t in enumerate(src):
            source = self.sources[i] if i < len(self.sources) else last
            assert source is not None
            yield source, t

    def attributes(self, op_name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes as plain Python values. ValueError for one that is unknown, missing or wrong."""
        if not attrs and not self._parameters:
            return {}
        for name in attrs.keys() - self._parameters.keys():
            known = ", ".join(self._parameters) or "none"
            raise ValueError(f"{op_name}: has no attribute {name!r} (its attributes: {known})")
        for name, p in self._parameters.items():
            if name not in attrs and p.default is p.empty:
                raise ValueError(f"{op_name}: the attribute {name!r} is missing")
        return {k: _plain(op_name, k, v, self._hints.get(k, Any)) for k, v in attrs.items()}

    def __str__(self) -> str:
        attrs = [
            f"{name}: {_hint_name(self._hints.get(name, Any))}"
            + (f" = {p.default}" if p.default is not p.empty else "")
            for name, p in self._parameters.items()
        ]
        return ", ".join([*(f"{s.name}?" if s.optional else f"{'*' * s.repeated}{s.name}" for s in self.sources),
                          *(["*", *attrs] if attrs else [])])  # fmt: skip

    def as_python(self) -> inspect.Signature:
        """The signature for `inspect` and editors."""
        p = inspect.Parameter
        sources = [
            p(s.name, p.VAR_POSITIONAL)
            if s.repeated
            else p(s.name, p.POSITIONAL_ONLY, default=None if s.optional else p.empty)
            for s in self.sources
        ]
        sources.sort(key=lambda x: x.kind)
        own = [x.replace(annotation=self._hints.get(x.name, Any)) for x in self._parameters.values()]
        return inspect.Signature([*sources, *own, p("name", p.KEYWORD_ONLY, default="")])


def module_of(reference: Callable[..., Any]) -> dict[str, Any]:
    """The names of a function's module."""
    return vars(inspect.getmodule(reference))


def _hints(reference: Callable[..., Any], own: Mapping[str, Any]) -> dict[str, Any]:
    names = module_of(reference) | {"Shape": tuple[int, ...], "Literal": Literal}
    return {
        name: eval(p.annotation, names) if isinstance(p.annotation, str) else p.annotation for name, p in own.items()
    }


def _hint_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)


def _plain(op_name: str, name: str, value: Any, hint: Any) -> Any:
    """An attribute's value as the hint's type. ValueError for any other."""
    if type(value) is hint and (hint is not float or -FLOAT_LIMIT <= value <= FLOAT_LIMIT) and hint is not int:
        return value
    label = f"{op_name}: {name}"
    if hint is float:
        if isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_)):
            number = float(value)
            if math.isnan(number) or FLOAT_LIMIT < abs(number) < math.inf:
                raise ValueError(f"{label} must be a number of f32, not {number}")
            return number
    elif hint is int:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if not -INT_LIMIT <= int(value) < INT_LIMIT:
                raise ValueError(f"{label} must be a whole number of 32 bits, not {value}")
            return operator.index(value)
    elif hint is bool:
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
    elif hint is str:
        if isinstance(value, str):
            return value
    elif typing.get_origin(hint) is Literal:
        if isinstance(value, str) and value in typing.get_args(hint):
            return value
    elif typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        if isinstance(value, (tuple, list)) and (args[-1] is ... or len(value) == len(args)):
            return tuple([_plain(label, "a length or place", n, int) for n in value])
    else:
        return value
    raise ValueError(f"{label} must be {_hint_name(hint)}, not {_brief(value)}")


def _types(source: Source) -> str:
    if source.kind in _FREE:
        return "of floats or GGUF blocks"
    return " or ".join(t for t in DTYPES if t in source.types)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _list(src: Sequence[Any]) -> str:
    return ", ".join(map(repr, src))


def _brief(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '…'}"

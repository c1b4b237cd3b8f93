"""Tensor: a node of a graph, with op, sources, shape and dtype; it has neither numbers nor a device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from logitless.graph.dtype import DTYPES, nbytes

Shape = tuple[int, ...]
NO_ATTRS: Mapping[str, Any] = MappingProxyType({})
LEAVES = frozenset({"feed", "variable", "const"})
# same bytes as their first source, at an offset
ALIASES = frozenset({"reshape", "slice_rows", "after", "detached"})


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A node: `op` applied to the tensors `src`, with structural parameters `attrs`.

    `shape` is in numpy's order (the last axis varies fastest), the memory contiguous. Tensors are
    immutable, and compare and hash by identity."""

    op: str
    src: tuple[Tensor, ...]
    shape: Shape
    dtype: str = "f32"
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    name: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<{self.op}{label} {self.dtype}{list(self.shape)}>"


def _checked(label: str, name: str, shape: Sequence[int], dtype: str) -> Shape:
    """A leaf's shape as plain numbers. ValueError with the label for a wrong name, shape or type."""
    if not isinstance(name, str):
        raise ValueError(f"{label}: a name is a text")
    if dtype not in DTYPES:
        raise ValueError(f"{label}: there is no type {dtype!r} (types: {', '.join(DTYPES)})")
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in shape
    ):
        raise ValueError(f"{label}: a shape is a tuple of lengths from 1 on, not {shape!r}")
    return tuple(int(n) for n in shape)


def tensors(label: str, values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Several tensors as a tuple. ValueError with the label for anything else."""
    if isinstance(values, Tensor) or not isinstance(values, Iterable):
        raise ValueError(f"{label} must be a list of tensors, not {values!r}")
    values = tuple(values)
    for t in values:
        if not isinstance(t, Tensor):
            raise ValueError(f"{label} must be tensors, not {t!r}")
    return values


def feed(name: str, shape: Shape, dtype: str = "f32", *, deferred: bool = False) -> Tensor:
    """An input that the caller gives to every run, as a numpy array of this shape and type.

    A `deferred` one is given in the middle of the run, before the first node that reads it starts.
    ValueError for a shape without elements, or a type that numpy lacks."""
    shape = _checked(f"feed {name!r}", name, shape, dtype)
    if DTYPES[dtype].numpy is None:
        raise ValueError(f"feed {name!r}: numpy has no {dtype}")
    return Tensor("feed", (), shape, dtype, {"deferred": True} if deferred else NO_ATTRS, name)


def variable(
    name: str, shape: Shape, dtype: str = "f32", *, constant: bool = False, host_written: bool = False
) -> Tensor:
    """A value that lives in a session: weights (`constant`: never written), KV caches.

    A `host_written` one (block tables) is written by no node, so every device that reads it has a
    copy. ValueError for a shape without elements, or of rows that are not whole blocks of the type.
    """
    shape = _checked(f"variable {name!r}", name, shape, dtype)
    nbytes(dtype, shape)
    attrs = {"constant": constant, "host_written": True} if host_written else {"constant": constant}
    return Tensor("variable", (), shape, dtype, attrs, name)


def const(value: float, dtype: str = "f32") -> Tensor:
    """A scalar, shape (), whose value is part of the graph. ValueError for one that the type lacks."""
    _checked("const", "const", (), dtype)
    kind = DTYPES[dtype].numpy
    if kind is None or not isinstance(value, (numbers.Real, np.number)) or isinstance(value, bool):
        raise ValueError(f"const: {value!r} is no number of {dtype}")
    with np.errstate(over="ignore"):
        stored = np.array(value).astype(kind)
    whole = stored.dtype.kind != "f"
    if (whole and stored != value) or (not whole and np.isinf(stored) and not np.isinf(value)):
        raise ValueError(f"const: {value!r} is no number of {dtype}")
    return Tensor("const", (), (), dtype, {"value": value})


def strides(shape: Shape) -> Shape:
    """Elements from one index to the next in each axis of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def broadcast_strides(shape: Shape, full: Shape) -> Shape:
    """Elements from one index to the next in each axis of the full shape; 0 where the array is broadcast."""
    own = (1,) * (len(full) - len(shape)) + shape
    return tuple(0 if n == 1 else step for n, step in zip(own, strides(own), strict=True))

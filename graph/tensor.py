"""Tensor: a node of a graph, with op, sources, shape and dtype; it has neither numbers nor a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
    immutable, and compare and hash by identity.
    """

    op: str
    src: tuple[Tensor, ...]
    shape: Shape
    dtype: str = "f32"
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    name: str = ""

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<{self.op}{label} {self.dtype}{list(self.shape)}>"


def feed(name: str, shape: Shape, dtype: str = "f32", *, deferred: bool = False) -> Tensor:
    """An input that the caller gives to every run, as a numpy array of this shape and type.

    A `deferred` one is given in the middle of the run, before the first node that reads it starts.
    ValueError for a type that numpy lacks.
    """
    if DTYPES[dtype].numpy is None:
        raise ValueError(f"feed {name!r}: numpy has no {dtype}")
    return Tensor("feed", (), shape, dtype, {"deferred": True} if deferred else NO_ATTRS, name)


def variable(
    name: str, shape: Shape, dtype: str = "f32", *, constant: bool = False, host_written: bool = False
) -> Tensor:
    """A value that lives in a session: weights (`constant`: never written), KV caches.

    A `host_written` one (block tables) is written by no node, so every device that reads it has a
    copy.
    """
    attrs = {"constant": constant, "host_written": True} if host_written else {"constant": constant}
    return Tensor("variable", (), shape, dtype, attrs, name)


def const(value: float, dtype: str = "f32") -> Tensor:
    """A scalar, shape (), whose value is part of the graph."""
    return Tensor("const", (), (), dtype, {"value": value})

"""A Tensor is a node of the graph: what to compute, never the numbers and never where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from logitless.graph.dtype import DTYPES, nbytes

Shape = tuple[int, ...]
NO_ATTRS: Mapping[str, Any] = MappingProxyType({})
LEAVES = frozenset({"feed", "state", "const"})
ALIASES = frozenset({"reshape", "slice_rows", "after"})  # same bytes as their first source, at an offset


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """`op` applied to `src`; `shape` is in numpy order and contiguous; `attrs` are the op's structural parameters."""

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


def feed(name: str, shape: Shape, dtype: str = "f32", *, late: bool = False) -> Tensor:
    """A value that the caller gives anew at every run, as a numpy array. A `late` one may be given when what does not
    depend on it has run: a run is cut in two before the first node that reads it."""
    if DTYPES[dtype].numpy is None:
        raise ValueError(f"feed {name!r}: numpy has no {dtype}")
    return Tensor("feed", (), shape, dtype, {"late": True} if late else NO_ATTRS, name)


def state(name: str, shape: Shape, dtype: str = "f32", *, constant: bool = False, by_host: bool = False) -> Tensor:
    """A value that lives in the session: weights (`constant`, never written) and KV caches. What only the host writes
    (`by_host`: page tables) no node may, so every device that reads it has a copy."""
    attrs = {"constant": constant, "by_host": True} if by_host else {"constant": constant}
    return Tensor("state", (), shape, dtype, attrs, name)


def const(value: float, dtype: str = "f32") -> Tensor:
    """A scalar that is part of the graph."""
    return Tensor("const", (), (), dtype, {"value": value})


def with_sources(t: Tensor, src: tuple[Tensor, ...]) -> Tensor:
    """The same node of these sources: t itself, if it has them."""
    for old, new in zip(t.src, src, strict=True):
        if old is not new:
            return Tensor(t.op, src, t.shape, t.dtype, t.attrs, t.name)
    return t

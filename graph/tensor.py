"""A Tensor is a node of the graph: what to compute, never the numbers and never where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
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


def toposort(roots: Iterable[Tensor], *, reverse: bool = False) -> list[Tensor]:
    """Sources first, depth first from the roots in order; a write comes after every other reader of what it overwrites.

    `reverse` visits a node's sources from right to left: another valid order, which may need less memory. Iterative,
    linear in nodes and edges. ValueError when a node both reads and overwrites its own history.
    """
    return list(_toposort(tuple(roots), reverse))


@lru_cache(maxsize=1)  # nodes never change, and a plan is made by several steps that begin with the order of one graph
def _toposort(roots: tuple[Tensor, ...], reverse: bool) -> tuple[Tensor, ...]:
    before = _readers_of_overwritten(roots)
    order: list[Tensor] = []
    done: dict[Tensor, bool] = {}  # False: being visited
    for root in roots:
        work: list[Tensor | None] = [root]
        while work:
            t = work.pop()
            if t is None:  # below it lies a node whose sources are done
                left = work.pop()
                assert left is not None
                done[left] = True
                order.append(left)
            elif t not in done:
                sources = t.src if reverse else t.src[::-1]
                if t in before:
                    sources = (*before[t], *sources)
                if not sources:
                    done[t] = True
                    order.append(t)
                    continue
                done[t] = False
                work += (t, None)
                for s in sources:  # the last one is visited first
                    state = done.get(s)
                    if state is None:
                        work.append(s)
                    elif not state:
                        raise ValueError(f"{s!r} both reads and overwrites its own history")
    return tuple(order)


def _readers_of_overwritten(roots: Iterable[Tensor]) -> dict[Tensor, list[Tensor]]:
    """Of each node that writes: the other readers of what it overwrites, under whatever alias."""
    from logitless.graph.op import OPS

    nodes: dict[Tensor, None] = {}
    stack = list(roots)[::-1]
    while stack:
        t = stack.pop()
        if t not in nodes:
            nodes[t] = None
            stack += t.src[::-1]
    writing = {name for name, declared in OPS.items() if declared.writes} - ALIASES
    writers = [(t, _unaliased(t.src[i])) for t in nodes if t.op in writing for i in OPS[t.op].writes]
    readers: dict[Tensor, list[Tensor]] = {overwritten: [] for _, overwritten in writers}
    for t in nodes if writers else ():
        if t.op not in ALIASES:
            for s in t.src:
                found = readers.get(_unaliased(s) if s.op in ALIASES else s)
                if found is not None:
                    found.append(t)
    before: dict[Tensor, list[Tensor]] = {}
    for t, overwritten in writers:
        before.setdefault(t, []).extend(r for r in readers[overwritten] if r is not t)
    return before


def _unaliased(t: Tensor) -> Tensor:
    while t.op in ALIASES:
        t = t.src[0]
    return t


def dump(roots: Iterable[Tensor]) -> str:
    """The graph as text, one node a line: `%3 = add f32[4, 6] (%1, %2)`."""
    names: dict[int, str] = {}
    lines = []
    for i, t in enumerate(toposort(roots)):
        names[id(t)] = f"%{i}"
        args = ", ".join(names[id(s)] for s in t.src)
        attrs = "".join(f" {k}={v}" for k, v in t.attrs.items())
        lines.append(f"%{i} = {t.op}{' ' + repr(t.name) if t.name else ''} {t.dtype}{list(t.shape)} ({args}){attrs}")
    return "\n".join(lines)

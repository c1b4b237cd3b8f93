"""Topological sort of graphs: readers of an overwritten tensor come before its writer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from logitless.graph.tensor import ALIASES, Tensor


def toposort(roots: Iterable[Tensor], *, reverse: bool = False) -> list[Tensor]:
    """Sort a graph: sources first, writers after all other readers of what they overwrite.

    Depth first from the roots in order. `reverse` visits a node's sources from right to left:
    another valid order, which may need less memory. Iterative, linear in nodes and edges.
    ValueError when a node both reads and overwrites its own history.
    """
    return list(_toposort(tuple(roots), reverse))


@lru_cache(maxsize=1)  # several steps of making a plan sort one graph
def _toposort(roots: tuple[Tensor, ...], reverse: bool) -> tuple[Tensor, ...]:
    before = _readers_of_overwritten(roots)
    order: list[Tensor] = []
    done: dict[Tensor, bool] = {}  # False: being visited
    for root in roots:
        work: list[Tensor | None] = [root]
        while work:
            t = work.pop()
            if t is None:  # below it lies a node whose sources are done
                node = work.pop()
                assert node is not None
                done[node] = True
                order.append(node)
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
                    finished = done.get(s)
                    if finished is None:
                        work.append(s)
                    elif not finished:
                        raise ValueError(f"{s!r} both reads and overwrites its own history")
    return tuple(order)


def _readers_of_overwritten(roots: Iterable[Tensor]) -> dict[Tensor, list[Tensor]]:
    """{writing node: the other readers of what it overwrites, under any alias}."""
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
                others = readers.get(_unaliased(s) if s.op in ALIASES else s)
                if others is not None:
                    others.append(t)
    before: dict[Tensor, list[Tensor]] = {}
    for t, overwritten in writers:
        before.setdefault(t, []).extend(r for r in readers[overwritten] if r is not t)
    return before


def _unaliased(t: Tensor) -> Tensor:
    while t.op in ALIASES:
        t = t.src[0]
    return t


def dump(roots: Iterable[Tensor]) -> str:
    """Format a graph, one node a line: `%3 = add f32[4, 6] (%1, %2)`."""
    names: dict[Tensor, str] = {}
    lines = []
    for i, t in enumerate(toposort(roots)):
        names[t] = f"%{i}"
        args = ", ".join(names[s] for s in t.src)
        attrs = "".join(f" {k}={v}" for k, v in t.attrs.items())
        lines.append(f"%{i} = {t.op}{' ' + repr(t.name) if t.name else ''} {t.dtype}{list(t.shape)} ({args}){attrs}")
    return "\n".join(lines)

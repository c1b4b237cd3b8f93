"""Topological sort of graphs, and rebuilding them node by node.

Readers of an overwritten tensor come before its writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from logitless.graph.tensor import ALIASES, Tensor


def toposort(roots: Iterable[Tensor], *, reverse: bool = False) -> list[Tensor]:
    """Sort a graph: sources first, writers after all other readers of the tensors that they overwrite.

    Depth first from the roots in order. `reverse` visits a node's sources from right to left:
    another valid order, which may need less memory. Iterative, linear in nodes and edges.
    ValueError when a node both reads and overwrites its own history."""
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
    """{writing node: the other readers of its overwritten tensor, under any alias}."""
    from logitless.graph.op import OPS

    nodes: dict[Tensor, None] = {}
    stack = list(roots)[::-1]
    while stack:
        t = stack.pop()
        if t not in nodes:
            nodes[t] = None
            stack += t.src[::-1]
    # looked up one by one: another thread may import ops meanwhile
    writing = {op for op in {t.op for t in nodes} - ALIASES if op in OPS and OPS[op].writes}
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


def rebuild(
    order: Iterable[Tensor], replace: Callable[[Tensor, Tensor], Tensor], new: dict[Tensor, Tensor] | None = None
) -> dict[Tensor, Tensor]:
    """{node: its replacement} of a sorted graph, where replace(t, t with new sources) makes each.

    `new`: nodes that are replaced already; the result is added to it."""
    new = {} if new is None else new
    for t in order:
        new[t] = replace(t, _with_sources(t, tuple([new.get(s, s) for s in t.src])))
    return new


def _with_sources(t: Tensor, src: tuple[Tensor, ...]) -> Tensor:
    """t with other sources; t itself if it has these already."""
    for old, new in zip(t.src, src, strict=True):
        if old is not new:
            return Tensor(t.op, src, t.shape, t.dtype, t.attrs, t.name)
    return t

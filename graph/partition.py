"""Which backend runs which node, and the copies at the seams between them.

Backends are in order of preference and the last one must be complete: a node runs on the first that supports it.
Nodes that touch the same mutable state (a KV cache) run on the first backend that supports all of them, so that a
state never moves. The user's nodes are left as they are: where a source comes from another backend, or a backend
rewrites a node, new nodes take their place, so a second plan or run sees what the first one saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graph.backend import Backend
from graph.op import destination
from graph.tensor import ALIASES, Tensor, toposort

TRANSFER = "transfer"  # a copy of its source on another backend


@dataclass(frozen=True)
class Segment:
    """Nodes that one backend runs in one go."""

    backend: int
    nodes: tuple[Tensor, ...]


@dataclass(frozen=True)
class Placement:
    """The graph as it will run. `backend_of` tells the backend of every node that is not a leaf, by id."""

    fetches: tuple[Tensor, ...]
    order: tuple[Tensor, ...]
    backend_of: Mapping[int, int]
    homes: Mapping[str, int]  # mutable state → its backend

    @property
    def segments(self) -> list[Segment]:
        """Runs of nodes on one backend; a transfer is a segment of its own, done by the session."""
        groups: list[tuple[int, list[Tensor]]] = []
        for t in self.order:
            if t.is_leaf or t.op in ALIASES:
                continue
            b = self.backend_of[id(t)]
            if groups and groups[-1][0] == b and TRANSFER not in (t.op, groups[-1][1][-1].op):
                groups[-1][1].append(t)
            else:
                groups.append((b, [t]))
        return [Segment(b, tuple(nodes)) for b, nodes in groups]

    @property
    def seams(self) -> list[Tensor]:
        return [t for t in self.order if t.op == TRANSFER]


def partition(
    fetches: Iterable[Tensor], backends: Sequence[Backend], homes: Mapping[str, int] | None = None
) -> Placement:
    """Place a graph. `homes`: mutable states that already live somewhere. ValueError names a node that nothing runs."""
    fetches = tuple(fetches)
    order = toposort(fetches)
    home = dict(homes or {})
    pinned = _state_groups(order, backends, home)
    produced: dict[int, int] = {}  # user's node → backend
    variants: dict[tuple[int, int], Tensor] = {}
    where: dict[int, int] = {}

    def on(t: Tensor, b: int) -> Tensor:
        if t.is_leaf:
            return t
        found = variants.get((id(t), b))
        if found is None:
            source = variants[id(t), produced[id(t)]]
            found = Tensor(TRANSFER, (source,), t.shape, t.dtype, {"to": b}, t.name)
            where[id(found)] = b
            variants[id(t), b] = found
        return found

    for t in order:
        if t.is_leaf:
            continue
        if t.op in ALIASES and not t.src[0].is_leaf:
            b = produced[id(t.src[0])]
        else:
            b = pinned.get(id(t), -1)
            b = b if b >= 0 else _first(t, backends)
        src = tuple(on(s, b) for s in t.src)
        node = t if all(a is s for a, s in zip(src, t.src, strict=True)) else replace(t, src=src)
        node = backends[b].rewrite(node)
        stack = [node]
        while stack:  # a rewrite may have made more than one node
            new = stack.pop()
            if not new.is_leaf and id(new) not in where:
                where[id(new)] = b
                stack.extend(new.src)
        produced[id(t)] = b
        variants[id(t), b] = node

    placed = tuple(f if f.is_leaf else variants[id(f), produced[id(f)]] for f in fetches)
    final = toposort(placed)
    # `where` is by id: nodes that a rewrite dropped are dead by now and must not shadow others
    return Placement(placed, tuple(final), {id(t): where[id(t)] for t in final if not t.is_leaf}, home)


def _first(t: Tensor, backends: Sequence[Backend]) -> int:
    for i, backend in enumerate(backends):
        if backend.supports(t):
            return i
    raise ValueError(f"no device runs {t!r}: tried {', '.join(b.name for b in backends)}")


def _state_groups(order: Sequence[Tensor], backends: Sequence[Backend], home: dict[str, int]) -> dict[int, int]:
    """The backend of every node that touches a mutable state; new states get their home."""
    state_of: dict[int, str] = {}  # the state whose bytes a tensor is
    touching: dict[str, list[Tensor]] = {}
    for t in order:
        if t.op == "state":
            if not t.attrs["constant"]:
                state_of[id(t)] = t.name
            continue
        for s in t.src:
            if id(s) in state_of:
                touching.setdefault(state_of[id(s)], []).append(t)
        owner = t.src[0] if t.op in ALIASES else destination(t)
        if owner is not None and id(owner) in state_of:
            state_of[id(t)] = state_of[id(owner)]

    # states that meet in one node share their home
    leader: dict[str, str] = {name: name for name in touching}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    met: dict[int, str] = {}
    for name, nodes in touching.items():
        for t in nodes:
            if id(t) in met:
                leader[find(name)] = find(met[id(t)])
            met[id(t)] = name
    groups: dict[str, list[str]] = {}
    for name in touching:
        groups.setdefault(find(name), []).append(name)

    pinned: dict[int, int] = {}
    for names in groups.values():
        nodes = [t for name in names for t in touching[name] if t.op not in ALIASES]
        known = {home[n] for n in names if n in home}
        candidates = sorted(known) or range(len(backends))
        b = next((b for b in candidates if all(backends[b].supports(t) for t in nodes)), None)
        if b is None or len(known) > 1:
            raise ValueError(f"no device runs everything that touches state {names[0]!r}")
        for n in names:
            home[n] = b
        for t in nodes:
            pinned[id(t)] = b
    return pinned

"""Which backend runs which node, and the copies at the seams between them.

Backends are in order of preference and one of them must be complete: a node runs on the first that supports it.
Nodes that touch the same mutable state (a KV cache) run on the first backend that supports all of them, so that a
state never moves. A `prefer` comes before that order: a node that reads a state runs where that one is wanted, and one
that reads none where its sources were made; of several places, where the layer of the deepest is.
The user's nodes are left as they are: where a source comes from another backend, or a backend rewrites or fuses nodes,
new ones take their place, so a second plan or run sees what the first one saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from logitless.graph.backend import Backend
from logitless.graph.execution.memory import Roots, roots_of
from logitless.graph.op import writes_of
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor

TRANSFER = "transfer"  # a copy of its source on another backend
Wish = tuple[int, int]  # the backend that a node is wanted on, and that of the layer that it belongs to
Prefer = Callable[[Tensor, Tensor], Wish | None]  # of a node and a state that it reads


@dataclass(frozen=True)
class Segment:
    """Nodes that one backend runs in one go. `late`: feeds that they are the first to read, and that may come late."""

    backend: int
    nodes: tuple[Tensor, ...]
    late: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The graph as it will run. `backend_of` tells the backend of every node that is not a leaf."""

    fetches: tuple[Tensor, ...]
    order: tuple[Tensor, ...]
    backend_of: Mapping[Tensor, int]
    homes: Mapping[str, int]  # mutable state → its backend

    def arena_of(self, t: Tensor) -> int:
        return self.backend_of[t]

    def nodes_of(self, backend: int) -> list[Tensor]:
        """What runs there, in order."""
        return [t for t in self.order if self.backend_of.get(t) == backend]

    @property
    def segments(self) -> list[Segment]:
        """Runs of nodes on one backend; a transfer is a segment of its own, done by the session."""
        groups: list[tuple[int, list[Tensor], list[Tensor]]] = []
        seen: set[Tensor] = set()
        for t in self.order:
            if t.is_leaf or t.op in ALIASES:
                continue
            b = self.backend_of[t]
            late = [s for s in t.src if s.op == "feed" and s.attrs.get("late") and s not in seen]
            seen.update(late)
            if groups and not late and groups[-1][0] == b and TRANSFER not in (t.op, groups[-1][1][-1].op):
                groups[-1][1].append(t)
            else:
                groups.append((b, [t], late))
        return [Segment(b, tuple(nodes), tuple(late)) for b, nodes, late in groups]

    @property
    def seams(self) -> list[Tensor]:
        return [t for t in self.order if t.op == TRANSFER]


def partition(
    fetches: Iterable[Tensor],
    backends: Sequence[Backend],
    homes: Mapping[str, int] | None = None,
    prefer: Prefer | None = None,
) -> Placement:
    """Place a graph. `homes`: mutable states that already live somewhere. ValueError names a node that nothing runs."""
    fetches = tuple(fetches)
    order = toposort(fetches)
    roots = roots_of(order)
    _check_bytes(order, fetches, roots)
    home = dict(homes or {})
    pinned = _pin_states(order, roots, backends, home, prefer)
    for f in fetches:
        if _is_mutable(roots[f][0]):
            home.setdefault(roots[f][0].name, 0)  # a state that is fetched and nothing else
    placing = _Placing(backends, roots, home, pinned, _Wanted(roots, prefer) if prefer is not None else None)
    placing.place(order)
    placed, final = _fuse(tuple(map(placing.chosen, fetches)), backends, placing.where)
    return Placement(placed, tuple(final), {t: placing.where[t] for t in final if not t.is_leaf}, home)


class _Wanted:
    """Where `prefer` wants nodes: because of what they read, or to be with their sources. To be asked in order."""

    def __init__(self, roots: Roots, prefer: Prefer) -> None:
        self._roots, self._prefer = roots, prefer
        self._depth: dict[Tensor, int] = {}
        self._layer: dict[Tensor, int] = {}  # node → backend of its layer

    def __call__(self, t: Tensor, produced: Mapping[Tensor, int]) -> int | None:
        depth, layer = self._depth, self._layer
        depth[t] = 1 + max((depth.get(s, 0) for s in t.src), default=0)
        wish = next(_wishes(t, self._roots, self._prefer), None)
        if wish is None:
            made = [s for s in t.src if s in layer]
            if not made:
                return None
            own = layer[max(made, key=lambda s: depth[s])]
            wish = (own if len({produced[s] for s in made}) > 1 else produced[made[0]]), own
        b, layer[t] = wish
        return b


class _Placing:
    """The user's nodes one after the other: each gets a backend, and sources and a form that this one can run."""

    def __init__(
        self,
        backends: Sequence[Backend],
        roots: Roots,
        home: Mapping[str, int],
        pinned: Mapping[Tensor, int],
        wanted: _Wanted | None,
    ) -> None:
        self._backends, self._roots, self._home, self._pinned, self._wanted = backends, roots, home, pinned, wanted
        self._everywhere: set[Tensor] = set()  # leaves are wherever they are read, and so are their aliases
        self._produced: dict[Tensor, int] = {}  # user's node → backend
        self._variants: dict[tuple[Tensor, int], Tensor] = {}  # user's node and a backend → what stands for it there
        self.where: dict[Tensor, int] = {}  # what stands for it → backend

    def place(self, order: Sequence[Tensor]) -> None:
        everywhere, produced, variants, home = self._everywhere, self._produced, self._variants, self._home
        for t in order:
            if t.is_leaf or (t.op in ALIASES and all(s in everywhere for s in t.src)):
                everywhere.add(t)
                if not t.is_leaf:
                    self.where[t] = home.get(self._roots[t][0].name, 0)
                continue
            b = self._backend(t)
            src = tuple([variants.get((s, b)) or self._on(s, b) for s in t.src])
            node = t if src == t.src else Tensor(t.op, src, t.shape, t.dtype, t.attrs, t.name)
            node = self._backends[b].rewrite(node)
            self._belongs(node, b)
            produced[t] = b
            variants[t, b] = node

    def chosen(self, t: Tensor) -> Tensor:
        """What stands for a node of the user's, where it was placed."""
        return t if t in self._everywhere else self._variants[t, self._produced[t]]

    def _backend(self, t: Tensor) -> int:
        wish = self._wanted(t, self._produced) if self._wanted is not None else None
        if t.op in ALIASES:  # of what was made, or of a leaf but after what was made
            b = next(self._produced[s] for s in t.src if s in self._produced)
            return self._home.get(self._roots[t][0].name, b)
        pinned = self._pinned.get(t)
        return _first(t, self._backends, wish) if pinned is None else pinned

    def _on(self, t: Tensor, b: int) -> Tensor:
        """A node on backend b: a leaf as it is, what another backend makes as a transfer."""
        if t in self._everywhere:
            return t
        source = self._variants[t, self._produced[t]]
        found = Tensor(TRANSFER, (source,), t.shape, t.dtype, {"to": b}, t.name)
        self.where[found] = b
        self._variants[t, b] = found
        return found

    def _belongs(self, node: Tensor, b: int) -> None:
        """Note the backend of a node and of all that its rewrite made below it."""
        where, stack = self.where, [node]
        while stack:
            new = stack.pop()
            if new not in where and not new.is_leaf:
                where[new] = b
                stack += new.src


def _fuse(
    placed: tuple[Tensor, ...], backends: Sequence[Backend], where: dict[Tensor, int]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The fetches when every backend has fused its nodes, and the graph's order; `where` gets the new ones."""
    order: list[Tensor] = []
    for b, backend in enumerate(backends):
        placed = tuple(backend.fuse(placed, lambda t, b=b: where.get(t) == b))  # type: ignore[misc]
        order = toposort(placed)
        before = set(where)
        for t in order:
            if t.is_leaf or t in before:
                continue
            # made by the device, or another device's node again because it reads what was made: that is where it runs
            made = next((s for s in t.src if not s.is_leaf and s not in before), None)
            where[t] = t.attrs["to"] if t.op == TRANSFER else b if made is None else where[made]
    return placed, order


def _is_mutable(t: Tensor) -> bool:
    return t.op == "state" and not t.attrs["constant"] and not t.attrs.get("by_host")


def _check_bytes(order: Sequence[Tensor], fetches: Sequence[Tensor], roots: Roots) -> None:
    """Feeds, scalars and constants are never written, and how a backend keeps a constant is its own business."""
    for t in order:
        for i in writes_of(t):
            root = roots[t.src[i]][0]
            if root.is_leaf and not _is_mutable(root):
                raise ValueError(f"{t!r} would overwrite {root!r}, which is not a mutable state")
    for t in (*(t for t in order if t.op in ALIASES), *fetches):
        root = roots[t][0]
        if root.op == "const" or (root.op == "state" and not _is_mutable(root)):
            raise ValueError(f"{root!r} is a constant: it can be neither fetched nor taken apart")


def _wishes(t: Tensor, roots: Roots, prefer: Prefer) -> Iterator[Wish]:
    """Where a node is wanted because of the states that it reads itself."""
    for root in (roots[s][0] for s in t.src):
        wish = prefer(t, root) if root.op == "state" else None
        if wish is not None:
            yield wish


def _first(t: Tensor, backends: Sequence[Backend], wanted: int | None) -> int:
    for i in range(len(backends)) if wanted is None else (wanted, *range(len(backends))):
        if backends[i].supports(t):
            return i
    raise ValueError(f"no device runs {t!r}: tried {', '.join(b.name for b in backends)}")


def _pin_states(
    order: Sequence[Tensor],
    roots: Roots,
    backends: Sequence[Backend],
    home: dict[str, int],
    prefer: Prefer | None,
) -> dict[Tensor, int]:
    """The backend of every node that touches a mutable state. States that meet in a node share a home."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    touching: list[tuple[Tensor, str]] = []
    for t in order:
        names = [root.name for s in t.src if _is_mutable(root := roots[s][0])] if t.op not in ALIASES else []
        for name in names:
            leader[find(name)] = find(names[0])
        if names:
            touching.append((t, names[0]))

    members: dict[str, list[str]] = {}
    for name in leader:
        members.setdefault(find(name), []).append(name)
    nodes: dict[str, list[Tensor]] = {name: [] for name in members}
    for t, name in touching:
        nodes[find(name)].append(t)
    for group, names in members.items():
        wishes = [b for t in nodes[group] for b, _ in _wishes(t, roots, prefer)] if prefer is not None else []
        b = _home_of(names, nodes[group], backends, home, wishes[:1])
        home.update(dict.fromkeys(names, b))
    return {t: home[name] for t, name in touching}


def _home_of(
    names: list[str],
    nodes: list[Tensor],
    backends: Sequence[Backend],
    home: Mapping[str, int],
    wishes: Sequence[int],
) -> int:
    """Where states that meet live: the first backend that runs all their nodes, unless they live somewhere already."""
    known = {home[name]: name for name in names if name in home}
    if len(known) > 1:
        raise ValueError(f"states {', '.join(map(repr, known.values()))} meet in a node but are on different devices")
    for b in known or (*wishes, *range(len(backends))):
        refused = next((t for t in nodes if not backends[b].supports(t)), None)
        if refused is None:
            return b
    why = f"{backends[b].name} refuses {refused!r}"
    raise ValueError(f"no device runs everything that touches state {names[0]!r}: {why}")

"""Graph partition: assigns each node to a backend, and adds the transfers between backends.

Backends are in order of preference and the last one is complete: a node runs on the first that
supports it. Nodes that touch the same mutable variable (a KV cache) run on the first backend that
supports all of them, so that a variable never moves. A placement hint comes before that order: a
node that reads a variable runs where the hint for it says, and a node that reads none where its
sources run; of several places, at the layer of the deepest source.

The user's nodes are left as they are: where a source comes from another backend, or a backend
rewrites or fuses nodes, new nodes take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from logitless.graph.backend import Backend
from logitless.graph.execution.memory import Owners, owners_of
from logitless.graph.indices import NO_CHECKS, IndexChecks, checks_of
from logitless.graph.op import writes_of
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, tensors

TRANSFER = "transfer"  # op that copies its source to another backend
LOOKUP = "expert_slots"  # op that writes the slots of a step's experts (expert_cache.py)
BY_HOST = frozenset((TRANSFER, LOOKUP))  # ops that the session runs
PlacementHint = tuple[int, int]  # the preferred backend of a node, and the backend of its layer
HintOf = Callable[[Tensor, Tensor], PlacementHint | None]  # (node, variable that it reads) → hint


@dataclass(frozen=True)
class Segment:
    """Successive nodes of one backend. `deferred`: deferred feeds first read by them."""

    backend: int
    nodes: tuple[Tensor, ...]
    deferred: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A partitioned graph.

    `order`: its nodes in execution order. `backend_of`: backend of every node but leaves.
    `variable_backend`: backend of every mutable variable, by name. `checks`: of the user's indices.
    """

    fetches: tuple[Tensor, ...]
    order: tuple[Tensor, ...]
    backend_of: Mapping[Tensor, int]
    variable_backend: Mapping[str, int]
    checks: IndexChecks = NO_CHECKS

    def arena_of(self, t: Tensor) -> int:
        """Index of the arena (one a backend) that holds a node's result."""
        return self.backend_of[t]

    def nodes_of(self, backend: int) -> list[Tensor]:
        """The nodes that one backend runs, in order."""
        return [t for t in self.order if self.backend_of.get(t) == backend]

    @property
    def segments(self) -> list[Segment]:
        """Runs of nodes on one backend; a node that the session runs is a segment of its own.

        A lookup comes again where another one came between it and a reader: that may have taken its slots."""
        groups: list[tuple[int, list[Tensor], list[Tensor]]] = []
        known: set[Tensor] = set()
        latest: dict[int, Tensor] = {}  # lookup of each backend
        for t in self.order:
            if t.is_leaf or t.op in ALIASES:
                continue
            b = self.backend_of[t]
            lookup = t if t.op == LOOKUP else next((s for s in t.src if s.op == LOOKUP), None)
            if lookup is not None and latest.get(b) is not lookup:
                latest[b] = lookup
                if lookup is not t:
                    groups.append((b, [lookup], []))
            deferred = [s for s in t.src if s.op == "feed" and s.attrs.get("deferred") and s not in known]
            known.update(deferred)
            if groups and not deferred and groups[-1][0] == b and not BY_HOST & {t.op, groups[-1][1][-1].op}:
                groups[-1][1].append(t)
            else:
                groups.append((b, [t], deferred))
        return [Segment(b, tuple(nodes), tuple(deferred)) for b, nodes, deferred in groups]

    @property
    def transfers(self) -> list[Tensor]:
        """The nodes that copy a result from one backend to another."""
        return [t for t in self.order if t.op == TRANSFER]


def partition(
    fetches: Iterable[Tensor],
    backends: Sequence[Backend],
    variable_backend: Mapping[str, int] | None = None,
    hint_of: HintOf | None = None,
) -> Placement:
    """Partition a graph. `variable_backend`: mutable variables that already live somewhere.

    ValueError names a node that no backend runs, a constant that is written or fetched, computed
    indices that may be out of bounds, or variables on different devices that meet in a node."""
    fetches = tensors("fetches", fetches)
    order = toposort(fetches)
    owners = owners_of(order)
    _check_constants(order, fetches, owners)
    checks = checks_of(order)
    variable_backend = dict(variable_backend or {})
    pinned = _pin_nodes(order, owners, backends, variable_backend, hint_of)
    for f in fetches:
        if _is_mutable(owners[f][0]):
            variable_backend.setdefault(owners[f][0].name, 0)  # fetched, and read by no node
    hints = _Hints(owners, hint_of) if hint_of is not None else None
    assignment = _Assignment(backends, owners, variable_backend, pinned, hints)
    assignment.assign(order)
    fused, final = _fuse(tuple(map(assignment.replacement, fetches)), backends, assignment.where)
    backend_of = {t: assignment.where[t] for t in final if not t.is_leaf}
    return Placement(fused, tuple(final), backend_of, variable_backend, checks)


class _Hints:
    """Preferred backends: by a node's inputs, or beside its sources. Nodes are asked in order."""

    def __init__(self, owners: Owners, hint_of: HintOf) -> None:
        self._owners, self._hint_of = owners, hint_of
        self._depth: dict[Tensor, int] = {}
        self._layer: dict[Tensor, int] = {}  # node → backend of its layer

    def backend(self, t: Tensor, assigned: Mapping[Tensor, int]) -> int | None:
        """The preferred backend, None if nothing says; `assigned`: backends of earlier nodes."""
        depth, layer = self._depth, self._layer
        depth[t] = 1 + max((depth.get(s, 0) for s in t.src), default=0)
        hint = next(_direct_hints(t, self._owners, self._hint_of), None)
        if hint is None:
            hinted = [s for s in t.src if s in layer]
            if not hinted:
                return None
            own = layer[max(hinted, key=lambda s: depth[s])]
            hint = (own if len({assigned[s] for s in hinted}) > 1 else assigned[hinted[0]]), own
        b, layer[t] = hint
        return b


class _Assignment:
    """Assigns the user's nodes in order: each gets a backend, and sources and a form that this one runs."""

    def __init__(
        self,
        backends: Sequence[Backend],
        owners: Owners,
        variable_backend: Mapping[str, int],
        pinned: Mapping[Tensor, int],
        hints: _Hints | None,
    ) -> None:
        self._backends, self._owners, self._variable_backend = backends, owners, variable_backend
        self._pinned, self._hints = pinned, hints
        self._everywhere: set[Tensor] = set()  # leaves, and aliases of them: wherever they are read
        self._assigned: dict[Tensor, int] = {}  # user's node → backend
        # (user's node, backend) → its replacement there
        self._variants: dict[tuple[Tensor, int], Tensor] = {}
        self.where: dict[Tensor, int] = {}  # replacement → backend

    def assign(self, order: Sequence[Tensor]) -> None:
        everywhere, assigned, variants = self._everywhere, self._assigned, self._variants
        for t in order:
            if t.is_leaf or (t.op in ALIASES and all(s in everywhere for s in t.src)):
                everywhere.add(t)
                if not t.is_leaf:
                    self.where[t] = self._variable_backend.get(self._owners[t][0].name, 0)
                continue
            b = self._backend(t)
            src = tuple([variants.get((s, b)) or self._on(s, b) for s in t.src])
            node = t if src == t.src else Tensor(t.op, src, t.shape, t.dtype, t.attrs, t.name)
            node = self._backends[b].rewrite(node)
            self._note(node, b)
            assigned[t] = b
            variants[t, b] = node

    def replacement(self, t: Tensor) -> Tensor:
        """The replacement of a user's node on the backend that it is assigned to."""
        return t if t in self._everywhere else self._variants[t, self._assigned[t]]

    def _backend(self, t: Tensor) -> int:
        hint = self._hints.backend(t, self._assigned) if self._hints is not None else None
        if t.op in ALIASES:  # alias of a result, or of a leaf after a result
            b = next(self._assigned[s] for s in t.src if s in self._assigned)
            return self._variable_backend.get(self._owners[t][0].name, b)
        pinned = self._pinned.get(t)
        return _first_supporting(t, self._backends, hint) if pinned is None else pinned

    def _on(self, t: Tensor, b: int) -> Tensor:
        """A node as backend b reads it: a leaf as it is, the result of another backend by a transfer."""
        if t in self._everywhere:
            return t
        source = self._variants[t, self._assigned[t]]
        copy = Tensor(TRANSFER, (source,), t.shape, t.dtype, {"to": b}, t.name)
        self.where[copy] = b
        self._variants[t, b] = copy
        return copy

    def _note(self, node: Tensor, b: int) -> None:
        """Note the backend of a node and of all that its rewrite made below it."""
        where, stack = self.where, [node]
        while stack:
            new = stack.pop()
            if new not in where and not new.is_leaf:
                where[new] = b
                stack += new.src


def _fuse(
    fetches: tuple[Tensor, ...], backends: Sequence[Backend], where: dict[Tensor, int]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Let every backend fuse its nodes: the new fetches, and the graph in order. `where` gets the new nodes."""
    order: list[Tensor] = []
    for b, backend in enumerate(backends):
        fetches = tuple(backend.fuse(fetches, lambda t, b=b: where.get(t) == b))  # type: ignore[misc]
        order = toposort(fetches)
        before = set(where)
        for t in order:
            if t.is_leaf or t in before:
                continue
            # made by this backend, or another one's node anew because it reads what was made: there
            # it runs
            source = next((s for s in t.src if not s.is_leaf and s not in before), None)
            where[t] = t.attrs["to"] if t.op == TRANSFER else b if source is None else where[source]
    return fetches, order


def _is_mutable(t: Tensor) -> bool:
    return t.op == "variable" and not t.attrs["constant"] and not t.attrs.get("host_written")


def _check_constants(order: Sequence[Tensor], fetches: Sequence[Tensor], owners: Owners) -> None:
    """Feeds, scalars and constants are never written; constants have a layout that only their backend knows."""
    for t in order:
        for i in writes_of(t):
            owner = owners[t.src[i]][0]
            if owner.is_leaf and not _is_mutable(owner):
                raise ValueError(f"{t!r} would overwrite {owner!r}, which is not a mutable variable")
    for t in (*(t for t in order if t.op in ALIASES), *fetches):
        owner = owners[t][0]
        if owner.op == "const" or (owner.op == "variable" and not _is_mutable(owner)):
            raise ValueError(f"{owner!r} is a constant: it can be neither fetched nor sliced")


def _direct_hints(t: Tensor, owners: Owners, hint_of: HintOf) -> Iterator[PlacementHint]:
    """Hints for a node by the variables that it reads itself."""
    for owner in (owners[s][0] for s in t.src):
        hint = hint_of(t, owner) if owner.op == "variable" else None
        if hint is not None:
            yield hint


def _first_supporting(t: Tensor, backends: Sequence[Backend], preferred: int | None) -> int:
    for i in range(len(backends)) if preferred is None else (preferred, *range(len(backends))):
        if backends[i].supports(t):
            return i
    raise ValueError(f"no device runs {t!r}: tried {', '.join(b.name for b in backends)}")


def _pin_nodes(
    order: Sequence[Tensor],
    owners: Owners,
    backends: Sequence[Backend],
    variable_backend: dict[str, int],
    hint_of: HintOf | None,
) -> dict[Tensor, int]:
    """The backend of every node that touches a mutable variable; variables that meet in a node
    share one.

    `variable_backend` gets the backends that are decided here."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    touching: list[tuple[Tensor, str]] = []
    for t in order:
        names = [owner.name for s in t.src if _is_mutable(owner := owners[s][0])] if t.op not in ALIASES else []
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
        hints = [b for t in nodes[group] for b, _ in _direct_hints(t, owners, hint_of)] if hint_of is not None else []
        b = _backend_of_group(names, nodes[group], backends, variable_backend, hints[:1])
        variable_backend.update(dict.fromkeys(names, b))
    return {t: variable_backend[name] for t, name in touching}


def _backend_of_group(
    names: list[str],
    nodes: list[Tensor],
    backends: Sequence[Backend],
    variable_backend: Mapping[str, int],
    hints: Sequence[int],
) -> int:
    """The backend of variables that meet: the one they have, else the first that runs all their nodes."""
    present = {variable_backend[name]: name for name in names if name in variable_backend}
    if len(present) > 1:
        meeting = ", ".join(map(repr, present.values()))
        raise ValueError(f"variables {meeting} meet in a node but are on different devices")
    for b in present or (*hints, *range(len(backends))):
        refused = next((t for t in nodes if not backends[b].supports(t)), None)
        if refused is None:
            return b
    why = f"{backends[b].name} refuses {refused!r}"
    raise ValueError(f"no device runs everything that touches variable {names[0]!r}: {why}")

"""Tensor parallelism: products divided between devices by rows of their weights, attention by heads.

An output of a product is computed as a whole by one device, with the sums of one device: the bits
do not depend on the division (Shoeybi et al., 2019, arXiv 1909.08053 divide every second product by
columns instead and add the devices' sums, which saves transfers and changes bits). Elementwise ops
stay divided; any other op reads the pieces joined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from logitless.graph.op import OPS
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, take_block
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor

ACTIVATIONS = ("silu", "gelu", "relu", "elu", "exp", "sigmoid", "softplus", "softcap", "glu", "glu_clamped")
ELEMENTWISE = frozenset(("add", "sub", "mul", "scale", "clamp", *ACTIVATIONS))
OF_CACHE = frozenset(("load_k", "load_v", "copy_pages", "clear_cells"))  # a cache, and what is the same for all heads
STORES = frozenset(("store_k", "store_v"))
SEPARATOR = "#"  # between the name of a variable and the number of a piece


@dataclass(frozen=True)
class Divided:
    """A value in pieces along its second axis: outputs of a product, heads of a cache. `ends`: of
    each piece; the last is the length of the axis."""

    ends: tuple[int, ...]
    pieces: tuple[Tensor, ...]


class Pieces(Protocol):
    """Variables of a session in pieces."""

    def define_piece(self, name: str, piece: str, start: int, stop: int) -> Tensor:
        """Define a piece of a variable: rows of a constant, heads of a cache."""


class Division:
    """Divides graphs. `shares`: relative share of each device. `n_units`: the number of equal parts
    between which a weight may be cut, by name and rows; 1: it stays whole. `caches`: KV caches are divided, too.
    """

    def __init__(
        self, session: Pieces, shares: Sequence[float], n_units: Callable[[str, int], int], *, caches: bool
    ) -> None:
        self._session, self._shares, self._n_units, self._caches = session, shares, n_units, caches
        self._variables: dict[str, Divided | None] = {}

    def of_variable(self, t: Tensor) -> Divided | None:
        """The pieces of a weight or a KV cache; None: it is whole. Piece d has the name `NAME#d`."""
        if t.name not in self._variables:
            self._variables[t.name] = self._defined(t)
        return self._variables[t.name]

    def _defined(self, t: Tensor) -> Divided | None:
        if t.attrs["constant"]:
            n = t.shape[0]
            units = self._n_units(t.name, n) if len(t.shape) == 2 else 1
        else:
            n = units = t.shape[1] if self._caches and len(t.shape) == 4 else 1
        total, reached, start = sum(self._shares), 0.0, 0
        ends, pieces = [], []
        for d, share in enumerate(self._shares):
            reached += share
            stop = round(units * reached / total) * (n // units)
            if units > 1 and stop > start:
                pieces.append(self._session.define_piece(t.name, f"{t.name}{SEPARATOR}{d}", start, stop))
                ends.append(stop)
                start = stop
        return Divided(tuple(ends), tuple(pieces)) if pieces else None

    def divide(self, fetches: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The fetches of the divided graph, and nodes to sort before them: so the first device, on which the
        pieces are joined, gets its own piece last and waits for none while it has work."""
        graph = _Graph(self)
        for t in toposort(fetches):
            graph.add(t)
        rest: list[Tensor] = []
        results = []
        for t in fetches:
            parts = graph.divided.get(t)
            if parts is not None and len(t.shape) == 4:
                results.append(parts.pieces[0])
                rest += parts.pieces[1:]
            else:
                results.append(graph.whole(t))
        return tuple(results), (*graph.first, *rest)


class _Graph:
    def __init__(self, division: Division) -> None:
        self._division = division
        self._new: dict[Tensor, Tensor] = {}
        self.divided: dict[Tensor, Divided] = {}
        self.first: list[Tensor] = []  # pieces of other devices, in order: started before the first device's

    def add(self, t: Tensor) -> None:
        """Note a node, whose sources are known."""
        if t.op == "variable" and not t.attrs["constant"] and not t.attrs.get("host_written"):
            parts = self._division.of_variable(t)
        else:
            parts = None if t.is_leaf else self._parts(t)
        if parts is not None:
            self.divided[t] = parts
        elif t.is_leaf or all(s not in self.divided and self._new[s] is s for s in t.src):
            self._new[t] = t
        else:
            src = tuple(map(self.whole, t.src))
            self._new[t] = Tensor(t.op, src, t.shape, t.dtype, t.attrs, t.name)

    def whole(self, t: Tensor) -> Tensor:
        """A node as one tensor."""
        if t not in self._new:
            pieces = self.divided[t].pieces
            self._new[t] = concat(*pieces) if len(pieces) > 1 else pieces[0]
            self.first += pieces[1:]
        return self._new[t]

    def _parts(self, t: Tensor) -> Divided | None:
        first = self.divided.get(t.src[0]) if t.src else None
        if t.op == "linear":
            weight = t.src[1]
            parts = self._division.of_variable(weight) if weight.op == "variable" and weight.attrs["constant"] else None
            return parts and self._each(t, parts.ends, lambda i: (self.whole(t.src[0]), parts.pieces[i]))
        if first is None and t.op != "attention":
            return None
        if t.op in ELEMENTWISE:
            return self._elementwise(t)
        if t.op == "reshape" and first is not None:
            return self._reshaped(t, first)
        if t.op in ("rope", "hadamard") or t.op in OF_CACHE:
            assert first is not None
            rest = tuple(map(self.whole, t.src[1:]))
            return self._each(t, first.ends, lambda i: (first.pieces[i], *rest))
        if t.op in STORES:
            assert first is not None
            rows, rest = self._taken(t.src[1], first.ends), tuple(map(self.whole, t.src[2:]))
            return self._each(t, first.ends, lambda i: (first.pieces[i], rows[i], *rest))
        keys = self.divided.get(t.src[1]) if t.op == "attention" else None
        if keys is not None:
            values, rest = self.divided[t.src[2]], tuple(map(self.whole, t.src[3:]))
            group = t.shape[1] // keys.ends[-1]  # heads of queries for one of keys
            ends = tuple([group * end for end in keys.ends])
            q = self._taken(t.src[0], ends)
            return self._each(t, ends, lambda i: (q[i], keys.pieces[i], values.pieces[i], *rest))
        return None

    def _each(self, t: Tensor, ends: tuple[int, ...], sources: Callable[[int], tuple[Tensor, ...]]) -> Divided:
        return Divided(ends, tuple([OPS[t.op](*sources(i), **t.attrs) for i in range(len(ends))]))

    def _elementwise(self, t: Tensor) -> Divided | None:
        """Pieces where all sources are divided alike, or are one number."""
        of_sources = [self.divided.get(s) for s in t.src]
        ends = {parts.ends for parts in of_sources if parts is not None}
        if len(ends) != 1:
            return None
        for s, parts in zip(t.src, of_sources, strict=True):
            if s.shape != t.shape if parts is not None else s.op != "const":
                return None
        return self._each(
            t,
            ends.pop(),
            lambda i: tuple([s if p is None else p.pieces[i] for s, p in zip(t.src, of_sources, strict=True)]),
        )

    def _reshaped(self, t: Tensor, parts: Divided) -> Divided | None:
        """Pieces of (T, H · D) as (T, H, D), or the other way."""
        before, after = t.src[0].shape, t.shape
        if min(len(before), len(after)) < 2 or before[0] != after[0]:
            return None
        ends = [end * after[1] for end in parts.ends]
        if any(end % before[1] for end in ends):
            return None
        ends = [end // before[1] for end in ends]
        sizes = [stop - start for start, stop in itertools.pairwise((0, *ends))]
        pieces = zip(parts.pieces, sizes, strict=True)
        return Divided(tuple(ends), tuple([reshape(p, shape=(after[0], n, *after[2:])) for p, n in pieces]))

    def _taken(self, t: Tensor, ends: tuple[int, ...]) -> Sequence[Tensor]:
        """Pieces of t with these ends."""
        parts = self.divided.get(t)
        if parts is not None and parts.ends == ends:
            return parts.pieces
        whole, (n, _, *rest) = self.whole(t), t.shape
        return [
            take_block(whole, start=(0, start, *[0] * len(rest)), shape=(n, stop - start, *rest))
            for start, stop in itertools.pairwise((0, *ends))
        ]

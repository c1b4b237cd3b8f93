"""Random graphs for hypothesis, and an interpreter that runs one in a small arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from logitless.graph.execution.memory import ArenaLayout, lay_out_arenas
from logitless.graph.op import OPS
from logitless.graph.ops.attention.paged_attention import copy_pages
from logitless.graph.ops.elementwise import add, glu, mul, scale, silu, sum_to
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import pad_rows, reshape, slice_rows
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, const, feed

PAIRS = np.array([[0, 1]], np.int32)  # the feed of `overwritten`


def overwritten(t: Tensor, name: str = "pairs") -> Tensor:
    """t with row 0 copied over row 1 in place."""
    return copy_pages(t, feed(name, (1, 2), "i32"))


ROWS, COLUMNS = 6, 8
Feeds = Mapping[str, np.ndarray[Any, Any]]


def feeds_of(roots: Sequence[Tensor], dtype: type = np.float32) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    leaves = sorted((t for t in toposort(roots) if t.op == "feed"), key=lambda t: t.name)
    return {t.name: rng.normal(size=t.shape).astype(dtype) for t in leaves}


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 25) -> list[Tensor]:
    """Strategy of one to three fetches of a graph, with nodes read often, seldom, via aliases or
    never.
    """
    x, w = feed("x", (ROWS, COLUMNS)), feed("w", (COLUMNS,))
    nodes: list[Tensor] = [x, feed("y", (ROWS, COLUMNS))]
    for _ in range(draw(st.integers(1, max_nodes))):
        a, b = (nodes[draw(st.integers(0, len(nodes) - 1))] for _ in range(2))
        nodes.append(_node(draw(st.sampled_from(MAKERS)), a, b, w))
    return [nodes[draw(st.integers(0, len(nodes) - 1))] for _ in range(draw(st.integers(1, 3)))]


def _node(kind: str, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Strategy of a node. All have the shape (ROWS, COLUMNS), and none squares: values stay finite."""
    match kind:
        case "add":
            return add(a, b)
        case "mul":
            return scale(mul(rms_norm(a, w, eps=1e-5), b), factor=0.25)
        case "glu":
            return glu(rms_norm(a, w, eps=1e-5), b, activation="silu")
        case "norm":
            return rms_norm(a, w, eps=1e-5)
        case "row":
            return add(slice_rows(a, start=2, stop=3), b)
        case "top":
            return pad_rows(silu(slice_rows(a, start=0, stop=2)), before=0, after=ROWS - 2)
        case "flat":
            return reshape(silu(reshape(a, shape=(-1,))), shape=(ROWS, COLUMNS))
        case "sum":
            return add(mul(b, const(0.5)), sum_to(a, shape=(1, COLUMNS)))
        case _:
            return silu(a)


MAKERS = ("silu", "add", "mul", "glu", "norm", "row", "top", "flat", "sum")


def lay_out(roots: Sequence[Tensor], *, in_place: bool = True, alignment: int = 32) -> tuple[list[Tensor], ArenaLayout]:
    order = toposort(roots)
    return order, lay_out_arenas(order, lambda t: 0, [alignment], roots, in_place=in_place)


def run_in_arena(roots: Sequence[Tensor], feeds: Feeds, order: Sequence[Tensor], plan: ArenaLayout) -> list[Any]:
    """Fetches in f32, computed in an arena of exactly the planned size that starts as NaN.

    Before each node, all bytes that no later node reads become NaN again, by an independent count
    of readers.
    """
    arena = np.full(plan.sizes[0], 0xFF, np.uint8)
    values = {t.name: feeds[t.name].astype(np.float32) for t in order if t.op == "feed"}

    def view(t: Tensor) -> Any:
        root, offset = plan.owners[t]
        if root.op == "const":
            return np.float32(root.attrs["value"])
        raw = arena[plan.offsets[root] :] if root.op != "feed" else values[root.name].reshape(-1).view(np.uint8)
        return raw[offset : offset + t.nbytes].view(np.float32).reshape(t.shape)

    unread = Counter(plan.owners[s][0] for t in order if t.op not in ALIASES for s in t.src)
    unread.update(plan.owners[t][0] for t in roots)
    alive: list[Tensor] = []
    for t in order:
        if t.is_leaf or t.op in ALIASES:
            continue
        live = np.zeros(len(arena), bool)
        for other in alive:
            live[plan.offsets[other] : plan.offsets[other] + other.nbytes] = True
        arena[~live] = 0xFF
        result = np.array(OPS[t.op].reference(*map(view, t.src), **t.attrs), np.float32)
        view(t)[...] = result
        unread.subtract(plan.owners[s][0] for s in t.src)
        alive = [other for other in (*alive, t) if unread[other] > 0]
    return [np.array(view(t)) for t in roots]

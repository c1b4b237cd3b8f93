"""Conformance cases from a graph: its ops with the shapes that they have there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.dtype import DTYPES
from logitless.graph.indices import ANY, Bounds, needed_bounds
from logitless.graph.op import OPS, destination
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES, Tensor, feed
from logitless.graph.testing.conformance import Array, Problem, add_constant, add_variable, encode, signature


def graph_problems(
    roots: Iterable[Tensor], feeds: Mapping[str, Array], constant: Callable[[str], Bytes | None], seed: int = 0
) -> Iterator[Problem]:
    """Make a problem for each node that differs from all before it in op, attributes or sources.

    Leaves have their real values: feeds, and constants as GGUF bytes (None: random ones). Results
    of other nodes and floating variables are random normal numbers; integer variables are 0, 1,
    2..."""
    known: set[tuple[Any, ...]] = set()
    for node in toposort(roots):
        if node.is_leaf or node.op in ALIASES:
            continue
        sources = tuple((s.dtype, s.shape, _kind(s)) for s in node.src)
        key = (node.op, sources, repr(sorted(node.attrs.items())))
        if key in known:
            continue
        known.add(key)
        rng = np.random.default_rng([seed, len(known)])
        rule = OPS[node.op]
        quantised = any(DTYPES[s.dtype].quantised for s in node.src)
        tolerance = max(rule.tolerance, rule.tolerance_quantised) if quantised else rule.tolerance
        problem = Problem(node.op, signature(node), (), tolerance)
        leaves: dict[Tensor, Tensor] = {}
        src = []
        for i, s in enumerate(node.src):
            if s not in leaves:
                bounds = needed_bounds(node).get(s, (ANY,))[0]
                leaves[s] = _leaf(problem, f"s{i}", s, feeds, constant, rng, bounds)
            src.append(leaves[s])
        problem.roots = (rule(*src, **node.attrs),)
        yield problem


def _root(t: Tensor) -> tuple[Tensor, int]:
    """The tensor that owns these bytes, and their offset there."""
    offset = 0
    while True:
        if t.op == "slice_rows":
            offset += t.attrs["start"] * (t.src[0].nbytes // t.src[0].shape[0])
        owner = t.src[0] if t.op in ALIASES else destination(t)
        if owner is None:
            return t, offset
        t = owner


def _kind(t: Tensor) -> str:
    """The kind of a source: a leaf's op, "constant", or "node" for a computed one."""
    root = _root(t)[0]
    if root.op == "variable":
        return "constant" if root.attrs["constant"] else "variable"
    return root.op if root.is_leaf else "node"


def _integers(t: Tensor, rng: np.random.Generator) -> Array:
    """Plausible integers of a node: ids are 0 or 1, experts of a row differ, orders are permutations."""
    if t.op == "top_experts":
        return np.stack([rng.permutation(t.src[0].shape[1])[: t.shape[1]] for _ in range(t.shape[0])])
    if t.op == "expert_order":
        order: Array = OPS[t.op].reference(_integers(_root(t.src[0])[0], rng), **t.attrs)
        return order
    return rng.integers(0, 2, t.shape)


def _leaf(
    problem: Problem,
    name: str,
    t: Tensor,
    feeds: Mapping[str, Array],
    constant: Callable[[str], Bytes | None],
    rng: np.random.Generator,
    bounds: Bounds,
) -> Tensor:
    """A leaf of the same type and shape in the problem. `bounds` of the indices that it has."""
    root, offset = _root(t)
    kind = _kind(t)
    if kind == "const":
        return t
    if kind == "constant":
        raw = constant(root.name)
        if raw is None:
            raw = encode(rng.normal(size=root.shape), root.dtype)
        return add_constant(problem, name, t.shape, t.dtype, raw[offset : offset + t.nbytes])
    numpy_type = DTYPES[t.dtype].numpy
    integer = t.dtype in ("i32", "u32")
    if kind == "variable":
        values = np.arange(np.prod(t.shape)) % bounds[1] if integer else rng.normal(size=t.shape)
        values = values.reshape(t.shape)
        return add_variable(problem, name, values.astype(numpy_type or np.float32), t.dtype)
    if kind == "feed" or integer:
        whole = feeds[root.name] if kind == "feed" else _integers(root, rng)
        raw = np.ascontiguousarray(whole, DTYPES[root.dtype].numpy).reshape(-1).view(np.uint8)
        problem.feeds[name] = raw[offset : offset + t.nbytes].view(np.dtype(numpy_type)).reshape(t.shape)
    else:
        problem.feeds[name] = rng.normal(size=t.shape).astype(numpy_type)
    return feed(name, t.shape, t.dtype)

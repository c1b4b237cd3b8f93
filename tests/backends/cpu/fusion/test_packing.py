"""Packing on the CPU: products of the same activations share their packed form."""

from __future__ import annotations

import logitless.backends.cpu.backend  # noqa: F401 — registers the rules of ops
from logitless.backends.cpu.fusion.packing import RECENT, duplicates
from logitless.backends.cpu.lowering.registry import REWRITES
from logitless.graph.ops.linear import linear
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed, variable


def products(x: Tensor, *dtypes: str) -> list[Tensor]:
    """Rewritten products of x (3, 64) with a weight of each type."""
    weights = [variable(f"w{i}", (8, 64), dtype, constant=True) for i, dtype in enumerate(dtypes)]
    return [REWRITES["linear"](linear(x, w)) for w in weights]


def test_weights_of_one_block_size_share_quantised_activations() -> None:
    q, k, v = products(feed("x", (3, 64)), "q8_0", "q4_0", "f32")
    (other,) = products(feed("other", (3, 64)), "q8_0")
    assert duplicates(toposort([q, k, v, other]), lambda _: True) == {k.src[0]: q.src[0]}


def test_nodes_of_other_backends_are_not_shared() -> None:
    q, k = products(feed("x", (3, 64)), "q8_0", "q8_0")
    assert duplicates(toposort([q, k]), lambda t: t is not q.src[0]) == {}


def test_distant_products_do_not_share() -> None:
    x = feed("x", (3, 64))
    first, last = products(x, "q8_0", "q8_0")
    between = [product for i in range(RECENT) for product in products(feed(f"x{i}", (3, 64)), "q8_0")]
    assert duplicates(toposort([first, *between, last]), lambda _: True) == {}
    assert duplicates(toposort([first, *between[1:], last]), lambda _: True) == {last.src[0]: first.src[0]}

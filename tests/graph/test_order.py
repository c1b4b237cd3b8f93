"""Topological order of graphs, with readers before writers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from logitless.graph import op
from logitless.graph.ops.elementwise import add, mul, scale, silu
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.order import toposort
from logitless.graph.tensor import feed, variable
from tests.helpers.random_graphs import overwritten


def test_toposort_puts_sources_first_and_nodes_once() -> None:
    x = feed("x", (2,))
    a, b = silu(x), scale(x, factor=2.0)
    c = add(a, b)
    d = mul(c, a)
    assert toposort([d, c, d]) == [x, a, b, c, d]
    assert toposort([d], reverse=True) == [x, a, b, c, d]  # d's right source is a
    assert toposort([c], reverse=True) == [x, b, a, c]
    assert toposort([]) == []


def test_toposort_puts_readers_before_the_writer() -> None:
    kv = variable("kv", (3, 4))
    old = [silu(kv), silu(slice_rows(kv, start=1, stop=2)), silu(reshape(reshape(kv, shape=(12,)), shape=(4, 3)))]
    new = overwritten(kv)
    after = scale(new, factor=3.0)
    newer = overwritten(new, "more")
    for roots in itertools.permutations([*old, after, newer]):
        for reverse in (False, True):
            at = {t: i for i, t in enumerate(toposort(roots, reverse=reverse))}
            assert max(at[t] for t in old) < at[new] < at[after] < at[newer]


def test_toposort_puts_readers_of_the_whole_before_a_write_to_an_alias() -> None:
    kv = variable("kv", (3, 4))
    new, old = overwritten(slice_rows(kv, start=0, stop=2)), silu(kv)
    for roots in ([new, old], [old, new]):
        order = toposort(roots)
        assert order.index(old) < order.index(new)


def test_toposort_refuses_reads_of_an_overwritten_value() -> None:
    kv = variable("kv", (3, 4))
    new = overwritten(kv)
    with pytest.raises(ValueError, match=r"<add .*both reads and overwrites its own history"):
        toposort([add(kv, new)])
    with pytest.raises(ValueError, match="own history"):
        toposort([add(reshape(kv, shape=(3, 4)), silu(new))])
    with pytest.raises(ValueError, match="own history"):
        toposort([overwritten(kv, "a"), overwritten(kv, "b")])  # two new values of one state


def test_toposort_of_a_deep_chain_is_linear() -> None:
    x = t = feed("x", (1,))
    for _ in range(20_000):
        t = add(t, t)
    order = toposort([t])
    assert len(order) == 20_001
    assert order[0] is x
    assert order[-1] is t
    t = variable("kv", (2, 1))
    for _ in range(5_000):
        t = overwritten(t)
    assert len(toposort([t])) == 10_001


def test_toposort_does_not_mind_a_thread_that_imports_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks ops up: going through the registry fails when that grows."""

    class Growing(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(op, "OPS", Growing(op.OPS))
    x = feed("x", (4,))
    assert [t.op for t in toposort([add(x, x)])] == ["feed", "add"]

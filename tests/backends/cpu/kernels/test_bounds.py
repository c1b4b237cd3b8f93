"""Kernels that write by index skip indices outside their memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.graph.indices import IndexPart, Relation
from logitless.graph.ops.attention.paged_attention import PAGE, copy_pages, store_k, store_v
from logitless.graph.ops.linear_attention import causal_conv_update, linear_attention_update
from logitless.graph.tensor import Tensor, feed

N_PAGES, HEADS, SIZE = 3, 2, 32
OUTSIDE = np.array([-1, N_PAGES * PAGE, 2**31 - 1, -(2**31)], np.int32)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds reach the kernels as they are, as those of a decode step do."""
    for checked in (IndexPart, Relation):
        monkeypatch.setattr(checked, "check", lambda *_: None)


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session([CPUBackend(1)])
    yield session
    session.close()


def run(session: Session, node: Tensor, feeds: dict[str, np.ndarray]) -> None:
    session.plan(lambda: [node]).run(feeds, [0])


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("store", [store_k, store_v], ids=["keys", "values"])
def test_cells_outside_the_cache_are_skipped(session: Session, store: object, dtype: str) -> None:
    shape = (N_PAGES, HEADS, SIZE, PAGE) if store is store_k else (N_PAGES, HEADS, PAGE, SIZE)
    cache = session.define("cache", shape, dtype)
    rows = np.ones((5, HEADS, SIZE), np.float32)
    node = store(cache, feed("rows", rows.shape), feed("cells", (5,), "i32"))  # type: ignore[operator]
    run(session, node, {"rows": rows, "cells": np.array([*OUTSIDE, 17], np.int32)})
    pages = session.read_bytes("cache", 0, cache.nbytes).reshape(N_PAGES, -1)
    assert [bool(page.any()) for page in pages] == [False, True, False]


def test_copies_of_missing_pages_are_skipped(session: Session) -> None:
    cache = session.define("cache", (N_PAGES, 1, 8, PAGE))
    session.write("cache", np.repeat(np.arange(1, 1 + N_PAGES, dtype=np.float32), 8 * PAGE))
    pairs = np.array([[0, i] for i in OUTSIDE] + [[i, 0] for i in OUTSIDE] + [[1, 2]], np.int32)
    run(session, copy_pages(cache, feed("pairs", pairs.shape, "i32")), {"pairs": pairs})
    assert session.read("cache")[:, 0, 0, 0].tolist() == [1, 2, 2]


def test_states_outside_the_rows_are_skipped(session: Session) -> None:
    n, size = 3, 32
    rows = {"begin": np.zeros(n, np.int32), "end": np.array([-1, 4, 2**31 - 1], np.int32)}
    begin, end = (feed(name, (n,), "i32") for name in rows)
    convs, states = session.define("convs", (4, 2, size)), session.define("states", (4, 1, size, size))
    x, w = feed("x", (n, size)), feed("w", (size, 1, 3))
    q, k, v = (feed(name, (n, 1, size)) for name in "qkv")
    decay, beta = (feed(name, (n, 1)) for name in ("decay", "beta"))
    feeds = rows | {t.name: np.ones(t.shape, np.float32) for t in (x, w, q, k, v, decay, beta)}
    run(session, causal_conv_update(x, w, convs, begin, end), feeds)
    recalled = linear_attention_update(q, k, v, decay, beta, states, begin, end, scale=1.0, delta=True, grouped=False)
    run(session, recalled, feeds)
    assert not session.read("convs").any()
    assert not session.read("states").any()

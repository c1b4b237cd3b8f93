"""Attention on the CPU over scores that rise far above a row's first block, whole and in parts of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from backends.cpu.backend import CPUBackend
from graph.ops.attention import PAGE, attention
from graph.session import Session
from graph.tensor import Tensor, feed

HEADS, SIZE, TOKENS, PAST, N_PAGES = 4, 64, 70, 90, 10  # positions 90 to 159
SCALE = SIZE**-0.5


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Scores drift up by some 90 over 160 positions for even heads, and down for odd ones."""
    r = np.random.default_rng(5)
    position = np.arange(N_PAGES)[:, None, None, None] * PAGE + np.arange(PAGE)
    drift = position / 160 * np.where(np.arange(HEADS) % 2, -1.0, 1.0)[:, None, None]
    return {
        "k": (r.normal(size=(N_PAGES, HEADS, SIZE, PAGE)) * 0.5 + drift).astype(np.float16),
        "v": r.normal(size=(N_PAGES, HEADS, PAGE, SIZE)).astype(np.float16),
        "tables": r.permutation(N_PAGES).astype(np.int32)[None],
        "q": (r.normal(size=(TOKENS, HEADS, SIZE)) * 0.5 + 11.0).astype(np.float32),
    }


@pytest.fixture
def session() -> Iterator[Session]:
    backend = CPUBackend(2)
    yield Session([backend])
    backend.close()


@pytest.mark.parametrize("attrs", [{}, {"window": 50}, {"cap": 30.0}], ids=["all", "window", "cap"])
def test_tops_that_rise_change_no_row_of_another_chunk(
    arrays: dict[str, np.ndarray], session: Session, attrs: dict[str, float]
) -> None:
    tables, paged = arrays["tables"], {}
    for name in ("k", "v"):  # laid out by position above: move the pages to where the table says
        paged[name] = np.empty_like(arrays[name])
        paged[name][tables[0]] = arrays[name]
    shapes = {"k": (N_PAGES, HEADS, SIZE, PAGE), "v": (N_PAGES, HEADS, PAGE, SIZE)}
    states = {name: session.define(name, shape, "f16") for name, shape in shapes.items()}
    for name, values in paged.items():
        session.write(name, values)

    def chunk(first: int, n: int) -> np.ndarray:
        def build() -> list[Tensor]:
            q, slot, pos = feed("q", (n, HEADS, SIZE), "f32"), feed("slot", (n,), "i32"), feed("pos", (n,), "i32")
            table = feed("tables", tables.shape, "i32")
            return [attention(q, states["k"], states["v"], table, slot, pos, scale=SCALE, **attrs)]

        where = slice(first, first + n)
        feeds = {"q": arrays["q"][where], "slot": np.zeros(n, np.int32), "tables": tables}
        feeds["pos"] = (PAST + np.arange(TOKENS, dtype=np.int32))[where]
        return session.run((n,), build, feeds)[0].copy()

    whole = chunk(0, TOKENS)
    inputs = [arrays["q"].astype(np.float64), paged["k"].astype(np.float64), paged["v"].astype(np.float64)]
    inputs += [tables, np.zeros(TOKENS, np.int32), PAST + np.arange(TOKENS)]
    expected = attention.reference(*inputs, scale=SCALE, **attrs)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=2e-4)
    parts, first = [], 0
    for n in (1, 3, 13, 2, 51):
        parts.append(chunk(first, n))
        first += n
    assert np.concatenate(parts).tobytes() == whole.tobytes()

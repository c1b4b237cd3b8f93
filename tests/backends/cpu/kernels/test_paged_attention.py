"""CPU attention: scores far above a row's first block, prefill chunks, independent sequences, splits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.lowering import attention as lower_attention
from logitless.graph.dtype import KV_TYPES
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, attention, biased_attention
from logitless.graph.tensor import Tensor, feed

HEADS, SIZE, TOKENS, PAST, N_PAGES = 4, 16, 70, 90, 10  # positions 90 to 159
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
        "q": (r.normal(size=(TOKENS, HEADS, SIZE)) * 0.5 + 22.0).astype(np.float32),
    }


@pytest.fixture
def session() -> Iterator[Session]:
    backend = CPUBackend(2)
    yield Session([backend])
    backend.close()


@pytest.mark.parametrize("attrs", [{}, {"window": 50}, {"cap": 30.0}], ids=["all", "window", "cap"])
def test_rising_tops_change_no_other_row(
    arrays: dict[str, np.ndarray], session: Session, attrs: dict[str, float]
) -> None:
    tables, paged = arrays["tables"], {}
    for name in ("k", "v"):  # laid out by position above: move the pages to the table's places
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


KINDS = [("f16", "f16", 4, 2, 16), ("q8_0", "q8_0", 4, 2, 32), ("f16", "f16", 9, 1, 32), ("q5_1", "iq4_nl", 4, 2, 32)]


@pytest.mark.parametrize(("key", "value", "heads", "kv_heads", "size"), KINDS)
@pytest.mark.parametrize("window", [0, 40])
def test_attention_bits_do_not_depend_on_other_rows(
    session: Session, key: str, value: str, heads: int, kv_heads: int, size: int, window: int
) -> None:
    r = np.random.default_rng(6)
    # positions: the last cell of a page, of a block, and between
    past = [60, 17, 40, 31, 90, 100, 63, 88]
    n, n_table = len(past), 30
    shapes = {"k": (n_table * (n + 2), kv_heads, size, PAGE), "v": (n_table * (n + 2), kv_heads, PAGE, size)}
    states = {name: session.define(name, shapes[name], kind) for name, kind in (("k", key), ("v", value))}
    for name, kind in (("k", key), ("v", value)):
        if bits := KV_TYPES[kind].bits:
            quants = r.integers(-127 if bits == 8 else -128, 128, states[name].nbytes).astype(np.uint8)
            pages = quants.reshape(-1, states[name].nbytes // (shapes[name][0] * kv_heads))
            scales = pages[:, size * KV_TYPES[kind].scales_at :].view(np.float16)
            scales[:] = r.uniform(0.001, 0.01, scales.shape) * (1 if bits == 8 else 8)
            session.write(name, quants)
        else:
            session.write(name, r.normal(size=shapes[name]).astype(np.float16 if kind == "f16" else np.float32))
    tables = r.permutation(n_table * (n + 2)).astype(np.int32).reshape(n + 2, n_table)
    q = r.normal(size=(n + 8, heads, size)).astype(np.float32)

    def rows(which: list[int], slots: list[int], past: list[int]) -> np.ndarray:
        def build() -> list[Tensor]:
            x, slot, pos = (
                feed("q", (len(which), heads, size)),
                feed("slot", (len(which),), "i32"),
                feed("pos", (len(which),), "i32"),
            )
            table = feed("tables", tables.shape, "i32")
            return [attention(x, states["k"], states["v"], table, slot, pos, scale=size**-0.5, window=window)]

        feeds = {"q": q[which], "slot": np.array(slots, np.int32), "pos": np.array(past, np.int32), "tables": tables}
        return session.run((len(which),), build, feeds)[0].copy()

    alone = np.concatenate([rows([i], [i], [past[i]]) for i in range(n)])
    everyone = list(range(n))
    independent = rows(everyone, everyone, past)
    beside_a_long_one = rows([*everyone, 8], [*everyone, 8], [*past, 450])[:n]
    filled_up = rows([*everyone, 8, 9, 10], [*everyone, n + 1, n + 1, n + 1], [*past, 0, 0, 0])[:n]
    beside_a_prompt = rows([*everyone, 8, 9, 10, 11, 12], [*everyone, 8, 8, 8, 8, 8], [*past, 70, 71, 72, 73, 74])[:n]
    for result in (independent, beside_a_long_one, filled_up, beside_a_prompt):
        assert result.tobytes() == alone.tobytes()
    within_a_prompt = rows([8] * 15 + [5], [5] * 16, list(range(85, 101)))[15:]
    assert within_a_prompt.tobytes() == alone[5:6].tobytes()
    caches = [session.read(name) for name in ("k", "v")]
    if key == value == "f16":
        inputs = [q[:n].astype(np.float64), *(cache.astype(np.float64) for cache in caches), tables]
        expected = attention.reference(*inputs, np.arange(n), np.array(past), scale=size**-0.5, window=window)
        np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-4)


# positions: one cell of a span, all of it, and between
LONG = [3, 511, 512, 767, 1023, 1024, 1500, 2047]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "window", "of_heads"),
    [
        *((4, 1, 16, "f16", 0, ""), (4, 1, 16, "f16", 600, ""), (12, 3, 16, "f16", 0, ""), (9, 1, 32, "f16", 0, "")),
        *((6, 3, 32, "f32", 600, "sinks"), (3, 3, 16, "f32", 600, "bias")),
    ],
)
def test_attention_bits_do_not_depend_on_the_split(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, size: int, dtype: str, window: int, of_heads: str
) -> None:
    r, n_pages = np.random.default_rng(7), 128
    shapes = {"k": (n_pages, kv_heads, size, PAGE), "v": (n_pages, kv_heads, PAGE, size)}
    caches = {
        name: r.normal(size=shape).astype({"f16": np.float16, "f32": np.float32}[dtype])
        for name, shape in shapes.items()
    }
    caches["k"][n_pages // 2 :] *= 3  # tops of later spans are higher
    tables = np.arange(n_pages, dtype=np.int32)[None]
    q, sink = r.normal(size=(len(LONG), heads, size)).astype(np.float32), r.normal(size=heads).astype(np.float32)
    attrs: dict[str, float] = {"scale": size**-0.5, "window": window}
    op = biased_attention if of_heads == "bias" else attention
    if of_heads == "bias":
        sink = r.normal(size=heads * n_pages * PAGE).astype(np.float32)

    def rows(cores: int, which: list[int]) -> np.ndarray:
        monkeypatch.setattr(lower_attention, "cores", lambda: cores)
        backend, n = CPUBackend(min(cores, 3)), len(which)
        session = Session([backend])
        k, v = (session.define(name, shapes[name], dtype) for name in ("k", "v"))
        for name, values in caches.items():
            session.write(name, values)

        def build() -> list[Tensor]:
            x, slot, pos = feed("q", (n, heads, size)), feed("slot", (n,), "i32"), feed("pos", (n,), "i32")
            sources = (x, k, v, feed("tables", tables.shape, "i32"), slot, pos)
            return [op(*sources, *([feed("sinks", sink.shape)] if of_heads else []), **attrs)]

        past = np.array([LONG[i] for i in which], np.int32)
        feeds = {"q": q[which], "slot": np.zeros(n, np.int32), "pos": past, "tables": tables, "sinks": sink}
        try:
            return session.run((n,), build, {name: feeds[name] for name in feeds if of_heads or name != "sinks"})[
                0
            ].copy()
        finally:
            session.close()
            backend.close()

    everyone = list(range(len(LONG)))
    whole = rows(1, everyone)
    more = [sink.astype(np.float64)] if of_heads else []
    inputs = [q.astype(np.float64), *(cache.astype(np.float64) for cache in caches.values()), tables]
    expected = op.reference(*inputs, np.zeros(len(LONG), np.int32), np.array(LONG), *more, **attrs)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    for cores in (1, 2, 7, 64):
        for which in ([i] for i in everyone):
            assert rows(cores, which).tobytes() == whole[which].tobytes()
        for which in ([2, 6], [0, 5, 7], everyone):
            assert rows(cores, which).tobytes() == whole[which].tobytes()

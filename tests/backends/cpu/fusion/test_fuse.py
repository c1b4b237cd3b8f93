"""CPU operator fusion: the same bits as unfused nodes, and only nodes without other readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.compiler import warmup
from logitless.backends.cpu.lowering import attention as lower_attention
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.backends.host import isa
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import PAGE, attention
from logitless.graph.ops.elementwise import add, gelu, mul, silu
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor, feed
from logitless.graph.testing.conformance import encode

wide = pytest.mark.skipif(isa() != "avx512_vnni", reason="no tile of two groups")
RNG = np.random.default_rng(5)


class Unfused(CPUBackend):
    """CPU backend without fusion."""

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fetches


@pytest.fixture(scope="module")
def backends() -> Iterator[list[CPUBackend]]:
    opened = [CPUBackend(2), Unfused(2)]
    yield opened
    for backend in opened:
        backend.close()


def run(
    backend: CPUBackend, build: Callable[[dict[str, Tensor]], list[Tensor]], values: dict, feeds: dict
) -> tuple[list[np.ndarray], list[str]]:
    """Values of the fetches, and the ops that computed them."""
    session = Session([backend])
    weights = {
        name: session.define(name, w.shape, dtype, lambda w=w, dtype=dtype: encode(w, dtype), constant=True)
        for name, (w, dtype) in values.items()
    }
    placement, _ = session.measure(lambda: build(weights))
    results = session.plan(lambda: build(weights)).run(feeds)
    return [np.array(f) for f in results], [t.op for t in placement.order if not t.is_leaf]


def feed_forward(w: dict[str, Tensor], rows: int, activation: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = feed("x", (rows, w["gate"].shape[1]))
    return [linear(mul(activation(linear(x, w["gate"])), linear(x, w["up"])), w["down"])]


@wide
@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k"), [("q8_0", 64, 96, 64), ("q4_0", 77, 64, 1088), ("q5_1", 535, 32, 64)]
)
@pytest.mark.parametrize("activation", [silu, gelu])
def test_glu_of_many_rows_is_one_node(
    backends: list[CPUBackend], activation: Callable[[Tensor], Tensor], dtype: str, rows: int, n: int, k: int
) -> None:
    shapes = {"gate": (n, k), "up": (n, k), "down": (21, n)}
    values = {name: (RNG.normal(size=shape).astype(np.float32), dtype) for name, shape in shapes.items()}
    feeds = {"x": RNG.normal(size=(rows, k)).astype(np.float32)}
    feeds["x"][3, 5] = np.nan
    (y,), ops = run(backends[0], lambda w: feed_forward(w, rows, activation), values, feeds)
    (expected,), _ = run(backends[1], lambda w: feed_forward(w, rows, activation), values, feeds)
    assert ops == ["quantize_act", "linear_glu_act", "linear_q8"]
    assert y.tobytes() == expected.tobytes()
    assert np.isnan(y[3]).all()
    assert not np.isnan(np.delete(y, 3, 0)).any()


@pytest.mark.parametrize(("dtype", "n", "k"), [("q8_0", 32, 64), ("q4_0", 64, 288), ("q5_1", 1120, 1024)])
@pytest.mark.parametrize("activation", [silu, gelu])
def test_glu_of_one_row_is_one_node(
    backends: list[CPUBackend], activation: Callable[[Tensor], Tensor], dtype: str, n: int, k: int
) -> None:
    shapes = {"gate": (n, k), "up": (n, k), "down": (21, n)}
    values = {name: (RNG.normal(size=shape).astype(np.float32), dtype) for name, shape in shapes.items()}
    feeds = {"x": RNG.normal(size=(1, k)).astype(np.float32)}
    (y,), ops = run(backends[0], lambda w: feed_forward(w, 1, activation), values, feeds)
    (expected,), separate = run(backends[1], lambda w: feed_forward(w, 1, activation), values, feeds)
    assert ops == ["quantize_act", "linear_glu_act", "linear_q8"]
    assert "linear_glu_act" not in separate
    assert y.tobytes() == expected.tobytes()
    assert np.isfinite(y).all()


@wide
@pytest.mark.parametrize(("rows", "parts", "products"), [(8, 1, 1), (64, 0, 3)])
def test_products_with_other_readers_stay(backends: list[CPUBackend], rows: int, parts: int, products: int) -> None:
    values = {name: (RNG.normal(size=(64, 64)), "q8_0") for name in ("gate", "up", "down")}
    feeds = {"x": RNG.normal(size=(rows, 64)).astype(np.float32)}

    def build(w: dict[str, Tensor]) -> list[Tensor]:
        x = feed("x", (rows, 64))
        gate, up = (linear(x, w[name]) for name in ("gate", "up"))
        return [linear(mul(silu(gate), up), w["down"]), up]

    _, ops = run(backends[0], build, values, feeds)
    assert "linear_glu_act" not in ops
    # few rows: both products of x in one
    assert [ops.count(op) for op in ("linear_parts", "linear_q8")] == [parts, products]


@pytest.mark.parametrize(("dtype", "rows", "k"), [("q8_0", 64, 96), ("q4_k", 535, 256)])
def test_rms_norm_is_fused_with_quantisation(backends: list[CPUBackend], dtype: str, rows: int, k: int) -> None:
    values = {"norm": (RNG.normal(size=k), "f32"), "w": (RNG.normal(size=(20, k)), dtype)}
    feeds = {"x": RNG.normal(size=(rows, k)).astype(np.float32)}

    def build(w: dict[str, Tensor]) -> list[Tensor]:
        return [linear(rms_norm(feed("x", (rows, k)), w["norm"], eps=1e-5), w["w"])]

    (y,), ops = run(backends[0], build, values, feeds)
    (expected,), _ = run(backends[1], build, values, feeds)
    assert ops == ["rms_norm_act", "linear_q8"]
    assert y.tobytes() == expected.tobytes()


@wide
@pytest.mark.parametrize(("dtype", "rows"), [("q8_0", 64), ("q4_0", 77), ("q6_k", 535)])
def test_residual_is_added_by_the_product(backends: list[CPUBackend], dtype: str, rows: int) -> None:
    values = {name: (RNG.normal(size=(256, 256)), dtype) for name in ("a", "b", "c")}
    feeds = {"x": RNG.normal(size=(rows, 256)).astype(np.float32)}

    def build(w: dict[str, Tensor]) -> list[Tensor]:
        x = feed("x", (rows, 256))  # cannot be overwritten
        y = add(x, linear(x, w["a"]))
        return [add(y, linear(mul(linear(y, w["b"]), y), w["c"]))]  # here y can

    (y,), ops = run(backends[0], build, values, feeds)
    (expected,), _ = run(backends[1], build, values, feeds)
    first = ["quantize_act", "linear_q8_add"]
    assert ops == [*first, "quantize_act", "linear_q8", "mul", *first]
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("heads", "rows", "past", "cores"), [(2, 64, 0, 2), (4, 535, 0, 2), (4, 64, 500, 100)])
def test_attention_is_fused_with_quantisation(
    backends: list[CPUBackend], monkeypatch: pytest.MonkeyPatch, heads: int, rows: int, past: int, cores: int
) -> None:
    """With a hundred cores, threads share contexts (test_paged_attention.py)."""
    monkeypatch.setattr(lower_attention, "cores", lambda: cores)
    kv_heads, size, n_pages = 2, 16, (rows // 2 + past) // 16 + 2
    shape = (rows, heads, size)
    numbers = {"slot": np.arange(rows) % 2, "pos": past + np.arange(rows) // 2}
    feeds = {"q": RNG.normal(size=shape).astype(np.float32), **{k: v.astype(np.int32) for k, v in numbers.items()}}
    cells = {
        name: RNG.normal(size=(n_pages, kv_heads, *last)).astype(np.float16)
        for name, last in (("k", (size, 16)), ("v", (16, size)))
    }
    raw = encode(RNG.normal(size=(32, heads * size)), "q8_0")
    results, ops = [], []
    for backend in backends:
        session = Session([backend])
        w = session.define("w", (32, heads * size), "q8_0", lambda: raw, constant=True)
        memory = [session.define(name, x.shape, "f16") for name, x in cells.items()]
        tables = session.define("tables", (2, n_pages), "i32", host_written=True)
        for name, x in cells.items():
            session.write(name, x)
        session.write("tables", np.stack([np.arange(n_pages), np.arange(n_pages)[::-1]]).astype(np.int32))

        def build(w: Tensor = w, memory: list[Tensor] = memory, tables: Tensor = tables) -> list[Tensor]:
            rest = [feed(name, (rows,), "i32") for name in ("slot", "pos")]
            y = attention(feed("q", shape), *memory, tables, *rest, scale=0.25)
            return [linear(reshape(y, shape=(-1, heads * size)), w)]

        ops.append([t.op for t in session.place(build()).order if not t.is_leaf])
        results.append(session.plan(build).run(feeds)[0].tobytes())
    # per KV head: 16 elements are no whole block, 32 are one
    assert ops[0] == (["attention", "reshape", "quantize_act"] if heads == 2 else ["attention_act"]) + ["linear_q8"]
    assert results[0] == results[1]
    (node,) = [t for t in session.place(build()).order if t.op == "attention"]
    kernels = [i.kernel for i in LOWERINGS["attention"](node, lambda t: 0) or ()]
    assert any(name.startswith("attention_join") for name in kernels) == (cores == 100)


@pytest.mark.parametrize(
    ("dtype", "rows", "n"), [("q8_0", 2, 64), ("q4_k", 1, 512), ("q4_0", 8, 1056), ("q6_k", 77, 2304), ("q4_k", 3, 256)]
)
@pytest.mark.parametrize("activation", [silu, gelu])
def test_glu_is_fused_with_quantisation(
    backends: list[CPUBackend], activation: Callable[[Tensor], Tensor], dtype: str, rows: int, n: int
) -> None:
    shapes = {"gate": (n, 256), "up": (n, 256), "down": (21, n)}
    values = {name: (RNG.normal(size=shape).astype(np.float32), dtype) for name, shape in shapes.items()}
    feeds = {"x": RNG.normal(size=(rows, 256)).astype(np.float32)}
    feeds["x"][0, 5] = np.nan
    (y,), ops = run(backends[0], lambda w: feed_forward(w, rows, activation), values, feeds)
    (expected,), _ = run(backends[1], lambda w: feed_forward(w, rows, activation), values, feeds)
    assert ops[-2:] == ["glu_act", "linear_q8"]
    assert "linear_glu_act" not in ops
    assert y.tobytes() == expected.tobytes()
    assert np.isnan(y).all(1).tolist() == [True] + [False] * (rows - 1)


@pytest.mark.parametrize("cores", [2, 64])
def test_prepare_finds_kernels_of_few_rows_in_a_graph_of_many(
    backends: list[CPUBackend], monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    session = Session(backends[:1])
    shapes = {"wo": (64, 256), "gate": (64, 64), "up": (64, 64), "down": (64, 64)}
    w = {
        name: session.define(
            name, shape, "q8_0", lambda shape=shape: encode(RNG.normal(size=shape), "q8_0"), constant=True
        )
        for name, shape in shapes.items()
    }
    w["norm"] = session.define("norm", (64,), "f32", lambda: encode(np.ones(64), "f32"), constant=True)
    memory = session.define("k", (8, 1, 32, PAGE), "f16"), session.define("v", (8, 1, PAGE, 32), "f16")
    monkeypatch.setattr(lower_attention, "cores", lambda: cores)

    def nodes(rows: int) -> tuple[Tensor, ...]:
        batch = feed("tables", (1, 8), "i32"), feed("slot", (rows,), "i32"), feed("pos", (rows,), "i32")
        x = linear(reshape(attention(feed("q", (rows, 8, 32)), *memory, *batch, scale=1.0), shape=(rows, 256)), w["wo"])
        y = rms_norm(x, w["norm"], eps=1e-5)
        y = linear(mul(silu(linear(y, w["gate"])), linear(y, w["up"])), w["down"])
        return session.place([add(x, y)]).order

    known: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(warmup.jit, "load", lambda names: known.update(names))
        warmup.prepare(nodes(512))
    requested: set[str] = set()
    for rows in (1, 5, 40, 64, 100, 200):
        requested |= {i.kernel for t in nodes(rows) if t.op in LOWERINGS for i in LOWERINGS[t.op](t, lambda _: 0) or ()}
    assert requested - known == set()
    joins = [name for name in requested if name.startswith("attention_join")]
    # a prefill
    assert [name.endswith(":act") for name in sorted(joins)] == [False, True][: 1 + (cores == 64)]

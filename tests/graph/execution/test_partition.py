"""Graph partition: graphs on several backends equal those on one, and the graph is not changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.partition import TRANSFER, partition
from logitless.graph.execution.plan import describe
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import copy_pages
from logitless.graph.ops.elementwise import add, mul, scale, silu, sum_to
from logitless.graph.ops.shape import after, pad_rows, reshape, slice_rows
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.evaluate import evaluate
from logitless.models.synthetic.model import synthesize
from tests.helpers.graph_text import dump
from tests.helpers.numpy_backend import NumpyBackend
from tests.helpers.random_graphs import feeds_of, graphs
from tests.helpers.tiny_model import Tiny

OPS_OF_GRAPHS = ("silu", "add", "mul", "glu", "rms_norm", "scale", "pad_rows", "sum_to")
LLAMA_OPS = ("get_rows", "rms_norm", "linear", "rope_angles", "rope", "store_k", "attention", "silu", "mul", "add")
X = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}


def two(*refused: str) -> list[NumpyBackend]:
    return [NumpyBackend("first", refused), NumpyBackend("second")]


def values(session: Session, *roots: Tensor) -> list[Any]:
    return session.plan(lambda: roots).run(X)


# --- fallback and splits --------------------------------------------------------------------------


def test_refused_op_runs_on_the_next_backend() -> None:
    x = feed("x", (3, 4))
    y = add(silu(scale(x, factor=2.0)), x)
    alone, pair = [NumpyBackend()], two("silu")
    expected = values(Session(alone), y)[0]
    session = Session(pair)
    plan = session.plan(lambda: [y])
    assert plan.run(X)[0].tobytes() == expected.tobytes()
    assert (pair[0].ran, pair[1].ran) == (["scale", "add"], ["silu"])
    placement = partition([y], session.backends)
    splits = [(s.backend, [t.op for t in s.nodes]) for s in placement.segments]
    assert splits == [(0, ["scale"]), (1, [TRANSFER]), (1, ["silu"]), (0, [TRANSFER]), (0, ["add"])]
    assert [(t.src[0].op, t.attrs["to"]) for t in placement.transfers] == [("scale", 1), ("silu", 0)]


def test_deferred_feed_is_requested_after_the_nodes_before_it() -> None:
    backend = NumpyBackend()
    x, late = feed("x", (3, 4)), feed("late", (3, 4), deferred=True)
    y = add(mul(silu(x), late), late)
    session = Session([backend])
    plan = session.plan(lambda: [y])
    ran: list[list[str]] = []

    def give() -> dict[str, Any]:
        ran.append(list(backend.ran))
        return {"late": np.full((3, 4), 2, np.float32)}

    result = plan.run(X, deferred=give)[0]
    assert ran == [["silu"]]
    assert backend.ran == ["silu", "mul", "add"]
    assert result == pytest.approx(X["x"] / (1 + np.exp(-X["x"])) * 2 + 2, rel=1e-6)
    with pytest.raises(ValueError, match="feed 'late' is missing"):
        plan.run(X)


def test_op_without_a_backend_is_named() -> None:
    y = silu(feed("x", (3, 4)))
    with pytest.raises(ValueError, match=r"no device runs <silu f32\[3, 4\]>: tried first, second"):
        partition([y], [NumpyBackend("first", ("silu",)), NumpyBackend("second", ("silu",))])


def test_one_transfer_serves_all_readers() -> None:
    x = feed("x", (3, 4))
    s = silu(x)
    y = add(add(scale(s, factor=2.0), scale(s, factor=3.0)), reshape(s, shape=(3, 4)))
    placement = partition([y], two("scale"))
    assert sum(t.src[0].op == "silu" for t in placement.transfers) == 1


def test_feeds_and_their_aliases_need_no_transfer() -> None:
    """Feeds are uploaded to every backend that reads them."""
    pair = two("silu")
    x = feed("x", (3, 4))
    row = slice_rows(reshape(x, shape=(6, 2)), start=2, stop=4)
    session = Session(pair)
    roots = [silu(row), scale(row, factor=2.0)]
    assert not partition(roots, pair).transfers
    plan = session.plan(lambda: roots)
    a, b = plan.run(X)
    np.testing.assert_array_equal(b, 2 * X["x"].reshape(6, 2)[2:4])
    np.testing.assert_allclose(a, b / 2 / (1 + np.exp(-b / 2)), rtol=1e-6)
    assert [backend.uploads for backend in pair] == [1, 1]


def test_alias_of_a_node_is_transferred_to_its_reader() -> None:
    x = feed("x", (3, 4))
    row = slice_rows(silu(x), start=1, stop=3)
    y, z = scale(row, factor=2.0), add(row, row)
    expected = values(Session([NumpyBackend()]), y, z, row)
    for got, e in zip(values(Session(two("scale")), y, z, row), expected, strict=True):
        assert got.tobytes() == e.tobytes()


def test_leaf_after_a_node_waits_for_it() -> None:
    pair, x = two("silu"), feed("x", (3, 4))
    doubled = scale(silu(x), factor=2.0)
    y = scale(after(slice_rows(x, start=1, stop=3), doubled), factor=3.0)
    assert [t.op for t in partition([y, doubled], pair).order].count("scale") == 2
    got, first = values(Session(pair), y, doubled)
    np.testing.assert_array_equal(got, 3 * X["x"][1:3])
    np.testing.assert_allclose(first, 2 * X["x"] / (1 + np.exp(-X["x"])), rtol=1e-6)


# --- planning and running change nothing ----------------------------------------------------------


def test_partition_leaves_the_graph_unchanged() -> None:
    x = feed("x", (3, 4))
    y = mul(silu(add(x, x)), scale(silu(x), factor=0.5))
    before, nodes = dump([y]), [(t, hash(t), t.src, t.attrs) for t in toposort([y])]
    session = Session(two("silu", "mul"))
    placed = dump(partition([y], session.backends).fetches)
    first, second = session.plan(lambda: [y]), session.plan(lambda: [y])
    for scaling in (1, 3):
        feeds = {"x": X["x"] * scaling}
        (expected,) = evaluate([y], feeds, {}, np.float32)
        for plan in (first, second, first):
            assert plan.run(feeds)[0].tobytes() == expected.tobytes()
    assert dump([y]) == before
    assert [(t, hash(t), t.src, t.attrs) for t in toposort([y])] == nodes
    assert dump(partition([y], session.backends).fetches) == placed


@given(roots=graphs(), refused=st.lists(st.sets(st.sampled_from(OPS_OF_GRAPHS)), min_size=2, max_size=2))
@settings(max_examples=60)
def test_random_graphs_on_random_backends_keep_their_bits(roots: list[Tensor], refused: list[set[str]]) -> None:
    feeds = feeds_of(roots)
    backends = [NumpyBackend(str(i), ops) for i, ops in enumerate([*refused, set()])]
    before = dump(roots)
    plan = Session(backends).plan(lambda: roots)
    for got, e in zip(plan.run(feeds), evaluate(roots, feeds, {}, np.float32), strict=True):
        assert got.tobytes() == np.asarray(e, np.float32).tobytes()
    assert dump(roots) == before
    for i, backend in enumerate(backends[:2]):
        assert not set(backend.ran) & refused[i]


# --- states ---------------------------------------------------------------------------------------


def test_variable_of_several_nodes_stays_on_one_backend() -> None:
    pair = two("copy_pages")
    session = Session(pair)
    kv = session.define("kv", (3, 4))
    session.write("kv", X["x"])
    old = silu(kv)
    new = scale(reshape(copy_pages(kv, feed("pairs", (1, 2), "i32")), shape=(12,)), factor=2.0)
    total = add(old, reshape(new, shape=(3, 4)))
    placement = partition([total], pair)
    plan = session.plan(lambda: [total])
    assert placement.variable_backend == {"kv": 1}
    # silu's and scale's results go to the add
    assert [t.op for t in placement.transfers] == [TRANSFER] * 2
    feeds = {"pairs": np.array([[2, 0]])}
    copied = X["x"].copy()
    (first,) = plan.run(feeds)
    copied[0] = copied[2]
    s = X["x"] / (1 + np.exp(-X["x"]))
    np.testing.assert_allclose(first, s + 2 * copied, rtol=1e-6)
    np.testing.assert_array_equal(session.read("kv"), copied)
    assert set(pair[0].ran) == {"add"}


def test_variable_keeps_its_backend_in_later_plans() -> None:
    session = Session(two("copy_pages"))
    kv = session.define("kv", (3, 4))
    write = session.plan(lambda: [copy_pages(kv, feed("pairs", (1, 2), "i32"))])
    read = session.plan(lambda: [silu(kv)])  # the first backend would run it
    session.write("kv", X["x"])
    write.run({"pairs": np.array([[2, 0]])})
    (y,) = read.run({})
    assert y[0].tobytes() == y[2].tobytes()
    assert y[2, 3] > 0


def test_variables_on_different_backends_that_meet_are_named() -> None:
    a, b = variable("a", (3, 4)), variable("b", (3, 4))
    with pytest.raises(ValueError, match="variables 'a', 'b' meet in a node but are on different devices"):
        partition([add(a, b)], two(), {"a": 0, "b": 1})
    with pytest.raises(ValueError, match="everything that touches variable 'a': first refuses <silu"):
        partition([silu(a)], two("silu"), {"a": 0})
    with pytest.raises(ValueError, match="everything that touches variable 'a': second refuses <mul"):
        partition([mul(silu(a), a)], [NumpyBackend("first", ("silu",)), NumpyBackend("second", ("mul",))])


def test_constants_are_loaded_on_every_backend_that_reads_them() -> None:
    pair = two("silu")
    session = Session(pair)
    w = session.define("w", (3, 4), source=lambda: X["x"].reshape(-1).view(np.uint8), constant=True)
    placement, arenas = session.measure(lambda: [add(silu(w), w)])
    assert [d.weights for d in session.device_bytes([(placement, arenas)])] == [48, 48]
    expected = evaluate([add(silu(w), w)], {}, {"w": X["x"]}, np.float32)[0]
    assert session.plan(lambda: [add(silu(w), w)]).run({})[0].tobytes() == expected.tobytes()


# --- measuring allocates nothing ------------------------------------------------------------------


def test_measure_reports_sizes_and_allocates_nothing() -> None:
    pair = two("silu")
    session = Session(pair)
    kv = session.define("kv", (3, 4))
    x = feed("x", (3, 4))
    big = pad_rows(silu(x), before=0, after=61)
    graph = [add(sum_to(big, shape=(1, 4)), copy_pages(kv, feed("pairs", (1, 2), "i32")))]
    placement, arenas = session.measure(lambda: graph)
    need = session.device_bytes([(placement, arenas)])
    assert [backend.allocated for backend in pair] == [[], []]
    assert [(d.device, d.weights, d.variables, d.feeds) for d in need] == [("first", 0, 48, 32), ("second", 0, 0, 64)]
    session.plan(lambda: graph)
    for d, backend in zip(need, pair, strict=True):
        assert d.arena in backend.allocated
        assert sum(backend.allocated) == d.weights + d.variables + d.feeds + d.arena


def test_describe_formats_a_measured_graph() -> None:
    session = Session(two("silu"))
    kv = session.define("kv", (3, 4))
    y = add(silu(feed("x", (3, 4))), scale(copy_pages(kv, feed("pairs", (1, 2), "i32")), factor=2.0))
    assert describe(*session.measure(lambda: [y], eval_order="left"), ["gpu", "cpu"]).splitlines() == [
        "gpu: arena of 128 bytes",
        "cpu: arena of 64 bytes",
        "cpu: 1 nodes",
        "  %1 = silu f32[3, 4] ('x') @ 0 +48",
        "copy to gpu",
        "  %2 = transfer f32[3, 4] (%1) @ 0 +48",
        "gpu: 3 nodes",
        "  %5 = copy_pages f32[3, 4] ('kv', 'pairs') @ 0 of 'kv' +48",
        "  %6 = scale f32[3, 4] (%5) @ 64 +48",
        "  %7 = add f32[3, 4] (%2, %6) @ 0 +48",
    ]


def test_run_allocates_nothing() -> None:
    backend = NumpyBackend()
    session = Session([backend])
    for i in range(3):
        session.run("key", lambda: [silu(feed("x", (3, 4)))], X)
        assert (i, session.n_plans_built, len(backend.allocated)) == (i, 1, 2)


def test_auto_order_needs_the_least_memory() -> None:
    x = feed("x", (4, 16))

    def narrow(t: Tensor) -> Tensor:
        return sum_to(t, shape=(1, 16))

    light, heavy = pad_rows(x, before=3, after=0), narrow(silu(pad_rows(x, before=0, after=60)))
    session = Session([NumpyBackend()])
    for graph in (lambda: [add(light, heavy)], lambda: [add(heavy, light)]):
        size = {order: session.measure(graph, eval_order=order)[1].sizes[0] for order in ("left", "right", "auto")}
        assert size["left"] != size["right"]
        assert size["auto"] == min(size.values())


# --- a whole model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthesize(path, "tiny", "F32")
    return path


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> np.ndarray[Any, Any]:
    return Tiny.open(tiny, [NumpyBackend()]).oracle()


@pytest.fixture(scope="module")
def cpu() -> Iterator[CPUBackend]:
    backend = CPUBackend(2)
    yield backend
    backend.close()


class Refusing:
    """A backend that refuses chosen ops, and otherwise is another."""

    def __init__(self, inner: CPUBackend, refused: set[str]) -> None:
        self.inner, self.refused = inner, refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def supports(self, t: Tensor) -> bool:
        return t.op not in self.refused


@given(refused=st.lists(st.sets(st.sampled_from(LLAMA_OPS)), min_size=2, max_size=2))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_llama_on_any_split_keeps_its_bits(
    tiny: Path, oracle: np.ndarray[Any, Any], cpu: CPUBackend, refused: list[set[str]]
) -> None:
    """Kernels in any number of segments give the same bits, near the oracle's
    values.
    """
    whole = Tiny.open(tiny, [cpu]).logits()
    pieces = Tiny.open(tiny, [Refusing(cpu, refused[0]), Refusing(cpu, refused[1]), cpu]).logits()  # type: ignore[list-item]
    np.testing.assert_allclose(pieces, oracle, atol=2e-5 * np.abs(oracle).max())
    assert (pieces.argmax(1) == oracle.argmax(1)).all()
    np.testing.assert_allclose(pieces, whole, atol=1e-6 * np.abs(oracle).max())
    if not refused[0] | refused[1]:
        assert pieces.tobytes() == whole.tobytes()


def test_llama_on_cpu_and_numpy_matches_the_oracle(tiny: Path, oracle: np.ndarray[Any, Any], cpu: CPUBackend) -> None:
    first = NumpyBackend("other", ("linear", "attention"))
    logits = Tiny.open(tiny, [first, cpu]).logits()
    assert {"rms_norm", "rope", "silu"} <= set(first.ran)
    np.testing.assert_allclose(logits, oracle, atol=2e-5 * np.abs(oracle).max())


def test_nan_in_the_arena_changes_no_result(tiny: Path, cpu: CPUBackend) -> None:
    """Nothing is read from the arena before it is written."""
    clean = Tiny.open(tiny, [cpu])
    expected = clean.logits()
    dirty = Tiny.open(tiny, [cpu])
    for n in (5, 1):
        dirty.session.reserve(lambda n=n: dirty.build(n))
    arena: Any = dirty.session.arena(0, 1)
    arena.array[:] = 0xFF
    assert dirty.logits().tobytes() == expected.tobytes()
    assert dirty.session.n_plans_built == 2


# --- wishes ---------------------------------------------------------------------------------------


def layers(backends: list[NumpyBackend], n: int) -> tuple[Session, Tensor]:
    """x + f(x · w) n times, each with a weight of its own."""
    session, x = Session(backends), silu(feed("x", (3, 4)))
    for i in range(n):
        w = session.define(f"w{i}", (4,), "f32", lambda: np.full(4, 0.5, np.float32).view(np.uint8), constant=True)
        x = add(x, silu(mul(x, w)), name=f"sum{i}")
    return session, x


def test_hint_keeps_a_layer_on_one_backend() -> None:
    """One copy where the layers change places: what has no weight goes with its sources, the sum
    with the new layer.
    """
    session, y = layers(two(), 4)
    session.hint_of = lambda _, s: {"w0": (1, 1), "w1": (1, 1), "w2": (0, 0), "w3": (1, 1)}[s.name]
    placement = session.place([y])
    assert [s.backend for s in placement.segments if s.nodes[0].op != TRANSFER] == [0, 1, 0, 1]
    assert [(t.name, t.attrs["to"]) for t in placement.transfers] == [("", 1), ("sum1", 0), ("sum2", 1)]
    alone, same = layers([NumpyBackend()], 4)
    assert values(session, y)[0].tobytes() == values(alone, same)[0].tobytes()


def test_hint_for_one_weight_leaves_its_layer_in_place() -> None:
    session, y = layers(two(), 3)
    session.hint_of = lambda _, s: (1, 0) if s.name == "w1" else (0, 0)
    placement = session.place([y])
    ran = [[t.op for t in s.nodes] for s in placement.segments if s.backend == 1 and s.nodes[0].op != TRANSFER]
    assert ran == [["mul", "silu"]]
    assert [t.attrs["to"] for t in placement.transfers] == [1, 0]


def test_hint_for_an_unsupported_op_is_ignored() -> None:
    session, y = layers([NumpyBackend("first"), NumpyBackend("second", ("mul",))], 2)
    session.hint_of = lambda _, s: (1, 1)
    assert [s.backend for s in session.place([y]).segments] == [0]


def test_hint_places_a_cache() -> None:
    session = Session(two())
    cache = session.define("cache", (5, 4))
    session.hint_of = lambda _, s: (1, 1)
    rows = copy_pages(cache, feed("copies", (1, 2), "i32"))
    assert session.place([rows]).variable_backend == {"cache": 1}
    session.backends[1] = NumpyBackend("second", ("copy_pages",))
    assert session.place([rows]).variable_backend == {"cache": 0}


def test_host_written_variable_is_on_every_backend_that_reads_it() -> None:
    session = Session(two("silu"))
    table = session.define("table", (2, 3), host_written=True)
    session.write("table", np.ones((2, 3), np.float32))
    plan = session.plan(lambda: [silu(table), scale(table, factor=2.0)])
    assert not session.place([silu(table), scale(table, factor=2.0)]).transfers
    session.write("table", np.full(3, 5, np.float32), 12)
    a, b = plan.run({})
    assert b.tolist() == [[2] * 3, [10] * 3]
    np.testing.assert_allclose(a, b / 2 / (1 + np.exp(-b / 2)), rtol=1e-6)
    assert session.read("table").tolist() == [[1] * 3, [5] * 3]
    with pytest.raises(ValueError, match="would overwrite <variable 'table'"):
        session.place([copy_pages(table, feed("copies", (1, 2), "i32"))])
    with pytest.raises(ValueError, match="can be neither fetched nor sliced"):
        session.place([table])

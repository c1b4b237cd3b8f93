"""Nodes, order, text, declarations, the oracle, and what a session refuses."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.op import OPS, op
from logitless.graph.ops.attention.paged_attention import attention, copy_pages, store_k
from logitless.graph.ops.elementwise import add, glu, mul, scale, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.order import dump, toposort
from logitless.graph.tensor import Tensor, const, feed, variable
from logitless.graph.testing.evaluate import evaluate
from tests.helpers.numpy_backend import NumpyBackend

PAIRS = np.array([[0, 1]], np.int32)


def written(t: Tensor, name: str = "pairs") -> Tensor:
    """Row 0 copied over row 1."""
    return copy_pages(t, feed(name, (1, 2), "i32"))


# --- order ----------------------------------------------------------------------------------------


def test_sources_come_first_and_nothing_twice() -> None:
    x = feed("x", (2,))
    a, b = silu(x), scale(x, factor=2.0)
    c = add(a, b)
    d = mul(c, a)
    assert toposort([d, c, d]) == [x, a, b, c, d]
    assert toposort([d], reverse=True) == [x, a, b, c, d]  # d's right source is a
    assert toposort([c], reverse=True) == [x, b, a, c]
    assert toposort([]) == []


def test_readers_of_the_old_value_come_before_the_write_in_any_order_of_roots() -> None:
    kv = variable("kv", (3, 4))
    old = [silu(kv), silu(slice_rows(kv, start=1, stop=2)), silu(reshape(reshape(kv, shape=(12,)), shape=(4, 3)))]
    new = written(kv)
    after = scale(new, factor=3.0)
    newer = written(new, "more")
    for roots in itertools.permutations([*old, after, newer]):
        for reverse in (False, True):
            at = {t: i for i, t in enumerate(toposort(roots, reverse=reverse))}
            assert max(at[t] for t in old) < at[new] < at[after] < at[newer]


def test_a_write_through_an_alias_waits_for_readers_of_the_whole() -> None:
    kv = variable("kv", (3, 4))
    new, old = written(slice_rows(kv, start=0, stop=2)), silu(kv)
    for roots in ([new, old], [old, new]):
        order = toposort(roots)
        assert order.index(old) < order.index(new)


def test_reading_the_old_value_after_the_write_is_refused() -> None:
    kv = variable("kv", (3, 4))
    new = written(kv)
    with pytest.raises(ValueError, match=r"<add .*both reads and overwrites its own history"):
        toposort([add(kv, new)])
    with pytest.raises(ValueError, match="own history"):
        toposort([add(reshape(kv, shape=(3, 4)), silu(new))])
    with pytest.raises(ValueError, match="own history"):
        toposort([written(kv, "a"), written(kv, "b")])  # two new values of one state


def test_a_deep_chain_takes_linear_time_and_no_recursion() -> None:
    x = t = feed("x", (1,))
    for _ in range(20_000):
        t = add(t, t)
    order = toposort([t])
    assert len(order) == 20_001
    assert order[0] is x
    assert order[-1] is t
    t = variable("kv", (2, 1))
    for _ in range(5_000):
        t = written(t)
    assert len(toposort([t])) == 10_001


# --- text -----------------------------------------------------------------------------------------


def test_dump() -> None:
    x = feed("x", (2, 3))
    y = rms_norm(x, variable("norm", (3,), constant=True), eps=1e-5, name="y")
    assert dump([add(y, const(1.0))]).splitlines() == [
        "%0 = feed 'x' f32[2, 3] ()",
        "%1 = variable 'norm' f32[3] () constant=True",
        "%2 = rms_norm 'y' f32[2, 3] (%0, %1) eps=1e-05",
        "%3 = const f32[] () value=1.0",
        "%4 = add f32[2, 3] (%2, %3)",
    ]
    assert repr(y) == "<rms_norm 'y' f32[2, 3]>"


# --- declarations ---------------------------------------------------------------------------------


def test_an_op_is_declared_once() -> None:
    def silu(x: float) -> float:
        return x

    before = OPS["silu"]
    with pytest.raises(ValueError, match="silu declared twice"):
        op(silu)
    assert OPS["silu"] is before


def test_a_declaration_in_four_lines() -> None:
    try:

        @op
        def thrice(x: float) -> float:
            return 3 * x

        y = thrice(feed("x", (2, 2)), name="y")
        assert (y.shape, y.dtype, y.name) == ((2, 2), "f32", "y")
        np.testing.assert_array_equal(evaluate([y], {"x": np.ones((2, 2))}, {})[0], 3)
    finally:
        OPS.pop("thrice", None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: add(feed("a", (2, 3)), feed("b", (4,))), r"add: .*f32\[2, 3\].*f32\[4\]"),
        (lambda: glu(feed("a", (2, 3)), feed("b", (2, 4)), activation="silu"), r"glu: .*\[2, 3\].*\[2, 4\]"),
        (lambda: linear(feed("x", (2, 3)), variable("w", (5, 4))), r"linear: .*\[2, 3\].*'w' f32\[5, 4\]"),
        (lambda: get_rows(feed("x", (2, 3)), feed("i", (2,))), r"get_rows: ids must be i32"),
        (lambda: reshape(feed("x", (2, 3)), shape=(4, 2)), r"reshape: cannot become \(4, 2\).*\[2, 3\]"),
        (lambda: slice_rows(feed("x", (2, 3)), start=1, stop=3), r"slice_rows: rows 1:3 are outside.*\[2, 3\]"),
        (lambda: rms_norm(feed("x", (2, 3)), feed("w", (2,)), eps=1.0), r"rms_norm: .*\[2, 3\].*\[2\]"),
        (lambda: store_k(variable("k", (1, 2, 8, 16)), feed("x", (3, 2, 4)), feed("c", (3,), "i32")), r"store_k: "),
        (
            lambda: attention(
                feed("q", (3, 2, 8)),
                variable("k", (1, 2, 8, 16)),
                variable("v", (1, 2, 8, 16)),
                *(feed(n, (3,), "i32") for n in "tsp"),
                scale=1.0,
            ),
            r"attention: shapes disagree.*'k'",
        ),
        (lambda: feed("x", (2, 32), "q8_0"), r"feed 'x': numpy has no q8_0"),
        (lambda: variable("w", (2, 33), "q8_0").nbytes, r"q8_0 packs 32 elements.*\(2, 33\)"),
    ],
)
def test_a_wrong_graph_fails_where_it_is_built(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_nodes_cannot_be_changed() -> None:
    x = feed("x", (2,))
    with pytest.raises(AttributeError):
        x.shape = (3,)  # type: ignore[misc]
    with pytest.raises(TypeError):
        x.attrs["factor"] = 1  # type: ignore[index]


# --- the oracle -----------------------------------------------------------------------------------


def test_evaluate_computes_in_the_precision_asked_for() -> None:
    x = feed("x", (2,))
    values = np.array([1, 1e-12])
    for dtype, expected in ((np.float64, 1e-12), (np.float32, 0.0)):
        (y,) = evaluate([add(add(x, const(1.0)), const(-1.0))], {"x": values}, {}, dtype)
        assert y.dtype == dtype
        assert y[1] == pytest.approx(expected, rel=1e-3)


def test_evaluate_writes_states_and_keeps_integers() -> None:
    kv = variable("kv", (3, 2))
    held = np.arange(6.0).reshape(3, 2)
    old, new = silu(kv), written(kv)
    got_new, got_old, ids = evaluate(
        [new, old, feed("i", (2,), "i32")], {"pairs": PAIRS, "i": np.array([1, 2])}, {"kv": held}
    )
    assert got_new is held
    np.testing.assert_array_equal(held, [[0, 1], [0, 1], [4, 5]])
    assert got_old[1, 0] == pytest.approx(2 / (1 + np.exp(-2)))
    assert ids.dtype.kind == "i"


# --- sessions -------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Session:
    return Session([NumpyBackend()])


def test_a_session_computes(session: Session) -> None:
    x = feed("x", (2, 3))
    values = np.arange(6).reshape(2, 3)
    y, same = session.plan(lambda: [scale(x, factor=2.0), x]).run({"x": values, "unused": values})
    np.testing.assert_array_equal(y, 2 * values)
    np.testing.assert_array_equal(same, values)
    assert y.dtype == np.float32


def test_scalars_and_empty_shapes(session: Session) -> None:
    x = feed("x", ())
    (y,) = session.plan(lambda: [scale(x, factor=2.0)]).run({"x": np.float32(4)})
    assert y.shape == ()
    assert y == 8


def test_only_the_rows_asked_for_come_back(session: Session) -> None:
    x = feed("x", (4, 2))
    plan = session.plan(lambda: [scale(x, factor=1.0), slice_rows(x, start=1, stop=4), x])
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    a, b, c = plan.run({"x": values}, [2, 1, None])
    np.testing.assert_array_equal(a, values[:2])
    np.testing.assert_array_equal(b, values[1:2])
    np.testing.assert_array_equal(c, values)
    assert plan.run({"x": values}, [0, 0, 0])[0].shape == (0, 2)
    for rows in ([5, None, None], [-1, None, None]):
        with pytest.raises(ValueError, match="rows wanted of <scale"):
            plan.run({"x": values}, rows)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "feed 'ids' is missing"),
        ({"ids": np.zeros(3, np.int32)}, r"feed 'ids': expected shape \(2,\), got \(3,\)"),
        ({"ids": np.zeros((2, 1), np.int32)}, r"feed 'ids': expected shape \(2,\), got \(2, 1\)"),
        ({"ids": np.array([0.0, 1.5])}, "feed 'ids': expected i32, got float64"),
    ],
)
def test_wrong_feeds_are_named(session: Session, feeds: dict[str, np.ndarray], message: str) -> None:
    plan = session.plan(lambda: [get_rows(feed("table", (3, 2)), feed("ids", (2,), "i32"))])
    with pytest.raises(ValueError, match=message):
        plan.run({"table": np.zeros((3, 2)), **feeds})


def test_wrong_definitions_are_named(session: Session) -> None:
    session.define("kv", (3, 2))
    with pytest.raises(ValueError, match="variable 'kv' is defined twice"):
        session.define("kv", (1,))
    with pytest.raises(ValueError, match="constant 'w' has no data"):
        session.define("w", (1,), constant=True)
    with pytest.raises(KeyError, match="no variable is named 'other'"):
        session.plan(lambda: [silu(variable("other", (3, 2)))])
    with pytest.raises(ValueError, match=r"'kv' f32\[2, 2\].*is not what this session defined"):
        session.plan(lambda: [silu(variable("kv", (2, 2)))])
    with pytest.raises(ValueError, match="two feeds are named 'x'"):
        session.plan(lambda: [add(feed("x", (2,)), feed("x", (2,)))])
    with pytest.raises(ValueError, match="a session needs at least one backend"):
        Session([])


def test_who_gave_a_constant_hears_when_it_is_loaded() -> None:
    loaded: list[str] = []
    session = Session([NumpyBackend()])

    def define(name: str) -> Tensor:
        zeros = partial(np.zeros, 8, np.uint8)
        return session.define(name, (2,), source=zeros, constant=True, on_loaded=lambda: loaded.append(name))

    weights = [define(name) for name in ("a", "b", "unused")]
    for _ in range(2):
        session.plan(lambda: [add(feed("x", (2,)), weights[0]), mul(feed("x2", (2,)), weights[1])]).run(
            {"x": np.zeros(2, np.float32), "x2": np.zeros(2, np.float32)}
        )
    assert sorted(loaded) == ["a", "b"]


def test_wrong_writes_are_named(session: Session) -> None:
    session.define("kv", (3, 2))
    w = session.define("w", (2,), source=lambda: np.zeros(8, np.uint8), constant=True)
    with pytest.raises(ValueError, match="variable 'w' is constant"):
        session.write("w", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="variable 'kv' is f32, got float64"):
        session.write("kv", np.zeros((3, 2)))
    with pytest.raises(ValueError, match="variable 'kv' has 24 bytes, got 8 at 20"):
        session.write("kv", np.zeros(2, np.float32), 20)
    with pytest.raises(KeyError, match="no variable is named 'q'"):
        session.write("q", np.zeros(2, np.float32))
    for t in (w, feed("x", (2, 2)), const(1.0)):
        with pytest.raises(ValueError, match=f"would overwrite <{t.op}.*not a mutable variable"):
            session.plan(lambda t=t: [written(t)])
    for fetched in (w, const(1.0), silu(reshape(w, shape=(2, 1)))):
        with pytest.raises(ValueError, match="is a constant: it can be neither fetched nor sliced"):
            session.plan(lambda fetched=fetched: [fetched])


def test_a_source_of_the_wrong_size_is_named(session: Session) -> None:
    kv = session.define("kv", (3, 2), source=lambda: np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="variable 'kv': expected 24 bytes, its source has 8"):
        session.plan(lambda: [silu(kv)])


def test_states_outlive_runs_and_can_be_read_and_written(session: Session) -> None:
    first = np.arange(6, dtype=np.float32)
    kv = session.define("kv", (3, 2), source=lambda: first.view(np.uint8))
    # before anyone knows where the state will live
    session.write("kv", np.array([9], np.float32), 4 * 5)
    np.testing.assert_array_equal(session.read("kv"), [[0, 1], [2, 3], [4, 9]])
    plan = session.plan(lambda: [written(kv)])
    np.testing.assert_array_equal(plan.run({"pairs": np.array([[2, 0]])})[0], [[4, 9], [2, 3], [4, 9]])
    session.write("kv", np.array([7, 7], np.float32).view(np.uint8))  # as bytes
    np.testing.assert_array_equal(plan.run({"pairs": np.array([[0, 1]])})[0], [[7, 7], [7, 7], [4, 9]])
    np.testing.assert_array_equal(session.read("kv"), [[7, 7], [7, 7], [4, 9]])
    np.testing.assert_array_equal(first, np.arange(6))  # the source's own bytes are left alone


def test_some_bytes_of_a_state(session: Session) -> None:
    kv = session.define("kv", (3, 2))
    session.write("kv", np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(session.read_bytes("kv", 8, 8).view(np.float32), [2, 3])
    plan = session.plan(lambda: [written(kv)])
    before = session.read_bytes("kv", 16, 8)
    plan.run({"pairs": np.array([[0, 2]])})
    np.testing.assert_array_equal(before.view(np.float32), [4, 5])
    np.testing.assert_array_equal(session.read_bytes("kv", 16, 8).view(np.float32), [0, 1])
    room = np.full(12, 255, np.uint8)
    assert np.shares_memory(session.read_bytes("kv", 16, 8, room[2:10]), room)
    assert room.tolist() == [255] * 2 + np.array([0, 1], "<f4").view(np.uint8).tolist() + [255] * 2
    for offset, n in ((-4, 4), (20, 8), (0, -1)):
        with pytest.raises(ValueError, match=f"variable 'kv' has 24 bytes that may be read, not {n} at {offset}"):
            session.read_bytes("kv", offset, n)


def test_a_state_may_be_fetched_alone(session: Session) -> None:
    kv = session.define("kv", (2,))
    session.write("kv", np.array([1, 2], np.float32))
    np.testing.assert_array_equal(session.plan(lambda: [kv]).run({})[0], [1, 2])


def test_plans_are_kept_by_key_and_the_least_recently_used_is_dropped() -> None:
    session = Session([NumpyBackend()], max_plans=2)
    x = np.ones((2, 2))

    def run(key: int) -> float:
        return float(session.run(key, lambda: [scale(feed("x", (2, 2)), factor=float(key))], {"x": x})[0][0, 0])

    assert [run(1), run(2), run(1), run(1)] == [1, 2, 1, 1]
    assert session.n_plans_built == 2
    assert run(3) == 3  # 2 goes
    assert run(1) == 1
    assert session.n_plans_built == 3
    assert run(2) == 2
    assert session.n_plans_built == 4


def test_feeds_may_be_written_where_the_plan_wants_them() -> None:
    """Whatever backends read them; and results stay what they were when the next run comes."""
    session = Session([NumpyBackend(refuses=("silu",)), CPUBackend(1)])
    x, factor = feed("x", (3, 4)), feed("f", (3, 4))
    plan = session.plan(lambda: [add(silu(x), factor), mul(x, factor)])
    assert set(plan.input_buffers) == {"x", "f"}
    rng = np.random.default_rng(7)
    found = []
    for _ in range(3):
        values = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("x", "f")}
        for name, value in values.items():
            plan.input_buffers[name][:] = value
        found.append((plan.run(None, [2, None]), plan.run(values, [2, None])))
    for ours, given in found:
        assert [a.tolist() for a in ours] == [a.tolist() for a in given]
    assert found[0][0][1].tolist() != found[1][0][1].tolist()
    plan.input_buffers["x"][:] = 0
    assert not plan.run(None)[1].any()
    session.close()


@pytest.mark.parametrize("make", [NumpyBackend, lambda: CPUBackend(1)], ids=["numpy", "cpu"])
def test_a_plan_that_is_dropped_is_free_at_once(make: Callable[[], Backend]) -> None:
    """A server that meets many sizes of steps drops plans all the time; the cycle collector may
    come late.
    """
    session = Session([make()], max_plans=1)
    x = np.ones((2, 2), np.float32)

    def build() -> list[Tensor]:
        return [silu(scale(feed("x", (2, 2)), factor=2.0))]

    gc.disable()
    try:
        session.run(1, build, {"x": x})
        plan = weakref.ref(session.cached_plan(1, build))
        assert plan() is not None
        session.run(2, build, {"x": x})
        assert plan() is None
    finally:
        gc.enable()
        session.close()


def test_plans_share_one_arena_and_a_reserved_one_is_not_replaced() -> None:
    backend = NumpyBackend()
    session = Session([backend])

    def chain(rows: int) -> list[Tensor]:
        return [add(silu(feed("x", (rows, 64))), scale(feed("x2", (rows, 64)), factor=2.0))]

    session.reserve(lambda: chain(100))
    assert backend.allocated == [2 * 100 * 256]
    for rows in (1, 100, 3):
        session.plan(lambda rows=rows: chain(rows)).run({"x": np.ones((rows, 64)), "x2": np.ones((rows, 64))})
    assert sorted(backend.allocated) == sorted([2 * 100 * 256, *(2 * 256 * rows for rows in (1, 100, 3))])
    session.plan(lambda: chain(101))
    assert max(backend.allocated) == 2 * 101 * 256


def test_closing_closes_the_backends() -> None:
    backend = NumpyBackend()
    Session([backend]).close()
    assert backend.closed

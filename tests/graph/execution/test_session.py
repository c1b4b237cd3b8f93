"""Sessions: variables, feeds, rows of results, cached plans, refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul, scale, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.training.optimizer import clear
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, const, feed, variable
from tests.helpers.numpy_backend import NumpyBackend
from tests.helpers.random_graphs import overwritten


@pytest.fixture
def session() -> Session:
    return Session([NumpyBackend()])


def test_session_runs_a_graph(session: Session) -> None:
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


def test_run_returns_the_requested_rows(session: Session) -> None:
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
    with pytest.raises(ValueError, match=r"'kv' f32\[2, 2\].*is not the variable that this session defined"):
        session.plan(lambda: [silu(variable("kv", (2, 2)))])
    with pytest.raises(ValueError, match="two feeds are named 'x'"):
        session.plan(lambda: [add(feed("x", (2,)), feed("x", (2,)))])
    with pytest.raises(ValueError, match="a session needs at least one backend"):
        Session([])


def test_on_loaded_is_called_after_the_upload() -> None:
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
    for write in (overwritten(w), overwritten(feed("x", (2, 2))), clear(const(1.0))):
        with pytest.raises(ValueError, match=f"would overwrite <{write.src[0].op}.*not a mutable variable"):
            session.plan(lambda write=write: [write])
    for fetched in (w, const(1.0), silu(reshape(w, shape=(2, 1)))):
        with pytest.raises(ValueError, match="is a constant: it can be neither fetched nor sliced"):
            session.plan(lambda fetched=fetched: [fetched])


def test_source_of_the_wrong_size_is_named(session: Session) -> None:
    kv = session.define("kv", (3, 2), source=lambda: np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="variable 'kv': expected 24 bytes, its source has 8"):
        session.plan(lambda: [silu(kv)])


def test_variables_outlive_runs_and_can_be_read_and_overwritten(session: Session) -> None:
    first = np.arange(6, dtype=np.float32)
    kv = session.define("kv", (3, 2), source=lambda: first.view(np.uint8))
    # before anyone knows where the state will live
    session.write("kv", np.array([9], np.float32), 4 * 5)
    np.testing.assert_array_equal(session.read("kv"), [[0, 1], [2, 3], [4, 9]])
    plan = session.plan(lambda: [overwritten(kv)])
    np.testing.assert_array_equal(plan.run({"pairs": np.array([[2, 0]])})[0], [[4, 9], [2, 3], [4, 9]])
    session.write("kv", np.array([7, 7], np.float32).view(np.uint8))  # as bytes
    np.testing.assert_array_equal(plan.run({"pairs": np.array([[0, 1]])})[0], [[7, 7], [7, 7], [4, 9]])
    np.testing.assert_array_equal(session.read("kv"), [[7, 7], [7, 7], [4, 9]])
    np.testing.assert_array_equal(first, np.arange(6))  # the source's own bytes are left alone


def test_read_bytes_returns_a_range_of_a_variable(session: Session) -> None:
    kv = session.define("kv", (3, 2))
    session.write("kv", np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(session.read_bytes("kv", 8, 8).view(np.float32), [2, 3])
    plan = session.plan(lambda: [overwritten(kv)])
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


def test_variable_can_be_fetched_alone(session: Session) -> None:
    kv = session.define("kv", (2,))
    session.write("kv", np.array([1, 2], np.float32))
    np.testing.assert_array_equal(session.plan(lambda: [kv]).run({})[0], [1, 2])


def test_plan_cache_drops_the_least_recently_used() -> None:
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


def test_input_buffers_replace_feeds() -> None:
    """Whatever backends read them; and results stay what they were when the next run comes."""
    session = Session([NumpyBackend(refuses=("silu",)), CPUBackend(1)])
    x, factor = feed("x", (3, 4)), feed("f", (3, 4))
    plan = session.plan(lambda: [add(silu(x), factor), mul(x, factor)])
    assert set(plan.input_buffers) == {"x", "f"}
    rng = np.random.default_rng(7)
    result = []
    for _ in range(3):
        values = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("x", "f")}
        for name, value in values.items():
            plan.input_buffers[name][:] = value
        result.append((plan.run(None, [2, None]), plan.run(values, [2, None])))
    for ours, given in result:
        assert [a.tolist() for a in ours] == [a.tolist() for a in given]
    assert result[0][0][1].tolist() != result[1][0][1].tolist()
    plan.input_buffers["x"][:] = 0
    assert not plan.run(None)[1].any()
    session.close()


@pytest.mark.parametrize("make", [NumpyBackend, lambda: CPUBackend(1)], ids=["numpy", "cpu"])
def test_dropped_plan_is_freed_at_once(make: Callable[[], Backend]) -> None:
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


@pytest.mark.parametrize("device", ["cpu", "opencl:0", "vulkan:0"])
def test_plan_lets_go_of_its_graph(device: str, open_device: Callable[[str], Backend]) -> None:
    """Hundreds of plans are kept; their graphs would take ten times their memory."""
    session = Session([open_device(device)])
    plan = session.plan(lambda: [silu(scale(feed("x", (2, 64)), factor=2.0, name="inner"))])
    toposort([feed("y", (1,))])  # the order of the last graph is remembered
    gc.collect()
    assert [t for t in gc.get_objects() if type(t) is Tensor and t.name == "inner"] == []
    assert plan.run({"x": np.zeros((2, 64))})[0].shape == (2, 64)
    session.release()


def test_plans_share_one_arena() -> None:
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

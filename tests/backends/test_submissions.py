"""Submissions of GPU programs: cut by durations, with the same bits, on OpenCL and Vulkan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from logitless.backends.errors import DeviceLost
from logitless.backends.gpu.device import lower_all
from logitless.backends.gpu.language.dialect import KERNELS, SIMT
from logitless.backends.submissions import (
    MAX_SECONDS,
    Launch,
    Rates,
    Stopwatch,
    Submissions,
    SubmittedWork,
    cut,
    prepared,
    split,
)
from logitless.graph.backend import Backend
from logitless.graph.execution.preemptible_plan import CUT_AFTER_RUNS, PreemptiblePlan
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import silu
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import encode

SLOW = Rates(byte=1e-3, mac=1e-5)  # seconds: every launch takes longer than a submission may


def launches(*seconds: float, joined: tuple[int, ...] = ()) -> list[Launch]:
    """`joined`: launches that read what the one before left in the scratch memory."""
    return [Launch(i, SubmittedWork(1, 1, 1), s, i not in joined) for i, s in enumerate(seconds)]


def contents(groups: list[list[Launch]]) -> list[list[Any]]:
    return [[launch.content for launch in group] for group in groups]


def test_groups_hold_as_many_launches_as_fit() -> None:
    assert contents(cut(launches(3, 3, 3, 9, 1, 1), 7)) == [[0, 1], [2], [3], [4, 5]]
    assert cut([], 7) == []


def test_launches_that_share_scratch_memory_stay_together() -> None:
    assert contents(cut(launches(3, 3, 3, 3, joined=(1, 2)), 4)) == [[0, 1, 2], [3]]


def test_launches_that_share_scratch_memory_are_cut_where_no_other_program_runs() -> None:
    assert contents(cut(launches(3, 3, 3, 3, joined=(1, 2)), 4, anywhere=True)) == [[0], [1], [2], [3]]


class Range(tuple[int, int]):
    """Groups of a launch: the first and their number."""

    def part(self, first: int, count: int) -> Range:
        return Range((self[0] + first, count))


@pytest.mark.parametrize(
    ("seconds", "groups", "expected"),
    [(0.25, 10, [(0, 3), (3, 3), (6, 4)]), (0.25, 2, [(0, 1), (1, 1)]), (0.25, 1, [(0, 1)]), (0.1, 10, [(0, 10)])],
)
def test_launch_that_is_too_long_is_divided_into_ranges_of_groups(
    seconds: float, groups: int, expected: list[tuple[int, int]]
) -> None:
    parts = Launch(Range((0, groups)), SubmittedWork(1, 1, 1), seconds, True, groups).parts(0.1)
    assert [part.content for part in parts] == expected
    assert sum(part.seconds for part in parts) == pytest.approx(seconds)
    assert [part.separable for part in parts] == [i == 0 for i in range(len(parts))]


def test_kernels_whose_groups_walk_all_elements_are_not_divided() -> None:
    assert not any(KERNELS[name].divisible for name in ("map_silu", "round_rows", "rms_norm_rounded", "sample"))
    assert all(KERNELS[name].divisible for name in ("linear_dot_q8_0", "linear_q4_k", "attention_tiles_f16_f16"))


def test_split_uses_the_measured_seconds_of_programs() -> None:
    programs = [Submissions(launches(*seconds), Rates()) for seconds in ((1, 1), (5, 5))]
    parts = split(programs, [8.0, 0.5], 4.5, lambda part: Submissions(part, Rates()))
    assert contents([list(part.launches) for part in parts]) == [[0], [1, 0, 1]]
    assert split(programs[:1], [1.0], 4.5, lambda part: Submissions(part, Rates())) == programs[:1]


def test_product_of_rounded_rows_is_not_separable() -> None:
    w = variable("w", (64, 64), "q8_0", constant=True)
    work = lower_all([linear(feed("x", (1, 64)), w), linear(feed("y", (1, 64)), w)], replace(SIMT, dot=True))
    assert [d.kernel for d in work] == ["round_rows", "linear_dot_q8_0"] * 2
    found = prepared(work, range(4), Rates())
    assert [launch.separable for launch in found] == [True, False] * 2
    assert [launch.work.macs for launch in found] == [0, 64 * 64] * 2


def test_rates_follow_the_measured_runs() -> None:
    rates, decode, prompt = Rates(), SubmittedWork(4e9, 4e9, 200), SubmittedWork(5e9, 2e12, 200)
    for _ in range(30):  # 500 GB/s and 20 T multiply-adds/s
        rates.learn(decode, 4e9 / 5e11 + 4e9 / 2e13 + 1e-3)
        rates.learn(prompt, 5e9 / 5e11 + 2e12 / 2e13 + 1e-3)
    assert rates.byte == pytest.approx(1 / 5e11, rel=0.05)
    assert rates.mac == pytest.approx(1 / 2e13, rel=0.05)


def test_rates_ignore_short_runs() -> None:
    rates = Rates()
    rates.learn(SubmittedWork(1000, 1000, 1), 1e-3)
    assert rates == Rates()


def test_program_is_cut_anew_when_it_takes_longer() -> None:
    some = Submissions(launches(*[0.01] * 8), Rates())
    assert len(some.groups) == 1
    assert not some.measured(0.09)
    assert some.measured(0.8)
    assert len(some.groups) == 8
    assert not some.measured(0.8)  # it stays
    assert some.measured(0.02)
    assert len(some.groups) == 1


def test_first_run_of_a_program_tells_nothing_where_it_compiles_kernels() -> None:
    rates = Rates(compiles_late=True)
    some = Submissions(launches(*[0.01] * 8), rates)
    assert not some.measured(80.0)
    assert (len(some.groups), rates) == (1, Rates(compiles_late=True))
    assert some.measured(0.8)


def test_launch_that_is_too_long_alone_is_not_recorded_anew() -> None:
    some = Submissions(launches(3 * MAX_SECONDS, 3 * MAX_SECONDS), Rates())
    assert len(some.groups) == 2
    assert not some.measured(9.0)


class Program:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ended(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_run_whose_end_was_not_seen_has_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("logitless.backends.submissions.time.perf_counter", lambda: now)
    watch, program = Stopwatch(), Program()

    def run(before: float, blocked: float, n: int = 1) -> None:
        nonlocal now
        for _ in range(n):
            watch.start(program)
        now += before

        def wait() -> None:
            nonlocal now
            now += blocked

        watch.wait(wait)

    run(1, 3)
    run(1, 0)  # it may have ended long before
    run(0, 1, n=2)  # of which program?
    watch.wait(lambda: None)
    run(0, 2)
    assert program.seconds == [4, 2]


@pytest.fixture(params=["vulkan:0", "opencl:0"])
def device(request: pytest.FixtureRequest, open_device: Callable[[str], Backend]) -> Iterator[Any]:
    backend: Any = open_device(request.param)
    before = backend.rates
    yield backend
    backend.rates = before


def model(session: Session, dtype: str = "q8_0") -> Callable[[], list[Tensor]]:
    """A chain of norms and products, which leave rounded rows in the scratch memory."""
    draw = np.random.default_rng(3)
    w = draw.normal(size=(256, 256)).astype(np.float32) / 16
    session.define("w", w.shape, dtype, lambda: encode(w, dtype), constant=True)
    session.define("g", (256,), source=lambda: np.ones(256, np.float32))

    def build() -> list[Tensor]:
        t = feed("x", (5, 256))
        for _ in range(6):
            t = silu(linear(rms_norm(t, variable("g", (256,)), eps=1e-5), variable("w", w.shape, dtype, constant=True)))
        return [t]

    return build


def n_submissions(plan: Any) -> int:
    return sum(len(program._submissions.groups) for program in plan.programs)


X = np.random.default_rng(4).normal(size=(5, 256)).astype(np.float32)


def test_several_submissions_have_the_bits_of_one(device: Any) -> None:
    session = Session([device])
    build = model(session)
    device.rates = Rates(byte=1e-15, mac=1e-15)
    whole = session.plan(build)
    device.rates = replace(SLOW)
    several = session.plan(build)
    assert n_submissions(whole) == 1
    n_launches = sum(len(program.launches) for program in several.programs)  # type: ignore[attr-defined]
    assert n_submissions(several) > 1.5 * n_launches  # products are divided
    (expected,) = whole.run({"x": X})
    (found,) = several.run({"x": X})
    assert found.tobytes() == expected.tobytes()
    assert np.isfinite(found).all()
    for program in several.programs:
        program.ended(1e-3)  # type: ignore[attr-defined]
    assert n_submissions(several) == 1
    (again,) = several.run({"x": X})
    assert again.tobytes() == expected.tobytes()
    session.release()


def test_device_lost_in_the_second_submission_is_one_line(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session([device])
    build = model(session)
    device.rates = replace(SLOW)
    plan = session.plan(build)
    inner, name = (device.device, "submit") if device.name.startswith("vulkan") else (device, "queue")
    submit, count = getattr(inner, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise DeviceLost(f"{device.name}: the device was lost (a submission)")
        return submit(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(inner, name, failing)
        with pytest.raises(DeviceLost, match=r"^[^\n]*lost[^\n]*$"):
            plan.run({"x": X})
    assert count == 2
    (found,) = plan.run({"x": X})  # what was submitted has ended
    assert np.isfinite(found).all()
    session.release()


@pytest.mark.parametrize(("most", "low", "high"), [(1e-7, 12, 100), (60.0, 1, 1)])
def test_programs_between_parts_change_no_bits(
    device: Any, most: float, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use the scratch memory; parts are cut to single launches, or joined."""
    monkeypatch.setattr("logitless.graph.execution.preemptible_plan.MAX_PART_SECONDS", most)
    session = Session([device])
    build = model(session)
    whole, other = session.plan(build), session.plan(build)
    (expected,) = whole.run({"x": X})
    plan = session.plan(build, "apart")
    assert isinstance(plan, PreemptiblePlan)
    for _ in range(CUT_AFTER_RUNS[-1] + 2):
        n_parts = 0
        for _ in plan.parts({"x": X}):
            n_parts += 1
            other.run({"x": 7 * X})
        assert plan.results()[0].tobytes() == expected.tobytes()
    assert low <= n_parts <= high
    session.release()

"""Schedules, stopping rules, results and progress, by formulas and an injected clock."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import replace

from logitless.training.config import TrainingConfig
from logitless.training.errors import TrainingError
from logitless.training.reporting.progress import Reporter, bar, clock, status
from logitless.training.reporting.results import Result
from logitless.training.run import settings_of
from logitless.training.schedule import Stopping, default_warmup, factor_at, rate_at
from logitless.training.trainer import Step, Validated, Validating

COSINE = TrainingConfig(schedule="cosine", learning_rate=1e-3, warmup=10, cos_decay_steps=100, cos_decay_min=0.1)


def test_warm_up_and_cosine() -> None:
    s = replace(COSINE, learning_rate=2e-3)
    assert [factor_at(s, n) for n in (0, 5)] == [0, 0.5]
    assert factor_at(s, 10) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.1)))  # counted from step 0
    assert factor_at(s, 50) == pytest.approx(0.55)
    assert factor_at(s, 100) == factor_at(s, 5000) == pytest.approx(0.1)
    assert rate_at(s, 50) == pytest.approx(1.1e-3)


def test_default_warm_up_of_a_long_run_ends() -> None:
    assert [default_warmup(n) for n in (9, 10, 990, 1000, 50_000)] == [0, 1, 99, 100, 100]


def test_restarts_are_longer_each_time_and_counted_from_the_warm_up() -> None:
    s = replace(COSINE, cos_decay_restart=1.5, cos_decay_min=0, enable_restart=True)
    assert factor_at(s, 10) == 1
    assert factor_at(s, 60) == pytest.approx(0.5)
    assert factor_at(s, 110) == pytest.approx(0, abs=1e-12)
    assert factor_at(s, 111) > 0.99
    assert factor_at(s, 110 + 75) == pytest.approx(0.5)
    assert factor_at(s, 110 + 150 + 112.5) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_a_floor_lifts_the_warm_up_too() -> None:
    s = replace(COSINE, cos_decay_steps=1000, adam_min_alpha=1e-4)
    assert rate_at(s, 0) == pytest.approx(1e-4)
    assert all(1e-4 <= rate_at(s, n) <= 1e-3 for n in range(2000))


def test_halving_is_constant_within_an_epoch() -> None:
    s = TrainingConfig(learning_rate=8e-5, schedule="halving", learning_rate_min=1e-5, decay_epochs=3)
    assert [rate_at(s, n, epoch) for n, epoch in ((0, 0), (99, 0), (7, 1), (0, 2), (0, 3), (0, 9))] == pytest.approx(
        [8e-5, 8e-5, 4e-5, 2e-5, 1e-5, 1e-5]
    )
    assert rate_at(TrainingConfig(learning_rate=1e-5), 12345) == 1e-5


@pytest.mark.parametrize(
    ("rule", "losses", "told"),
    [
        (Stopping(past=3), [1.0] * 4, "(--opt-delta)"),
        (Stopping(max_no_improvement=2), [1.0, 1.1, 1.2], "no improvement in 2 steps"),
        (Stopping(max_no_improvement=2), [1.0, 1.0, 1.0], "no improvement in 2 steps"),  # an equal loss is none
        (Stopping(epsf=1e-3), [1.0, 1.0001], "(--adam-epsf)"),
    ],
)
def test_each_rule_stops_with_its_name(rule: Stopping, losses: list[float], told: str) -> None:
    reasons = [rule.update(loss) for loss in losses]
    assert reasons[:-1] == [None] * (len(losses) - 1)
    assert told in str(reasons[-1])


def test_equal_validation_loss_is_no_improvement() -> None:
    rule = Stopping(patience=2)
    for step, loss in enumerate((2.0, 1.0, 1.0, 1.0), 1):
        assert not rule.stale
        rule.validated(loss, step)
    assert rule.stale == "no lower validation loss than that of step 2 in 2 validations"


def test_disabled_rules_never_stop() -> None:
    rule = Stopping()
    assert not any(rule.update(1.0) for _ in range(1000))


def test_results_have_uncertainties() -> None:
    r = Result()
    assert math.isnan(r.loss)
    r.add(2.0, 10, 5)
    assert math.isnan(r.loss_uncertainty)
    for loss, n, right in ((3.0, 10, 1), (1.0, 20, 18)):
        r.add(loss, n, right)
    assert r.loss == pytest.approx((20 + 30 + 20) / 40)
    assert r.loss_uncertainty == pytest.approx(statistics.stdev([2, 3, 1]) / math.sqrt(3))
    assert r.accuracy == pytest.approx(0.6)
    assert r.accuracy_uncertainty == pytest.approx(math.sqrt(0.6 * 0.4 / 39))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", 0.0), ("learning_rate", math.inf), ("schedule", "x"), ("optimizer", "adam")),
        *(("adam_beta1", 2.0), ("batch_size", 0), ("grad_acc", 0), ("ctx_size", 0), ("cos_decay_restart", 0.5)),
    ],
)
def test_a_configuration_that_makes_no_sense_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(TrainingError, match=f"^{field}: "):
        settings_of(TrainingConfig(**{field: value}))


def test_a_run_without_limit_is_refused() -> None:
    with pytest.raises(TrainingError, match="a run needs a limit: epochs or iterations"):
        settings_of(TrainingConfig(iterations=0))


def test_reporters_lines_fit_the_terminal_that_it_is_told() -> None:
    lines: list[str] = []
    reporter = Reporter(lambda text, _: lines.append(text), terminal=True, now=lambda: 1e6, columns=lambda: 59)
    result = Result(94080, 20000, [3.5, 3.6], [1, 1])
    reporter(Step(1, 9, 1, 355, 365, 3.5, 0.2, 12.34, 1e-4, 1.0, 512, result))
    reporter(Validating(3, 19, result))
    reporter(Validated(1, 1, result))
    assert len(lines) == 3
    assert all(len(line) <= 59 and "loss=" in line for line in lines), lines


def test_progress_fits_eighty_columns() -> None:
    assert [bar(n, 64) for n in (0, 1, 13, 64)] == ["|        |", "|▏       |", "|█▋      |", "|████████|"]
    assert [clock(x) for x in (0, 59.6, 3723, math.nan)] == ["0:00", "1:00", "1:02:03", "-:--"]
    r = Result(10**9, 5 * 10**8, [123.456, 99.1], [1e9, 1e9])
    for done in (1, 10**6, 10**9):
        line = status("train", (done, 10**9), r, 1e6, 1e6, 1e6)
        assert len(line) <= 80
        assert f"data={done}/1000000000" in line
    assert "loss=111.28 acc=50.0%" in line
    small = status("train", (355, 365), Result(94080, 20000, [3.5, 3.6], [1, 1]), 137.0, 61.0, 689.4)
    assert small == "train: |███████▊| data=355/365 loss=3.550±0.050 acc=21.3±0.1% ETA=1:01 689 tok/s"
    for columns in (60, 50, 40):
        narrow = status("train", (355, 365), Result(94080, 20000, [3.5, 3.6], [1, 1]), 1e6, 1e6, 1e6, 12.34, columns)
        assert len(narrow) <= columns
        assert "data=355/365 loss=3.55" in narrow
        assert "norm=12.3" in narrow
    rewards = Result(9, 0, [0.1], [1], {"mean_reward": (2.5, 5)})
    assert len(status("train", (123456, 234567), rewards, 1e6, 1e6, 1e6, 0.001234, 60)) <= 60
    assert status("val", (19, 19), Result(2432, 600, [3.5, 3.6], [1, 1]), 2.0, 0.0).endswith(
        "acc=24.7±0.9% t=0:02 ETA=0:00"
    )


def test_an_epoch_that_ends_within_a_step_leaves_its_line() -> None:
    written: list[tuple[str, bool]] = []
    report = Reporter(lambda text, final: written.append((text, final)), terminal=True, now=lambda: 1.0)
    for i, sample in ((1, 4), (2, 8), (3, 2), (4, 6), (5, 10)):
        report(changed(step(i), sample=sample))
    assert [(text.split("| ")[1].split()[0], final) for text, final in written] == [
        ("data=4/10", False),
        ("data=8/10", False),
        ("data=10/10", True),
        ("data=6/10", False),
        ("data=10/10", True),
    ]
    report(Validating(7, 7, Result(700, 5, [1.0], [1.0])))
    report(Validated(5, 0, Result(700, 5, [1.0], [1.0])))
    assert written[-1][0].startswith("val: |████████| data=7/7 ")


def step(i: int) -> Step:
    return Step(i, 10, 0, i, 10, 5.0 - i, 0.5, 1.0, 1e-3, 1.0, 100, Result(10, 5, [1.0], [1.0]))


def test_the_time_left_is_smoothed_and_leaves_saving_out() -> None:
    now = [0.0]
    lines: list[str] = []
    report = Reporter(lambda text, final: lines.append(text), terminal=False, now=lambda: now[0])
    now[0] = 2.0
    report(step(1))
    assert "dt=0:02 eta=0:18" in lines[-1]
    report.outside(50.0)
    now[0] = 62.0  # 10 seconds of training
    report(step(2))
    assert f"dt=0:10 eta={clock((0.7 * 10 + 0.3 * 2) * 8)}" in lines[-1]
    assert "iter=2/10 sample=2/10 sched=1.000000 loss=3.000000" in lines[-1]
    assert report.losses == [(1, 4.0), (2, 3.0)]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_shown(loss: float, shown: str, terminal: bool) -> None:
    lines: list[str] = []
    report = Reporter(lambda text, final: lines.append(text), terminal=terminal, now=lambda: 1.0)
    for i, at in ((1, 4.0), (2, loss), (3, loss)):
        report(changed(step(i), loss=at, result=Result(10, 5, [at], [1.0])))
    assert f" loss={shown}" in lines[1]
    assert f" loss={shown}" in lines[2]

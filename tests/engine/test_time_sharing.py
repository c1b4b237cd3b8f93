"""Time slicing: training's share of the device beside requests, for runs of any duration."""

from __future__ import annotations

import math

import pytest

from logitless.engine.time_sharing import TimeSlicer


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("run", [0.001, 0.5])
def test_the_share_holds_for_runs_of_any_length(share: float, run: float) -> None:
    slicer = TimeSlicer(share)
    trained = served = 0.0
    while served < 60:
        if slicer.left > 0:
            trained += run
            slicer.ran(run)
        else:
            served += 0.005
            slicer.stepped(0.005)
    assert trained / (trained + served) <= share + run / 60
    assert trained / (trained + served) >= share - 0.05 or run < 0.005  # a step lets one run in at most


def test_everything_may_be_trainings() -> None:
    slicer = TimeSlicer(1.0)
    slicer.ran(100.0)
    assert slicer.left == math.inf


def test_little_is_saved_up() -> None:
    slicer = TimeSlicer(0.5)
    for _ in range(1000):
        slicer.stepped(1.0)
    taken = []
    for _ in range(100):
        taken.append(slicer.left)
        slicer.ran(slicer.left)
        slicer.stepped(1.0)
    assert max(taken) == 1.25
    assert 100 < sum(taken) <= 104


def test_a_turn_comes_after_each_step_and_a_slow_step_is_paid_back_over_several() -> None:
    """What a client waits for is a step and a turn: of steps of 1 s and one of 9 s, no turn is as long as that."""
    slicer = TimeSlicer(0.5)
    taken = []
    for i in range(80):
        slicer.stepped(9.0 if i == 20 else 1.0)
        taken.append(slicer.left)
        slicer.ran(slicer.left - 0.25)  # it ends where its next part would not fit
        assert slicer.left == 0
    assert taken[19] == taken[21] == 1.25
    assert taken[:2] == [1.0, 1.25]
    assert max(taken) == 1.25
    assert sum(taken) - 0.25 * 80 == pytest.approx(80, abs=5)  # half of 88 s of steps but what is not saved up

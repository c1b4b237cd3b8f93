"""Training's share of the device while requests run, whatever its runs take."""

from __future__ import annotations

import math

import pytest

from server.turns import Turns


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("run", [0.001, 0.5])
def test_the_share_holds_for_runs_of_any_length(share: float, run: float) -> None:
    turns = Turns(share)
    trained = served = 0.0
    while served < 60:
        if turns.left > 0:
            trained += run
            turns.ran(run)
        else:
            served += 0.005
            turns.stepped(0.005)
    assert trained / (trained + served) <= share + run / 60
    assert trained / (trained + served) >= share - 0.05 or run < 0.005  # a step lets one run in at most


def test_everything_may_be_trainings() -> None:
    turns = Turns(1.0)
    turns.ran(100.0)
    assert turns.left == math.inf


def test_time_is_not_saved_up() -> None:
    turns = Turns(0.5)
    for _ in range(1000):
        turns.stepped(1.0)
    turns.ran(1.5)
    assert turns.left == 0

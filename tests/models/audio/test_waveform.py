"""Resampling: sines keep their values, sounds beyond 8 kHz are silenced, seams do not show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from logitless.models.audio.waveform import resampled
from tests.helpers.sounds import F32, sine

RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 44_101, 15_999)


def whole(samples: F32, rate: int, cuts: Sequence[int] = ()) -> F32:
    return np.concatenate([*resampled(np.split(samples, cuts), rate)])


@pytest.mark.parametrize("rate", RATES)
def test_a_sine_stays_itself(rate: int) -> None:
    n = 2 * rate + 7
    result = whole(sine(1234.5, n, rate), rate)
    assert len(result) == -(-n * 16_000 // rate)
    error = np.abs(result - sine(1234.5, len(result)))
    assert error[2000:-2000].max() < 2e-5


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000])
@pytest.mark.parametrize("hertz", [8001, 9000, 10_500])
def test_higher_sounds_are_silenced(rate: int, hertz: float) -> None:
    result = whole(sine(hertz, 2 * rate, rate), rate)
    assert np.abs(result[2000:-2000]).max() < 2e-5


def test_level_and_time_stay() -> None:
    assert np.abs(whole(np.full(48_000, 0.5, np.float32), 48_000)[2000:-2000] - 0.5).max() < 1e-5
    for rate in (8000, 44_100, 48_000):
        click = np.zeros(rate, np.float32)
        click[rate // 2] = 1
        assert int(whole(click, rate).argmax()) == 8000


@pytest.mark.parametrize("rate", [8000, 44_100])
def test_blocks_do_not_matter(rate: int) -> None:
    noise = np.random.default_rng(1).normal(size=3 * rate).astype(np.float32)
    once = whole(noise, rate)
    np.testing.assert_array_equal(whole(noise, rate, [1, 5, 1000, 2 * rate]), once)
    assert len(whole(noise[:1], rate)) == (2 if rate == 8000 else 1)


def test_silence_of_no_length_is_none() -> None:
    assert [*resampled([], 44_100)] == []

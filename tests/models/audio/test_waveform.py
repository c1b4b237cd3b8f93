"""Waveforms: seconds and digests."""

from __future__ import annotations

import numpy as np

from logitless.models.audio.waveform import Waveform


def test_a_waveform_is_known_by_its_samples() -> None:
    samples = np.linspace(-1, 1, 8000, dtype=np.float32)
    other = samples.copy()
    other[17] = np.nextafter(other[17], np.float32(2))
    assert Waveform(samples).seconds == 0.5
    assert Waveform(samples).digest == Waveform(samples.copy()).digest
    assert Waveform(samples).digest == Waveform(np.repeat(samples, 2)[::2]).digest
    assert Waveform(samples).digest != Waveform(other).digest
    assert Waveform(samples).digest != Waveform(samples[:-1]).digest

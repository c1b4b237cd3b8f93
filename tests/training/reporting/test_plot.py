"""Loss plots."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from logitless.training.reporting.plot import plot, svg

CURVES = {"training": [(0.0, 3.0), (1.0, 1.0), (2.0, float("nan"))], "a<b": [(0.0, 2.0), (2.0, 2.5)]}


def test_svg_has_every_finite_point_and_no_markup_from_names() -> None:
    text = svg(CURVES, "loss")
    lines = [line for line in text.splitlines() if "#4477aa" in line and "<polyline" in line]
    assert len(lines) == 1
    assert lines[0].count(",") == 2
    assert "a&lt;b" in text
    assert "nan" not in text
    (alone,) = [
        line for line in svg({**CURVES, "a<b": [(1.0, 2.0)]}).splitlines() if "#cc6677" in line and "<poly" in line
    ]
    assert alone.count(",") == 2


def test_png_shows_the_curves_where_the_svg_has_them(tmp_path: Path) -> None:
    plot(tmp_path / "loss.png", CURVES, "loss")
    with Image.open(tmp_path / "loss.png") as picture:
        pixels = np.asarray(picture)
    blue = np.argwhere((pixels == (0x44, 0x77, 0xAA)).all(-1))
    assert pixels.shape == (840, 1440, 3)
    # from the top left of the plane to the middle of its bottom; the word above it is where no
    # curve goes
    word, curve = blue[blue[:, 0] < 100], blue[blue[:, 0] >= 100]
    assert len(word) > 0
    assert curve[curve[:, 1].argmin()][0] < 120
    assert curve[curve[:, 1].argmax()][0] > 600


def test_names_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'x\.gif' does not end in"):
        plot("x.gif", CURVES)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Pillow, which is not installed"):
        plot(tmp_path / "x.png", CURVES)

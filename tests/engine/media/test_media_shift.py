"""Context shift beside a projector: off with a warning where images have positions of their own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, write_projector, write_text_model


@pytest.mark.parametrize(("name", "shifts"), [("qwen2.5vl", False), ("mlp", True)])
def test_context_shift_beside_a_projector(
    name: str, shifts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_text_model(tmp_path / "m.gguf", SPECS[name], MODELS / "stories260K.gguf")
    projector = write_projector(tmp_path / "mmproj.gguf", SPECS[name])
    alone = open_model(model, ModelOptions(context_shift=True, mmproj_auto=False))
    with caplog.at_level(logging.WARNING):
        opened = open_model(model, ModelOptions(context_shift=True, mmproj=str(projector)))
    assert alone.options.context_shift
    assert (opened.options.context_shift, bool(opened.engine_options.moves)) == (shifts, shifts)
    assert ("--context-shift: is off" in caplog.text) == (not shifts)

"""Rows of Gemma 3n's encoder, compared with an independent one in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.gguf.file import GGUFFile
from logitless.models.vision.encoder import VisionEncoder
from logitless.models.vision.params import read_params
from tests.helpers.reference_mobilenet import MobileNet
from tests.helpers.vision_files import N_TEXT, SPECS, picture, write_projector


@pytest.mark.parametrize(("image", "seed"), [(256, 0), (256, 3), (512, 1)])
def test_rows_are_those_of_float64(image: int, seed: int, tmp_path: Path) -> None:
    """Weights with which llama.cpp, whose GELUs and depthwise convolutions read 16 bits, differs by 0.16 nats (seed
    3); maps that are pooled (512)."""
    path = write_projector(tmp_path / "p.gguf", replace(SPECS["gemma3nv"], image=image), seed)
    tiles = [np.asarray(picture(image, image, seed=k)) for k in ((1, 5) if image == 256 else (1,))]
    with GGUFFile.open(path) as gguf:
        session = Session([CPUBackend(1)])
        encoder = VisionEncoder.define(session, gguf, read_params(gguf), N_TEXT)
        (rows,) = session.run("rows", lambda: encoder.rows(len(tiles), image, image), encoder.feeds(tiles))
        session.close()
    reference = MobileNet(path)
    expected = np.concatenate([reference.rows(tile) for tile in tiles])
    assert np.abs(rows - expected).max() < 2e-4 * np.abs(expected).max()

"""DeepSeek-OCR's encoder: rows of squares, alone and with others, and its resized positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from logitless.backends.registry import open_backends
from logitless.graph import Session
from logitless.models.gguf.file import GGUFFile
from logitless.models.vision.params import read_params
from logitless.models.vision.patches import cubic_axis
from logitless.models.vision.preprocess import pieces_of
from logitless.models.vision.towers.ocr import OCREncoder
from tests.helpers.vision_files import N_TEXT, SPECS, picture, write_projector


@pytest.mark.parametrize(("side", "n"), [(16, 10), (16, 16), (14, 16), (7, 3)])
def test_a_filtered_cubic_line_is_pillows(side: int, n: int) -> None:
    line = np.random.default_rng(side).normal(size=side).astype(np.float32)
    expected = np.asarray(Image.fromarray(line[None], "F").resize((n, 1), Image.Resampling.BICUBIC))[0]
    assert np.abs(cubic_axis(n, side, filtered=True) @ line - expected).max() < 1e-5


def test_rows_of_squares_are_the_same_bits_whatever_shares_their_batch(tmp_path: Path) -> None:
    """And each square the same as in another row: the grid of a wide image has 3 × 1 of them, and ends of lines."""
    with (
        GGUFFile.open(write_projector(tmp_path / "p.gguf", SPECS["deepseekocr"])) as gguf,
        Session(open_backends(["cpu"])) as session,
    ):
        p = read_params(gguf)
        encoder = OCREncoder.define(session, gguf, p, N_TEXT)
        wide, overview, _ = pieces_of(picture(60, 20).resize((1200, 400)), p)
        assert isinstance(wide, np.ndarray)
        assert isinstance(overview, np.ndarray)
        assert (wide.shape, overview.shape) == ((640, 3 * 640, 3), (1024, 1024, 3))
        assert (p.n_rows(640, 1920), p.n_rows(1024, 1024)) == (310, 273)
        pair = wide[:, :1280]
        tiles = [pair, pair[:, ::-1]]

        def rows(*tiles: np.ndarray) -> np.ndarray:
            return session.compute(encoder.rows(len(tiles), *tiles[0].shape[:2]), encoder.feeds(tiles))[0]

        together = rows(*tiles)
        assert np.array_equal(together, np.concatenate([rows(tile) for tile in tiles]))
        assert np.array_equal(together[:100], rows(wide[:, :640]))
    of_rows, ends, kinds = encoder.row_places(640, 1280)
    assert sorted([*of_rows, *ends]) == list(range(210))
    assert of_rows[[0, 9, 10, 100, 199]].tolist() == [0, 9, 21, 10, 208]  # the second square begins behind the first
    assert (ends[0], kinds.tolist()) == (20, [0] * 10)
    assert encoder.row_places(1024, 1024)[2].tolist() == [0] * 16 + [1]

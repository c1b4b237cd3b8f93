"""Context shift and cache reuse beside a projector: off where images have positions of their own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.engine.kv_cache.prefix_cache import common_prefix
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.requests import CompletionRequest
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs


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


@pytest.mark.parametrize(("name", "moves"), [("qwen2.5vl", False), ("mlp", True)])
def test_cache_reuse_moves_text_behind_images_only_where_positions_are_places(
    name: str, moves: bool, tmp_path: Path
) -> None:
    model = write_text_model(tmp_path / "m.gguf", SPECS[name], MODELS / "stories260K.gguf")
    story = "Once upon a time there was a little girl who had a dog and a ball. The sun was warm and big."
    image = [png(picture(40, 24))]

    def n_moved(runs: Runs, old: CompletionRequest, new: CompletionRequest) -> int:
        """Tokens that a prompt takes from another, beside those of its beginning."""
        runs.run(replace(old, id_slot=1))
        stats = runs.scheduler.stats
        before = stats.prompt_tokens_cached
        runs.run(replace(new, id_slot=1, n_cache_reuse=24))
        return stats.prompt_tokens_cached - before - common_prefix(old.prompt, new.prompt)

    with Runs(model, write_projector(tmp_path / "mmproj.gguf", SPECS[name])) as runs:
        for old, new, has_image, can_move in (
            (f"Tom ran. <image> {story}", f"<image> {story}", True, moves),
            (f"<image> {story} Tom sat.", f"{story} Sue saw him.", False, moves),
            (f"Kim hid. {story} <image>", f"{story} <image>", True, True),
        ):
            pair = runs.request(old, image), runs.request(new, image if has_image else [])
            assert (n_moved(runs, *pair) >= 24) == can_move, (old, new)

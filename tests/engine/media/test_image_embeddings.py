"""Embeddings of prompts with images: the hidden states of generation, computed between other steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from logitless.engine.errors import InvalidRequest
from logitless.engine.media import media_encoder
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs


@pytest.mark.parametrize("name", ["mlp", "qwen2vl", "qwen3vl", "pixtral"])
def test_the_last_hidden_state_is_that_of_generation(name: str, tmp_path: Path, shared_data: Path) -> None:
    """Times the output's matrix it gives the log-probabilities of the next token."""
    spec = SPECS[name]
    model = write_text_model(tmp_path / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    media = [png(picture(40, 24)), png(picture(16, 16, seed=3))]
    with Runs(model, write_projector(tmp_path / "mm.gguf", spec), type_k="f32", type_v="f32") as runs:
        _, expected = runs.first("h<image>g<image>ab", media)
        asked = runs.request("h<image>g<image>ab", media)
        runs.runner.media.clear()  # type: ignore[union-attr]
        assert asked.media is not None
        while not runs.scheduler.encode([span.tile for span in asked.media.spans]):
            pass
        (state,) = runs.runner.embedder.embed([asked.prompt], "last", media=asked.media)
        rows = runs.runner.embedder.embed([asked.prompt], "none", media=asked.media)[0]
        assert len(rows) == len(asked.prompt)
        assert np.array_equal(rows[-1], state)
        other = runs.runner.embedder.embed([[max(id, 0) for id in asked.prompt]], "last")[0]
        assert not np.allclose(other, state)
    tensors = {t.name: t for t in GGUFReader(model).tensors}
    matrix = tensors.get("output.weight", tensors["token_embd.weight"])
    logits = dequantize(matrix.data, matrix.tensor_type).astype(np.float64) @ state
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    for id, logprob in expected.items():
        assert logprobs[id] == pytest.approx(logprob, abs=2e-3)


def test_images_without_room_are_refused(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_encoder, "LEAST_ROWS", 1)
    monkeypatch.setattr("logitless.engine.runner.model_runner.MOST_MEDIA_ROWS", 20)
    spec = SPECS["mlp"]
    model = write_text_model(tmp_path / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    with Runs(model, write_projector(tmp_path / "mm.gguf", spec)) as runs:
        media = runs.request("<image><image>", [png(picture(16, 16, seed=i)) for i in range(2)]).media
        assert media is not None
        with pytest.raises(InvalidRequest, match="the images and sounds have 32 tokens, at most 20 are possible"):
            runs.scheduler.encode([span.tile for span in media.spans])
        runs.runner.media = None
        with pytest.raises(InvalidRequest, match="--mmproj"):
            runs.scheduler.encode([])

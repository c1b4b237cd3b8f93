"""Embeddings of prompts with images: the states from which generation predicts the next token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logitless.models.gguf.file import GGUFFile
from logitless.models.quantization.quantize import dequantized
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs


@pytest.mark.parametrize("name", ["gemma3", "gemma4v", "mlp", "qwen2.5vl", "qwen3vl"])
def test_embedding_of_images_is_the_state_that_predicts(name: str, tmp_path: Path) -> None:
    """Of images whose rows see each other, of causal ones, of positions of their own, and of deepstack."""
    model = write_text_model(tmp_path / "m.gguf", SPECS[name], MODELS / "stories260K.gguf")
    images = [png(picture(24, 24)), png(picture(40, 16, seed=5))]
    with Runs(model, write_projector(tmp_path / "p.gguf", SPECS[name])) as runs:
        request = runs.request("h<image>and<image>g", images, cache_prompt=False)
        ((prob,),) = runs.run(request)
        assert request.media is not None
        assert request.media.causal == ("gemma" not in name)
        (state,) = runs.runner.embedder.embed([request.prompt], "last", media=request.media)
        rows = runs.runner.embedder.embed([request.prompt], "none", media=request.media)[0]
    with GGUFFile.open(model) as gguf:
        head = gguf.tensors.get("output.weight") or gguf.tensors["token_embd.weight"]
        logits = dequantized(head, gguf.bytes_of(head.name)).astype(np.float64) @ state
        cap = gguf.metadata.get(f"{gguf.metadata['general.architecture']}.final_logit_softcapping")
    logits = cap * np.tanh(logits / cap) if cap else logits
    logits -= np.log(np.exp(logits).sum())
    got = dict(prob.top)
    assert [logits[id] for id in got] == pytest.approx(list(got.values()), abs=0.03)
    assert np.allclose(rows[-1], state, atol=1e-5)

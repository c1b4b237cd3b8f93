"""llama.cpp as the oracle of sounds: projector types, one and two sounds, several chunks, images beside.

Weights are random. Voxtral is not among them: llama.cpp pools its rows, and the model does not
(test_audio_encoder.py)."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from pathlib import Path

import pytest

from logitless.models.audio.waveform import Waveform
from tests.helpers.audio_files import AUDIO_SPECS, N_CTX, sound, wav, write_audio_projector, write_audio_text_model
from tests.helpers.vision_files import picture, png
from tests.helpers.vision_requests import Runs
from tests.models.vision.test_llama_cpp_images import theirs

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")


SHORT, LONG, CHUNKS = sound(0.4), sound(12, seed=1), sound(30.3, seed=2, bits=8)  # in 8 bits, for the size of a body
SECONDS = sound(8.005, seed=3)  # whose last frame begins another chunk
SPOKEN = sound(2.3, seed=4)  # rows that fill neither the last block nor the last window
FILES = {SPOKEN: wav(SPOKEN), SHORT: wav(SHORT), LONG: wav(LONG), CHUNKS: wav(CHUNKS, bits=8), SECONDS: wav(SECONDS)}
FAR = {"qwen3a": 0.015}  # llama.cpp's convolutions read 16 bits
PROMPTS: dict[str, list[tuple[str, list[bytes | Waveform]]]] = {
    "ultravox": [("h<image>g", [LONG]), ("h<image>ab", [CHUNKS])],
    "qwen2a": [("so<image> a long<image>b", [LONG, SHORT])],
    "qwen3a": [("so<image> a long<image>b", [LONG, SHORT]), ("h<image>ab", [SECONDS])],
    "granite_speech": [("so<image> a long<image>b", [SPOKEN, SHORT])],
    "granite_speech of layers": [("h<image>ab", [SHORT])],
    "gemma4a": [("so<image> a long<image>b", [LONG, SHORT]), ("h<image>ab", [CHUNKS])],
    "qwen2.5o audio": [("h<image>g<image>a", [png(picture(50, 30)), SHORT])],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_sounds_are_answered_as_by_llama_cpp(name: str, shared_data: Path, tmp_path: Path) -> None:
    spec, prompts, most = AUDIO_SPECS[name], PROMPTS[name], FAR.get(name, 0.005)
    model = write_audio_text_model(tmp_path / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    projector = write_audio_projector(tmp_path / "mm.gguf", spec)
    asked = [
        (text, [base64.b64encode(FILES[m] if isinstance(m, Waveform) else m).decode() for m in media])
        for text, media in prompts
    ]
    (answers,) = theirs([(str(model), str(projector), asked)], n_ctx=N_CTX, exact=True)
    with Runs(model, projector, n_ctx=N_CTX, type_k="f32", type_v="f32") as runs:
        for (text, media), (n_tokens, tops) in zip(prompts, answers, strict=True):
            n, got = runs.first(text, media)
            assert n == n_tokens, text
            assert max(got, key=lambda id: got[id]) == tops[0][0], text
            assert [got[id] for id, _ in tops] == pytest.approx([value for _, value in tops], abs=most), text

"""Synthetic projectors: files that are read here and in llama.cpp with the same answer."""

from __future__ import annotations

import base64
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.models.gguf.file import GGUFFile
from logitless.models.synthetic.model import SHAPES, synthesize
from logitless.models.synthetic.projector import PROJECTOR_SHAPES, ProjectorShape, synthesize_projector
from logitless.models.vision.params import read_params
from tests.helpers.audio_files import N_CTX, sound, wav
from tests.helpers.vision_files import picture, png
from tests.helpers.vision_requests import Runs
from tests.models.vision.test_llama_cpp_images import theirs

N_TEXT = SHAPES["tiny"].n_embd


def small(name: str) -> ProjectorShape:
    """A shape of the same kind in a few layers of a small width."""
    return replace(PROJECTOR_SHAPES[name], n_embd=32, n_layer=2, n_head=4, n_ff=64, image_size=56)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
@pytest.mark.parametrize("name", ["siglip", "qwen2.5vl"])
def test_a_synthetic_projector_answers_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    model, projector = tmp_path / "m.gguf", tmp_path / "p.gguf"
    synthesize(model, "tiny", "F32")
    synthesize_projector(projector, N_TEXT, small(name))
    image = png(picture(56, 56))
    (((n_tokens, tops),),) = theirs([(str(model), str(projector), [("a<image>b", [base64.b64encode(image).decode()])])])
    with Runs(model, projector) as runs:
        n, got = runs.first("a<image>b", [image])
    assert n == n_tokens
    assert [got[id] for id, _ in tops] == pytest.approx([value for _, value in tops], abs=0.04)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_a_synthetic_projector_of_sounds_answers_as_in_llama_cpp(tmp_path: Path) -> None:
    model, projector = tmp_path / "m.gguf", tmp_path / "p.gguf"
    synthesize(model, "tiny", "F32")
    shape = replace(PROJECTOR_SHAPES["whisper"], n_embd=40, n_layer=2, n_head=2, n_ff=64)
    synthesize_projector(projector, N_TEXT, shape)
    heard = sound(1)
    asked = [("a<image>b", [base64.b64encode(wav(heard)).decode()])]
    (((n_tokens, tops),),) = theirs([(str(model), str(projector), asked)], n_ctx=N_CTX, exact=True)
    with Runs(model, projector, n_ctx=N_CTX, type_k="f32", type_v="f32") as runs:
        n, got = runs.first("a<image>b", [heard])
    assert n == n_tokens
    assert [got[id] for id, _ in tops] == pytest.approx([value for _, value in tops], abs=0.005)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize_projector(tmp_path / name, N_TEXT, "tiny", seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    with pytest.raises(ValueError, match="unknown shape 'huge'; the shapes are tiny, siglip"):
        synthesize_projector(tmp_path / "d", N_TEXT, "huge")


def test_synth_writes_a_projector_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, projector = str(tmp_path / "m.gguf"), str(tmp_path / "mmproj.gguf")
    words = ["synth", "--shape", "mini", "-o", model, "--mmproj", projector]
    assert main([*words, "--mmproj-shape", "Tiny"]) == 0
    assert f"{projector}: tiny F16, seed 0" in capsys.readouterr().err
    with GGUFFile.open(projector) as file:
        assert file.metadata["clip.vision.projection_dim"] == SHAPES["mini"].n_embd
        assert read_params(file).n_rows(32, 32) == 16
    for more, said in (
        (["--mmproj-shape", "huge"], "--mmproj-shape: 'huge' is not one of tiny, siglip, qwen2.5vl, whisper"),
        (["--mmproj", model], f"--mmproj: {model} is the file of -o"),
    ):
        assert main([*words, *more]) != 0
        assert said in capsys.readouterr().err
    assert main(["synth", "--list"]) == 0
    assert (
        "siglip     width 1152, 27 layers, 16 heads, ffn 4304, projector gemma3 of 896 x 896\n"
        in capsys.readouterr().out
    )

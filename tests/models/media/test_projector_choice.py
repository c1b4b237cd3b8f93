"""The projector beside a model: names and widths belong together, else the model reads text, with a warning."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from logitless import LLM, SamplingParams
from logitless.errors import ModelError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.projector_choice import fitting_projector, media_of
from logitless.models.model import hparams_of
from logitless.models.synthetic.projector import PROJECTOR_SHAPES, synthesize_projector
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import N_TEXT, SPECS, write_projector

TEXT = MODELS / "stories260K.gguf"


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("eye") / "eye", SPECS["mlp"])


def put(folder: Path, *names: str, projector: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(projector if "mmproj" in name.lower() else TEXT, folder / name)


def chosen(model: Path, *, own_folder: bool = False) -> str:
    with GGUFFile.open(model) as gguf:
        found = fitting_projector(model, gguf, hparams_of(gguf), own_folder=own_folder)
    return "" if found is None else found.name


@pytest.mark.parametrize(
    ("names", "taken"),  # the first name is the model's
    [
        # as Hugging Face's repositories have them
        ("gemma-3-4b-it-Q4_K_M.gguf mmproj-model-f16.gguf", True),
        ("gemma-3-4b-it-q4_0.gguf mmproj-model-f16-4B.gguf", True),
        ("google_gemma-3-4b-it-Q4_K_M.gguf mmproj-google_gemma-3-4b-it-bf16.gguf", True),
        ("Qwen2.5-VL-7B-Instruct.Q4_K_M.gguf Qwen2.5-VL-7B-Instruct.mmproj-Q8_0.gguf", True),
        ("llava-v1.5-7b-Q4_K.gguf llava-v1.5-7b-mmproj-f16.gguf", True),
        ("moondream2-text-model-f16.gguf moondream2-mmproj-f16.gguf", True),
        ("Qwen3-VL-8B-UD-Q4_K_XL.gguf Qwen3-VL-8B-IQ2_XXS.gguf mmproj-F16.gguf", True),  # one model in two types
        ("m.gguf MMPROJ-F32.gguf", True),
        # others
        ("text.gguf mmproj-llava.gguf", False),
        ("Qwen2.5-VL-7B.gguf mmproj-Qwen2-VL-7B.gguf", False),
        ("Qwen2-VL-7B.gguf mmproj-Qwen2.5-VL-7B.gguf", False),
        ("gemma-3-12b.gguf mmproj-gemma-3-2b.gguf", False),
        ("qwen.gguf mmproj-qwen-vl.gguf", False),
        ("a.gguf b.gguf mmproj-F16.gguf", False),  # of which of them?
        ("a.gguf b.gguf mmproj-b-F16.gguf", False),
    ],
)
def test_a_projector_belongs_to_the_model_of_its_name(
    names: str, taken: bool, tmp_path: Path, eye: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, *others = names.split()
    put(tmp_path / "models", model, *others, projector=eye)
    with caplog.at_level(logging.WARNING):
        found = chosen(tmp_path / "models" / model)
    assert found == (others[-1] if taken else "")
    assert [record.getMessage() for record in caplog.records] == (
        [] if taken else [f"images are not read: {others[-1]} is not named like {model}; --mmproj takes it"]
    )
    assert media_of(tmp_path / "models" / model) == (taken, False)


def test_projector_of_the_nearest_type_is_taken(tmp_path: Path, eye: Path) -> None:
    put(tmp_path, "m-Q4_K_M.gguf", "mmproj-m-F16.gguf", "mmproj-m-Q8_0.gguf", "mmproj-other-Q4_0.gguf", projector=eye)
    assert chosen(tmp_path / "m-Q4_K_M.gguf") == "mmproj-m-Q8_0.gguf"


def test_names_of_the_folder_count(tmp_path: Path, eye: Path) -> None:
    """A model whose file is named after the language model that it was made from."""
    put(tmp_path / "ultravox-v0_5", "Llama-3.2-1B-Q4_0.gguf", "mmproj-ultravox-v0_5-f16.gguf", projector=eye)
    assert chosen(tmp_path / "ultravox-v0_5" / "Llama-3.2-1B-Q4_0.gguf") == "mmproj-ultravox-v0_5-f16.gguf"


def test_names_of_a_folder_of_more_models_do_not_count(tmp_path: Path, eye: Path) -> None:
    put(tmp_path / "llava", "text.gguf", "other.gguf", "mmproj-llava-f16.gguf", projector=eye)
    assert chosen(tmp_path / "llava" / "text.gguf") == ""


def test_any_name_will_do_in_an_own_folder(tmp_path: Path, eye: Path) -> None:
    put(tmp_path, "m.gguf", "mmproj-cat.gguf", projector=eye)
    assert (chosen(tmp_path / "m.gguf"), chosen(tmp_path / "m.gguf", own_folder=True)) == ("", "mmproj-cat.gguf")


def test_files_that_are_no_models_take_no_projector_away(tmp_path: Path, eye: Path) -> None:
    put(tmp_path, "m.gguf", "mmproj.gguf", "m-imatrix.gguf", "mtp-m.gguf", projector=eye)
    (tmp_path / "notes.gguf").write_bytes(b"no GGUF file")
    assert chosen(tmp_path / "m.gguf") == "mmproj.gguf"


@pytest.mark.parametrize("fault", ["width", "cut", "audio width", "unknown"])
def test_a_model_beside_a_projector_that_does_not_fit_answers_texts(
    fault: str, tmp_path: Path, eye: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copyfile(TEXT, tmp_path / "m.gguf")
    beside = tmp_path / "mmproj-m.gguf"
    if fault == "width":
        synthesize_projector(beside, 2 * N_TEXT, "tiny")
        reason = f"tensor 'mm.input_projection.weight' has shape (32, {2 * N_TEXT}), expected (32, {N_TEXT})"
    elif fault == "audio width":
        whisper = PROJECTOR_SHAPES["whisper"]
        synthesize_projector(beside, 2 * N_TEXT, type(whisper)(whisper.kind, 0, 128, 32, 1, 4, 64, 1))
        reason = f"tensor 'mm.a.fc.weight' has shape ({2 * N_TEXT}, 32), expected ({N_TEXT}, 32)"
    elif fault == "cut":
        beside.write_bytes(eye.read_bytes()[:-1000])
        reason = "tensor"
    else:
        beside.write_bytes(eye.read_bytes().replace(b"mlp", b"mlq"))
        reason = "projector type 'mlq' is not supported"
    with caplog.at_level(logging.WARNING), LLM(tmp_path / "m.gguf", ctx_size=64) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=1, temperature=0)).text
    assert f"images are not read: {beside}: {reason}" in caplog.text
    assert media_of(tmp_path / "m.gguf") == (False, False)
    with pytest.raises(ModelError, match=str(beside)):  # one that is named must fit
        LLM(tmp_path / "m.gguf", ctx_size=64, mmproj=str(beside))


@pytest.mark.parametrize(("kind", "name"), [("internvl", "v.class_embd"), ("gemma3", "mm.input_projection.weight")])
@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_a_projector_with_a_number_that_is_not_finite_is_one_line_at_the_start(
    kind: str, name: str, wrong: float, tmp_path: Path
) -> None:
    """Through the Python API; a bound of infinity is none (tests/models/vision)."""
    shutil.copyfile(TEXT, tmp_path / "m.gguf")
    projector = write_projector(tmp_path / "mmproj-m.gguf", SPECS[kind])
    reader = GGUFReader(projector, "r+")
    next(t for t in reader.tensors if t.name == name).data.reshape(-1)[-1] = wrong
    reader.data.flush()
    with pytest.raises(ModelError) as refused:
        LLM(tmp_path / "m.gguf", ctx_size=64, mmproj=str(projector))
    assert str(refused.value) == f"{projector}: tensor '{name}' has a number that is NaN or infinite"

"""Image encoders of Hugging Face folders: rows of transformers, and llama.cpp's answers by the converted pair."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import convert
from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.main import main
from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.projector_choice import check_projector, fitting_projector, media_of
from logitless.models.model import hparams_of
from logitless.models.vision.encoder import VisionEncoder
from logitless.models.vision.params import read_params
from tests.helpers.huggingface_folders import DATA, recorded, tokenizer_json, write_folder
from tests.helpers.huggingface_weights import pixels
from tests.helpers.vision_files import SMOL_TOKENS, picture, png
from tests.helpers.vision_requests import Runs
from tests.models.vision.test_llama_cpp_images import theirs

NAMES = sorted(path.stem for path in (DATA / "visions").glob("*.json"))
FILE = "preprocessor_config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: write_folder(tmp_path_factory.mktemp(name) / "model", f"visions/{name}") for name in NAMES}
    words = tokenizer_json()
    words["added_tokens"] += [{"id": 272 + i, "content": word, "special": True} for i, word in enumerate(SMOL_TOKENS)]
    (folders["smolvlm"] / "tokenizer.json").write_text(json.dumps(words))
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_picture_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    side, expected = recorded(f"visions/{name}")["side"], np.array(recorded(f"visions/{name}")["rows"])
    with GGUFFile.open(folders[name] / FILE) as gguf:
        session = Session([CPUBackend(1)])
        encoder = VisionEncoder.define(session, gguf, read_params(gguf), 64)
        parts = session.run("rows", lambda: encoder.rows(1, side, side), encoder.feeds([pixels(side)]))
        session.close()
    assert np.abs(np.concatenate(parts)[:, ::8] - expected).max() < 2e-3  # GELU by tanh, as in llama.cpp


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_folder_answers_as_llama_cpp_with_the_converted_files(folders: dict[str, Path]) -> None:
    image, pairs = png(picture(50, 30)), []
    for folder in folders.values():
        pairs.append((str(folder.with_name("m.gguf")), str(folder.with_name("mmproj.gguf"))))
        convert(folder, pairs[-1][0])
        convert(folder, pairs[-1][1], mmproj=True)
    prompt = ("h<image>g", [base64.b64encode(image).decode()])
    answers = theirs([(*pair, [prompt]) for pair in pairs])
    for (name, folder), ((n_expected, tops),) in zip(folders.items(), answers, strict=True):
        with GGUFFile.open(folder) as gguf:
            projector = fitting_projector(folder, gguf, hparams_of(gguf))
        assert projector == folder / FILE
        with Runs(folder, projector) as runs:
            n, values = runs.first("h<image>g", [image])
        assert n == n_expected, name
        for id, value in (tops or ())[:3]:
            assert values[id] == pytest.approx(value, abs=0.04), name


def test_folder_says_that_it_reads_images_and_convert_names_the_flag(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders["gemma3"]
    assert media_of(folder) == (True, False)
    assert main(["convert", str(folder), "-o", str(tmp_path / "m.gguf")]) == 0
    assert "--mmproj -o mmproj.gguf writes its image encoder" in capsys.readouterr().err
    assert main(["convert", str(folder), "--mmproj", "--type", "Q8_0", "-o", str(tmp_path / "p.gguf")]) == 2
    assert not caplog.records  # nothing is left unread


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({FILE: None}, "has no image encoder of a supported kind"),
        ({FILE: {"image_mean": [0.5], "image_std": [0.5] * 3}}, f"{FILE}: 'image_mean' has not three numbers"),
        ({FILE: {"image_mean": "x"}}, f"{FILE}: 'image_mean' is no list"),
        ({"vision_config": {"patch_size": None}}, "config.json: 'patch_size' is missing"),
        ({"vision_config": {"depth": 1}}, "tensor 'visual.blocks.1.* is unknown in the projector"),
        ({"vision_config": {"depth": 4}}, "'fullatt_block_indexes' is not every n-th layer"),
        ({"vision_config": {"window_size": 64}}, "'window_size' is not 112, the supported one"),
        ({"vision_config": {"num_heads": 3}}, "key 'clip.vision.attention.head_count' is 3"),
        ({"vision_config": {"patch_size": 8}}, r"tensor 'v.patch_embd.weight' has shape \(32, 3, 4, 4\)"),
        ({"vision_config": 3}, "has no image encoder of a supported kind"),
        ({"vision_config": {"mlp_ratio": -1}}, "'mlp_ratio' is -1, not a positive number"),
    ],
)
def test_wrong_image_encoder_is_refused_in_one_line(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "visions/qwen2vl" if "mlp_ratio" in str(changes) else "visions/qwen2.5vl")
    config = json.loads((folder / "config.json").read_text())
    own = changes.get("vision_config", {})
    config["vision_config"] = {**config["vision_config"], **own} if isinstance(own, dict) else own
    (folder / "config.json").write_text(json.dumps(config))
    if FILE in changes:
        (folder / FILE).unlink()
        if changes[FILE] is not None:
            (folder / FILE).write_text(json.dumps(changes[FILE]))
    with GGUFFile.open(folder) as text, pytest.raises(ModelFileError, match=problem) as error:
        check_projector(folder / FILE, text, hparams_of(text))
    assert "\n" not in str(error.value)


def test_text_model_with_an_encoder_of_no_object_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "visions/qwen3vl")
    config = json.loads((folder / "config.json").read_text()) | {"vision_config": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"config.json: 'vision_config' is no object"):
        GGUFFile.open(folder)

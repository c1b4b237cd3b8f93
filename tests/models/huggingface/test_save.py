"""Fine-tuned models as Hugging Face folders: the numbers, back in the form of the base."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from logitless.cli.main import main
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import Data, copied_keys, write_gguf
from logitless.models.quantization.quantize import dequantized
from tests.helpers.huggingface_folders import write_folder


def doubled(folder: Path, path: Path) -> None:
    """The folder's model with all matrices and norms times 1.5, as a file of f32."""
    with GGUFFile.open(folder) as base:
        tensors = []
        for name, info in base.tensors.items():
            values = dequantized(info, base.bytes_of(name)) * np.float32(1.5)
            tensors.append((name, Data(values, info.shape)))
        write_gguf(path, str(base.metadata["general.architecture"]), copied_keys(base.metadata), tensors)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "F32"), ("gemma3", "BF16"), ("qwen3moe", "F16")])
def test_tuned_file_as_a_folder_has_its_numbers(family: str, dtype: str, tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", family, dtype)
    doubled(base, tmp_path / "tuned.gguf")
    assert main(f"convert {tmp_path}/tuned.gguf --base {base} -o {tmp_path}/out".split()) == 0
    with GGUFFile.open(tmp_path / "out") as out, GGUFFile.open(tmp_path / "tuned.gguf") as tuned:
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in out.path.iterdir()}
        for name, info in tuned.tensors.items():
            values = dequantized(out.tensors[name], out.bytes_of(name))
            error = {"F32": 1e-6, "F16": 1e-3, "BF16": 4e-3}[dtype]
            np.testing.assert_allclose(values, dequantized(info, tuned.bytes_of(name)), rtol=error, atol=error)


def test_unchanged_model_as_a_folder_is_the_folder(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", "gpt-oss", "BF16")  # whose experts could not be written
    (base / "2_Normalize").mkdir()
    (base / "2_Normalize" / "config.json").write_text("{}")
    assert main(f"convert {base} -o {tmp_path}/m.gguf".split()) == 0
    assert main(f"convert {tmp_path}/m.gguf --base {base} -o {tmp_path}/out".split()) == 0
    assert (tmp_path / "out" / "2_Normalize" / "config.json").read_text() == "{}"
    with GGUFFile.open(base) as one, GGUFFile.open(tmp_path / "out") as other:
        assert all((one.bytes_of(name) == other.bytes_of(name)).all() for name in one.tensors)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("{t}/gpt-oss.gguf --base {t}/gpt-oss -o {t}/out", "has another form than in GGUF, which is not written"),
        ("{t}/gpt-oss.gguf --base {t}/llama -o {t}/out", "is missing or of another shape"),
        ("{t}/gpt-oss.gguf --base {t}/nothing -o {t}/out", "--base: .* is no folder"),
        ("{t}/gpt-oss.gguf --base {t}/llama -o {t}/llama", "is there already, and not an empty folder"),
        ("{t}/gpt-oss.gguf --base {t}/llama -o {t}/out --type F16", "--type is of GGUF files"),
        ("{t}/gpt-oss.gguf -o {t}/out", "is a file, not a folder; --base FOLDER makes a folder of it"),
    ],
)
def test_folder_that_cannot_be_written_is_refused_in_one_line(
    words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for family in ("gpt-oss", "llama"):
        write_folder(tmp_path / family, family)
    doubled(tmp_path / "gpt-oss", tmp_path / "gpt-oss.gguf")
    assert main(f"convert {words.format(t=tmp_path)}".split()) != 0
    error = capsys.readouterr().err
    assert re.search(line, error), error
    assert "Traceback" not in error
